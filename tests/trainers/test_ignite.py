"""Ignite's trainer with amplab's scaler and regions."""

import copy

import pytest
import torch
from torch.nn import functional as F

import amplab

ignite = pytest.importorskip("ignite")
from ignite.engine import Engine, Events, create_supervised_trainer, supervised_training_step_amp  # noqa: E402  # noqa: E402
from ignite.handlers import Checkpoint, DiskSaver  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def engine_of(page, model, scaler, accumulates=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    update = supervised_training_step_amp(
        *(model, optimizer, F.cross_entropy, "cpu"),
        scaler=scaler,
        gradient_accumulation_steps=accumulates,
        model_fn=page("Ignite").in_half,
    )
    return Engine(update), optimizer


@pytest.mark.parametrize("accumulates", [1, 2])
def test_the_scaler_trains_as_torchs_does_to_the_bit(page, classifier, batches, overflowing, accumulates):
    found = []
    for kind in (torch.amp.GradScaler, amplab.GradScaler):
        model, scaler = copy.deepcopy(classifier), kind(**overflowing)
        engine_of(page, model, scaler, accumulates)[0].run(batches, max_epochs=2)
        found.append((list(model.parameters()), scaler.get_scale()))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1] < overflowing["init_scale"]


def test_regions_and_scaler_train(page, classifier, batches):
    losses = []
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=0.01)
    trainer = create_supervised_trainer(
        *(classifier, optimizer, F.cross_entropy, "cpu"),
        amp_mode="amp",
        scaler=amplab.GradScaler("cpu"),
        model_fn=page("Ignite").in_half,
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    trainer.run(batches, max_epochs=8)
    assert classifier.dtypes == (torch.float16, torch.float32)
    assert losses[-1] < 0.7 * losses[0]


def test_a_resumed_run_goes_on_to_the_bit(page, classifier, batches, overflowing, tmp_path):
    whole, first, second = (copy.deepcopy(classifier) for _ in range(3))
    scalers = [amplab.GradScaler(**overflowing) for _ in range(3)]
    engine_of(page, whole, scalers[0])[0].run(batches, max_epochs=4)
    engine, optimizer = engine_of(page, first, scalers[1])
    saved = {"model": first, "optimizer": optimizer, "scaler": scalers[1]}
    engine.add_event_handler(Events.COMPLETED, Checkpoint(saved, DiskSaver(tmp_path), filename_pattern="last.pt"))
    engine.run(batches, max_epochs=2)
    engine, optimizer = engine_of(page, second, scalers[2])
    loaded = {"model": second, "optimizer": optimizer, "scaler": scalers[2]}
    Checkpoint.load_objects(loaded, torch.load(tmp_path / "last.pt"))
    engine.run(batches, max_epochs=2)
    assert all(map(torch.equal, whole.parameters(), second.parameters()))
    assert scalers[0].state_dict() == scalers[2].state_dict()


def test_the_trainer_of_the_page(page, classifier, batches):
    scaler, optimizer = amplab.GradScaler("cpu"), torch.optim.AdamW(classifier.parameters(), lr=0.01)
    first = page("Ignite").trainer_of(classifier, optimizer, scaler).run(batches, max_epochs=1).output
    assert page("Ignite").trainer_of(classifier, optimizer, scaler).run(batches, max_epochs=5).output < first
