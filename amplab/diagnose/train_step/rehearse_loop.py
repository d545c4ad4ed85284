"""`rehearse_loop`: rehearse a train step once, and again if one rehearsal does not decide.

    overflowed             again at lower scales, until backward is finite
    clipped while scaled   again at another scale: a limit that moves with the scale does the same, a fixed one does not
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

from torch import nn
from torch.optim import Optimizer

from amplab.amp import Session
from amplab.diagnose.rules.gradients import may_be_scaled, may_clip_scaled_gradients
from amplab.diagnose.train_step.rehearsal import Rehearsal, gradients_left_over, rehearse
from amplab.trace.handed_step import Scaler

__all__ = ["rehearse_loop"]

T = TypeVar("T")
_SCALE_FACTOR, _TRIES = 16.0, 4  # from one scale to the next, and how often to a lower one: by 2^16 in all


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
    if may_clip_scaled_gradients(found) or may_be_scaled(found):
        other = found.scale / _SCALE_FACTOR if found.scale >= _SCALE_FACTOR else found.scale * _SCALE_FACTOR
        found = replace(found, elsewhere=again(loss_scale=other))
    if found.schedules and _is_dynamic(scaler) and first.scale > 1:
        found = replace(found, skipped=first if first.overflowed else again(overflows=True))
    if found.cleared and found.stepped and _is_dynamic(scaler) and first.scale > 1:
        left = _quietly(gradients_left_over, model, train_step, optimizers, scaler=scaler, stateful=stateful)
        found = replace(found, left_over=left or ())
    return found


def _again(*given: Any, **options: Any) -> Rehearsal | None:
    return _quietly(rehearse, *given, **options)


def _quietly(function: Callable[..., T], *given: Any, **options: Any) -> T | None:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return function(*given, **options)
        except Exception:  # noqa: BLE001  the first rehearsal has raised what the caller needs to know
            return None


def _is_dynamic(scaler: Scaler | None) -> bool:
    if isinstance(scaler, Session):
        return any(each.dynamic for each in scaler.scalers)
    return scaler is not None and scaler.is_enabled()
