"""Kills and disks: no whole record is lost, no checkpoint is torn, and training goes on without a log."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import amplab
from amplab import amp
from amplab.lab import ExperimentConfig, RunLog, StepRecord, load_run
from amplab.lab.checkpoints import Checkpoint
from amplab.lab.experiment import Experiment
from amplab.lab.run_log.lock import hold, is_held
from amplab.lab.run_store import RunStore
from amplab.lab.saved_experiment import read_saved
from amplab.lab.watched_run import WatchedRun
from amplab.parallel.ranks import Rank

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL and /dev/full")

WRITES = """
import sys, torch
from pathlib import Path
import amplab
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

with amplab.watch(model, optimizer, log=sys.argv[1]) as watch:
    train(6)
    if os.fork() == 0:
        train(3)
        print(watch.log_path, *watch.failures)
        sys.exit(0)  # leaves the block, in a copy of the process that opened the log
    os.wait()
    train(4)
"""

PAUSES = """
import os, sys, torch
import amplab

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with amplab.watch(model, optimizer, log=sys.argv[1]):
    for _ in range(300):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("pauses", flush=True)
    sys.stdin.read()
"""


def kill_in_a_pause(path):
    """Return how many of 300 steps are in the log of a loop that is killed while it pauses after them."""
    words = [sys.executable, "-W", "ignore", "-c", PAUSES, str(path)]
    loop = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert loop.stdout.readline() == "pauses\n"
    loop.kill()
    loop.communicate()
    return len(load_run(path).history)


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


def test_a_loop_that_is_killed_while_it_pauses_has_written_every_step(tmp_path):
    assert kill_in_a_pause(tmp_path / "run.jsonl") == 300


@pytest.mark.long
def test_many_loops_that_are_killed_while_they_pause(tmp_path):
    assert [kill_in_a_pause(tmp_path / f"{number}.jsonl") for number in range(40)] == [300] * 40


def test_a_fork_that_trains_on_and_leaves_the_block_writes_nothing_to_the_log(tmp_path):
    path = tmp_path / "run.jsonl"
    words = [sys.executable, "-W", "ignore", "-c", FORKS, str(path)]
    said = subprocess.run(words, cwd=ROOT, check=True, timeout=100, stdout=subprocess.PIPE, text=True).stdout
    assert said.startswith(f"None log: cannot write {path} (the process was forked from the one that writes it)")
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


def in_a_fork(work):
    """Call `work` in a copy of this process, whose limits it may change, and return its result."""
    return in_forks(work)[0]


def in_forks(*works):
    """Call each function in a copy of this process, all at the same time, and return their results."""
    results = []
    for work in works:
        out, into = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.write(into, json.dumps(work()).encode())
            finally:
                os._exit(0)
        os.close(into)
        results.append((child, out))
    told = []
    for child, out in results:
        with open(out, "rb") as file:
            told.append(json.load(file))
        os.waitpid(child, 0)
    return told


def limit(size):
    """Let no file of this process grow beyond some bytes: the system then refuses the rest, as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def add_steps(store, count):
    for _ in range(count):
        step = store.step_count
        store.append(StepRecord(step, 1.0, 2.0, 2.0, False, None, "O1", None, step / 1000, None))


def store_in(path):
    told = []
    return RunStore(WatchedRun("Net", "Adam", "apex"), log=path, on_failure=told.append), told


def test_steps_wait_in_memory_while_the_disk_is_full(tmp_path):
    path = tmp_path / "run.jsonl"

    def fill_the_disk_for_a_while():
        store, told = store_in(path)
        add_steps(store, 20)
        store.flush()
        size = path.stat().st_size
        limit(size + 40)  # less than a line
        add_steps(store, 30)
        store.flush()
        store.note("restart", step=50)
        torn = path.stat().st_size - size, store.is_on_disk
        limit(resource.RLIM_INFINITY)
        add_steps(store, 10)
        time.sleep(1.1)
        store.flush()
        return told, torn, len(load_run(path).history), store.is_on_disk

    (said,), torn, steps, is_whole = in_a_fork(fill_the_disk_for_a_while)
    assert torn == [0, False]
    assert (steps, is_whole) == (60, True)
    assert f"{path} now (File too large)" in said
    assert "remove other files" in said
    assert [event["event"] for event in load_run(path).events] == ["restart"]


