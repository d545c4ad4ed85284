"""What a notebook shows while the lab starts: a line that says so, before torch is imported.

The import takes 2 to 15 seconds in a new kernel, and the cell's place would be empty. The line is shown only by a cell
that does nothing but import and open the lab, and disappears with the dashboard. Standard library only.
"""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

__all__ = ["START_LINE", "StartLine", "opens_the_lab"]

P = ParamSpec("P")
Opened = TypeVar("Opened")

_SENT_SECONDS = 0.05


class StartLine:
    """The line of this kernel; it has no effect outside of a notebook."""

    def __init__(self) -> None:
        self._line: Any = None  # IPython's handle

    def show(self, text: str) -> None:
        """Show the line, or change its text."""
        kernel = getattr(_ipython(), "kernel", None)
        if kernel is None or (self._line is None and not opens_the_lab(_source(kernel))):
            return
        if self._line is None:
            self._line = sys.modules["IPython.display"].display(_Line(text), display_id=True)
        else:
            self._line.update(_Line(text))
        time.sleep(_SENT_SECONDS)  # a library that is loaded holds the lock that the sending thread needs

    def until_open(self, function: Callable[P, Opened]) -> Callable[P, Opened]:
        """Return a function that removes the line when it ends, in whatever way."""

        @wraps(function)
        def opening(*args: P.args, **kwargs: P.kwargs) -> Opened:
            if self._line is not None:
                self.show("Starting the lab: preparing the experiment.")
            try:
                return function(*args, **kwargs)
            finally:
                if self._line is not None:
                    self._line = None
                    sys.modules["IPython.display"].clear_output(wait=True)

        return opening


def opens_the_lab(source: str) -> bool:
    """Return whether a cell opens the lab and prints nothing before: what the line replaces would be lost.

    >>> opens_the_lab("import amplab.lab\\nlab = amplab.lab.open()\\nlab"), opens_the_lab("import amplab.lab")
    (True, False)
    >>> opens_the_lab("from amplab import lab\\nprint(1)\\nlab.open()")
    False
    """
    try:
        lines = ast.parse(source).body
    except SyntaxError:  # as with a magic of IPython
        return False
    after = [line for line in lines if not isinstance(line, ast.Import | ast.ImportFrom)]
    return bool(after) and "lab.open(" in ast.unparse(after[0])


class _Line:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return (
            '<div role="status" style="display: flex; gap: 10px; align-items: center; min-height: 48px">'
            f'<progress aria-label="Starting" style="width: 120px"></progress><span>{self._text}</span></div>'
        )


def _ipython() -> Any:
    shell = sys.modules.get("IPython")
    return None if shell is None else shell.get_ipython()


def _source(kernel: Any) -> str:
    """Return the source of the running cell, "" if the kernel does not say."""
    try:
        return str(kernel.get_parent("shell")["content"]["code"])
    except (AttributeError, KeyError, TypeError):
        return ""


START_LINE = StartLine()
START_LINE.show("Starting the lab: importing PyTorch. In a new kernel this takes 2 to 15 seconds.")
