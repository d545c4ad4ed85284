"""One experiment on two processes: what `amplab train` trains, shows, keeps when a rank dies, and continues."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from amplab.amp.run_state.file_format import read_run_state
from amplab.cli import main
from amplab.lab import Experiment, ExperimentConfig, load_run, rank_exchange
from amplab.lab.checkpoints import Checkpoint
from amplab.lab.rank_exchange import RankExchange
from amplab.lab.rank_training import train_on_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from ranks import run_ranks

STEPS = 40
# One process that accumulates two batches halves each loss: at twice the scale its backward has the same bits.
ALONE = ExperimentConfig(hidden=16, accumulate=2, init_scale=2.0**25, max_loss_scale=2.0**25)
LIMIT = 400  # seconds, of about 20 on two cores that do nothing else

STARTED = """
# A sitecustomize of every rank: a checkpoint after every step; rank 1 of the first start dies in the middle of one
import os, signal

if "RANK" in os.environ:
    from amplab.lab import checkpoints
    from amplab.lab.rank_exchange import RankExchange

    checkpoints.EVERY_SECONDS = 0.0
    averages, calls = RankExchange.average_, []

    def average_and_die(self, grads):
        calls.append(grads)
        if len(calls) == 17:
            os.kill(os.getpid(), signal.SIGKILL)
        averages(self, grads)

    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        RankExchange.average_ = average_and_die
"""


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of a run whose rank 1 was killed once, and what was printed."""
    folder = tmp_path_factory.mktemp("restarted")
    (folder / "sitecustomize.py").write_text(STARTED)
    words = ["--steps", STEPS, "--hidden=16", "--init-scale=2**24", "--max-loss-scale=2**24"]
    command = [sys.executable, "-m", "amplab", "train", "--nproc", 2, "--max-restarts", 1, *words]
    settings = {"PYTHONPATH": f"{folder}", "AMPLAB_KERNELS": "reference"}
    words = [*map(str, command), "--log", str(folder / "run.jsonl")]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | settings
    ) as process:
        try:
            printed, _ = process.communicate(timeout=LIMIT)
        finally:
            process.terminate()  # torchrun then ends the ranks
    assert process.returncode == 0, printed
    return folder / "run", printed


def test_a_run_that_lost_a_rank_ends_as_one_process_with_the_joined_batch(restarted):
    """Two ranks, one killed, both started again from the checkpoint: the bits of one process."""
    folder, _ = restarted
    torch.set_num_threads(1)
    alone = Experiment(ALONE)
    records = [alone.step() for _ in range(STEPS)]
    saved = read_run_state(folder / "rank-0.checkpoint")
    assert saved["position"] == STEPS
    weights = saved["models"][0]
    assert all(torch.equal(weights[name], value) for name, value in alone.model.state_dict().items())
    run = load_run(folder)
    assert run.history.skipped_steps() == [each.step for each in records if each.skipped] != []
    assert run.history.column("loss_scale").tolist() == [each.loss_scale / 2 for each in records]
    assert run.history.column("loss").tolist() == pytest.approx([each.loss for each in records], rel=1e-6)


def test_the_others_say_so_when_a_rank_dies_and_the_logs_of_both_attempts_load(restarted):
    folder, printed = restarted
    (said,) = (line for line in printed.splitlines() if "rank 0 of 2 stopped" in line)
    assert said.startswith("rank 0 of 2 stopped: another rank has ended, or did not answer in time")
    assert len(said) < 200
    before, run = load_run(folder / "attempt-0"), load_run(folder)
    assert len(before.history) < STEPS == len(run.history)
    (restart,) = (change for change in run.history.changes if change.field == "restart")
    assert 0 < restart.step <= len(before.history)
    assert [len(each.history) for each in run.ranks] == [STEPS, STEPS]
    kept = before.history.column("loss")[: restart.step]
    assert kept.tolist() == run.history.column("loss")[: restart.step].tolist()


def test_the_table_has_a_line_for_each_rank(restarted):
    folder, printed = restarted
    run = load_run(folder)
    assert (run.world_size, [each.rank for each in run.ranks], run.differences) == (2, [0, 1], ())
    assert str(run.rank_table()) in printed
    assert f"{STEPS} steps" in str(run)


