"""`rehearse` runs a train step once and restores all state; `rehearse_loop` decides which rehearsals a loop needs.

    overflowed             again at lower scales, until backward is finite
    clipped while scaled   again at another scale: a limit that moves with the scale does the same, a fixed one does not
    added while scaled     again at another scale: what does not grow with the scale is divided by it
    not growing with it    again far below 1: what was never scaled is the same, what a hook clamps is smaller
    rewritten gradients    again with an overflow: whether the loop hides it from the scaler
    stepped while scaled   again at another scale: gradients that are the same at both were never scaled
    schedulers moved       again with an overflow: whether they move when the optimizer's step is skipped
    gradients cleared      again with an overflow and a step after it: whether its gradients are cleared too

All state is restored after each rehearsal. Only the first may print; a later one that fails is ignored.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.amp import Session
from amplab.diagnose.rules.gradients import (
    may_add_to_scaled_gradients,
    may_be_scaled,
    may_clip_scaled_gradients,
    not_scaled_perhaps,
)
from amplab.diagnose.train_step.loop_recorder import LoopRecorder, norm_of
from amplab.diagnose.train_step.loop_state import kept, scales_of, set_scale
from amplab.diagnose.train_step.named_code import clips_of_model_parameters, leads_to
from amplab.diagnose.train_step.rehearsal import Rehearsal
from amplab.diagnose.train_step.schedules import ScheduleWatch, schedulers_of
from amplab.policies.signals import is_interrupt
from amplab.trace.handed_step import Scaler
from amplab.trace.named_state import named_scalers
from amplab.trace.stand_ins import apart
from amplab.trace.untouched import untouched

__all__ = ["RecordingError", "rehearse", "rehearse_loop"]

T = TypeVar("T")
_SCALE_FACTOR, _TRIES = 16.0, 4  # from one scale to the next, and how often to a lower one: by 2^16 in all
_FAR_BELOW = 2.0**-24


class RecordingError(Exception):
    """The recorder itself failed, not the train step."""


def rehearse_loop(
    model: nn.Module,
    train_step: Callable[[], Any],
    optimizers: Sequence[Optimizer],
    *,
    scaler: Scaler | None = None,
    stateful: Sequence[Any] = (),
) -> Rehearsal:
    """Rehearse `train_step`, and again if one rehearsal does not decide; arguments as for `rehearse`.

    Raises:
        Exception: what `train_step` raises in the first rehearsal.

    Sync: many.
    """
    again = partial(_again, model, train_step, optimizers, scaler=scaler, stateful=stateful)
    first = found = rehearse(model, train_step, optimizers, scaler=scaler, stateful=stateful)
    scale = first.scale
    for _ in range(_TRIES):
        if not found.overflowed or scale <= 1:
            break
        scale = max(scale / _SCALE_FACTOR, 1.0)
        found = again(loss_scale=scale) or found
    if found.overflowed:
        found = first
    if may_clip_scaled_gradients(found) or may_be_scaled(found) or may_add_to_scaled_gradients(found):
        other = found.scale / _SCALE_FACTOR if found.scale >= _SCALE_FACTOR else found.scale * _SCALE_FACTOR
        found = replace(found, elsewhere=again(loss_scale=other))
    if not_scaled_perhaps(found):
        found = replace(found, far_below=again(loss_scale=_FAR_BELOW))
    if (found.schedules or found.rewritten) and _is_dynamic(scaler) and first.scale > 1:
        found = replace(found, skipped=first if first.overflowed else again(overflows=True))
    if found.cleared and found.stepped and _is_dynamic(scaler) and first.scale > 1:
        left = _quietly(_gradients_left_over, model, train_step, optimizers, scaler=scaler, stateful=stateful)
        found = replace(found, left_over=left or ())
    return found


def rehearse(
    model: nn.Module,
    train_step: Callable[[], Any],
    optimizers: Sequence[Optimizer],
    *,
    scaler: Scaler | None = None,
    stateful: Sequence[Any] = (),
    loss_scale: float | None = None,
    overflows: bool = False,
) -> Rehearsal:
    """Run `train_step` once and return what it does with the gradients; then restore all state.

    Restored are parameters, masters, buffers, gradients, optimizer states, loss scales, random states, the schedulers
    that the step's code names, and `stateful`. A batch that `train_step` takes from an iterator is lost.

    Args:
        model: the model, or several in one module.
        train_step: a whole iteration: forward, backward, optimizer step, and what is between them.
        optimizers: those that it steps.
        scaler: the session or GradScaler in it.
        stateful: other objects that it changes and that have state_dict and load_state_dict: schedulers, averages.
        loss_scale: run it at this scale; None for the present one.
        overflows: set every gradient to inf.

    Sync: many.
    """
    schedulers = schedulers_of(train_step, stateful)
    named = {id(each) for each in stateful}
    recorder = LoopRecorder(model, optimizers, scaler, ScheduleWatch(schedulers, optimizers), overflows=overflows)
    changed = *schedulers_of(train_step, counting=False), *named_scalers(train_step)
    others = [each for each in changed if id(each) not in named]
    with (
        apart(model),  # first: the optimizers step its tensors
        kept(optimizers, scaler, [*stateful, *others]) as before,
        untouched(model),
        recorder.recording(),
    ):
        if loss_scale is not None:
            for each in (scaler, *named_scalers(train_step)):
                set_scale(each, loss_scale)
        recorder.scales = scales_of(scaler)
        train_step()
        if recorder.failure is not None:
            raise RecordingError(f"{type(recorder.failure).__name__}: {recorder.failure}") from recorder.failure
        seen = recorder.rehearsal()
        cleared = not any(_has_gradient(each) for each in model.parameters())
        moves = recorder.schedules.moves([each.is_unmoved() for each in before])
        left_out = [(each, leads_to(train_step, optimizers[each.optimizer])) for each in recorder.unstepped()]
    return replace(
        seen,
        cleared=cleared,
        schedules=moves,
        unstepped=tuple(each._replace(named=named) for each, named in left_out),
        clips_by_name=clips_of_model_parameters(train_step),
    )


def _again(*given: Any, **options: Any) -> Rehearsal | None:
    return _quietly(rehearse, *given, **options)


def _quietly(function: Callable[..., T], *given: Any, **options: Any) -> T | None:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return function(*given, **options)
        except Exception as error:  # the first rehearsal has raised what the caller needs to know
            if is_interrupt(error):
                raise
            return None


def _is_dynamic(scaler: Scaler | None) -> bool:
    if isinstance(scaler, Session):
        return any(each.dynamic for each in scaler.scalers)
    return scaler is not None and scaler.is_enabled()


def _gradients_left_over(
    model: nn.Module,
    train_step: Callable[[], Any],
    optimizers: Sequence[Optimizer],
    *,
    scaler: Scaler | None = None,
    stateful: Sequence[Any] = (),
) -> tuple[str, ...]:
    """Run a step that overflows and one more; return the gradients that are still inf or NaN from the first one.

    Arguments, and what is restored, as for `rehearse`. Sync: many.
    """
    named = {id(each) for each in stateful}
    changed = *schedulers_of(train_step, counting=False), *named_scalers(train_step)
    others = [each for each in changed if id(each) not in named]
    with apart(model), kept(optimizers, scaler, [*stateful, *others]), untouched(model):
        with LoopRecorder(model, optimizers, scaler, overflows=True).recording():
            train_step()
        after = LoopRecorder(model, optimizers, scaler)
        with after.recording():
            train_step()
        return after.rehearsal().left_over


def _has_gradient(parameter: Tensor) -> bool:
    """Whether a gradient is there and not 0. Sync: one."""
    return parameter.grad is not None and norm_of(parameter.grad) != 0
