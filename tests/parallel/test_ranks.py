"""The ranks of the tests: values, errors, deaths and time limits come back, and a process group ends with its rank."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, rank_outcomes, run_ranks
from torch import nn

from amplab.parallel import DistributedDataParallel


def summed(rank, start):
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return rank, total


def fails_alone(rank):
    if rank == 1:
        raise ValueError("rank one has no data")
    dist.all_reduce(torch.ones(1))


def dies_alone(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def hangs(rank):
    if rank == 1:
        time.sleep(600)
    return rank


kept = []


def wraps(rank, keeps):
    for _ in range(3):
        parallel = DistributedDataParallel(nn.Linear(3, 2))
        parallel(torch.ones(1, 3)).sum().backward()
    if keeps:
        kept.append(parallel)


def test_values_come_back_from_every_rank():
    assert run_ranks(summed, 3) == [(0, torch.tensor([7])), (1, torch.tensor([7]))]
    assert [value[1].item() for value in run_ranks(summed, 0, world_size=4)] == [6] * 4


def test_errors_deaths_and_hangs_come_back():
    with pytest.raises(RankError, match=r"rank 1: (.|\n)*rank one has no data"):
        run_ranks(fails_alone)
    alive, dead = rank_outcomes(dies_alone, backend=None)
    assert (alive.value, alive.error) == (0, None)
    assert (dead.value, dead.exitcode) == (None, -signal.SIGKILL)
    done, hung = rank_outcomes(hangs, limit=8, backend=None)  # a busy machine starts slowly
    assert (done.value, hung.value, hung.exitcode) == (0, None, 1)
    assert hung.error.startswith("reached the limit")
    assert "in hangs" in hung.output  # the stack says where
    with pytest.raises(ValueError, match="top level"):
        run_ranks(lambda rank: rank)


def test_a_process_group_ends_with_its_rank_unless_a_wrapper_outlives_it():
    """Threads of gloo that outlive Python abort the process, one time in ten."""
    run_ranks(wraps, False)
    with pytest.raises(RankError, match="pt_gloo_runloop"):
        run_ranks(wraps, True)


ENDS = """
import glob, sys
import torch.distributed as dist
from torch import nn
{imports}
def main():
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
    nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
main()
dist.destroy_process_group()
print(sum("gloo" in open(path).read() for path in glob.glob("/proc/self/task/*/comm")))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted in /proc")
def test_amplab_lets_the_group_of_a_script_end(tmp_path):
    """Torch's functional module keeps the group that exists when it is imported; amplab.parallel imports it first."""
    script = [sys.executable, "-c", ENDS.format(imports="import amplab.parallel"), str(tmp_path / "store")]
    assert subprocess.run(script, capture_output=True, text=True, timeout=120, check=True).stdout == "0\n"
