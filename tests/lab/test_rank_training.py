"""One experiment on two processes: what `amplab train` trains, shows, keeps when a rank dies, and continues."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from amplab.amp.run_state.file_format import read_run_state
from amplab.lab import Experiment, ExperimentConfig, load_run

STEPS = 40
# One process that accumulates two batches halves each loss: at twice the scale its backward has the same bits.
ALONE = ExperimentConfig(hidden=16, accumulate=2, init_scale=2.0**25, max_loss_scale=2.0**25)
LIMIT = 100  # seconds

RANK = """
import os, signal, sys, torch
from amplab.cli import main
from amplab.lab import checkpoints

checkpoints.EVERY_SECONDS = 0.0  # from the first step on, as far as they take at most 1 % of the time
forwards = 0

def die_after_some_steps(*_):
    global forwards
    forwards += 1
    if os.path.exists(CHECKPOINT) and forwards >= 200:
        os.kill(os.getpid(), signal.SIGKILL)

CHECKPOINT = sys.argv[-1] + "/rank-0.checkpoint"
if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    torch.nn.modules.module.register_module_forward_hook(die_after_some_steps)
sys.exit(main(sys.argv[1:-1]))
"""


def torchrun(*words: object) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*command, *map(str, words)]


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of a run whose rank 1 was killed once, and what was printed."""
    folder = tmp_path_factory.mktemp("restarted")
    script = folder / "rank.py"
    script.write_text(RANK)
    words = ["train", "--steps", STEPS, "--hidden=16", "--init-scale=2**24", "--max-loss-scale=2**24"]
    command = torchrun("--max-restarts", 1, script, *words, "--run-log", folder / "run.jsonl", folder / "run")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "AMPLAB_KERNELS": "reference"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout + done.stderr


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
    assert "rank 0 of 2 stopped: another rank has ended, or did not answer in time" in printed
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


def test_an_interrupt_stops_both_ranks_after_the_same_step(tmp_path):
    command = [sys.executable, "-m", "amplab", "train", "--nproc", "2", "--steps", "100000", "--hidden=16"]
    process = subprocess.Popen(
        [*command, "--log", str(tmp_path / "run.jsonl")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "AMPLAB_KERNELS": "reference"},
    )  # fmt: skip
    try:
        end = time.monotonic() + LIMIT
        while not list(tmp_path.glob("run/rank-1.jsonl")):
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl+C does
        printed, _ = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "  interrupted" in printed
    run = load_run(tmp_path / "run")
    assert run.differences == ()
    assert len(run.history) > 0
    assert read_run_state(tmp_path / "run" / "rank-0.checkpoint")["position"] == len(run.history)
