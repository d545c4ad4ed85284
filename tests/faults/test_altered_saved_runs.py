"""A saved run of the lab, log and checkpoint, that somebody altered: one sentence, or a run that goes on and loads."""

import random
import shutil

import pytest
import torch
from alterations import altered, altered_bytes
from test_altered_run_logs import ALTERATIONS, use

from amplab.lab import ExperimentConfig, Trainer, load_run
from amplab.lab.checkpoints import last_checkpoint
from amplab.views.dashboard import Dashboard

STEPS = 12


def cut(path, chance):
    """Cut a log after one of its lines, or within it."""
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content) // 3, len(content))])


def alter_checkpoint(path, chance):
    if chance.random() < 0.3:
        path.write_bytes(altered_bytes(path.read_bytes(), chance))
        return
    state = torch.load(path, weights_only=True)
    part = chance.choice(("extra", "position"))
    torch.save({**state, part: altered(state[part], chance)}, path)


def fit(folder):
    """Let the checkpoint say that the log was as long as it is now."""
    state = torch.load(folder / "run.checkpoint", weights_only=True)
    state["extra"]["log_bytes"] = (folder / "run.jsonl").stat().st_size
    torch.save(state, folder / "run.checkpoint")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run that was paused, and skipped steps."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = Trainer(ExperimentConfig(hidden=4, init_scale=2.0**24, max_loss_scale=2.0**24), log=folder / "run.jsonl")
    trainer.run(STEPS)
    trainer.stop()
    assert trainer.wait(20)
    return folder


def is_continued(folder):
    """Continue a saved run beside a present one; whether it was accepted. What is accepted trains, draws and loads."""
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        return False
    before = {path: path.read_bytes() for path in folder.iterdir()}
    trainer = Trainer(ExperimentConfig(hidden=4))
    trainer.run(1)
    trainer.continue_saved(checkpoint)
    assert trainer.wait(20)
    if trainer.failures:
        (failure,) = trainer.failures
        assert "cannot continue" in failure.text
        assert len(failure.text.splitlines()) == 1
        assert len(trainer.history) == 1
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
        trainer.stop()
        return False
    trainer.run(2)
    assert trainer.wait(20)
    Dashboard(trainer).close()
    trainer.stop()
    assert trainer.wait(20)
    run = load_run(trainer.log_path)
    assert len(run.history) == len(trainer.history) == checkpoint.step + 2
    use(run)
    return True


def attack(saved, tmp_path, seeds):
    accepted = 0
    for seed in seeds:
        chance, folder = random.Random(seed), tmp_path / str(seed)
        shutil.copytree(saved, folder)
        alter, suffix = chance.choice([(cut, "jsonl"), (alter_checkpoint, "checkpoint"), *LOGS])
        alter(folder / f"run.{suffix}", chance)
        if suffix == "jsonl" and chance.random() < 0.7:
            fit(folder)
        accepted += is_continued(folder)
        shutil.rmtree(folder)
    return accepted


LOGS = [(alter, "jsonl") for alter in ALTERATIONS.values()]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_altered_saved_run_is_refused_or_goes_on(saved, tmp_path):
    assert is_continued(shutil.copytree(saved, tmp_path / "whole"))
    assert 0 < attack(saved, tmp_path, (*range(25), 462)) < 26  # 462: a last line without its end


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_many_altered_saved_runs(saved, tmp_path):
    assert attack(saved, tmp_path, range(100, 700))
