"""`modules_beside`: what a kernel can import, without a cell that does, from the folder of its notebook."""

import os
import pkgutil
from collections import deque

__all__ = ["modules_beside"]

_MOST_FOLDERS = 2000
_DISTRIBUTIONS = (".dist-info", ".egg-info")


def modules_beside(folder: str = ".") -> list[str]:
    """Return the names of modules and packages in `folder`, and in the folders inside, which Python imports from, too.

    A folder without ``__init__.py`` is a namespace package. The metadata of distributions counts, too: importing torch
    loads the objects that their entry points name, such as a debugger, which reads commands from its folder. Past
    `_MOST_FOLDERS` folders the search ends, and "…" stands for what may be in the others, and in folders that cannot be
    listed: Python may import from them all the same.

    >>> modules_beside(os.path.dirname(__file__))[:1]
    ['beside']
    """
    found = _distributions(folder)
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
        if not _is_readable(here):
            found.append(f"{prefix}…")
            continue
        found += sorted(f"{prefix}{each.name}" for each in pkgutil.iter_modules([here]))
        waiting += [(os.path.join(here, name), f"{prefix}{name}.") for name in _folders(here)]
    return found


def _distributions(folder: str) -> list[str]:
    """Return the names of the metadata of distributions in `folder`."""
    if not _is_readable(folder):
        return []
    return sorted(name for name in os.listdir(folder) if name.lower().endswith(_DISTRIBUTIONS))


def _is_readable(folder: str) -> bool:
    try:
        os.scandir(folder).close()
    except OSError:
        return False
    return True


def _folders(folder: str) -> list[str]:
    """Return the folders in `folder` that an import can name."""
    with os.scandir(folder) as entries:
        return sorted(each.name for each in entries if each.name.isidentifier() and each.is_dir())
