"""Full disks, read-only folders, paths below a file: what cannot be written is named, and nothing is half written.

A limit on the size of files takes the place of a full disk: from some byte on every write fails, in every folder. Where
the tests may mount, a disk of 64 kB is filled as well.
"""

import contextlib
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch

import amplab
from amplab import amp
from amplab.amp.run_state.file_format import write_atomically
from amplab.cli import main, may_write
from amplab.kernels.builder import KernelLibrary, cache
from amplab.kernels.builder.recipe import current_recipe, obstacle
from amplab.lab import ExperimentConfig, Trainer, load_run
from amplab.lab.html_report import report
from amplab.launch import LaunchError, copy_lessons, find_lessons
from amplab.lessons.progress import PROGRESS, record_right

pytestmark = pytest.mark.skipif(os.name != "posix", reason="limits, modes and mounts of POSIX")
NOBODY = 65534


@contextlib.contextmanager
def file_limit(size):
    """Let every write beyond a size fail in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def read_only(folder):
    """Make a folder read-only, and be somebody whom that stops."""
    folder.chmod(0o555)
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@contextlib.contextmanager
def full_disk(folder):
    """Mount a disk of 64 kB at a folder, and fill it."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        with contextlib.suppress(OSError), (folder / "filled").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def train(folder):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        status = main(["train", "--steps", "2", "--hidden=4", "--log", str(folder / "run.jsonl")])
    if status:
        assert status == 2
        raise OSError(said.getvalue())


def watch(folder):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with amplab.watch(model, optimizer, log=folder / "run.jsonl"):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def bench(folder):
    """What `amplab bench --json` asks before it measures, and does afterwards."""
    if not may_write(folder / "figures.json"):
        raise OSError(f"{folder}")
    write_atomically(folder / "figures.json", lambda file: file.write(bytes(10_000)))


def lessons(folder):
    copy_lessons(find_lessons(), folder)


def solve(folder):
    record_right("03-1")


def save(folder):
    amp.save_run_state(folder / "run.pt", position=torch.zeros(10_000))


@pytest.fixture(scope="module")
def trainer():
    trainer = Trainer(ExperimentConfig(hidden=4))
    trainer.run(2)
    trainer.wait()
    yield trainer
    trainer.stop()
    trainer.wait()


@pytest.fixture
def writers(trainer, monkeypatch):
    """Everything that writes a file for a user, in a folder."""
    writers = {each.__name__: each for each in (train, watch, bench, lessons, solve, save)}
    writers["report"] = lambda folder: report(trainer, folder / "run.html")
    monkeypatch.setenv("AMPLAB_KERNELS", "reference")
    return writers


