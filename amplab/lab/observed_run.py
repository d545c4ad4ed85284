"""A history as the rules about runs read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from amplab.diagnose import Observation, StepObservation
from amplab.formats import FLOAT16
from amplab.lab.config import ExperimentConfig
from amplab.lab.events import StepRecord
from amplab.lab.history import History
from amplab.lab.watched_run import NO_LEVEL, WatchedRun

__all__ = ["LOOK_BACK", "observed_run"]

LOOK_BACK = 2000
"""Steps that the rules look back upon."""


def observed_run(
    history: History,
    config: ExperimentConfig | WatchedRun | None = None,
    *,
    growth_interval: int | None = None,
    dynamic: bool | None = None,
    norms: Mapping[int, float] | None = None,
    rates: Mapping[int, float] | None = None,
) -> Observation:
    """Return the last steps of a run.

    Args:
        history: the run; the share of gradients lost in half comes from its samples, and of the scales of a step's
            backwards it keeps those that differ.
        config: what it was, for who scaled its losses; None where unknown.
        growth_interval: clean steps until the scale grows, None where unknown.
        dynamic: whether the scale moves; None takes it from the config: what scales moves, but a
            static scale of an experiment.
        norms, rates: gradient norm and learning rate by step, where they are known.
    """
    records = history.records(max(0, len(history) - LOOK_BACK))
    lost = {taken.step: taken.histogram.lost_share(taken.loss_scale, FLOAT16) for taken in history.gradient_samples}
    mixed = {each.step: each.scales for each in history.mixed_scales}
    untold = history.untold_losses()
    steps = tuple(_observed(record, norms or {}, rates or {}, lost, mixed) for record in records)
    steps = tuple(replace(step, loss=None) if step.step in untold else step for step in steps) if untold else steps
    scaling, level = _scaling(config)
    moves = scaling != "none" and not _is_static(config) if dynamic is None else dynamic
    return Observation(steps, growth_interval, moves, scaling, level)


def _scaling(config: ExperimentConfig | WatchedRun | None) -> tuple[str, str]:
    """Who scaled the losses, as `amplab.diagnose` has it, and the opt_level, empty where there is none."""
    if isinstance(config, WatchedRun):
        return config.scaling, config.opt_level.replace(NO_LEVEL, "")
    return ("", "") if config is None else ("apex", config.opt_level)


def _is_static(config: ExperimentConfig | WatchedRun | None) -> bool:
    return isinstance(config, ExperimentConfig) and isinstance(config.loss_scale, float)


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
