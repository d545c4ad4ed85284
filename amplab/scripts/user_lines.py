"""Make warnings of redirected calls point at the line of the script, as without the redirection.

A redirected call has one frame of this room more than the script expects, and that frame is where warnings of torch's
C++ code and those with ``stacklevel=2`` point. Such a warning is issued again for the first frame outside this room.
"""

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from amplab.scripts.redirection import HERE, Redirection

__all__ = ["point_warnings_at_the_script"]


def point_warnings_at_the_script(redirection: Redirection) -> None:
    """Issue warnings whose location is a file of this room for the line that called it."""
    show = getattr(warnings, "_showwarnmsg", None)  # what C code calls, also under `catch_warnings(record=True)`
    if show is None:
        return
    redirection.replace(warnings, "_showwarnmsg", _showing(show))
    for module in [module for module in sys.modules.values() if _is_here(getattr(module, "__file__", None))]:
        redirection.replace(module, "__warningregistry__", None)  # one warning for each line of the script


def _showing(own: Callable[[Any], None]) -> Callable[[Any], None]:
    def show(message: Any) -> None:
        frame = _caller() if _is_here(message.filename) else None
        if frame is None:
            own(message)
            return
        around = frame.f_globals
        warnings.warn_explicit(
            message.message, message.category, frame.f_code.co_filename, frame.f_lineno, around.get("__name__"),
            around.setdefault("__warningregistry__", {}), around, message.source,
        )  # fmt: skip

    return show


def _caller() -> FrameType | None:
    """Return the frame that called the redirected function that is running, or None."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _is_here(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and _is_here(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_here(path: str | None) -> bool:
    return path is not None and path.startswith(HERE)
