"""Run a step again under other conditions, to see whether an inf or NaN goes away: another scale, another format.

`in_format` replaces float16 and bfloat16 in a step without a change to its code: inputs of these dtypes are converted,
and casts to them go to the other dtype. It works below autograd and below every kind of autocast, in the dispatcher,
which all ops pass.

    probe(model, step, loss_scale=1.0)                      is it gone at scale 1
    probe(model, step, number_format=torch.float32)         is it gone in float32
    headroom(model, step)                                   at which scale is it gone
    losses_in_float32(model, step, rates)                   does float32 train on this batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amplab.diagnose.observed_step.tensor_summary import Measurements
from amplab.diagnose.observed_step.values import measured_in, writes_values
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.formats.stored_values import stored_values
from amplab.policies.casting.function_modes import without_function_modes
from amplab.policies.nested_tensors import map_tensors
from amplab.trace.argument_checks import check_loss, check_step
from amplab.trace.as_found import leaves_as_found
from amplab.trace.dispatch_mode import DispatchMode, run_op
from amplab.trace.engines import clear_cast_caches
from amplab.trace.untouched import untouched

__all__ = [
    "RerunResult",
    "Headroom",
    "UpdateRate",
    "gradients_of",
    "headroom",
    "in_format",
    "losses_in_float32",
    "probe",
]

_current_node = torch._C._current_autograd_node


@dataclass(frozen=True)
class RerunResult:
    """The result of one forward and backward.

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
        """Whether the loss and every gradient are finite."""
        return math.isfinite(self.loss) and not self.bad_gradients


@leaves_as_found
def probe(
    model: nn.Module,
    step: Callable[[], Tensor],
    *,
    casting: AbstractContextManager[object] | None = None,
    loss_scale: float = 1.0,
    number_format: torch.dtype | None = None,
) -> RerunResult:
    """Run one forward and backward and return whether loss and gradients are finite; all state is restored.

    Args:
        model: as `trace_step` takes it.
        step: as there.
        casting: context in which forward and backward run; the caller's own by default.
        loss_scale: what the loss is multiplied by, in float32, before backward.
        number_format: run in this dtype what runs in float16 or bfloat16; None for no change.

    Raises:
        TypeError, ValueError: as `trace_step`; but the model may be compiled.

    Sync: one.
    """
    check_step(model, step, loss_scale, compiled=True, values=True)
    with _run(model, step, casting, loss_scale, whole=_chosen(model, number_format)) as loss:
        return _result_of(model, loss, loss_scale)