def test_a_disk_that_stays_full_loses_the_last_lines_and_says_how_many(tmp_path):
    path = tmp_path / "run.jsonl"

    def fill_the_disk():
        store, told = store_in(path)
        add_steps(store, 20)
        store.flush()
        limit(path.stat().st_size + 40)
        add_steps(store, 30)
        store.flush()
        store.close()
        limit(resource.RLIM_INFINITY)
        store.reopen()
        add_steps(store, 3)
        store.close()
        return told, len(store.history)

    (waits, lost), steps = in_a_fork(fill_the_disk)
    assert steps == 53
    assert "wait in memory" in waits
    assert "its last 30 lines are lost" in lost
    run = load_run(path)
    assert (len(run.history), run.truncated) == (20, False)


def test_lines_that_wait_are_written_as_far_as_they_fit_when_the_log_closes(tmp_path):
    path = tmp_path / "run.jsonl"

    def free_some_space_at_the_end():
        store, told = store_in(path)
        add_steps(store, 20)
        store.flush()
        size = path.stat().st_size
        limit(size + 40)
        add_steps(store, 30)
        store.note("restart", step=50)
        limit(size + 1000)
        store.close()
        return told, size + 1000 - path.stat().st_size

    (_, lost), free = in_a_fork(free_some_space_at_the_end)
    run = load_run(path)
    assert (run.truncated, 25 < len(run.history) < 50) == (False, True)
    assert 0 <= free < max(map(len, path.read_bytes().splitlines(keepends=True)[1:]))
    assert f"its last {51 - len(run.history)} lines are lost" in lost


def test_lines_that_fit_are_in_the_log_while_the_others_wait(tmp_path):
    """The disk has space for one more step again and again, then for all."""
    path = tmp_path / "run.jsonl"

    def free_a_line_at_a_time():
        store, told = store_in(path)
        add_steps(store, 5)
        store.flush()
        limit(path.stat().st_size + 40)
        add_steps(store, 20)
        store.note("restart", step=25)
        seen = []
        for _ in range(10):
            limit(path.stat().st_size + 90)
            store._log._retry = 0.0
            store.flush()
            run = load_run(path)
            seen.append([len(run.history), run.truncated, store._log.waiting])
        limit(resource.RLIM_INFINITY)
        add_steps(store, 5)
        store.close()
        return told, seen

    (waits,), seen = in_a_fork(free_a_line_at_a_time)
    assert "wait in memory" in waits
    assert seen == [[5 + each, False, 21 - each] for each in range(1, 11)]
    run = load_run(path)
    assert run.history.column("step").tolist() == list(range(30))
    assert run.events == ({"event": "restart", "step": 25},)


def test_a_disk_that_is_full_for_a_hundred_thousand_steps_loses_none(tmp_path):
    path = tmp_path / "run.jsonl"

    def fill_the_disk_for_a_while():
        store, told = store_in(path)
        add_steps(store, 5)
        store.flush()
        limit(path.stat().st_size + 40)
        add_steps(store, 100_000)
        store._log._retry = 0.0
        store.flush()
        limit(resource.RLIM_INFINITY)
        store.close()
        return told

    (waits,) = in_a_fork(fill_the_disk_for_a_while)
    assert "wait in memory" in waits
    assert len(load_run(path).history) == 100_005


