"""Gradients around one backward of a scaled loss. Both APIs of amp use it; each decides what follows from found_inf.

    with ScaledBackward(optimizers, scale) as backward:       set aside: every .grad becomes None
        (loss * scale).backward()                      after an exception every .grad is restored
    found_inf = each.unscale_new(aside, scale, None)   unscale: .grad <- old + new / scale; found_inf is returned

add_unscaled(params, aside, scale)    .grad <- old + new / scale
add_scaled(aside, factor)             .grad <- old * factor + new, still scaled
"""

import contextlib
import sys
import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from types import FrameType, TracebackType
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from amplab.kernels import unscale_add
from amplab.policies.casting.function_modes import without_function_modes
from amplab.policies.casting.thread_scopes import block_at
from amplab.scalers import Unscaler, inverse_scale, local_shard
from amplab.scalers.unscaler import gathered_found_inf

__all__ = [
    "ReachedGradients",
    "ScaledBackward",
    "SetAside",
    "add_scaled",
    "add_unscaled",
    "gradients_of",
    "put_back",
    "set_aside",
]


class SetAside(NamedTuple):
    """A parameter, and the gradient that it had."""

    param: Tensor
    grad: Tensor


class ReachedGradients(Protocol):
    """The gradients of one optimizer that a backward reaches."""

    @property
    def copies_shared(self) -> bool:
        """Whether to copy a gradient that is a part of larger memory before the backward.

        If the memory is a bucket of DistributedDataParallel, the next backward writes there. Not needed for buffers
        that no backward writes.
        """

    @property
    def model_params(self) -> list[Tensor]:
        """The parameters whose gradients the backward writes."""

    def before_backward(self) -> list[Tensor]:
        """Prepare for a backward; return the parameters whose gradients it may write."""

    def factor_in_place(self, scale: Any) -> Any | None:
        """Return None if gradients are to be set aside.

        Otherwise a factor, for gradients that the backward of a wrapper is to average together with the new ones: they
        are multiplied by it and stay in ``.grad``, as if they were new.
        """

    def after_failed_backward(self) -> None:
        """Undo `before_backward`. Gradients have been put back."""

    def unscale_new(self, aside: list[SetAside], scale: Any, found_inf: Tensor | None) -> Tensor:
        """Divide new gradients by ``scale`` and add those in ``aside``. Return found_inf, 1.0 for inf or NaN."""


Reached = TypeVar("Reached", bound=ReachedGradients)


class ScaledBackward(Generic[Reached]):
    """One backward of a scaled loss. If its block raises, every gradient is restored, and so is grad mode.

    Args:
        reached: the gradients of each optimizer whose parameters the backward reaches.
        scale: of the loss.

    Attributes:
        aside: the gradients that were there before, for each of ``reached``, without those that stay in place.

    Raises:
        RuntimeError: where the block begins, inside the block of another one that reaches one of these parameters.
    """

    _frame: FrameType | None = None  # that of the user's `with` statement
    _places: frozenset[int] = frozenset()  # its instructions in the block

    def __init__(self, reached: Sequence[Reached], scale: Any) -> None:
        self._reached, self._scale = reached, scale
        self._saved: list[SetAside] = []
        self._begun: list[Reached] = []
        self._params: list[Tensor] = []
        self._grad_enabled = torch.is_grad_enabled()
        self.aside: list[tuple[Reached, list[SetAside]]] = []

    @property
    def all_aside(self) -> tuple[SetAside, ...]:
        """`aside` of all optimizers."""
        return tuple(chain.from_iterable(each for _, each in self.aside))

    def __enter__(self) -> Self:
        """Set the gradients aside. Sync: none."""
        self._refuse_nested()
        self._frame = _users_frame(sys._getframe(1))
        self._places = block_at(self._frame.f_code, self._frame.f_lasti)
        try:
            _OPEN.blocks.append(self)
            with without_function_modes():
                for each in self._reached:
                    self._set_aside(each)
        except BaseException:
            self._put_back()
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._put_back()
        self._end()

    def _end(self) -> None:
        self._frame = None
        _OPEN.blocks = [block for block in _OPEN.blocks if block is not self]

    def _is_open(self) -> bool:
        """Whether the block is being executed; `__exit__` may not have run after an interrupt."""
        return self._frame is not None and self._frame.f_lasti in self._places

    def _refuse_nested(self) -> None:
        _OPEN.blocks = [block for block in _OPEN.blocks if block._is_open()]
        if not _OPEN.blocks:
            return
        own = {id(param) for each in self._reached for param in each.model_params}
        if any(id(param) in own for block in _OPEN.blocks for param in block._params):
            raise RuntimeError(
                "scale_loss inside the block of another scale_loss for the same parameters: each would divide the "
                "gradients of both by its own scale. Begin the second block after the first one; gradients add up."
            )

    def _set_aside(self, each: Reached) -> None:
        self._begun.append(each)
        params = each.before_backward()
        aside = gradients_of(params)
        factor = each.factor_in_place(self._scale) if aside else None
        if factor is not None:
            self._keep_in_place(each, params, aside, factor)
            return
        if each.copies_shared:
            aside = [SetAside(param, _copied(grad)) for param, grad in aside]
        self._params += params
        self.aside.append((each, aside))  # before a gradient is removed, so that an interrupt loses none
        for param, _ in aside:
            param.grad = None

    def _keep_in_place(self, each: Reached, params: list[Tensor], grads: list[SetAside], factor: Any) -> None:
        saved = [SetAside(param, grad.clone()) for param, grad in grads]
        self._params += params
        self._saved += saved
        self.aside.append((each, []))
        with torch.no_grad():
            for _, grad in grads:
                grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)

    def _put_back(self) -> None:
        torch.set_grad_enabled(self._grad_enabled)  # an interrupted block of torch.no_grad may have lost its end
        for param in self._params:
            param.grad = None
        put_back(self._saved)
        for _, aside in self.aside:
            put_back(aside)
        for each in self._begun:
            each.after_failed_backward()


