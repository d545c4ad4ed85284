"""Replace names of other packages until an undo, and print a line on stderr for each kind of redirected call.

`cuda_on_cpu`, the only part of amplab that replaces names of torch, uses this.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["HERE", "Redirection", "ReplacedNames"]

_ABSENT = object()
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
HERE = os.path.join(os.path.dirname(__file__), "")


class ReplacedNames:
    """Replaces attributes of modules and classes until `restore`.

    >>> class Color:
    ...     name = "red"
    >>> replaced = ReplacedNames()
    >>> replaced.replace(Color, "name", "blue")
    >>> Color.name
    'blue'
    >>> replaced.restore()
    >>> Color.name
    'red'
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value``; `restore` deletes a name that ``owner`` did not define itself."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Undo every `replace`, the last one first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class Redirection:
    """Calls that are redirected until `undo`, each kind reported once.

    Args:
        say: called once for each kind of redirected call, with a line that names it.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._names = ReplacedNames()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value``, without a report."""
        self._names.replace(owner, name, value)

    def stand_in(self, owner: Any, name: str, note: str, answer: Callable[..., Any]) -> None:
        """Replace ``owner.name`` by ``answer``, and report ``note`` at its first call from outside torch and amplab."""
        self.replace(owner, name, self.noted(name, note, answer))

    def noted(self, name: str, note: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``answer`` called ``name``, which reports ``note`` as `stand_in` does."""

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if note not in self._said and not _torch_calls():
                self.tell(note)
            return answer(*args, **kwargs)

        stand_in.__name__ = name
        return stand_in

    def adapt(self, owner: Any, name: str, arguments: Callable[..., _Arguments]) -> None:
        """Make ``owner.name`` receive its arguments through ``arguments``."""
        own = getattr(owner, name)

        @functools.wraps(own)
        def adapted(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = arguments(args, kwargs)
            return own(*args, **kwargs)

        self._names.replace(owner, name, adapted)

    def tell(self, note: str) -> None:
        """Report ``note``, once."""
        if note not in self._said:
            self._said.add(note)
            self._say(note)

    def undo(self) -> None:
        """Restore every name. A second call does nothing."""
        self._names.restore()


def _torch_calls() -> bool:
    """Return whether torch or this package made the redirected call, and not the user's code."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(HERE) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "amplab")
