"""Several processes under torchrun's launcher: how their ends are told. One process launches, real ranks end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ENDS = """
import os, signal, sys, time
rank, what = os.environ["RANK"], sys.argv[1]
if what == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "refused":
    sys.exit(2)
if what == "killed":
    time.sleep(600)  # until the launcher ends it
line = f"{rank} {os.environ['TORCHELASTIC_RUN_ID']} {os.environ['OMP_NUM_THREADS']}\\n"
os.write(1, line.encode())  # at once: torchrun starts Python unbuffered, and the ranks share the output
"""

LAUNCHES = """
import json, logging, os, signal, sys
from amplab.launch import launch_ranks

def seen():
    handlers = [repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    return [logging.root.manager.disable, handlers, {name: os.environ.get(name) for name in NAMES}]

NAMES = "AMPLAB_LAUNCHER", "OMP_NUM_THREADS", "PYTHONSAFEPATH", "TORCHELASTIC_SIGNALS_TO_HANDLE"
os.environ.pop("OMP_NUM_THREADS", None)
sys.path.remove(os.getcwd())
os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])  # for ends.py
logging.disable(logging.INFO)
signal.signal(signal.SIGTERM, lambda *_: None)
before = seen()
ends = {what: launch_ranks(2, ["ends", what], name=what) for what in ("killed", "refused", "done")}
told = {what: [[end.rank, end.exitcode, str(end)] for end in each] for what, each in ends.items()}
json.dump({**told, "process": [before, seen()]}, sys.stderr)
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """Return how the ranks of each launch ended, and what was printed."""
    folder: Path = tmp_path_factory.mktemp("launched")
    (folder / "ends.py").write_text(ENDS)
    (folder / "launches.py").write_text(LAUNCHES)
    words = [sys.executable, "launches.py"]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True, timeout=200)
    return json.loads(result.stderr), result.stdout


def test_a_killed_rank_comes_first_and_the_signal_has_its_name(launched):
    (first, second) = launched[0]["killed"]
    assert first[:2] == [1, -9]
    assert first[2].startswith("rank 1 was ended by SIGKILL")
    assert second[:2] == [0, -15]


def test_an_exit_code_is_told(launched):
    assert {each[1] for each in launched[0]["refused"]} <= {2, -15}
    assert launched[0]["refused"][0][2].endswith("ended with exit code 2")


def test_ranks_that_do_their_work_are_not_told(launched):
    """And they have the name of the launch, and one thread each; nothing else is printed on standard error."""
    ends, printed = launched
    assert ends["done"] == []
    assert sorted(printed.splitlines()) == ["0 done 1", "1 done 1"]


def test_the_process_that_launched_is_as_before(launched):
    """Its variables, the level of `logging.disable` and its handlers of signals."""
    before, after = launched[0]["process"]
    assert after == before
