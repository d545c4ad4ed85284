"""Files written whole or not at all: a killed process and a full disk, both real."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch
from interrupts import interrupted_everywhere
from torch.utils import _config_module

from amplab import amp
from amplab.amp.run_state import file_format
from amplab.amp.run_state.file_format import read_run_state, write_atomically

ROOT = Path(__file__).resolve().parents[3]
NOBODY = 65534


def in_a_child(script, path):
    """Run a script in another process, with ``path`` and ``amp`` at hand."""
    setting = f"import os, signal, sys, torch\nfrom amplab import amp\npath = {str(path)!r}\n"
    return subprocess.run(
        [sys.executable, "-c", setting + textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(os.name != "posix", reason="kills with SIGKILL")
def test_a_crash_before_the_rename_leaves_the_checkpoint_before(tmp_path):
    path = tmp_path / "run.pt"
    child = in_a_child(
        """
        amp.save_run_state(path, position=torch.full((1000,), 1))
        sys.addaudithook(lambda event, _: event == "os.rename" and os.kill(os.getpid(), signal.SIGKILL))
        amp.save_run_state(path, position=torch.full((1000,), 2))
        """,
        path,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert torch.equal(amp.load_run_state(path).position, torch.full((1000,), 1))
    (partial,) = (each for each in tmp_path.iterdir() if each != path)
    assert re.fullmatch(r"\.run\.pt\.[0-9a-f]{8}\.partial", partial.name)
    assert torch.equal(torch.load(partial)["position"], torch.full((1000,), 2))  # the write had indeed ended
    amp.save_run_state(path, position=3)  # removes it
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="flock")
def test_what_another_process_still_writes_is_not_removed(tmp_path):
    path = tmp_path / "run.pt"
    slow = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from amplab.amp.run_state.file_format import write_atomically\n"
            "def write(file):\n    file.write(b'slow'); print(flush=True); sys.stdin.read()\n"
            f"write_atomically(Path({str(path)!r}), write)",
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert slow.stdout.readline() == b"\n"
    write_atomically(path, lambda file: file.write(b"quick"))
    slow.communicate(b"")
    assert slow.returncode == 0
    assert path.read_bytes() == b"slow"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files by setrlimit")
def test_a_full_disk_leaves_the_checkpoint_before_and_nothing_else(tmp_path):
    path = tmp_path / "run.pt"
    child = in_a_child(
        """
        import resource
        amp.save_run_state(path, position=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        amp.save_run_state(path, position=torch.zeros(1_000_000))
        """,
        path,
    )
    assert child.returncode == 1
    assert re.search(r"OSError: \[Errno \d+\] .*run\.pt", child.stderr)
    assert amp.load_run_state(path).position == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="links, modes and pipes of POSIX")
def test_what_stands_at_the_path_keeps_its_nature(tmp_path):
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_bytes(b"old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_atomically(link, lambda file: file.write(b"new"))
    assert (link.is_symlink(), target.read_bytes(), target.stat().st_mode & 0o777) == (True, b"new", 0o600)
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="is not a regular file"):
        write_atomically(pipe, lambda file: file.write(b"new"))
    assert pipe.is_fifo()


def saves(path, seconds):
    """Replace a file again and again, and count the failures."""
    failed, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            write_atomically(path, lambda file: file.write(b"whole" * 1000))
        except OSError as error:
            failed.append(repr(error))
    return failed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_two_processes_that_save_to_one_path_do_not_remove_each_others_files(tmp_path):
    path = tmp_path / "run.pt"
    child = os.fork()
    if child == 0:
        os._exit(len(saves(path, 2.0)) > 0)
    failed = saves(path, 2.0)
    _, status = os.waitpid(child, 0)
    assert failed == []
    assert os.waitstatus_to_exitcode(status) == 0
    assert path.read_bytes() == b"whole" * 1000
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="flock, and names of 255 bytes")
@pytest.mark.parametrize("name", ["n" * 250, "名" * 84, "n" * 255], ids=["250", "wide", "255"])
def test_the_longest_names_can_be_saved_and_cleaned_up_after(tmp_path, name):
    path = tmp_path / name
    other = Path(f"{path}"[:-1] + "x")
    child = os.fork()
    if child == 0:
        write_atomically(path, lambda file: os.kill(os.getpid(), signal.SIGKILL))
    os.waitpid(child, 0)
    (partial,) = tmp_path.iterdir()
    write_atomically(other, lambda file: file.write(b"another file"))
    assert partial.exists()
    write_atomically(path, lambda file: file.write(b"new"))
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


@pytest.mark.skipif(os.name != "posix", reason="links of POSIX")
def test_a_link_that_leads_to_itself_is_refused_and_stays(tmp_path):
    loop = tmp_path / "run.pt"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="leads back to itself"):
        write_atomically(loop, lambda file: file.write(b"new"))
    assert loop.is_symlink()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_folder_that_may_be_written_to_and_not_read_gets_the_file():
    folder = Path(tempfile.mkdtemp())  # outside of pytest's, which another user may not enter
    path = folder / "run.pt"
    path.write_bytes(b"before")
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, -1)
        os.chown(path, NOBODY, -1)
    folder.chmod(0o300)
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:
            os.setuid(NOBODY)
        os._exit(int(saves(path, 0.1) != []))
    _, status = os.waitpid(child, 0)
    folder.chmod(0o700)
    assert os.waitstatus_to_exitcode(status) == 0
    assert path.read_bytes() == b"whole" * 1000
    path.unlink()
    folder.rmdir()


@pytest.mark.skipif(sys.platform != "linux", reason="names that are not UTF-8")
def test_a_file_whose_name_is_no_text_is_read_without_its_tensors_too(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    amp.save_run_state(folder / "run.pt", position=3)
    assert [read_run_state(folder / "run.pt", whole=whole)["position"] for whole in (True, False)] == [3, 3]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts the descriptors of Linux")
def test_an_interrupted_save_leaves_no_descriptor_open_and_the_option_of_torch_as_it_was(tmp_path):
    """At every point of the functions that open the folder and set the option."""
    option, points, at = torch.serialization.get_crc32_options(), set(), tmp_path / "run.pt"
    where = {
        "folders": (file_format.__file__, torch.serialization.__file__, _config_module.__file__),
        "functions": ("_fsync_folder", "_checksums", "set_crc32_options", "__setattr__"),
    }
    torch.serialization.set_crc32_options(False)
    try:
        amp.save_run_state(at, position=1)
        descriptors = len(os.listdir("/proc/self/fd"))
        for interrupt in interrupted_everywhere(lambda: amp.save_run_state(at, position=1), **where):
            assert not torch.serialization.get_crc32_options(), interrupt
            assert len(os.listdir("/proc/self/fd")) == descriptors, interrupt
            assert interrupt.escaped, interrupt
            points.add(interrupt.where.rpartition(" ")[2])
    finally:
        torch.serialization.set_crc32_options(option)
    assert {"_fsync_folder", "_checksums", "set_crc32_options", "ConfigModule.__setattr__"} <= points
    assert [each.name for each in tmp_path.iterdir()] == ["run.pt"]