def test_ranks_on_two_nodes_continue_together(tmp_path):
    """Without --rdzv-id, the two processes of torchrun have no name of the launch in common."""
    (tmp_path / "sitecustomize.py").write_text(STARTED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["torch.distributed.run", "--nnodes=2", "--max-restarts=1", "--master-addr=127.0.0.1"]
    train = ["amplab", "train", f"--steps={STEPS}", "--hidden=16", f"--log={tmp_path / 'run.jsonl'}"]
    settings = {"PYTHONPATH": f"{tmp_path}", "AMPLAB_KERNELS": "reference", "OMP_NUM_THREADS": "1"}
    options = {"stderr": subprocess.STDOUT, "env": os.environ | settings}
    with ExitStack() as ends:
        nodes = []
        for rank in range(2):
            words = ["-m", *torchrun, f"--master-port={port}", f"--node-rank={rank}", "-m", "--", *train]
            said = ends.enter_context((tmp_path / f"{rank}.txt").open("w+"))
            nodes.append(subprocess.Popen([sys.executable, *words], stdout=said, **options))
            ends.callback(nodes[-1].wait)
            ends.callback(nodes[-1].terminate)
        codes = [node.wait(LIMIT) for node in nodes]
    assert codes == [0, 0], [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    run = load_run(tmp_path / "run")
    assert [len(each.history) for each in run.ranks] == [STEPS, STEPS]
    assert run.differences == ()
    assert [change.field for change in run.history.changes] == ["start", "restart"]
    assert sorted(each.name for each in tmp_path.glob("run*")) == ["run"]


DIES = """
# A sitecustomize of every rank: rank 1 dies once its log has a line
import os, signal, threading, time
from pathlib import Path

def die():
    while not any(b"\\n" in log.read_bytes() for log in Path(os.environ["LOGS"]).glob("*/rank-1.jsonl")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("RANK") == "1":
    threading.Thread(target=die, daemon=True).start()
"""


def test_a_killed_rank_is_told_in_one_line_with_its_log(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(DIES)
    command = [sys.executable, "-m", "amplab", "train", "--nproc", "2", "--steps", "100000", "--hidden=16"]
    settings = {"LOGS": f"{tmp_path}", "PYTHONPATH": f"{tmp_path}", "AMPLAB_KERNELS": "reference"}
    with subprocess.Popen(
        [*command, "--log", str(tmp_path)], stdout=-1, stderr=-1, text=True, env=os.environ | settings
    ) as process:
        try:
            _, said = process.communicate(timeout=LIMIT)
        finally:
            process.terminate()
    assert process.returncode == 1, said
    (log,) = tmp_path.glob("*/rank-1.jsonl")
    lines = said.splitlines()
    assert sum("SIGKILL" in line and "rank 1" in line and str(log) in line for line in lines) == 1, said
    assert "Traceback" not in said
    assert len(lines) < 8


ORPHANED = """
# A sitecustomize of every rank: rank 1 dies in each attempt but the last, in which it kills the launcher
import os, signal, threading, time
from pathlib import Path

began = time.time()

def attack():
    saved = set()  # the times of checkpoints of this attempt; the first one may be of its start
    while len(saved) < 3:
        times = {each.stat().st_mtime for each in Path(os.environ["LOGS"]).glob("*/rank-0.checkpoint")}
        saved |= {each for each in times if each > began}
        time.sleep(0.001)
    last = os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["TORCHELASTIC_MAX_RESTARTS"]
    os.kill(os.getppid() if last else os.getpid(), signal.SIGKILL)

if "RANK" in os.environ:
    from amplab.lab import checkpoints
    checkpoints.EVERY_SECONDS = 0.0
if os.environ.get("RANK") == "1":
    threading.Thread(target=attack, daemon=True).start()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal at the end of the parent process is Linux's")
def test_ranks_end_in_order_when_their_launcher_is_killed_after_a_restart(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ORPHANED)
    words = ["train", "--nproc", 2, "--max-restarts", 1, "--steps", 1_000_000, "--hidden=16", "--log", tmp_path]
    settings = {"LOGS": f"{tmp_path}", "PYTHONPATH": f"{tmp_path}", "AMPLAB_KERNELS": "reference"}
    with subprocess.Popen(
        [sys.executable, "-m", "amplab", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | settings,
    ) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT)  # the ranks have the pipe, too
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL, said
    assert "interrupted" in said
    (checkpoint,) = tmp_path.glob("*/rank-0.checkpoint")
    run = load_run(checkpoint.parent)
    ends = [rank.end for rank in run.ranks]
    assert [(end.state, end.steps) for end in ends] == [("closed", len(run.history))] * 2, said
    assert 0 < read_run_state(checkpoint)["position"] <= len(run.history)


def send_once_there_is(log: Path, what: signal.Signals) -> None:
    while not log.exists() or log.read_bytes().count(b"\n") < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), what)


def interrupted_alone(rank: int, folder: Path) -> int:
    """Train until rank 1 gets the signal of Ctrl+C once its log has a line, and rank 0 none; return the exit status."""
    if rank == 1:
        log = folder / "run" / "rank-1.jsonl"
        threading.Thread(target=send_once_there_is, args=(log, signal.SIGINT), daemon=True).start()
    return train_on_ranks(ExperimentConfig(hidden=16), steps=100_000, log_path=folder / "run.jsonl").exit_status


def test_an_interrupt_of_one_rank_stops_both_after_the_same_step(tmp_path):
    assert run_ranks(interrupted_alone, tmp_path) == [130, 130]
    run = load_run(tmp_path / "run")
    assert run.differences == ()
    assert len(run.history) > 0
    assert read_run_state(tmp_path / "run" / "rank-0.checkpoint")["position"] == len(run.history)


def of_one_launch(rank: int, folder: Path, restarts: int) -> int:
    """Train 3 steps; in a restart go on, and rank 1 gets SIGTERM when it begins to restore; return the exit status."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": f"{restarts}"}
    restore = Checkpoint.restore

    def ended(saved: Checkpoint, exchange: RankExchange | None) -> tuple[Experiment, Path]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)  # until the main thread has handled it
        return restore(saved, exchange)

    steps = 100_000 if restarts else 3
    with patch.object(Checkpoint, "restore", ended if rank == 1 else restore):
        return train_on_ranks(ExperimentConfig(hidden=16), steps=steps, log_path=folder / "run.jsonl").exit_status


def test_a_signal_to_a_rank_that_restores_its_checkpoint_stops_both_after_the_first_step(tmp_path):
    """Before, that rank ended without a word, and the other one waited for it."""
    assert run_ranks(of_one_launch, tmp_path, 0) == [0, 0]
    assert run_ranks(of_one_launch, tmp_path, 1) == [130, 130]
    run = load_run(tmp_path / "run")
    assert [(rank.end.state, rank.end.steps) for rank in run.ranks] == [("closed", 4)] * 2


def printed() -> str:
    """What this rank has printed so far; ranks.py has redirected it to a file."""
    return Path("/proc/self/fd/1").read_text()


def is_silent(rank: int) -> bool:
    """Whether the last that was said of a rank is that it does not answer."""
    silent = f"rank {rank} has not answered for 1 s; the other ranks wait for it."
    return printed().count(silent) > printed().count(f"rank {rank} answers again.")


def is_stopped(pid_file: Path) -> bool:
    """Whether a signal has stopped the process."""
    pid = pid_file.read_text() if pid_file.exists() else ""
    return bool(pid) and Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


def continue_once_told(stopped: int, pid_file: Path) -> None:
    """Let the stopped rank go on when the other has said that it does not answer; end both when it does again."""
    while not (is_stopped(pid_file) and is_silent(stopped)):  # a busy machine may keep it silent before
        time.sleep(0.01)
    os.kill(int(pid_file.read_text()), signal.SIGCONT)
    while is_silent(stopped):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def stopped_for_a_while(rank: int, folder: Path, stopped: int) -> int:
    rank_exchange.SILENT = 1.0
    if rank == stopped:
        (folder / "pid").write_text(str(os.getpid()))
        log = folder / "run" / f"rank-{rank}.jsonl"
        threading.Thread(target=send_once_there_is, args=(log, signal.SIGSTOP), daemon=True).start()
    else:
        threading.Thread(target=continue_once_told, args=(stopped, folder / "pid"), daemon=True).start()
    return train_on_ranks(ExperimentConfig(hidden=16), steps=100_000, log_path=folder / "run.jsonl").exit_status


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads what a rank has printed in /proc")
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_does_not_answer_is_told_while_the_others_wait(tmp_path, stopped):
    assert run_ranks(stopped_for_a_while, tmp_path, stopped) == [130, 130]
    assert load_run(tmp_path / "run").differences == ()


@pytest.mark.parametrize(
    ("rank", "world_size", "named"),
    [("x", "y", "WORLD_SIZE=y"), ("x", "2", "RANK=x"), ("2", "2", "RANK=2"), ("-1", "2", "RANK=-1")],
)
def test_variables_of_no_launcher_are_refused_by_name(monkeypatch, capsys, rank, world_size, named):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    assert main(["train", "--steps=1", "--hidden=4"]) == 2
    said = capsys.readouterr().err
    assert f"{named}: expected" in said
    assert said.count("\n") == 1
