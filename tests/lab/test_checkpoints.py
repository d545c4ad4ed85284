"""A run continues in another process after its own was killed, bit for bit as if not interrupted."""

import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

from amplab.lab import TASKS, Experiment, ExperimentConfig, Failed, Trainer, checkpoints, load_run
from amplab.lab.checkpoints import KEPT, KEPT_LONGEST, Checkpoint, begin_again, checkpoint_of_launch, last_checkpoint
from amplab.lab.levels import LEVELS
from amplab.lab.run_log.writer import RunLog
from amplab.parallel.ranks import Rank

SMALL = ExperimentConfig(hidden=16)
STORY = """
import sys, torch
from amplab.lab import ExperimentConfig, Trainer
from amplab.lab import checkpoints

checkpoints.EVERY_SECONDS = 0.2


def begin(config, log):
    trainer = Trainer(ExperimentConfig.parse(config), log=log)
    trainer.run(30)
    trainer.change(opt_level="O2", lr=0.02)
    trainer.inject("overflow")
    trainer.run(20)
    trainer.inject("underflow")
    return trainer
"""
KILLED = (
    STORY
    + """
trainer = begin(*sys.argv[1:])
trainer.set_speed(100)
trainer.start()
print("begun", flush=True)
sys.stdin.read()
"""
)
CONFIGS = (
    "amplab/1 task=digits model=cnn opt_level=O1 hidden=16 optimizer=adam lr=0.01 growth_interval=10",
    "amplab/1 task=digits model=mlp opt_level=O1 hidden=16 init_scale=2**20 growth_interval=5",
)


def begin(config: str, log: Path) -> Trainer:
    """Train the story that the killed process trains, up to its last control."""
    names: dict = {}
    exec(STORY, names)  # one text for both processes
    return names["begin"](config, log)


def killed_run(config: str, runs: Path, least: int) -> Checkpoint:
    """Train in a process, kill it after a checkpoint of at least `least` steps, and return that checkpoint."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, config, str(runs)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        written = next(runs.glob("*.checkpoint")).stat().st_mtime_ns
        deadline = time.monotonic() + 60
        while (path := next(runs.glob("*.checkpoint"))).stat().st_mtime_ns == written or steps_in(path) < least:
            assert time.monotonic() < deadline
            assert last_checkpoint(runs) is None  # another process trains it
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = last_checkpoint(runs)
    assert found is not None
    return found


def steps_in(path: Path) -> int:
    return torch.load(path)["position"]


def without_clock(trainer: Trainer) -> list:
    return [[getattr(record, name) for name in FIELDS] for record in trainer.history.records()]


FIELDS = ("step", "loss", "loss_scale", "next_loss_scale", "skipped", "opt_level", "injected", "grad_exponent")


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
@pytest.mark.parametrize("config", CONFIGS)
def test_a_killed_run_continues_as_if_not_interrupted(config: str, tmp_path: Path) -> None:
    saved = killed_run(config, tmp_path / "runs", 60)
    old_log = saved.log.read_bytes()
    continued = Trainer(log=tmp_path / "runs")
    continued.continue_saved(saved)
    assert continued.wait(60)
    assert (continued.state, len(continued.history)) == ("paused", saved.step)
    continued.run(40)
    whole = begin(config, tmp_path / "other")
    whole.run(saved.step + 40 - len(whole.history))
    assert repr(without_clock(continued)) == repr(without_clock(whole))  # NaN equals itself in text
    ours, theirs = (each._run.experiment.model.state_dict() for each in (continued, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert continued.shrinking
    assert continued.config == whole.config
    continued.stop()
    assert continued.wait(10)
    assert saved.log.read_bytes() == old_log
    read = load_run(continued.log_path)
    assert (len(read.history), read.last_config) == (saved.step + 40, whole.config)
    assert [event["event"] for event in read.events if event["event"] in ("config", "inject")] == [
        "config",
        "inject",
        "inject",
    ]
    assert read.history.skip_count == whole.history.skip_count > 0


CHANGED = """
import os, sys
from amplab.lab import ExperimentConfig, Trainer

