"""`modules_beside`: the Python modules that a kernel can import from the folder of its notebook."""

import os
import pkgutil
from collections import deque

__all__ = ["modules_beside"]

_MOST_FOLDERS = 2000


def modules_beside(folder: str = ".") -> list[str]:
    """Return the names of modules and packages in `folder`, and in the folders inside, which Python imports from, too.

    A folder without ``__init__.py`` is a namespace package. Past `_MOST_FOLDERS` folders the search ends, and "…"
    stands for what may be in the others.

    >>> modules_beside(os.path.dirname(__file__))[:1]
    ['beside']
    """
    found: list[str] = []
    seen: set[str] = set()  # a link may lead back
    waiting = deque([(folder, "")])
    while waiting:
        here, prefix = waiting.popleft()
        real = os.path.realpath(here)
        if real in seen:
            continue
        if len(seen) == _MOST_FOLDERS:
            return [*found, "…"]
        seen.add(real)
        found += sorted(f"{prefix}{each.name}" for each in pkgutil.iter_modules([here]))
        waiting += [(os.path.join(here, name), f"{prefix}{name}.") for name in _folders(here)]
    return found


def _folders(folder: str) -> list[str]:
    """Return the folders in `folder` that an import can name."""
    try:
        with os.scandir(folder) as entries:
            return sorted(each.name for each in entries if each.name.isidentifier() and each.is_dir())
    except OSError:
        return []
