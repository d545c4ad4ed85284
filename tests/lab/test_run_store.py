"""What is kept of a run: the log is the history, and a log that fails is told and done without."""

from pathlib import Path

import pytest

from amplab.lab import ExperimentConfig, Failed, Trainer, load_run

SMALL = ExperimentConfig(hidden=16)


def test_the_log_holds_steps_changes_and_faults_and_a_reset_begins_another(runs: Path):
    trainer = Trainer(SMALL, log=runs)
    assert trainer.log_path is None
    trainer.run(2)
    first = trainer.log_path
    trainer.inject("nan")
    trainer.change(opt_level="O2")
    trainer.run(2)
    trainer.reset()
    trainer.run(1)
    trainer.stop()
    assert trainer.wait(10)
    run = load_run(first)
    assert [event["event"] for event in run.events] == ["inject", "config"]
    assert run.events[0] == {"event": "inject", "step": 2, "fault": "nan", "on": True}
    assert (run.config, run.last_config) == (SMALL, SMALL.changed(opt_level="O2"))
    assert run.history.column("injected").tolist() == [None, None, "nan", None]
    assert run.history.level_changes() == [(0, "O1"), (2, "O2")]
    assert trainer.log_path != first
    assert len(load_run(trainer.log_path).history) == 1
    trainer.inject("nan")  # after the end: nothing to write to, and no complaint
    assert trainer.wait(10)
    assert trainer.state == "stopped"


def test_the_log_is_the_history(runs: Path):
    trainer = Trainer(SMALL, log=runs / "one.jsonl")
    trainer.run(60)
    run = load_run(runs / "one.jsonl")  # flushed when it rests
    assert run.history.records() == trainer.history.records()
    assert run.history.last_score == trainer.history.last_score is not None


def test_a_log_that_cannot_be_written_is_reported_and_the_run_continues(tmp_path, listen):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    trainer = Trainer(SMALL, log=blocked / "runs")
    ear = listen(trainer)
    trainer.run(5)
    (told,) = ear.of(Failed)
    assert told.text.startswith(f"log: cannot write {blocked / 'runs'} (")
    assert "AMPLAB_RUNS" in told.text
    assert (len(trainer.history), trainer.log_path, trainer.state) == (5, None, "paused")


LEFT = {
    "deleted": lambda log: log.unlink(),
    "moved away": lambda log: log.rename(log.with_suffix(".moved")),
    "emptied": lambda log: log.write_text(""),
    "last line torn": lambda log: log.write_bytes(log.read_bytes()[:-30]),
}


@pytest.mark.parametrize("what", LEFT)
def test_a_run_that_comes_back_to_a_log_that_has_lost_lines_says_so(runs: Path, listen, what):
    trainer = Trainer(SMALL, log=runs)
    ear = listen(trainer)
    trainer.run(5)
    log = trainer.log_path
    trainer.reset()
    assert trainer.wait(10)
    LEFT[what](log)
    left = log.exists() and log.read_bytes()
    trainer.undo()
    assert trainer.wait(10)
    trainer.run(3)
    (told,) = [each for each in ear.of(Failed) if each.text.startswith("log: ")]  # beside one of the checkpoint
    assert told.text.startswith(f"log: cannot write {log} (")
    assert (len(trainer.history), trainer.log_path) == (8, None)
    assert (log.exists() and log.read_bytes()) == left


@pytest.mark.parametrize("aside", ["moved", "deleted"])
def test_a_run_that_comes_back_writes_nothing_to_the_log_of_another_run(tmp_path: Path, listen, aside):
    log = tmp_path / "run.jsonl"
    trainer = Trainer(SMALL, log=log)
    ear = listen(trainer)
    trainer.run(5)
    if aside == "moved":
        log.rename(tmp_path / "archived.jsonl")
    else:
        log.unlink()  # its inode is free for the next file
    trainer.reset()
    trainer.run(20)
    assert trainer.log_path == log
    trainer.continue_from(trainer.kept.runs[0])
    assert trainer.wait(10)
    trainer.run(3)
    assert "another file has its name now" in ear.of(Failed)[-1].text
    assert (len(trainer.history), trainer.log_path) == (8, None)
    assert len(load_run(log).history) == 20


def test_a_run_that_comes_back_goes_on_in_its_log(runs: Path):
    trainer = Trainer(SMALL, log=runs)
    trainer.run(5)
    log = trainer.log_path
    trainer.reset()
    trainer.undo()
    assert trainer.wait(10)
    trainer.run(3)
    assert trainer.log_path == log
    assert len(load_run(log).history) == 8