trainer = Trainer(ExperimentConfig(hidden=16), log=sys.argv[1])
trainer.run(30)
trainer.inject("underflow", on=True)
trainer.change(lr=0.05)
trainer.wait()
trainer.undo()
trainer.change(opt_level="O2", lr=0.02)
trainer.wait()
if sys.argv[2] == "stopped":
    trainer.stop()
    trainer.wait()
os._exit(0)  # nothing runs at the exit, as after SIGKILL
"""


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_run_that_was_changed_while_it_was_paused_continues_with_the_changes(end: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CHANGED, str(tmp_path / "runs"), end], check=True, timeout=120)
    saved = last_checkpoint(tmp_path / "runs")
    continued = Trainer(log=tmp_path / "runs")
    continued.continue_saved(saved)
    assert continued.wait(60)
    assert (continued.config, continued.armed) == (SMALL.changed(opt_level="O2", lr=0.02), {"underflow"})
    continued.run(5)
    whole = Trainer(SMALL)
    whole.run(30)
    whole.inject("underflow", on=True)
    whole.change(opt_level="O2", lr=0.02)
    whole.run(5)
    assert repr(without_clock(continued)) == repr(without_clock(whole))
    continued.stop()
    assert continued.wait(10)
    old, new = load_run(saved.log), load_run(continued.log_path)
    changes = [event for event in old.events if event["event"] in ("config", "inject")]
    assert [event["event"] for event in changes] == ["inject", "config", "config", "config"]
    assert [event for event in new.events if event["event"] in ("config", "inject")] == changes


@pytest.mark.filterwarnings("ignore:Adam on half parameters")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_continues_at_every_level(task: str, level: str, tmp_path: Path) -> None:
    config = ExperimentConfig().changed(task=task, opt_level=level)
    whole, first = Experiment(config), Experiment(config)
    try:
        for _ in range(3):
            first.step()
    except RuntimeError as error:  # a task that shows what is banned
        pytest.skip(str(error).partition("\n")[0])
    state = torch.get_rng_state()
    first.save(tmp_path / "run.checkpoint", {"more": 1})
    second, extra = Experiment.load(tmp_path / "run.checkpoint")
    assert torch.equal(torch.get_rng_state(), state)
    assert (extra["more"], second.steps_done) == (1, 3)
    expected = [whole.step() for _ in range(6)][3:]
    got = [second.step() for _ in range(3)]
    assert repr([replace(each, seconds=0) for each in got]) == repr([replace(each, seconds=0) for each in expected])
    theirs = whole.model.state_dict()
    for name, value in second.model.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0, equal_nan=True)


RESET = """
import sys
from amplab.lab import ExperimentConfig, Trainer