@pytest.fixture
def folder():
    """A folder that everybody may enter: those of pytest are private."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "folder"
        folder.mkdir()
        folder.parent.chmod(0o755)
        yield folder


def refusal(write, folder, monkeypatch):
    """What a writer says that cannot write."""
    monkeypatch.setenv(PROGRESS, str(folder / "progress.json"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((OSError, ValueError, LaunchError, Warning)) as refused:
            write(folder)
    return str(refused.value)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def no_room(folder):
    with file_limit(0):
        yield


@contextlib.contextmanager
def some_room(folder):
    with file_limit(5000):
        yield


@contextlib.contextmanager
def below_a_file(folder):
    folder.rmdir()
    folder.touch()
    yield


DISKS = {each.__name__: each for each in (no_room, some_room, read_only, below_a_file, full_disk)}
LARGE = ("bench", "lessons", "save", "report")
SMALL = ("train", "watch", "solve")  # for which 5000 bytes are enough


@pytest.mark.parametrize(
    ("kind", "disk"),
    [(kind, disk) for kind in LARGE + SMALL for disk in DISKS if (kind in LARGE or disk != "some_room")],
)
def test_what_cannot_be_written_is_named_and_leaves_nothing(writers, folder, monkeypatch, capfd, kind, disk):
    with DISKS[disk](folder):
        said = refusal(writers[kind], folder / "below" if disk == "below_a_file" else folder, monkeypatch)
        left = files(folder)
    assert str(folder) in said
    assert set(left) <= {"filled"}
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_keeps_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv(PROGRESS, str(tmp_path / "progress.json"))
    record_right("03-1")
    amp.save_run_state(tmp_path / "run.pt", position=1)
    before = files(tmp_path)
    with file_limit(0), pytest.warns(UserWarning, match=r"progress\.json"):
        record_right("04-1")
    with file_limit(0), pytest.raises(OSError, match=r"run\.pt"):
        amp.save_run_state(tmp_path / "run.pt", position=2)
    assert files(tmp_path) == before


def test_a_lesson_of_which_a_part_was_written_is_written_whole_later(tmp_path):
    with file_limit(5000), pytest.raises(LaunchError):
        copy_lessons(find_lessons(), tmp_path)
    copy_lessons(find_lessons(), tmp_path)
    for copy in tmp_path.glob("*.ipynb"):
        assert copy.read_bytes() == (find_lessons() / copy.name).read_bytes()


def test_a_checkpoint_that_finds_no_room_is_named_and_the_run_goes_on(tmp_path):
    trainer = Trainer(ExperimentConfig(hidden=4), log=tmp_path / "run.jsonl")
    with file_limit(3000):
        trainer.run(2)
        trainer.wait()
    trainer.run(2)
    trainer.stop()
    trainer.wait()
    assert len(trainer.history) == 4
    told = [(each.mended, str(tmp_path) in each.text) for each in trainer.failures]
    assert told == [(False, True), (True, True)]  # the next checkpoint finds room
    assert set(files(tmp_path)) == {"run.jsonl", "run.checkpoint"}


def test_a_log_whose_checkpoint_has_too_long_a_name_leaves_those_of_other_runs(tmp_path):
    told = []
    for name in ("n" * 249, "run"):
        trainer = Trainer(ExperimentConfig(hidden=4), log=tmp_path / f"{name}.jsonl")
        trainer.run(1)
        trainer.stop()
        trainer.wait()
        told.append([each.text for each in trainer.failures])
    assert ["too long" in told[0][0], told[1]] == [True, []]
    assert (tmp_path / "run.checkpoint").exists()


@pytest.mark.skipif(obstacle() is not None, reason=f"cannot build here: {obstacle()}")
def test_a_log_of_a_build_that_cannot_be_written_does_not_hide_why_it_failed(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("AMPLAB_KERNELS", "require")
    folder.parent.chmod(0o700)
    made = current_recipe()
    made.__dict__["key"] = "no-such-key"
    (cache.writable_folder(made.key) / "build.log").mkdir()
    with pytest.raises(RuntimeError, match="the key is no-such-key") as refused:
        KernelLibrary(lambda: made).ensure(print)
    assert str(folder / "amplab" / "kernels") in str(refused.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_when_the_disk_fills_and_the_exit_status_tells(tmp_path, ranks):
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "from amplab.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["train", "--steps", "120", "--hidden=4", "--log", str(tmp_path)]
    words += ["--nproc", str(ranks)] if ranks > 1 else []
    run = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False, timeout=300
    )
    out, err = run.stdout, run.stderr
    assert run.returncode == 1, err
    assert "120/120" in out
    assert "lines are lost" in out
    assert ("lines are lost" in err) == (ranks > 1)  # of the others than rank 0
    assert "Traceback" not in err


def steps_in(log):
    return len(load_run(log).history)


def test_a_run_that_is_replaced_while_the_disk_is_full_keeps_its_log(tmp_path):
    trainer = Trainer(ExperimentConfig(hidden=4), log=tmp_path)
    trainer.run(10)
    log = trainer.log_path
    with file_limit(log.stat().st_size):
        trainer.run(20)
        trainer.reset()
        trainer.run(5)
    (kept,) = trainer.kept.runs
    assert (len(kept.history), steps_in(log)) == (30, 10)
    time.sleep(1.1)  # a full disk is tried again once a second
    trainer.run(5)
    assert (steps_in(log), steps_in(trainer.log_path)) == (30, 10)
    trainer.undo()
    trainer.run(7)
    assert (trainer.log_path, steps_in(log)) == (log, 37)
    (told,) = [each.text for each in trainer.failures if each.text.startswith("log")]
    assert "are written when there is space" in told