class _Open(threading.local):
    """The blocks of this thread, without those that have ended; after an interrupt also some that have."""

    def __init__(self) -> None:
        self.blocks: list[ScaledBackward[Any]] = []


_OPEN = _Open()


def _users_frame(frame: FrameType) -> FrameType:
    """Return the frame with the user's ``with`` statement, around generators that are context managers."""
    while (outer := frame.f_back) is not None and outer.f_code is _ENTER and outer.f_back is not None:
        frame = outer.f_back
    return frame


_ENTER = contextlib._GeneratorContextManager.__enter__.__code__


def set_aside(params: Iterable[Tensor]) -> list[SetAside]:
    """Take the gradients off ``params`` and return them. Sync: none."""
    aside = gradients_of(params)
    for param, _ in aside:
        param.grad = None
    return aside


def gradients_of(params: Iterable[Tensor]) -> list[SetAside]:
    """Return the parameters that have a gradient, with it. Sync: none."""
    return [SetAside(param, grad) for param in params if (grad := param.grad) is not None]


def _copied(grad: Tensor) -> Tensor:
    """Return the gradient, or a copy if its memory holds more than it."""
    shares = grad.layout is torch.strided and grad.untyped_storage().nbytes() > grad.nbytes
    return grad.clone() if shares else grad


def put_back(aside: Iterable[SetAside]) -> None:
    """Restore the gradients that the parameters had. Newer gradients are dropped. Sync: none."""
    for param, grad in aside:
        param.grad = grad


def add_unscaled(
    params: list[Tensor],
    aside: list[SetAside],
    scale: float | Tensor,
    unscaler: Unscaler,
    found_inf: Tensor | None,
) -> Tensor:
    """Divide the new gradients of ``params`` by ``scale``, then add those that were set aside.

    Args:
        params: all parameters whose gradients the backward may have written.
        aside: the gradients that they had before.
        scale: the scale of the new gradients, a number or a one-element tensor on their device.
        unscaler: keeps the grouping of ``params`` from call to call, and may keep gradients in flat buffers.
        found_inf: ``(1,)`` float32 from gradients unscaled before; None to start from 0.0.

    Returns:
        ``(1,)`` float32: 1.0 if a new gradient is inf or NaN.

    Sync: none.
    """
    if not aside:
        found_inf = unscaler.unscale_(params, scale, found_inf=found_inf)
        unscaler.settle(params)
        return found_inf
    # One pass divides and adds, except for sparse gradients.
    sums = [
        (old, new) for old in aside if (new := old.param.grad) is not None and not (old.grad.is_sparse or new.is_sparse)
    ]
    summed = {id(old.param) for old, _ in sums}
    found = {
        device: torch.zeros(1, dtype=torch.float32, device=device)
        for device in dict.fromkeys(old.grad.device for old, _ in sums)
    }
    for device, found_here in found.items():
        here = [(local_shard(new), local_shard(old.grad)) for old, new in sums if old.grad.device == device]
        unscale_add([new for new, _ in here], [old for _, old in here], found_here, inverse_scale(scale, device))
    if found:
        found_inf = gathered_found_inf(found, found_inf)
    found_inf = unscaler.unscale_([param for param in params if id(param) not in summed], scale, found_inf=found_inf)
    put_back(old for old, _ in sums)
    add_scaled([old for old in aside if id(old.param) not in summed], 1.0)
    unscaler.settle(params)
    return found_inf


def add_scaled(aside: Iterable[SetAside], factor: float) -> None:
    """Add the gradients that were set aside, times ``factor``, to the new ones, which stay as they are. Sync: none."""
    for param, old in aside:
        if factor != 1.0:
            old.mul_(factor)
        new = param.grad
        if new is None:
            param.grad = old
        else:  # torch adds a sparse tensor to a dense one, not the reverse
            param.grad = new + old if old.is_sparse else old.add_(new)
