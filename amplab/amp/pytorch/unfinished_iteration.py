"""UnfinishedIteration: whether an interrupt has ended an iteration of a `GradScaler` before its `update`.

    inside a call of the scaler    gradients are unscaled or not: no call goes on before the next `scale`
    between two calls              the function that made the last call has ended by an exception

In both cases the next `scale` begins an iteration. A program that leaves `update` out returns from its functions, or is
still in them, and is refused as by torch's class. So is a function that catches the interrupt itself and goes on.
"""

import sys
import threading
from dis import opmap
from types import FrameType

import torch

from amplab.policies.casting.thread_scopes import SUSPENDABLE, is_running

__all__ = ["UnfinishedIteration"]

_RETURNS = {opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in opmap}


class UnfinishedIteration:
    """What an interrupt has left of an iteration; a context manager around calls that an interrupt leaves half done."""

    def __init__(self) -> None:
        self._calls: list[FrameType] = []  # with a block that runs, or that an interrupt has ended
        self._grad_enabled = True
        self._caller: FrameType | None = None
        self._thread = 0

    def __enter__(self) -> None:
        self._calls.append(sys._getframe(1))
        self._grad_enabled = torch.is_grad_enabled()

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: object) -> None:
        if kind is None:
            own = sys._getframe(1)
            self._calls = [call for call in self._calls if call is not own and is_running(call)]
        elif issubclass(kind, Exception):
            self._calls.pop()
        else:
            torch.set_grad_enabled(self._grad_enabled)  # an interrupted block of torch.no_grad may have lost its end

    def called_by(self, caller: FrameType | None) -> None:
        """Keep the frame that calls the scaler, with its variables, for `between_calls`; None ends the iteration."""
        self._caller, self._thread = caller, threading.get_ident()

    def between_calls(self) -> bool:
        """Whether the last caller, or a function that it was called by, has ended by an exception."""
        frame = self._caller
        if self._thread != threading.get_ident():
            return False
        while frame is not None and not frame.f_code.co_flags & SUSPENDABLE and not is_running(frame):
            if frame.f_code.co_code[frame.f_lasti] not in _RETURNS:
                return True
            frame = frame.f_back  # which a frame keeps after its end
        return False

    def in_call(self) -> bool:
        """Whether an interrupt has ended a block. An error does not count."""
        return any(not is_running(call) for call in self._calls)

    def refuse_call(self) -> None:
        """Raise RuntimeError if an interrupt has ended a call: its gradients may be unscaled or not."""
        if self.in_call():
            raise RuntimeError(
                "unscale_(), step() or update() was interrupted, and its gradients may be unscaled or not: call "
                "optimizer.zero_grad(), and begin the next iteration with scale(loss)."
            )