def no_space(folder, *args, **options):
    """In place of `Path.mkdir`: a folder needs a block of its own, unlike an empty file."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def test_a_log_whose_folder_finds_no_space_begins_when_there_is_some(tmp_path, monkeypatch):
    path = tmp_path / "runs" / "run.jsonl"
    make = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", no_space)
    store, told = store_in(path)
    add_steps(store, 5)
    store.note("restart", step=5)
    assert not store.is_on_disk
    monkeypatch.setattr(Path, "mkdir", make)
    add_steps(store, 5)
    store.close()
    (waits,) = told
    assert f"{path} now (No space left on device)" in waits
    run = load_run(path)
    assert run.history.column("step").tolist() == list(range(10))
    assert run.events == ({"event": "restart", "step": 5},)


def test_a_log_whose_folder_never_finds_space_says_how_many_lines_are_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", no_space)
    store, told = store_in(tmp_path / "runs" / "run.jsonl")
    add_steps(store, 5)
    store.close()
    assert "its last 5 lines are lost" in told[-1]
    assert (store.log_path, list(tmp_path.iterdir())) == (None, [])


def test_a_watch_warns_that_lines_wait_and_that_they_are_lost(tmp_path):
    def watch_until_the_disk_is_full():
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            warnings.catch_warnings(record=True) as told,
            amplab.watch(model, optimizer, log=tmp_path / "run.jsonl") as w,
        ):
            warnings.simplefilter("always")
            for step in range(4):
                model(torch.ones(3, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.25)
                if not step:
                    limit((tmp_path / "run.jsonl").stat().st_size + 40)
        return [str(each.message) for each in told], list(w.failures)

    warned, failures = in_a_fork(watch_until_the_disk_is_full)
    assert ["wait in memory" in each for each in warned] == [True, False]
    assert "lines are lost" in warned[1]
    assert "pass the next watch log= with a writable folder" in warned[1]
    assert "AMPLAB_RUNS" not in warned[1]
    assert warned == [f"amplab.watch: {each}" for each in failures]


def test_a_log_that_is_deleted_during_the_run_is_said_once_and_the_steps_stay_in_memory(tmp_path):
    store, told = store_in(tmp_path / "runs" / "run.jsonl")
    add_steps(store, 5)
    store.flush()
    shutil.rmtree(tmp_path / "runs")
    add_steps(store, 5)
    store.flush()
    add_steps(store, 5)
    store.close()
    (said,) = told
    assert f"cannot write {tmp_path / 'runs' / 'run.jsonl'} (it was deleted during the run)" in said
    assert "amplab.lab.report" in said
    assert (len(store.history), store.log_path) == (15, None)
    assert not (tmp_path / "runs").exists()


def test_a_log_that_another_program_shortens_gets_no_hole(tmp_path):
    store, told = store_in(tmp_path / "run.jsonl")
    add_steps(store, 5)
    store.flush()
    os.truncate(tmp_path / "run.jsonl", 0)
    add_steps(store, 5)
    store.close()
    assert "another program has shortened it" in told[0]
    assert (tmp_path / "run.jsonl").read_bytes() == b""


def test_a_name_that_another_process_takes_at_the_last_moment_is_left_to_it(tmp_path):
    path, other = tmp_path / "run.jsonl", tmp_path / "other"
    other.write_text("the log of another process")

    def open_a_log():
        store, told = store_in(path)
        sys.addaudithook(
            lambda event, args: event == "open" and args[0] == str(path) and not path.exists() and os.link(other, path)
        )
        add_steps(store, 3)
        store.close()
        return told, str(store.log_path)

    assert in_a_fork(open_a_log) == [[], str(tmp_path / "run-2.jsonl")]
    assert len(load_run(tmp_path / "run-2.jsonl").history) == 3
    assert path.read_text() == "the log of another process"


def test_a_log_is_read_while_its_process_writes(tmp_path):
    """Again and again: every log that is read is whole up to some step."""
    path = tmp_path / "run.jsonl"
    store, _ = store_in(path)
    add_steps(store, 1)
    store.flush()
    child = os.fork()
    if child == 0:
        with path.open("ab", buffering=0) as file:  # in parts, as a reader on another machine sees them
            lines = "".join(f'[{step},1.0,2.0,2.0,false,null,"O1",null,0.5,null,null]\n' for step in range(1, 4000))
            for at in range(0, len(lines), 7):
                file.write(lines[at : at + 7].encode())
        os._exit(0)
    steps = 0
    while not os.waitpid(child, os.WNOHANG)[0]:
        run = load_run(path)
        assert len(run.history) >= steps
        steps = len(run.history)
    assert len(load_run(path).history) == 4000


def test_processes_that_ask_whether_a_log_is_held_do_not_disturb_each_other_nor_the_writer(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    path.touch()

    def share(is_wrong, seconds=0.5):
        """Of calls in a row; on a busy machine a reader that loses its core may keep a shared lock for some time."""
        until, wrong, calls = time.monotonic() + seconds, 0, 0
        while time.monotonic() < until:
            wrong, calls = wrong + is_wrong(), calls + 1
        return wrong / calls

    def ask():
        return share(lambda: is_held(path))

    def hold_again_and_again():
        def is_refused():
            with path.open("ab") as file:
                return not hold(file.fileno())

        return share(is_refused)

    assert max(in_forks(ask, ask)) < 0.005  # 0.1 where nobody tries again
    assert in_forks(ask, ask, hold_again_and_again)[-1] < 0.02  # 0.2
    with path.open("ab") as file:
        assert hold(file.fileno())
        assert is_held(path)


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