@leaves_as_found
def gradients_of(
    model: nn.Module,
    step: Callable[[], Tensor],
    *,
    casting: AbstractContextManager[object] | None = None,
    loss_scale: float = 1.0,
    number_format: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Run one forward and backward and return the gradients in float32, divided by the scale; all state is restored.

    Complex gradients are left out; of sparse ones the values are returned.

    Args:
        model, step, casting, loss_scale, number_format: as for `probe`.

    Sync: none.
    """
    with (
        _run(model, step, casting, loss_scale, whole=_chosen(model, number_format)),
        torch.no_grad(),
        without_function_modes(),  # not to be cast
    ):
        found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        found = {name: grad for name, grad in found.items() if not grad.is_complex()}
        return {name: stored_values(grad).float() / loss_scale for name, grad in found.items()}


@dataclass(frozen=True)
class Headroom:
    """How far the values of one backward are from the end of their range.

    Args:
        result: the result of the run.
        factor: by how much its loss could still be multiplied. Backward is linear in the scale, so the value nearest
            the end of its format decides. inf if backward produces only zeros; None if an element of a gradient is
            not finite already.
    """

    result: RerunResult
    factor: float | None


@leaves_as_found
def headroom(
    model: nn.Module,
    step: Callable[[], Tensor],
    *,
    casting: AbstractContextManager[object] | None = None,
    loss_scale: float = 1.0,
) -> Headroom:
    """Run one forward and backward and measure the values that backward writes.

    Args:
        model, step, casting, loss_scale: as for `probe`.

    Sync: two; one more for each other dtype.
    """
    seen = _Backward()
    with _run(model, step, casting, loss_scale, backward=seen) as loss:
        ours = len(seen.measured)
        with without_function_modes():  # not to be cast
            seen.measure(each.grad for each in model.parameters() if each.grad is not None)
        result = _result_of(model, loss, loss_scale)
    seen.measured.settle()
    found = [seen.measured[place] for place in range(len(seen.measured))]
    if not all(each.is_finite for each in found[ours:]):
        return Headroom(result, None)
    sized = (each for each in found if each.absmax > 0 and each.is_finite)
    return Headroom(result, min((torch.finfo(each.dtype).max / each.absmax for each in sized), default=math.inf))


@contextmanager
def _run(
    model: nn.Module,
    step: Callable[[], Tensor],
    casting: AbstractContextManager[object] | None,
    loss_scale: float,
    *,
    whole: AbstractContextManager[object] | None = None,
    backward: AbstractContextManager[object] | None = None,
) -> Iterator[Tensor]:
    """Run forward and backward and yield the loss while the gradients exist; then restore all state.

    Args:
        whole: context of the whole run.
        backward: context of backward alone.
    """
    torch.clear_autocast_cache()
    with untouched(model) as gradients, whole or nullcontext(), casting or nullcontext():
        clear_cast_caches()
        try:
            loss = step()
            check_loss(loss, model)
            gradients.park_leaves_of(loss)
            with backward or nullcontext():
                torch.autograd.backward(loss.float() * loss_scale)
            yield loss
        finally:
            clear_cast_caches()
            torch.clear_autocast_cache()


class UpdateRate(NamedTuple):
    """How an optimizer moves a parameter, as far as it matters for whether the steps are too large.

    Args:
        rate: the learning rate.
        by_sign: whether an element moves by about the rate whatever its gradient, as Adam moves it.
    """

    rate: float
    by_sign: bool


@leaves_as_found
def losses_in_float32(
    model: nn.Module,
    step: Callable[[], Tensor],
    rates: Mapping[str, UpdateRate],
    *,
    casting: AbstractContextManager[object] | None = None,
    steps: int = 8,
) -> list[float]:
    """Train on one batch in float32 and return the losses, up to the first that is not finite; restore all state.

    Args:
        model, step, casting: as for `probe`.
        rates: name of a parameter -> how it moves. Momentum is left out, so the steps are smaller than the optimizer's.
        steps: number of steps.

    Sync: one for each step.
    """
    losses: list[float] = []
    _clear_caches()
    try:
        with untouched(model) as gradients, in_format(model, torch.float32), casting or nullcontext():
            while len(losses) < steps and all(map(math.isfinite, losses)):
                clear_cast_caches()
                loss = step()
                losses.append(loss.item())
                gradients.park_leaves_of(loss)
                torch.autograd.backward(loss.float())
                with torch.no_grad(), without_function_modes():
                    _move(model, rates)
    finally:
        _clear_caches()
    return losses


def _clear_caches() -> None:
    clear_cast_caches()
    torch.clear_autocast_cache()


def _move(model: nn.Module, rates: Mapping[str, UpdateRate]) -> None:
    for name, parameter in model.named_parameters():
        grad, parameter.grad = parameter.grad, None
        if grad is not None and name in rates:
            parameter.sub_((grad.sign() if rates[name].by_sign else grad) * rates[name].rate)


class _Backward(DispatchMode):
    """Measure what backward writes, without the forward that a checkpointed block computes again in it."""

    def __init__(self) -> None:
        super().__init__()
        self.measured = Measurements()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run_op(func, args, kwargs)
        if _current_node() is not None and not torch.is_grad_enabled() and writes_values(func):
            with without_function_modes():
                self.measure((result,))
        return result

    def measure(self, values: Iterable[Any]) -> None:
        for tensor in measured_in(values):
            self.measured.add(tensor)


def _chosen(model: nn.Module, number_format: torch.dtype | None) -> AbstractContextManager[None]:
    return nullcontext() if number_format is None else in_format(model, number_format)


@torch.no_grad()
def _result_of(model: nn.Module, loss: Tensor, loss_scale: float) -> RerunResult:
    named = [(name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(stored_values(grad).float()).to(loss.device) for _, grad in named]
    figures = torch.stack([loss.detach().reshape(()).float(), *norms]).tolist()
    bad = tuple(name for (name, _), norm in zip(named, figures[1:], strict=True) if not math.isfinite(norm))
    return RerunResult(figures[0], bad, math.hypot(*figures[1:]) / loss_scale)


@contextmanager
def in_format(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Run in `dtype` what the block would run in float16 or bfloat16.

    The model's weights of these dtypes are replaced. The block must be inside of `amplab.trace.untouched.untouched`,
    which restores their values.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in LOW_PRECISION_DTYPES:
            tensor.data = tensor.data.to(dtype)
    with _OtherFormat(dtype):
        yield


class _OtherFormat(DispatchMode):
    """Convert float16 and bfloat16 inputs to `dtype`, and create tensors in it that are requested in these dtypes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.is_view:  # a view uses the same memory
            return run_op(func, args, kwargs)
        args, kwargs = map_tensors((args, kwargs), self._cast)
        return run_op(func, tuple(map(self._asked, args)), {name: self._asked(value) for name, value in kwargs.items()})

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.dtype in LOW_PRECISION_DTYPES - {self._dtype} else tensor

    def _asked(self, value: Any) -> Any:
        return self._dtype if isinstance(value, torch.dtype) and value in LOW_PRECISION_DTYPES else value
