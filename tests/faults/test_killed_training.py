"""SIGKILL of real training at random times: what was saved loads, and goes on to the bits of an uninterrupted run.

One process forks each training that is killed, so that a trial takes a fraction of a second.
"""

import os
import random
import signal
import subprocess
import sys
from itertools import count

import pytest
import torch

from amplab import amp
from amplab.lab import RunLog, StepRecord, Trainer, load_run
from amplab.lab.checkpoints import begin_again, last_checkpoint
from amplab.lab.run_log import launch_of
from amplab.lab.run_log.ranks import rank_log
from amplab.lab.watched_run import WatchedRun
from amplab.parallel.ranks import Rank

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL and fork")
STEPS = 80  # of the script

SCRIPT = f"""
import torch
from amplab import amp

def train(folder, save=True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=7)
    data, position, losses = torch.Generator().manual_seed(1), 0, []
    if save and (folder / "run.pt").exists():
        state = amp.load_run_state(folder / "run.pt", model=model, optimizer=optimizer, scaler=scaler)
        position, losses = state.position, state.extra["losses"]
        data.set_state(state.extra["data"])
    for step in range(position, {STEPS}):
        with amp.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(4, 8, generator=data)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        if save:
            amp.save_run_state(
                folder / "run.pt", model=model, optimizer=optimizer, scaler=scaler,
                position=step + 1, extra={{"losses": losses, "data": data.get_state()}},
            )
    return losses, model.state_dict(), scaler.state_dict()
"""
SERVER = (
    SCRIPT
    + """
import os, signal, sys, tempfile, time
from pathlib import Path
import amplab.cli, amplab.lab
from amplab.lab import checkpoints

checkpoints.EVERY_SECONDS, checkpoints._SHARE = 0.01, 1.0
torch.set_num_threads(1)

def begin(kind, path):
    if kind == "script":
        train(path)
    else:
        words = ["amplab", "train", "--steps", "100000", "--hidden=16", "--init-scale=2**24", "--log", str(path)]
        sys.stdout = open(os.devnull, "w")
        amplab.cli.main(words[1:])

with tempfile.TemporaryDirectory() as folder:  # what is imported at the first use
    for _ in range(2):
        train(Path(folder))
amplab.lab.Experiment(amplab.lab.ExperimentConfig(hidden=16)).step()
for line in sys.stdin:
    kind, seconds, path = line.rstrip().split(" ", 2)
    child = os.fork()
    if child == 0:
        begin(kind, Path(path))
        os._exit(0)
    time.sleep(float(seconds))
    os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], flush=True)
"""
)


