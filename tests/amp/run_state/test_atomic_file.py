"""Files written whole or not at all: a killed process and a full disk, both real."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from amplab import amp
from amplab.amp.run_state.file_format import write_atomically

ROOT = Path(__file__).resolve().parents[3]


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
