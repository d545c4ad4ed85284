"""Tools that one rank of two calls, or that do more on one rank: nothing waits, and training goes on as before."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from amplab import GradScaler, amp, autocast, doctor, first_nonfinite, gradient_range, xray
from amplab.diagnose import examination
from amplab.parallel import DistributedDataParallel, Reducer, convert_syncbn_model

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from ranks import run_ranks


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def are_equal(model: nn.Module) -> None:
    """Assert that the weights and buffers of all ranks are the same bits: what they exchange has stayed in step."""
    for each in (*model.parameters(), *model.buffers()):
        own = [torch.empty_like(each) for _ in range(2)]
        torch.distributed.all_gather(own, each.detach())
        assert torch.equal(*own)


def call_all(model: nn.Module, batch: Tensor, train_step: Callable[[], None], **given: object) -> None:
    step = {"batch": batch, "loss": loss_of}
    examination._RANKS_WAIT = 0.2
    xray(model, **step)
    gradient_range(model, **step)
    first_nonfinite(model, **step)
    doctor(model, batch, loss=loss_of, train_step=train_step, **given)


def tools_with_combine_ddp(rank: int) -> None:
    model, batch = net(), torch.randn(4, 8) + rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O2", combine_grad=True, combine_ddp=True, verbosity=0)

    def train() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model(batch)), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    for step in range(2):
        if rank == 0:
            call_all(model, batch, train, optimizer=optimizer, scaler=amp)
        for _ in range(1 + step):
            train()
        are_equal(nn.ParameterList(model.parameters()))  # each rank has statistics of its own
    amp.reset()


def tools_with_synchronized_statistics(rank: int) -> None:
    model, batch = convert_syncbn_model(net()), torch.randn(4, 8) + rank
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        optimizer.zero_grad()
        loss_of(wrapped(batch)).backward()
        optimizer.step()

    for _ in range(2):
        if rank == 0:
            call_all(wrapped, batch, train, optimizer=optimizer)
        train()
        are_equal(model)


def rehearsals_that_differ(rank: int) -> list[list[str]]:
    """Rank 0 clips scaled gradients, so that the doctor runs its train step more often than that of rank 1."""
    return [found_by_doctor(rank, average) for average in (DistributedDataParallel, Reducer)]


def found_by_doctor(rank: int, average: type) -> list[str]:
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(4, 8)
    averaging = average(model)
    forward = averaging if average is DistributedDataParallel else model
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu")

    def train(*, clips: bool = rank == 0) -> None:
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = loss_of(forward(batch))
        scaler.scale(loss).backward()
        if average is Reducer:
            averaging.reduce()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    found = doctor(model, train_step=train, optimizer=optimizer, scaler=scaler)
    train(clips=False)
    are_equal(model)
    return [each.name for each in found]


def loops_of_apex(rank: int, level: str) -> list[list[str]]:
    """Accumulate two batches under no_sync with one `zero_grad` for a step, and then with one for each batch."""
    return [accumulated(level, clears_each=clears_each) for clears_each in (False, True)]


def accumulated(level: str, *, clears_each: bool) -> list[str]:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    wrapped = DistributedDataParallel(model)

    def train() -> None:
        model.zero_grad()
        with wrapped.no_sync(), amp.scale_loss(loss_of(wrapped(batch)), optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        if clears_each:
            model.zero_grad()
        with amp.scale_loss(loss_of(wrapped(batch)), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    try:
        return [each.name for each in doctor(wrapped, train_step=train, optimizer=optimizer, scaler=amp)]
    finally:
        amp.reset()


def sharded(rank: int) -> list[str]:
    from torch.distributed.fsdp import fully_shard

    model, batch = net(), torch.randn(4, 8)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()

    refused = []
    for tool in (
        lambda: doctor(model, batch, loss=loss_of),
        lambda: doctor(model, train_step=train, optimizer=optimizer),
        lambda: first_nonfinite(model, batch, loss=loss_of),
        lambda: gradient_range(model, batch, loss=loss_of),
        lambda: xray(model, batch, loss=loss_of, stats=True),
    ):
        try:
            tool()
        except ValueError as error:
            refused.append(str(error))
    train()
    return refused


def test_tools_that_one_rank_calls_wait_for_no_other():
    run_ranks(tools_with_combine_ddp)
    run_ranks(tools_with_synchronized_statistics)


def test_ranks_whose_loops_need_different_rehearsals_do_not_wait_for_each_other():
    first, second = run_ranks(rehearsals_that_differ)
    assert first == [["clips-scaled-gradients"]] * 2
    assert second == [[], []]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_doctor_follows_a_loop_that_accumulates_under_no_sync(level):
    assert run_ranks(loops_of_apex, level) == [[[], ["zero-grad-in-accumulation"]]] * 2


def test_a_tool_that_needs_whole_weights_refuses_shards_by_name():
    for refused in run_ranks(sharded):
        assert len(refused) == 5
        assert all("0.weight is sharded" in each for each in refused)
