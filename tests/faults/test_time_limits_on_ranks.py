"""A time limit whose class is a RuntimeError, as the errors of torch.distributed are, while a rank waits for others."""

import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from amplab import amp
from amplab.parallel.ranks import AgreedText, texts_of_ranks

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends SIGALRM")
LONG = 60.0  # seconds


class Late(RuntimeError):
    """What the handler raises."""


def late(*_):
    raise Late("time is over")


def end_the_wait_of(pid):
    """Send the signal to a rank that is about to wait, or waits. Its handler runs once the wait has ended."""
    time.sleep(0.3)
    os.kill(pid, signal.SIGALRM)


def waits_for_a_choice(store, rank, pid):
    """Rank 1 is the first to ask, and chooses after the signal."""

    def choose():
        store.set("asked", "")
        end_the_wait_of(pid)
        return "chosen"

    if rank == 0:
        store.wait(["asked"])
    return AgreedText("place", choose, timeout=LONG).text


def waits_for_texts(_store, rank, pid):
    """Rank 1 gives its text after the signal."""
    if rank == 1:
        end_the_wait_of(pid)
    return texts_of_ranks("text", str(rank), timeout=LONG)


WAITS = {"choice": waits_for_a_choice, "texts": waits_for_texts}


def waits(rank, kind):
    """Return what the wait raises or returns; the signal comes to rank 0."""
    signal.signal(signal.SIGALRM, late)
    store = dist.group.WORLD.get_group_store()
    if rank == 0:
        store.set("pid", str(os.getpid()))
    try:
        return WAITS[kind](store, rank, int(store.get("pid")))
    except Late as error:
        return repr(error)


@pytest.mark.parametrize(("kind", "of_the_other"), [("choice", "chosen"), ("texts", ["0", "1"])])
def test_a_time_limit_ends_a_wait_for_other_ranks(kind, of_the_other):
    assert run_ranks(waits, kind) == [repr(Late("time is over")), of_the_other]


def steps(rank, at):
    """Train with averaged gradients; in step ``at`` the signal comes to rank 1 as it sends. Return what is raised."""
    torch.manual_seed(0)
    signal.signal(signal.SIGALRM, late)
    model = nn.Sequential(nn.Linear(4, 1024), nn.Linear(1024, 1040), nn.Linear(1040, 1))  # several buckets
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O0", combine_grad=True, combine_ddp=True, verbosity=0)
    send = dist.all_reduce

    def interrupted(*args, **options):
        if options.get("async_op"):
            signals.stop()
            signal.raise_signal(signal.SIGALRM)
        return send(*args, **options)

    signals = mock.patch.object(dist, "all_reduce", interrupted)
    raised = []
    for step in range(4):
        optimizer.zero_grad()
        if (rank, step) == (1, at):
            signals.start()
        try:
            with session.scale_loss(model(torch.ones(2, 4) * (rank + 1)).square().mean(), optimizer) as loss:
                loss.backward()
        except RuntimeError as error:
            raised.append((step, type(error).__name__, str(error)))
        else:
            optimizer.step()
    return raised, [param.sum().item() for param in model.parameters()]


@pytest.mark.parametrize("at", [0, 2], ids=["first", "later"])
def test_a_time_limit_while_gradients_are_averaged_is_named_on_every_rank_and_all_go_on(at):
    (others, weights), (own, own_weights) = run_ranks(steps, at)
    assert own == [(at, "Late", "time is over")]
    ((step, kind, message),) = others
    assert (step, kind) == (at, "RuntimeError")
    assert message.startswith("A block of scale_loss raised Late: time is over.")
    assert weights == own_weights
