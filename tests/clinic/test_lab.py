"""The lab's own experiments are healthy: nothing above a note at any level."""

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
        pytest.skip("Adam on half parameters is no healthy run")
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
        lambda: F.cross_entropy(experiment.model(images), labels),
        optimizers=experiment.optimizer,
        amp=experiment.session,
        batch=(images, labels),
        run=run,
    )
    assert not found.harmful, str(found.harmful)
    assert all(torch.isfinite(each).all() for each in experiment.model.state_dict().values())
