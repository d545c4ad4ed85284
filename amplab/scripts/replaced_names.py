"""Put other values in the place of attributes, and the old ones back.

The one file of amplab that changes what other packages define; `cuda_on_cpu` alone uses it, when a user asks for that.
"""

from typing import Any

__all__ = ["ReplacedNames"]

_ABSENT = object()


class ReplacedNames:
    """Attributes of modules and classes that stand replaced until `restore`.

    >>> class Colour:
    ...     name = "red"
    >>> replaced = ReplacedNames()
    >>> replaced.replace(Colour, "name", "blue")
    >>> Colour.name
    'blue'
    >>> replaced.restore()
    >>> Colour.name
    'red'
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Let ``owner.name`` be ``value``; an inherited or missing one is inherited or missing again afterwards."""
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
