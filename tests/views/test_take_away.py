"""What the menu "Export" gives, and what a pasted setting does."""

import json

import pytest

from amplab.lab import ExperimentConfig, Trainer
from amplab.views.take_away import FILES, file_of, take_setting


@pytest.mark.parametrize("kind", FILES)
def test_each_file_has_a_name_a_type_and_what_it_promises(kind: str) -> None:
    trainer = Trainer(ExperimentConfig(hidden=16))
    trainer.run(3)
    file = file_of(trainer, kind)
    assert file["name"].startswith("run.")
    if kind == "json":
        assert json.loads(file["text"])["config"] == str(trainer.config)
    else:
        assert {"csv": "step,loss,", "report": "<!doctype html>"}[kind] in file["text"]
    assert len(trainer.history) == 3


def test_a_pasted_setting_restores_the_whole_experiment() -> None:
    wanted = ExperimentConfig(model="cnn", hidden=16, opt_level="O2", init_scale=2.0**10, float32_modules="hidden")
    trainer = Trainer(ExperimentConfig(hidden=16))
    assert take_setting(trainer, f"  {wanted}\n") == ""
    trainer.wait()
    assert trainer.config == wanted


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hello", "hello"),
        ("amplab/1 task=digits model=zzz opt_level=O1", "zzz"),
        ("amplab/1 task=digits model=mlp opt_level=O1 float32_modules=conv1", "conv1"),
        ("amplab/1 task=digits model=mlp opt_level=O1 float32_ops=nothing", "nothing"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_and_the_run_goes_on(text: str, named: str) -> None:
    trainer = Trainer(ExperimentConfig(hidden=16))
    trainer.run(2)
    before = trainer.config
    assert named in take_setting(trainer, text)
    trainer.wait()
    assert (trainer.config, len(trainer.history), trainer.state) == (before, 2, "paused")
