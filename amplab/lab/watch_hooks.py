"""The hooks of a watch, each registered only while it is needed: a module without any takes torch's shorter way."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

__all__ = ["WatchHooks"]


class WatchHooks:
    """Hooks by name.

    Args:
        register: for each name what registers the hook.
    """

    def __init__(self, **register: Callable[[], RemovableHandle]) -> None:
        self._register = register
        self._handles: dict[str, RemovableHandle] = {}

    def need(self, name: str, needed: bool = True) -> None:
        """Have a hook registered, or not; again is harmless."""
        if needed and name not in self._handles:
            self._handles[name] = self._register[name]()
        elif not needed and name in self._handles:
            self._handles.pop(name).remove()

    def end(self) -> None:
        """Take all of them off."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