trainer = Trainer(ExperimentConfig(hidden=16), log=sys.argv[1])
trainer.run(7)
trainer.reset()
trainer.run(5)
trainer.reset()
trainer.wait(10)
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.name != "posix", reason="locks of another system")
def test_no_run_of_a_kernel_that_lives_is_offered_also_after_a_reset(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RESET, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert len(list(tmp_path.glob("*.checkpoint"))) == 2
        assert last_checkpoint(tmp_path) is None
        process.stdin.close()
    found = last_checkpoint(tmp_path)
    assert (found.step, found.config) == (5, SMALL)
    assert found.name == f"run of {time.strftime('%H:%M', time.localtime(found.path.stat().st_mtime))}"
    os.utime(found.path, (0, 0))
    assert last_checkpoint(tmp_path).step == 7
    for path in tmp_path.glob("*.checkpoint"):
        os.utime(path, (0, 0))
    assert last_checkpoint(tmp_path) is None  # too long ago


def test_the_number_of_checkpoints_is_bounded_and_they_cost_little(tmp_path: Path) -> None:
    kept = KEPT + KEPT_LONGEST
    for _ in range(kept + 3):
        trainer = Trainer(SMALL, log=tmp_path)
        trainer.run(1)
        trainer.stop()
        assert trainer.wait(10)
    assert len(list(tmp_path.glob("*.checkpoint"))) == kept
    logs = set(tmp_path.glob("*.jsonl"))
    assert len(logs) == kept + 3
    assert len(logs & set(checkpoints._held)) <= kept, "a lock takes a file descriptor"
    assert max(path.stat().st_size for path in tmp_path.glob("*.checkpoint")) < 100_000


def test_files_of_others_with_the_same_endings_stay(tmp_path: Path) -> None:
    others = [f"epoch-{number}.checkpoint" for number in range(KEPT + 3)] + [".precious.3f2a.partial", ".x.1.partial"]
    for name in [*others, *(f"epoch-{number}.jsonl" for number in range(KEPT + 3))]:
        (tmp_path / name).write_text("of the user")
        os.utime(tmp_path / name, (0, 0))
    for _ in range(KEPT + 2):
        trainer = Trainer(SMALL, log=tmp_path)
        trainer.run(1)
        trainer.stop()
        assert trainer.wait(10)
    assert {(tmp_path / name).read_text() for name in others} == {"of the user"}


def test_a_run_keeps_its_checkpoint_beside_later_ones_of_a_clock_that_was_ahead(tmp_path: Path) -> None:
    for _ in range(KEPT):
        trainer = Trainer(SMALL, log=tmp_path)
        trainer.run(1)
        trainer.stop()
        assert trainer.wait(10)
    for path in tmp_path.glob("*.checkpoint"):
        os.utime(path, (time.time() + 3600, time.time() + 3600))
    trainer = Trainer(SMALL, log=tmp_path)
    trainer.run(5)
    assert trainer.log_path.with_suffix(".checkpoint").exists()
    trainer.stop()


def test_the_log_and_its_checkpoints_stay_where_they_are_if_the_working_folder_changes(tmp_path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(SMALL, log="runs")
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer.run(3)
    assert trainer.log_path.parent == tmp_path / "runs"
    monkeypatch.chdir(tmp_path)
    trainer.run(3)
    trainer.stop()
    assert trainer.wait(10)
    assert last_step(trainer.log_path.with_suffix(".checkpoint")) == 6
    assert len(load_run(trainer.log_path).history) == 6
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_log_that_is_moved_away_ends_the_checkpoints_and_is_told(tmp_path: Path, listen) -> None:
    trainer = Trainer(SMALL, log=tmp_path / "runs")
    ear = listen(trainer)
    trainer.run(3)
    trainer.log_path.rename(tmp_path / "elsewhere.jsonl")
    trainer.run(3)
    (told,) = ear.of(Failed)
    assert "its log is not at" in told.text
    trainer.stop()
    assert trainer.wait(10)
    assert len(load_run(tmp_path / "elsewhere.jsonl").history) == 6


def move_and_copy_back(log: Path) -> Path:
    log.parent.rename(log.parent.with_name("old"))
    shutil.copytree(log.parent.with_name("old"), log.parent)
    return log.parent.with_name("old") / log.name


def replace_by_a_copy(log: Path) -> Path:
    """As editors and rsync do; a hard link keeps the log."""
    shutil.copy(log, log.with_suffix(".copy"))
    link = log.with_name("link.jsonl")
    link.hardlink_to(log)
    log.with_suffix(".copy").replace(log)
    return link


@pytest.mark.parametrize("way", [move_and_copy_back, replace_by_a_copy])
def test_no_checkpoint_is_written_beside_a_copy_of_the_log_and_that_is_told(way, tmp_path: Path, listen) -> None:
    trainer = Trainer(SMALL, log=tmp_path / "runs")
    ear = listen(trainer)
    trainer.run(3)
    path = trainer.log_path
    elsewhere = way(path)
    trainer.run(3)
    trainer.run(3)
    trainer.change(lr=0.05)
    assert trainer.wait(10)
    (told,) = ear.of(Failed)
    assert "checkpoint: cannot write" in told.text
    assert "another file has its name now" in told.text
    assert (len(load_run(path).history), last_step(path.with_suffix(".checkpoint"))) == (3, 3)
    elsewhere.replace(path)
    trainer.run(3)
    assert ear.of(Failed)[-1].mended
    assert (len(load_run(path).history), last_step(path.with_suffix(".checkpoint"))) == (12, 12)
    trainer.stop()
    assert trainer.wait(10)
    assert len(ear.of(Failed)) == 2


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="changes its user to one that a folder refuses")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_folder_that_cannot_be_entered_for_a_while_ends_no_run(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp())  # outside of pytest's, which another user may not enter
    own = folder / "own"
    own.mkdir()
    folder.chmod(0o755)
    os.chown(own, 65534, 65534)
    before = Trainer(SMALL, log=tmp_path)
    before.run(3)  # imports what another user may not read
    before.stop()
    assert before.wait(10)
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            os.setuid(65534)
            trainer = Trainer(SMALL, log=own / "runs")
            trainer.run(3)
            own.chmod(0)
            trainer.run(3)
            (failed,) = trainer.failures
            own.chmod(0o755)
            trainer.run(3)
            is_told = failed.text.startswith("checkpoint: cannot") and trainer.failures[-1].mended
            goes_on = (trainer.state, len(trainer.history)) == ("paused", 9)
            trainer.stop()
            trainer.wait()
            os._exit(0 if is_told and goes_on else 3)
        finally:
            os._exit(4)
    _, status = os.waitpid(child, 0)
    (log,) = (own / "runs").glob("*.jsonl")
    steps = len(load_run(log).history)
    shutil.rmtree(folder)
    assert (os.waitstatus_to_exitcode(status), steps) == (0, 9)


def last_step(checkpoint: Path) -> int:
    return torch.load(checkpoint)["position"]


def test_a_checkpoint_does_not_replace_a_file_of_others(tmp_path: Path, listen) -> None:
    other = tmp_path / "run.checkpoint"
    torch.save({"weights": torch.ones(3)}, other)
    before = other.read_bytes()
    trainer = Trainer(SMALL, log=tmp_path / "run.jsonl")
    ear = listen(trainer)
    trainer.run(3)
    trainer.stop()
    assert trainer.wait(10)
    assert other.read_bytes() == before
    (failed,) = ear.of(Failed)
    assert "the lab did not write the file there and does not replace it; move it elsewhere" in failed.text
    assert len(load_run(tmp_path / "run.jsonl").history) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_writes_checkpoints_of_its_own_while_another_thread_writes_one(tmp_path: Path) -> None:
    trainer = Trainer(SMALL, log=tmp_path)
    trainer.run(1)
    taken, free = threading.Event(), threading.Event()

    def write_for_long() -> None:
        with checkpoints._guard:
            taken.set()
            free.wait(60)

    writer = threading.Thread(target=write_for_long)
    writer.start()
    assert taken.wait(60)
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # which ends a child that hangs
        try:
            of_parent = list(checkpoints._held)
            own = Trainer(SMALL, log=tmp_path)
            own.run(1)
            own.stop()
            own.wait()
            os._exit(len(of_parent))
        finally:
            os._exit(4)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    free.set()
    writer.join()
    trainer.stop()
    assert status == 0
    assert len(list(tmp_path.glob("*.checkpoint"))) == 2


def test_a_damaged_checkpoint_is_a_sentence_and_the_run_goes_on(tmp_path: Path, listen) -> None:
    trainer = Trainer(SMALL, log=tmp_path)
    trainer.run(2)
    saved = Checkpoint(next(tmp_path.glob("*.checkpoint")), SMALL, 2, saved=datetime.now())
    other = Trainer(SMALL, log=tmp_path / "other")
    other.run(3)
    ear = listen(other)
    saved.path.write_bytes(b"PK damaged")
    other.continue_saved(saved)
    assert other.wait(10)
    (told,) = ear.of(Failed)
    assert "cannot continue" in told.text
    assert str(saved.path) in told.text
    assert len(other.history) == 3


@pytest.mark.parametrize("log_bytes", [10**13, None], ids=["of more than the memory", "missing"])
def test_a_checkpoint_that_does_not_fit_its_log_is_a_sentence_and_the_run_goes_on(tmp_path: Path, log_bytes) -> None:
    trainer = Trainer(SMALL, log=tmp_path)
    trainer.run(2)
    trainer.stop()
    assert trainer.wait(10)
    path = next(tmp_path.glob("*.checkpoint"))
    state = torch.load(path)
    del state["extra"]["log_bytes"]
    torch.save({**state, "extra": state["extra"] | ({"log_bytes": log_bytes} if log_bytes else {})}, path)
    other = Trainer(SMALL, log=tmp_path / "other")
    other.run(3)
    other.continue_saved(Checkpoint(path, SMALL, 2, saved=datetime.now()))
    assert other.wait(10)
    assert (other.state, len(other.history)) == ("paused", 3)
    (told,) = other.failures
    assert re.search(r"cannot continue: .*\.jsonl: .*expected", told.text)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_a_log_in_whose_place_a_pipe_is_does_not_hold_up_the_trainer(tmp_path: Path) -> None:
    trainer = Trainer(SMALL, log=tmp_path)
    trainer.run(2)
    saved = Checkpoint(next(tmp_path.glob("*.checkpoint")), SMALL, 2, saved=datetime.now())
    saved.log.rename(tmp_path / "moved")
    os.mkfifo(saved.log)
    other = Trainer(SMALL)
    other.continue_saved(saved)
    is_done = other.wait(5)
    if not is_done:
        os.close(os.open(saved.log, os.O_WRONLY))  # lets it go
    assert is_done
    assert "not a regular file but a named pipe" in other.failures[-1].text


@pytest.mark.parametrize("left", ["", '{"amplab_run": 4'])
def test_ranks_that_start_again_refuse_a_log_without_its_first_line(tmp_path: Path, left: str) -> None:
    log = tmp_path / "rank-1.jsonl"
    log.write_text(left)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rank-1\.jsonl: no first line; expected the log of the checkpoint"):
            begin_again(log, 5)
    assert [*tmp_path.iterdir()] == [log]
    assert log.read_text() == left


def test_a_stop_right_after_a_saved_run_is_continued_ends_that_run(tmp_path: Path) -> None:
    trainer = Trainer(SMALL, log=tmp_path)
    trainer.run(2)
    saved = Checkpoint(next(tmp_path.glob("*.checkpoint")), SMALL, 2, saved=datetime.now())
    trainer.stop()
    other = Trainer(SMALL, log=tmp_path / "other")
    other.run(3)
    other.continue_saved(saved)
    other.stop()
    assert other.wait(10)
    assert (other.state, len(other.history)) == ("stopped", 2)


def test_a_checkpoint_that_cannot_be_written_is_reported_once_and_the_run_goes_on(tmp_path: Path, listen) -> None:
    trainer = Trainer(SMALL, log=tmp_path / "run.jsonl")
    ear = listen(trainer)
    (tmp_path / "run.checkpoint").mkdir()
    trainer.run(1)
    trainer.run(1)
    assert len(trainer.history) == 2
    (told,) = ear.of(Failed)
    assert "a restarted kernel cannot continue the run" in told.text


def test_a_checkpoint_is_written_again_once_the_disk_has_space(tmp_path: Path, listen, monkeypatch) -> None:
    monkeypatch.setattr(checkpoints, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "_SHARE", 1e9)
    trainer = Trainer(SMALL, log=tmp_path / "run.jsonl")
    ear = listen(trainer)
    file = tmp_path / "run.checkpoint"
    trainer.run(2)
    for _ in range(2):
        before, kept = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, kept[1]))  # as on a full disk; the log is smaller
        try:
            trainer.run(20)  # with a checkpoint after each step
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        assert file.read_bytes() == before
        trainer.run(2)
    assert steps_in(file) == 46
    assert [(each.mended, str(file) in each.text) for each in ear.of(Failed)] == [(False, True), (True, True)] * 2