@pytest.fixture(scope="module")
def kill():
    """A function that starts a training of a kind in a folder, kills it after some seconds, returns whether it ran."""
    words = [sys.executable, "-W", "ignore", "-c", SERVER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def start(kind, folder, seconds):
            server.stdin.write(f"{kind} {seconds} {folder}\n")
            server.stdin.flush()
            return int(server.stdout.readline()) != 0

        yield start
        server.stdin.close()


def killed_at_call(number, work):
    """Run `work` in a fork that kills itself before a call of the system; return whether it came to that."""
    child = os.fork()
    if child == 0:
        calls = count()
        sys.addaudithook(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == number else None)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def facts(trainer):
    names = ("step", "loss", "loss_scale", "next_loss_scale", "skipped", "injected", "grad_exponent")
    return repr([[getattr(record, name) for name in names] for record in trainer.history.records()])


def continues(folder, more=5):
    """Continue a killed run from its checkpoint; its steps, and those of a run that was not interrupted."""
    saved = last_checkpoint(folder)
    (log,) = folder.glob("*.jsonl")
    run = load_run(log)
    assert len(run.history) >= saved.step  # the log has every step of the checkpoint
    whole, ours = Trainer(saved.config), Trainer(log=folder)
    whole.run(saved.step + more)
    ours.continue_saved(saved)
    assert ours.wait(60)
    assert len(ours.history) == saved.step
    ours.run(more)
    assert facts(ours) == facts(whole)
    kept = [repr(each) for each in run.history.column("loss").tolist()]
    assert kept[: saved.step] == [repr(each) for each in whole.history.column("loss").tolist()][: saved.step]
    states = [each._run.experiment.model.state_dict() for each in (ours, whole)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for each in (ours, whole):
        each.stop()
        assert each.wait(20)
    assert len(load_run(ours.log_path).history) == saved.step + more
    assert not list(folder.glob(".*"))


class Patience:
    """The longest time before a kill: doubled after one that came before any progress, so that a busy machine has some.

    Args:
        seconds: The time on an idle machine.
    """

    def __init__(self, seconds):
        self.seconds = self._least = seconds

    def learn(self, *, progress):
        self.seconds = max(self._least, self.seconds / 2) if progress else self.seconds * 2
        assert self.seconds < 300, "no progress, however late the kill"


def attack_the_command(kill, folder, kills, seed):
    """Kill `amplab train`, so many times after a checkpoint."""
    chance, patience = random.Random(seed), Patience(0.8)
    for trial in count():
        each = folder / str(trial)
        assert kill("command", each, chance.uniform(0.0, patience.seconds))
        for log in each.glob("*.jsonl"):
            if log.stat().st_size:
                load_run(log)
        has_checkpoint = any(each.glob("*.checkpoint"))
        if has_checkpoint:
            continues(each)
            kills -= 1
        if not kills:
            return
        patience.learn(progress=has_checkpoint)


def attack_the_script(kill, folder, seed):
    """Kill a script again and again until it has done its work; the number of kills."""
    chance, patience, kills, done = random.Random(seed), Patience(0.25), 0, 0
    while kill("script", folder, chance.uniform(0.0, patience.seconds)):
        kills += 1
        before, done = done, position_in(folder / "run.pt")
        patience.learn(progress=done > before)
    assert [path.name for path in folder.iterdir()] == ["run.pt"]
    return kills


def position_in(path):
    return amp.load_run_state(path).position if path.exists() else 0


def check_the_script(folder):
    names = {}
    exec(SCRIPT, names)
    losses, model, scaler = names["train"](folder, save=False)
    again = names["train"](folder)  # loads the end, trains nothing
    assert again[0] == losses
    assert all(torch.equal(again[1][name], model[name]) for name in model)
    assert again[2] == scaler


def test_a_killed_command_continues_bitwise(kill, tmp_path):
    attack_the_command(kill, tmp_path, 2, seed=3)


def test_a_script_that_is_killed_again_and_again_ends_as_if_it_were_not(kill, tmp_path):
    assert attack_the_script(kill, tmp_path, seed=1) > 0
    check_the_script(tmp_path)


def test_ranks_killed_while_they_start_again_start_again(tmp_path):
    """Killed at each call of the system while a log is cut to its checkpoint, it can be cut again."""
    expected, at = None, 0
    while True:
        log = rank_log(tmp_path / str(at), 0)
        store = RunLog(log, WatchedRun("Net", "Adam", "apex"), rank=Rank(0, 2, "one"))
        for step in range(30):
            store.append(StepRecord(step, 1.0, 2.0, 2.0, False, None, "O1", None, step / 1000, None))
        store.close(steps=30)
        was_killed = killed_at_call(at, lambda path=log: begin_again(path, 20))
        if was_killed:
            assert launch_of(log) == ("one", 2)
            begin_again(log, 20)
        lines = log.read_bytes().splitlines()[1:]
        expected = expected or [*lines]
        assert lines == expected
        assert len(load_run(log).history) == 20
        assert max(len(load_run(each).history) for each in log.parent.glob("attempt-*/*.jsonl")) == 30
        assert not list(log.parent.glob(".*"))
        if not was_killed:
            break
        at += 1
        assert at < 100
    assert at > 3


@pytest.mark.long
def test_many_killed_commands(kill, tmp_path):
    attack_the_command(kill, tmp_path, 40, seed=5)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_many_killed_scripts(kill, tmp_path, seed):
    assert attack_the_script(kill, tmp_path, seed) > 0
    check_the_script(tmp_path)
