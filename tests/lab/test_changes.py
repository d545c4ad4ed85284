"""What a person changes in a run: each change is kept once, with its text, and a log that is read back has the same."""

from pathlib import Path

import pytest
import torch.nn.functional as F

from amplab.lab import ExperimentConfig, RunChange, Trainer, load_run
from amplab.lab.changes import config_changes, fault_change
from amplab.lab.experiment import Experiment

SMALL = ExperimentConfig(hidden=16)


@pytest.mark.parametrize(
    ("change", "label", "text"),
    [
        ({"opt_level": "O2"}, "O2", "opt_level O1 → O2"),
        ({"lr": 0.01}, "lr 0.01", "Learning rate 0.1 → 0.01"),
        ({"batch_size": 32}, "batch size 32", "Batch size 64 → 32"),
        ({"init_scale": 2.0**20}, "init 2²⁰", "init 2¹⁶ → 2²⁰"),
        ({"loss_scale": 128.0}, "scale 2⁷", "Loss scale by O1 → 2⁷"),
        ({"loss_scale": "dynamic"}, "scale dynamic", "Loss scale by O1 → dynamic"),
        ({"growth_interval": 100}, "window 100", "window 50 → 100"),
        ({"min_loss_scale": 1.0}, "floor 2⁰", "floor none → 2⁰"),
    ],
)
def test_a_change_says_from_what_to_what(change, label, text):
    (found,) = config_changes(SMALL, SMALL.changed(**change), 7)
    assert (found.step, found.field, found.label, found.text) == (7, next(iter(change)), label, text)


def test_an_optimizer_brings_its_learning_rate_and_a_level_drops_its_overrides():
    found = config_changes(SMALL, SMALL.changed(optimizer="adam"), 3)
    assert [each.label for each in found] == ["Adam", "lr 0.005"]
    at_o2 = SMALL.changed(opt_level="O2", master_weights=False)
    assert [each.text for each in config_changes(at_o2, at_o2.changed(opt_level="O1"), 3)] == ["opt_level O2 → O1"]


def test_faults_say_whether_they_last():
    assert fault_change("overflow", 5, on=True).text == "injected overflow"
    assert [fault_change("underflow", 5, on=on).label for on in (True, False)] == ["underflow on", "underflow off"]


def test_every_change_of_a_run_is_in_its_history_and_in_its_log(tmp_path: Path):
    trainer = Trainer(SMALL, log=tmp_path / "run.jsonl")
    trainer.run(2)
    trainer.change(opt_level="O2")
    trainer.change(lr=0.05)
    trainer.inject("overflow")
    trainer.run(2)
    trainer.change(optimizer="adam", batch_size=16)
    trainer.inject("underflow")
    trainer.run(1)
    trainer.inject("underflow")
    trainer.run(1)
    changes = trainer.history.changes
    assert [(each.step, each.label) for each in changes] == [
        *((0, "O1"), (2, "O2"), (2, "lr 0.05"), (2, "overflow"), (4, "Adam"), (4, "batch size 16")),
        *((4, "underflow on"), (5, "underflow off")),
    ]
    trainer.stop()
    assert trainer.wait(10)
    assert load_run(tmp_path / "run.jsonl").history.changes == changes
    trainer.reset(SMALL.changed(model="cnn"))
    assert trainer.wait(10)
    assert trainer.history.changes == (RunChange(0, "start", "O1", "start: digits, CNN, O1"),)


def test_a_history_without_changes_has_its_levels(tmp_path: Path):
    trainer = Trainer(SMALL)
    trainer.run(1)
    watched = type(trainer.history)()
    for record in trainer.history.records():
        watched.append(record)
    assert [(each.step, each.label) for each in watched.changes] == [(0, "O1")]


def test_the_history_and_the_log_hold_memory_by_kind_and_what_each_layer_loses(tmp_path: Path):
    trainer = Trainer(SMALL, log=tmp_path / "run.jsonl")
    trainer.run(41)
    trainer.change(opt_level="O2")
    trainer.run(3)
    history = trainer.history
    steps = [step for step, _ in history.memory]
    assert steps == sorted(set(steps)), "memory is kept where it changes, not at every step"
    assert steps[-1] >= 41
    assert history.memory[0][1].masters == 0 < history.memory[-1][1].masters, "O2 has masters"
    assert [sample.step for sample in history.gradient_samples] == [0, 20, 40]
    names = [name for name, _ in trainer._run.experiment.model.named_parameters()]
    for sample in history.gradient_samples:
        assert [layer.name for layer in sample.layers] == names
    trainer.stop()
    assert trainer.wait(10)
    loaded = load_run(tmp_path / "run.jsonl").history
    assert loaded.memory == history.memory
    assert [each.layers for each in loaded.gradient_samples] == [each.layers for each in history.gradient_samples]


def test_the_shares_of_a_layer_are_those_of_its_gradient_in_float16():
    experiment = Experiment(SMALL.changed(loss_scale=2.0**-8))
    for _ in range(3):
        experiment.step()
    record = experiment.gradients()
    images, labels = experiment._task.batch(3, SMALL.batch_size)
    model = experiment._float32_copy()
    F.cross_entropy(model(images), labels).backward()
    for layer, (name, parameter) in zip(record.sample.layers, model.named_parameters(), strict=True):
        grad = parameter.grad[parameter.grad != 0]
        flushed = ((grad * 2.0**-8).abs() < 2.0**-25).float().mean().item()
        assert (layer.name, layer.overflow) == (name, 0.0)
        assert layer.underflow == pytest.approx(flushed)
    assert max(layer.underflow for layer in record.sample.layers) > 0