def run_of_launch(folder: Path, name: str, launch: str) -> Path:
    """Write the log and the checkpoint of rank 0; return the checkpoint."""
    log = folder / name / "rank-0.jsonl"
    RunLog(log, SMALL, rank=Rank(0, 2, launch)).close()
    experiment = Experiment(SMALL)
    experiment.step()
    path = log.with_suffix(".checkpoint")
    experiment.save(path, {"log_bytes": log.stat().st_size, "saved": datetime.now().isoformat()})
    return path


def test_other_runs_that_are_damaged_do_not_keep_ranks_from_starting_again(tmp_path: Path) -> None:
    own = run_of_launch(tmp_path, "own", "this")
    run_of_launch(tmp_path, "without log", "other").with_suffix(".jsonl").unlink()
    run_of_launch(tmp_path, "damaged", "other").with_suffix(".jsonl").write_text("no log\n")
    (tmp_path / "folder" / "rank-0.jsonl").mkdir(parents=True)
    (tmp_path / "folder" / "rank-0.checkpoint").write_text("")
    found = checkpoint_of_launch(tmp_path, Rank(1, 2, "this"))
    assert found is not None
    assert (found.path, found.step) == (own, 1)
    assert checkpoint_of_launch(tmp_path, Rank(1, 2, "a third")) is None
    with pytest.raises(ValueError, match="2 ranks"):
        checkpoint_of_launch(tmp_path, Rank(1, 3, "this"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_run_for_whose_log_there_is_no_space_leaves_no_file(tmp_path: Path):
    saved = killed_run("amplab/1 task=digits hidden=16", tmp_path, 5)
    files = sorted(tmp_path.iterdir())
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
        try:
            saved.restore()
        except OSError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert sorted(tmp_path.iterdir()) == files


def test_a_run_dated_by_a_clock_that_was_ahead_is_offered_after_the_others(tmp_path: Path) -> None:
    for steps in (3, 5):
        trainer = Trainer(SMALL, log=tmp_path / f"{steps}.jsonl")
        trainer.run(steps)
        trainer.stop()
        assert trainer.wait(10)
    for log in list(checkpoints._held):
        os.close(checkpoints._held.pop(log))  # as when their kernel ends
    os.utime(tmp_path / "3.checkpoint", (time.time() + 7200, time.time() + 7200))
    assert last_checkpoint(tmp_path).step == 5
    (tmp_path / "5.checkpoint").unlink()
    assert last_checkpoint(tmp_path).step == 3


def resets(log: Path, number: int) -> None:
    trainer = Trainer(SMALL, log=log)
    for _ in range(number):
        trainer.run(2)
        trainer.reset()
    trainer.stop()
    assert trainer.wait(10)


def test_a_paused_run_keeps_its_checkpoint_while_another_one_in_its_process_is_reset(tmp_path: Path) -> None:
    paused = Trainer(SMALL, log=tmp_path)
    paused.run(7)
    resets(tmp_path, KEPT + 2)
    assert steps_in(paused.log_path.with_suffix(".checkpoint")) == 7
    paused.stop()


def end_of_kernel() -> None:
    """Unlock the logs of this process, as when it ends."""
    for log in list(checkpoints._held):
        os.close(checkpoints._held.pop(log))


def stopped_run(folder: Path, steps: int) -> Path:
    """Train a run, stop it, and return its checkpoint."""
    trainer = Trainer(SMALL, log=folder)
    trainer.run(steps)
    trainer.stop()
    assert trainer.wait(10)
    return trainer.log_path.with_suffix(".checkpoint")


def test_short_runs_neither_displace_a_long_one_nor_hide_it(tmp_path: Path) -> None:
    """As the run of a kernel that has ended, and some presses of Step in the next one, each after a Reset."""
    long = stopped_run(tmp_path, 250)
    end_of_kernel()
    resets(tmp_path, KEPT + KEPT_LONGEST + 2)
    assert long.exists()
    assert len(list(tmp_path.glob("*.checkpoint"))) == KEPT + KEPT_LONGEST
    end_of_kernel()
    assert last_checkpoint(tmp_path).path == long
    later = stopped_run(tmp_path, 3)
    end_of_kernel()
    assert last_checkpoint(tmp_path).path == later, "more than a hundredth of the steps: it was meant"
    os.utime(long, (0, 0))
    stopped_run(tmp_path, 1)
    assert not long.exists(), "too old to be offered"


def test_a_long_run_that_is_damaged_hides_no_short_one(tmp_path: Path) -> None:
    long, short = stopped_run(tmp_path, 250), stopped_run(tmp_path, 2)
    end_of_kernel()
    content = bytearray(long.read_bytes())
    content[len(content) // 2] ^= 1  # in the tensors, which the first look does not read
    long.write_bytes(content)
    assert last_checkpoint(tmp_path).path == short


def continued(folder: Path) -> str:
    """Continue the last run for a step in another process, as it were, and return the name of its log."""
    end_of_kernel()
    trainer = Trainer(SMALL, log=folder)
    trainer.continue_saved(last_checkpoint(folder))
    assert trainer.wait(10)
    trainer.run(1)
    trainer.stop()
    assert trainer.wait(10)
    return trainer.log_path.name


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("run", ["run-2.jsonl", "run-3.jsonl", "run-4.jsonl"]),
        ("run-2024", ["run-2024-2.jsonl", "run-2024-3.jsonl", "run-2024-4.jsonl"]),
    ],
)
def test_the_logs_of_a_run_that_is_continued_again_and_again_are_numbered(name, names, tmp_path: Path) -> None:
    stopped_run(tmp_path / f"{name}.jsonl", 2)
    assert [continued(tmp_path) for _ in names] == names
    assert len(load_run(tmp_path / names[-1]).history) == 5


@pytest.mark.skipif(os.name != "posix", reason="locks of another system")
def test_a_paused_run_keeps_its_checkpoint_while_other_processes_reset_theirs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RESET, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        resets(tmp_path, KEPT + 2)
        process.kill()
    assert last_checkpoint(tmp_path).step == 5
    of_process = [path for path in tmp_path.glob("*.checkpoint") if steps_in(path) in (5, 7)]
    for path in of_process:
        os.utime(path, (0, 0))
    resets(tmp_path, KEPT + 2)
    assert not any(path.exists() for path in of_process)  # the process has ended, and there are later runs


def test_a_large_checkpoint_of_another_model_is_not_read_and_hides_no_run(tmp_path: Path) -> None:
    trainer = Trainer(SMALL, log=tmp_path / "small.jsonl")
    trainer.run(3)
    trainer.stop()
    assert trainer.wait(10)
    for log in list(checkpoints._held):
        os.close(checkpoints._held.pop(log))  # as when their kernel ends
    state = torch.load(tmp_path / "small.checkpoint")
    state["extra"]["config"] = state["extra"]["config"].replace("task=digits", "task=mine")
    torch.save({**state, "large": torch.zeros(2**27)}, tmp_path / "large.checkpoint")
    shutil.copy(tmp_path / "small.jsonl", tmp_path / "large.jsonl")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = last_checkpoint(tmp_path, lambda each: each if each.config.task == "digits" else None)
    assert (found.step, found.path.name) == (3, "small.checkpoint")
    resets(tmp_path, KEPT + KEPT_LONGEST)
    assert len(list(tmp_path.glob("*.checkpoint"))) == KEPT + KEPT_LONGEST, "two fewer"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**28, "512 MB are in the file"


@pytest.mark.skipif(os.name != "posix", reason="locks of another system")
def test_logs_that_another_program_has_locked_delay_no_run(tmp_path: Path) -> None:
    """Whoever may read a log may lock it."""
    trainer = Trainer(SMALL, log=tmp_path / "run.jsonl")
    trainer.run(1)
    trainer.stop()
    assert trainer.wait(10)
    opened = []
    for place in range(40):
        for suffix in (".jsonl", ".checkpoint"):
            shutil.copy(tmp_path / f"run{suffix}", tmp_path / f"run-{place}{suffix}")
        opened.append((tmp_path / f"run-{place}.jsonl").open("rb"))
        fcntl.flock(opened[-1].fileno(), fcntl.LOCK_EX)
    began = time.monotonic()
    assert last_checkpoint(tmp_path) is None
    resets(tmp_path, 1)
    assert time.monotonic() - began < 20, "a second for each log would be 40, twice"
    assert len(list(tmp_path.glob("run-*.checkpoint"))) == 40
    for file in opened:
        file.close()


def test_runs_in_many_folders_keep_few_files_open(tmp_path: Path) -> None:
    for place in range(checkpoints._MOST_HELD + 20):
        trainer = Trainer(SMALL, log=tmp_path / str(place))
        trainer.run(1)
        trainer.stop()
        assert trainer.wait(10)
    assert len([log for log in checkpoints._held if tmp_path in log.parents]) <= checkpoints._MOST_HELD + 1
    assert last_checkpoint(tmp_path / str(place)) is None, "its process lives"
