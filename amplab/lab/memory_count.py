"""`level_memory`: counts what one training step keeps in memory, on a fresh model.

Everything is counted in tensors of real steps: the session's by `Session.memory`, what the forward keeps for its
backward by the X-ray, at two batch sizes, between and beyond which activations grow linearly.
"""

from __future__ import annotations

import warnings

from amplab.lab.config import ExperimentConfig
from amplab.lab.experiment import Experiment
from amplab.lab.memory_fit import LevelMemory

__all__ = ["level_memory"]

_MOST_STEPS = 40  # until a step is not skipped, so that the optimizer has its state


def level_memory(config: ExperimentConfig) -> LevelMemory:
    """Count one step of a fresh experiment.

    It trains until one step is not skipped, because an optimizer creates its state in its first step.

    >>> counted = level_memory(ExperimentConfig(hidden=16, opt_level="O0", batch_size=32))
    >>> counted.parameters == counted.gradients == counted.optimizer_state == 4 * (64 * 16 + 16 + 16 * 16 + 16 + 170)
    True
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about this level, which nobody has chosen
        experiment = Experiment(config)
    with experiment.code_kept():  # which all runs share
        return _counted(experiment)


def _counted(experiment: Experiment) -> LevelMemory:
    config, gradients = experiment.config, 0
    for _ in range(_MOST_STEPS):
        skipped = experiment.step().skipped
        gradients = max(gradients, experiment.memory().gradients)  # as just before the optimizer's step
        if not skipped:
            break
    used = experiment.session.memory()
    kept = experiment.kept()
    activations = None if kept is None else sum(kept.activations.values())
    return LevelMemory(
        opt_level=config.opt_level,
        label=config.level.label,
        parameters=used.parameters,
        gradients=gradients,
        masters=used.masters,
        optimizer_state=used.optimizer_state,
        buffers=sum(buffer.nbytes for buffer in experiment.model.buffers()),
        weight_casts=0 if kept is None else sum(kept.weight_casts.values()),
        activations=activations,
        per_example=_per_example(experiment, activations),
        batch_size=config.batch_size,
    )


def _per_example(experiment: Experiment, activations: int | None) -> float:
    """Return the bytes that one more example adds: from a second, smaller batch, else in proportion."""
    whole = experiment.config.batch_size
    if activations is None:
        return 0.0
    smaller = None if whole < 2 else experiment.kept(batch_size=whole // 2)
    if smaller is None:
        return activations / whole
    return (activations - sum(smaller.activations.values())) / (whole - whole // 2)
