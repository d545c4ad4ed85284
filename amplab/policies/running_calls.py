"""Tell whether a call is still running, for state that is valid during one call of a function that torch owns.

A hook that runs before the call keeps the frame of the call. torch skips the hook after the call if the call raises,
so that hook cannot be relied on to clear the state. The state is valid while the frame is on the caller's stack.
"""

import sys
from types import FrameType

__all__ = ["is_running"]


def is_running(frame: FrameType) -> bool:
    """Return whether ``frame`` is on the stack of the calling thread. Takes time in proportion to the frames above."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None:
        if caller is frame:
            return True
        caller = caller.f_back
    return False
