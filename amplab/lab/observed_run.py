"""A history as the rules about runs read it."""

from __future__ import annotations

from collections.abc import Mapping

from amplab.diagnose import Observation, StepObservation
from amplab.formats import FLOAT16
from amplab.lab.events import StepRecord
from amplab.lab.history import History

__all__ = ["LOOK_BACK", "observed_run"]

LOOK_BACK = 2000
"""Steps that the rules look back upon."""


def observed_run(
    history: History,
    *,
    growth_interval: int | None = None,
    dynamic: bool = True,
    norms: Mapping[int, float] | None = None,
    rates: Mapping[int, float] | None = None,
) -> Observation:
    """Return the last steps of a run.

    Args:
        history: the run; the share of gradients lost in half comes from its samples, and of the scales of a step's
            backwards it keeps those that differ.
        growth_interval: clean steps until the scale grows, None where unknown.
        dynamic: whether the scale moves.
        norms, rates: gradient norm and learning rate by step, where they are known.
    """
    records = history.records(max(0, len(history) - LOOK_BACK))
    lost = {taken.step: taken.histogram.lost_share(taken.loss_scale, FLOAT16) for taken in history.gradient_samples}
    mixed = {each.step: each.scales for each in history.mixed_scales}
    steps = (_observed(record, norms or {}, rates or {}, lost, mixed) for record in records)
    return Observation(tuple(steps), growth_interval, dynamic)


def _observed(
    record: StepRecord,
    norms: Mapping[int, float],
    rates: Mapping[int, float],
    lost: Mapping[int, float | None],
    mixed: Mapping[int, tuple[float, ...]],
) -> StepObservation:
    return StepObservation(
        record.step,
        record.loss,
        record.loss_scale,
        record.skipped,
        record.next_loss_scale,
        record.first_nonfinite,
        gradient_norm=norms.get(record.step),
        underflow=lost.get(record.step),
        learning_rate=rates.get(record.step),
        backward_scales=mixed.get(record.step, ()),
    )
