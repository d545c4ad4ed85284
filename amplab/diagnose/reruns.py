"""Run a step again under other conditions, to see whether what went wrong goes away: another scale, another format.

`in_format` takes float16 out of a step without a change to its code, whichever face put it there: halves that come in
are widened, and casts to half go to the other dtype instead. It works below autograd and below every kind of autocast,
at the one place that all ops pass.

    probe(model, loss_fn, loss_scale=1.0)                          is it gone at scale 1
    probe(model, loss_fn, number_format=torch.float32)             is it gone in float32
    room(model, loss_fn)                                           at which scale is it gone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amplab.diagnose.observed_step.tensor_summary import Measurements
from amplab.diagnose.observed_step.values import measured_in, writes_values
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies.nested_tensors import map_tensors
from amplab.trace.engines import clear_cast_caches
from amplab.trace.step_checks import check_loss, check_step
from amplab.trace.untouched import untouched

__all__ = ["Outcome", "Room", "in_format", "probe", "room"]

_current_node = torch._C._current_autograd_node


@dataclass(frozen=True)
class Outcome:
    """What one forward and backward came to.

    Args:
        loss: before it was scaled.
        bad_gradients: names of the parameters whose gradient is not finite, in the model's order.
        gradient_norm: L2 norm of all gradients, divided by the scale.
    """

    loss: float
    bad_gradients: tuple[str, ...]
    gradient_norm: float

    @property
    def is_finite(self) -> bool:
        """Whether the loss and every gradient are numbers."""
        return math.isfinite(self.loss) and not self.bad_gradients


def probe(
    model: nn.Module,
    loss_fn: Callable[[], Tensor],
    *,
    casting: AbstractContextManager | None = None,
    loss_scale: float = 1.0,
    number_format: torch.dtype | None = None,
) -> Outcome:
    """Run one forward and backward and say whether its results are finite; the model is left as it was.

    Args:
        model: as `trace_step` takes it.
        loss_fn: as there.
        casting: context in which forward and backward run; the caller's own by default.
        loss_scale: what the loss is multiplied by, in float32, before backward.
        number_format: run in this dtype what runs in float16 or bfloat16; None for no change.

    Raises:
        TypeError, ValueError: as `trace_step`; a compiled model will do.

    Sync: one.
    """
    check_step(model, loss_fn, loss_scale, compiled=True, values=True)
    with _run(model, loss_fn, casting, loss_scale, whole=_chosen(model, number_format)) as loss:
        return _outcome(model, loss, loss_scale)


@dataclass(frozen=True)
class Room:
    """What one run leaves between its backward and the end of the range.

    Args:
        outcome: what the run came to.
        factor: by how much its loss could still be multiplied: backward is linear in the scale, so the first of its
            values to leave its format says so. inf where backward makes nothing but zeros; None where an element of a
            gradient is not finite as it is.
    """

    outcome: Outcome
    factor: float | None


def room(
    model: nn.Module,
    loss_fn: Callable[[], Tensor],
    *,
    casting: AbstractContextManager | None = None,
    loss_scale: float = 1.0,
) -> Room:
    """Run one forward and backward and measure what backward writes.

    Args:
        model, loss_fn, casting, loss_scale: as for `probe`.

    Sync: two; one more for each other dtype.
    """
    seen = _Backward()
    with _run(model, loss_fn, casting, loss_scale, backward=seen) as loss:
        ours = len(seen.measured)
        with torch._C.DisableTorchFunction():  # not to be cast
            seen.measure(each.grad for each in model.parameters() if each.grad is not None)
        outcome = _outcome(model, loss, loss_scale)
    seen.measured.settle()
    found = [seen.measured[place] for place in range(len(seen.measured))]
    if not all(each.is_finite for each in found[ours:]):
        return Room(outcome, None)
    sized = (each for each in found if each.absmax > 0 and each.is_finite)
    return Room(outcome, min((torch.finfo(each.dtype).max / each.absmax for each in sized), default=math.inf))


@contextmanager
def _run(
    model: nn.Module,
    loss_fn: Callable[[], Tensor],
    casting: AbstractContextManager | None,
    loss_scale: float,
    *,
    whole: AbstractContextManager | None = None,
    backward: AbstractContextManager | None = None,
) -> Iterator[Tensor]:
    """Run forward and backward, give the loss while the gradients are there, and leave the model as it was.

    The contexts are for the whole run, and for backward alone.
    """
    torch.clear_autocast_cache()
    with untouched(model) as gradients, whole or nullcontext(), casting or nullcontext():
        clear_cast_caches()
        try:
            loss = loss_fn()
            check_loss(loss, model)
            gradients.park_leaves_of(loss)
            with backward or nullcontext():
                torch.autograd.backward(loss.float() * loss_scale)
            yield loss
        finally:
            clear_cast_caches()
            torch.clear_autocast_cache()


class _Backward(TorchDispatchMode):
    """Measure what backward writes, and nothing else: not what a checkpointed block computes again in it."""

    def __init__(self) -> None:
        super().__init__()
        self.measured = Measurements()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper it stands for would import the compiler, seconds at the first op

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if _current_node() is not None and not torch.is_grad_enabled() and writes_values(func):
            with torch._C.DisableTorchFunction():
                self.measure((result,))
        return result

    def measure(self, values: Iterable[Any]) -> None:
        for tensor in measured_in(values):
            self.measured.add(tensor)


def _chosen(model: nn.Module, number_format: torch.dtype | None) -> AbstractContextManager[None]:
    return nullcontext() if number_format is None else in_format(model, number_format)


@torch.no_grad()
def _outcome(model: nn.Module, loss: Tensor, loss_scale: float) -> Outcome:
    named = [(name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(_values(grad).float()).to(loss.device) for _, grad in named]
    figures = torch.stack([loss.detach().reshape(()).float(), *norms]).tolist()
    bad = tuple(name for (name, _), norm in zip(named, figures[1:], strict=True) if not math.isfinite(norm))
    return Outcome(figures[0], bad, math.hypot(*figures[1:]) / loss_scale)


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


@contextmanager
def in_format(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Run in `dtype` what the block would run in float16 or bfloat16.

    The model's own half weights are replaced for the length of the block, which must lie inside
    `amplab.trace.untouched.untouched`: that puts them back.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in LOW_PRECISION_DTYPES:
            tensor.data = tensor.data.to(dtype)
    with _InsteadOfHalf(dtype):
        yield


class _InsteadOfHalf(TorchDispatchMode):
    """Widen halves that come in, and make what is asked for in half in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper it stands for would import the compiler, seconds at the first op

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.is_view:  # the same memory goes on
            return func(*args, **(kwargs or {}))
        args, kwargs = map_tensors((args, kwargs or {}), self._cast)
        return func(*map(self._asked, args), **{name: self._asked(value) for name, value in kwargs.items()})

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.dtype in LOW_PRECISION_DTYPES - {self._dtype} else tensor

    def _asked(self, value: Any) -> Any:
        return self._dtype if isinstance(value, torch.dtype) and value in LOW_PRECISION_DTYPES else value
