"""`trace_step`: record one forward and backward of a model, and leave nothing behind.

The optimizer's step is not part of it: a trace ends where the gradients are there.
"""

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from amplab.trace.engines import clear_cast_caches
from amplab.trace.kept_tensors import KeptTensors
from amplab.trace.reasons import SCALE_LOSS, records_of
from amplab.trace.recorder import Event, Observer, Recorder
from amplab.trace.records import Trace
from amplab.trace.untouched import ParkedGradients, untouched

__all__ = ["record_step", "trace_step"]

_AS_IT_IS = nullcontext()


def trace_step(
    model: nn.Module,
    loss_fn: Callable[[], Tensor],
    *,
    casting: AbstractContextManager = _AS_IT_IS,
    loss_scale: float = 1.0,
    observer: Observer | None = None,
) -> Trace:
    """Run one forward and backward of `model` and return every op with its dtypes, its place and the reason.

    Parameters, buffers, gradients, training flags and random states are afterwards what they were; no hook stays. Two
    calls give equal traces.

    Args:
        model: the module whose submodules give ops their path. Not compiled, its lazy parameters initialised.
        loss_fn: runs the forward on a batch of its own and returns the loss, one floating-point number.
        casting: context in which forward and backward run, e.g. `engine.active()`; the caller's own context by default.
        loss_scale: what the loss is multiplied by before backward, > 0.
        observer: is shown the tensors of every op as it runs, see `recorder.Observer`.

    Raises:
        TypeError: `model`, `loss_fn` or what it returns is of another type.
        ValueError: a loss that is no single number or hangs on no parameter, a loss scale out of range, a model that is
            compiled, scripted or not yet initialised. What `loss_fn` raises passes through, with everything put back.

    Sync: none.

    >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    >>> trace = trace_step(model, lambda: model(torch.ones(2, 8)).sum())
    >>> [(record.op, record.module) for record in trace if record.phase == "forward" and not record.is_view]
    [('ones', ''), ('linear', '0'), ('relu', '1'), ('sum', '')]
    """
    return Trace(records_of(record_step(model, loss_fn, casting=casting, loss_scale=loss_scale, observer=observer)))


def record_step(
    model: nn.Module,
    loss_fn: Callable[[], Tensor],
    *,
    casting: AbstractContextManager = _AS_IT_IS,
    loss_scale: float = 1.0,
    observer: Observer | None = None,
    kept: KeptTensors | None = None,
    before_restoring: Callable[[], object] | None = None,
) -> list[Event]:
    """Run the step as `trace_step` does and return what was seen, not yet in words (`reasons.records_of`).

    Args:
        kept: counts what is saved for backward.
        before_restoring: called after backward, while the gradients are there.
        model, loss_fn, casting, loss_scale, observer: as `trace_step`, which has also what is raised.

    Sync: none.
    """
    _check(model, loss_fn, loss_scale)
    recorder = Recorder(model, observer, kept)
    with untouched(model) as gradients, casting:
        clear_cast_caches()
        try:
            _run(recorder, gradients, loss_fn, loss_scale)
            if before_restoring is not None:
                before_restoring()
        finally:
            clear_cast_caches()
    return recorder.events


def _run(recorder: Recorder, gradients: ParkedGradients, loss_fn: Callable[[], Tensor], loss_scale: float) -> None:
    with recorder.recording():
        with recorder.calls:
            loss = loss_fn()
        _check_loss(loss)
        gradients.park_leaves_of(loss)
        if loss_scale != 1:
            with recorder.calls.named(SCALE_LOSS):
                loss = loss.float() * loss_scale
        with recorder.calls:
            torch.autograd.backward(loss)


def _check(model: nn.Module, loss_fn: Callable[[], Tensor], loss_scale: float) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: expected a torch.nn.Module, whose submodules name the ops.")
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn={type(loss_fn).__name__}: expected a function without arguments that runs the forward and "
            "returns the loss; wrap it, e.g. lambda: criterion(model(x), y)."
        )
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, int | float):
        raise TypeError(f"loss_scale={loss_scale!r}: expected a number; take the scaler's current scale.")
    if not (math.isfinite(loss_scale) and loss_scale > 0):
        raise ValueError(f"loss_scale={loss_scale}: expected a finite number > 0; 1.0 leaves the loss as it is.")
    for path, module in model.named_modules():
        _check_module(path or type(module).__name__, module)


def _check_module(path: str, module: nn.Module) -> None:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if (dynamo and isinstance(module, dynamo.OptimizedModule)) or module._compiled_call_impl is not None:
        raise ValueError(
            f"{path} is compiled: its ops are fused and never reach the dispatcher one by one; trace the module that "
            "was given to torch.compile."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"{path} is scripted and takes no hooks; trace the module that was given to torch.jit.")
    if any(map(nn.parameter.is_lazy, (*module._parameters.values(), *module._buffers.values()))):
        raise ValueError(f"{path} has uninitialised parameters: expected a model that has seen a batch; run it once.")


def _check_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn returned {type(loss).__name__}: expected the loss as a tensor with one element.")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"loss_fn returned {loss.dtype} of shape {tuple(loss.shape)}: expected one floating-point number; "
            "reduce it, e.g. with .mean()."
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a tensor without a gradient: expected a loss that hangs on the model's parameters; look "
            "for detach(), .item() or torch.no_grad() on its way."
        )
