"""`trace_step`: record one forward and backward of a model, and restore all state.

The optimizer's step is not part of a trace.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from amplab.policies.casting.function_modes import without_function_modes
from amplab.trace.argument_checks import check_loss, check_step
from amplab.trace.as_found import leaves_as_found
from amplab.trace.engines import clear_cast_caches
from amplab.trace.kept_tensors import KeptTensors
from amplab.trace.reasons import SCALE_LOSS, records_of
from amplab.trace.recorder import Event, Observer, Recorder
from amplab.trace.records import Trace
from amplab.trace.untouched import ParkedGradients, nodes_behind, untouched

__all__ = ["explains_second_backward", "record_step", "run_backward", "trace_step"]

_AS_IT_IS: AbstractContextManager[object] = nullcontext()


@leaves_as_found
def trace_step(
    model: nn.Module,
    step: Callable[[], Tensor],
    *,
    casting: AbstractContextManager[object] = _AS_IT_IS,
    loss_scale: float = 1.0,
    observer: Observer | None = None,
    draws: bool = True,
) -> Trace:
    """Run one forward and backward of `model` and return every op with its dtypes, its place and the reason.

    Parameters, buffers, gradients, training flags, random states and hooks are restored. Two calls return equal traces.

    Args:
        model: the module whose submodules give ops their path. Not compiled, its lazy parameters initialized;
            compiled functions that it calls run as they are written.
        step: runs the forward on a batch of its own and returns the loss, one floating-point number.
        casting: context in which forward and backward run, e.g. `engine.active()`; the caller's own context by default.
        loss_scale: what the loss is multiplied by before backward, > 0.
        observer: gets the tensors of every op as it runs, see `recorder.Observer`.
        draws: as `untouched` takes it.

    Raises:
        TypeError: `model`, `step` or what it returns has another type.
        ValueError: a loss that is not a single number or depends on no parameter, a loss scale out of range, a model
            that is compiled, scripted or not yet initialized, or gradients that are disabled around the call. What
            `step` raises passes through.

    Sync: none.

    >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    >>> trace = trace_step(model, lambda: model(torch.ones(2, 8)).sum())
    >>> [(record.op, record.module) for record in trace if record.phase == "forward" and not record.is_view]
    [('ones', ''), ('linear', '0'), ('relu', '1'), ('sum', '')]
    """
    check_step(model, step, loss_scale)
    events = record_step(model, step, casting=casting, loss_scale=loss_scale, observer=observer, draws=draws)
    return Trace(records_of(events), type(model).__name__)


def record_step(
    model: nn.Module,
    step: Callable[[], Tensor],
    *,
    casting: AbstractContextManager[object] = _AS_IT_IS,
    loss_scale: float = 1.0,
    observer: Observer | None = None,
    kept: KeptTensors | None = None,
    before_restoring: Callable[[], object] | None = None,
    draws: bool = True,
) -> list[Event]:
    """Run the step as `trace_step` does and return the events, from which `reasons.records_of` makes records.

    Args:
        kept: counts what is saved for backward.
        before_restoring: called after backward, while the gradients exist.
        model, step, casting, loss_scale, observer, draws: as `trace_step`; checked already, see `argument_checks`.

    Sync: none.
    """
    recorder = Recorder(model, observer, kept)
    with untouched(model, draws=draws) as gradients, casting:
        clear_cast_caches()
        try:
            _run(recorder, model, gradients, step, loss_scale)
            if before_restoring is not None:
                before_restoring()
        finally:
            clear_cast_caches()
    return recorder.events


def _run(
    recorder: Recorder,
    model: nn.Module,
    gradients: ParkedGradients,
    step: Callable[[], Tensor],
    loss_scale: float,
) -> None:
    with recorder.recording():
        with recorder.calls:
            loss = step()
        check_loss(loss, model)
        gradients.park_leaves_of(loss)
        if loss_scale != 1:
            with recorder.calls.named(SCALE_LOSS):
                loss = loss.float() * loss_scale
        with recorder.calls:
            run_backward(loss, model)


def run_backward(loss: Tensor, model: nn.Module) -> None:
    """Run the backward of `loss`, the result of a step that began without gradients.

    Raises:
        ValueError: the step has called backward, or `loss` depends on no parameter of a model that has some to train.
    """
    with explains_second_backward(model):
        _backward(loss)
    trained = {id(each) for each in model.parameters() if each.requires_grad}
    # Backward of a reentrant checkpoint reaches parameters that the graph does not show; a hook may drop gradients.
    if trained and not _has_gradients(model) and trained.isdisjoint(_leaves_of(loss)):
        raise ValueError(
            f"the loss depends on no parameter of {type(model).__name__}: expected the loss of this model's output; "
            "look for another model in the step, or a loss of the inputs alone."
        )


@contextmanager
def explains_second_backward(model: nn.Module) -> Iterator[None]:
    """Explain the error of a backward that fails because the step itself has called backward.

    The step must have begun without gradients; the block runs the backward of its loss.

    Raises:
        ValueError: instead of autograd's RuntimeError about a second backward, if `model` had gradients before it.
    """
    began = _has_gradients(model)
    try:
        yield
    except RuntimeError as error:
        if began and "through the graph a second time" in str(error):
            raise ValueError(
                "step called backward(), so the backward of its loss would be the second one: expected a function that "
                "runs the forward and returns the loss without calling backward."
            ) from error
        raise


def _has_gradients(model: nn.Module) -> bool:
    with without_function_modes():
        return any(each.grad is not None for each in model.parameters())


def _leaves_of(loss: Tensor) -> set[int]:
    return {id(getattr(node, "variable", None)) for node in nodes_behind(loss)}


def _backward(loss: Tensor) -> None:
    try:
        torch.autograd.backward(loss)
    except CheckpointError as error:  # torch's checkpoint restores torch.autocast only
        error.add_note(
            "torch.utils.checkpoint runs the block again in backward, without amplab's casts: use amplab.checkpoint, "
            "which restores them."
        )
        raise
