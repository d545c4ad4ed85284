"""A training script of two ranks that torchrun starts again in the middle of an epoch: the bits of a run without that.

This file is the script, too: ``torchrun --max-restarts 1 test_restarted_ranks.py FOLDER``.
"""

import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import amplab
from amplab import amp

BATCHES, STEPS = 5, 14  # of an epoch, of the run: it ends in the middle of the third epoch
KILLED_AT = 8  # step; in the middle of the second epoch


def train(rank: int, folder: Path, *, level: str, steps: int = STEPS) -> list[torch.Tensor]:
    """Train with dropout, shuffled data and a scale that overflows, saved after every step; return what is trained."""
    torch.manual_seed(rank)  # the dropout of each rank
    x = torch.randn(BATCHES * 8, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, seed=3)
    # With its own generator: otherwise each new iterator draws from that of the dropout.
    loader = DataLoader(data, batch_size=4, sampler=sampler, generator=torch.Generator())
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scaler = amplab.GradScaler("cpu", init_scale=2.0**20, growth_interval=3) if level == "autocast" else None
    if scaler is None:
        amp.initialize(net, optimizer, opt_level=level, verbosity=0, dynamic_init_scale=2.0**20, scale_window=3)
    model = nn.parallel.DistributedDataParallel(net)
    scaling = {"amp": amp} if scaler is None else {"scaler": scaler}
    saved = folder / f"{level}-rank-{rank}.pt"
    done = amp.load_run_state(saved, model=net, optimizer=optimizer, **scaling).position if saved.exists() else 0
    while done < steps:
        epoch, begun = divmod(done, BATCHES)
        sampler.set_epoch(epoch)
        for inputs, targets in islice(loader, begun, begun + steps - done):
            optimizer.zero_grad()
            if scaler is None:
                with amp.scale_loss((model(inputs) - targets).square().mean(), optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
            else:
                with amplab.autocast("cpu", dtype=torch.float16):
                    loss = (model(inputs) - targets).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            done += 1
            amp.save_run_state(saved, model=net, optimizer=optimizer, position=done, **scaling)
            dist.barrier()  # every rank has saved this step before one begins the next
    scale = amp.loss_scale() if scaler is None else scaler.get_scale()
    moments = [each for state in optimizer.state.values() for each in state.values()]
    amp.reset()
    return [torch.tensor(scale), *net.parameters(), *moments]


LEVELS = ("autocast", "O1", "O2")


def uninterrupted(rank: int, folder: Path) -> dict[str, list[torch.Tensor]]:
    return {level: train(rank, folder, level=level) for level in LEVELS}


def main(folder: Path) -> None:
    """What torchrun runs: in the first start rank 1 is killed, and rank 0 goes on until it sees that."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        for level in LEVELS:
            train(rank, folder, level=level, steps=KILLED_AT)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    trained = {level: train(rank, folder, level=level) for level in LEVELS}
    torch.save(trained, folder / f"trained-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[torch.Tensor]]]]:
    """Return the folder of the run that was started again, and what the ranks without that have trained."""
    folder = tmp_path_factory.mktemp("restarted")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    new_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # for each start; in the old one are addresses of the dead
    words = [sys.executable, *launch, __file__, str(folder)]
    subprocess.run(words, check=True, timeout=200, capture_output=True, env=os.environ | new_store)
    alone = tmp_path_factory.mktemp("alone")
    return folder, run_ranks(uninterrupted, alone)


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_restarted_in_the_middle_of_an_epoch_has_the_bits_of_one_that_was_not(folders, level):
    folder, alone = folders
    for rank, trained in enumerate(alone):
        restarted = torch.load(folder / f"trained-{rank}.pt")[level]
        assert len(restarted) == len(trained[level]) > 8
        assert all(map(torch.equal, restarted, trained[level]))
        assert trained[level][0] < 2.0**20  # steps were skipped


if __name__ == "__main__":
    main(Path(sys.argv[1]))
