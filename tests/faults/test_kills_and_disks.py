"""Kills and disks: no whole record is lost, no checkpoint is torn, and training goes on without a log."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from amplab import amp
from amplab.lab import ExperimentConfig, Failed, RunLog, Trainer, load_run
from amplab.lab.checkpoints import Checkpoint
from amplab.lab.experiment import Experiment, read_saved
from amplab.lab.watched_run import WatchedRun
from amplab.parallel.ranks import Rank

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL and /dev/full")

WRITES = """
import sys, torch
from pathlib import Path
from amplab import amp
from amplab.lab import ExperimentConfig, RunLog, StepRecord

log = RunLog(Path(sys.argv[1]) / f"run-{sys.argv[2]}.jsonl", ExperimentConfig())
print("begun", flush=True)
for step in range(10**9):
    log.append(StepRecord(step, 1.0, 2.0, 2.0, False, None, "O1", None, step / 1000, None))
    log.note("restart", step=step)
    amp.save_run_state(Path(sys.argv[1]) / "run.pt", position=step, extra=torch.full((2000,), step))
"""


FORKS = """
import os, sys, torch
import amplab

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps):
    for _ in range(steps):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

with amplab.watch(model, optimizer, log=sys.argv[1]):
    train(6)
    if os.fork() == 0:
        train(3)
        sys.exit(0)  # leaves the block, in a copy of the process that opened the log
    os.wait()
    train(4)
"""


def kill_a_writer(folder, number, after):
    """Start a process that writes a log and checkpoints, and kill it after some seconds."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(folder), str(number)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "begun\n"
    time.sleep(after)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()


def check_after_a_kill(folder, number):
    """Nothing is torn: the checkpoint is one whole save, the log holds every step up to the checkpoint's."""
    run = load_run(folder / f"run-{number}.jsonl")
    if (folder / "run.pt").exists():
        state = amp.load_run_state(folder / "run.pt")
        assert (state.extra == state.position).all()
        assert len(run.history) > state.position
    amp.save_run_state(folder / "last.pt", position=-1)


def attack(folder, times):
    chance = random.Random(0)
    for number in range(times):
        (folder / "run.pt").unlink(missing_ok=True)
        kill_a_writer(folder, number, chance.random() * 0.4)
        check_after_a_kill(folder, number)
    amp.save_run_state(folder / "run.pt")
    assert not list(folder.glob(".*.partial"))


def test_a_killed_writer_loses_no_record_and_tears_no_checkpoint(tmp_path):
    attack(tmp_path, 2)


def test_a_fork_that_trains_on_and_leaves_the_block_writes_nothing_to_the_log(tmp_path):
    path = tmp_path / "run.jsonl"
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS, str(path)], cwd=ROOT, check=True, timeout=100)
    assert load_run(path).history.column("step").tolist() == list(range(10))


@pytest.mark.long
def test_many_killed_writers(tmp_path):
    attack(tmp_path, 60)


def test_a_rank_killed_before_its_first_line_does_not_hide_the_others(tmp_path):
    log = RunLog(tmp_path / "rank-0.jsonl", WatchedRun("Net", "Adam", "apex"), rank=Rank(0, 2, "one"))
    log.close()
    (tmp_path / "rank-1.jsonl").touch()
    run = load_run(tmp_path)
    assert [each.rank for each in run.ranks] == [0]
    assert "of which 1 have a log here" in str(run)
    (tmp_path / "alone.jsonl").touch()
    with pytest.raises(ValueError, match=r"alone\.jsonl: an empty file, as a process leaves it that is killed"):
        load_run(tmp_path / "alone.jsonl")


def test_a_full_disk_ends_the_log_with_one_message_and_not_the_training(tmp_path):
    """/dev/full takes the place of the log's file: every write fails as on a full disk."""
    log = tmp_path / "run.jsonl"
    trainer = Trainer(ExperimentConfig(hidden=16), log=log)
    failures = []
    trainer.subscribe(lambda event: failures.append(event.text) if isinstance(event, Failed) else None)
    trainer.run(3)
    full = os.open("/dev/full", os.O_WRONLY)
    for number in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{number}") == str(log):
            os.dup2(full, int(number))
    os.close(full)
    trainer.run(20)
    time.sleep(0.3)
    trainer.run(20)
    trainer.stop()
    assert trainer.wait(30)
    assert len(trainer.history) == 43
    assert len([text for text in failures if "cannot write" in text]) == 1
    assert "No space left" in failures[0]


def altered_extra(path, **changes):
    state = torch.load(path, weights_only=True)
    position = changes.pop("position", state["position"])
    torch.save({**state, "position": position, "extra": {**state["extra"], **changes}}, path)


@pytest.mark.parametrize(
    "changes",
    [
        {"position": -1}, {"position": "3"}, {"position": None}, {"config": 7}, {"config": "amplab/1 task=nothing"},
        {"armed": ["meteor"]}, {"armed": None}, {"seconds": "now"}, {"seconds": float("nan")}, {"log_bytes": -5},
        {"log_bytes": 1.5}, {"saved": 3},
    ],
)  # fmt: skip
def test_an_altered_checkpoint_of_the_lab_is_refused(tmp_path, changes):
    experiment = Experiment(ExperimentConfig(hidden=16))
    experiment.step()
    path = tmp_path / "run.checkpoint"
    experiment.save(path, {"log_bytes": 0, "saved": "2026-11-23T12:00:00"})
    steps, extra = read_saved(path)
    assert (steps, json.loads(json.dumps(extra))["log_bytes"]) == (1, 0)
    altered_extra(path, **changes)
    with pytest.raises((amp.RunStateError, ValueError)) as refusal:
        Checkpoint(path, ExperimentConfig(), 1, None).restore()
    assert str(refusal.value)
