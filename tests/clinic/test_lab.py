"""The lab's own experiments are healthy: nothing above a note at any level, but for Adam on half parameters."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from amplab.diagnose import Observation, StepObservation, doctor
from amplab.lab import Experiment, ExperimentConfig, load_task

STEPS = 30


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_nothing_above_a_note(level, model, optimizer):
    if (level, optimizer) == ("O3", "adam"):
        with pytest.warns(UserWarning, match="Adam on half parameters"):
            found, _ = examined(level, model, optimizer)
        assert (found[0].name, found[0].severity) == ("adam-on-half", "error")
        return
    found, experiment = examined(level, model, optimizer)
    assert not found.harmful, str(found.harmful)
    assert all(torch.isfinite(each).all() for each in experiment.model.state_dict().values())


def examined(level, model, optimizer):
    """Train, and look at the run and at the next step."""
    config = replace(ExperimentConfig(hidden=32), opt_level=level, model=model, optimizer=optimizer)
    experiment = Experiment(config)
    records = [experiment.step() for _ in range(STEPS)]
    run = Observation(
        tuple(
            StepObservation(each.step, each.loss, each.loss_scale, each.skipped, each.next_loss_scale)
            for each in records
        ),
        growth_interval=config.growth_interval,
    )
    images, labels = load_task("digits", config.seed).batch(STEPS, config.batch_size)
    found = doctor(
        experiment.model,
        step=lambda: F.cross_entropy(experiment.model(images), labels),
        optimizer=experiment.optimizer,
        scaler=experiment.session,
        batch=(images, labels),
        run=run,
    )
    return found, experiment
