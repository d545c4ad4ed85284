"""Ranks of ``combine_ddp`` that do not do the same: every rank raises a sentence, none aborts, and all can go on."""

import re
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from amplab import amp

COMBINED = {"combine_grad": True, "combine_ddp": True, "loss_scale": 64.0, "verbosity": 0}


def sgd(params):
    return torch.optim.SGD(params, lr=0.01)


def initialized(model, optimizers, level="O0"):
    session = amp.Session()
    session.initialize(model, optimizers, opt_level=level, **COMBINED)
    return session


def said(function, *args, **arguments):
    """Return what a call raises, "" for nothing."""
    try:
        function(*args, **arguments)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def averaged(session, optimizers, loss, **arguments):
    with session.scale_loss(loss, optimizers, **arguments) as scaled_loss:
        scaled_loss.backward()


class Failing(torch.autograd.Function):
    """The identity, whose backward raises if it is told to."""

    @staticmethod
    def forward(ctx, inputs, fails):
        ctx.fails = fails
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ValueError("no such kernel")
        return grad, None


class Wide(nn.Module):
    """A model of several buckets of different sizes. Its backward fails in the middle or, ``late``, after the last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(8, 1024), nn.Linear(1024, 1040), nn.Linear(1040, 1200)

    def forward(self, inputs, fails):
        return self.third(Failing.apply(self.second(self.first(inputs)), fails))


def a_backward_that_raises_on_rank_1(rank, *, in_step):
    """Return what each step says; the backward is the first one, or one whose buckets leave early."""
    model = Wide()
    optimizer = sgd(model.parameters())
    session = initialized(model, optimizer)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8), rank == 1 and step == in_step).square().mean()
        found.append(said(averaged, session, optimizer, loss))
        if not found[-1]:
            optimizer.step()
    assert model.first.weight.isfinite().all()
    return found, [param.sum().item() for param in model.parameters()]


def a_backward_without_averages_that_raises_on_rank_1(rank):
    """Each step sums the gradients of two backwards. On rank 1 the first one of the first step raises."""
    model = Wide()
    optimizer = sgd(model.parameters())
    session = initialized(model, optimizer)
    found = []
    for step in range(4):
        for delayed in (True, False):
            loss = model(torch.ones(2, 8), (rank, step, delayed) == (1, 0, True)).square().mean()
            found.append(said(averaged, session, optimizer, loss, delay_unscale=delayed))
        optimizer.step()
        optimizer.zero_grad()
    return found, [param.sum().item() for param in model.parameters()]


def optimizers_in_another_order(rank, *, width, buffers=False):
    """Rank 1 swaps two forwards and blocks once; their gradients, or buffers, have the same size, or not."""
    torch.manual_seed(0)
    models = [nn.Linear(8, 8), nn.Linear(8, width)]
    if buffers:
        models = [nn.Sequential(model, nn.BatchNorm1d(model.out_features)) for model in models]
    optimizers = [sgd(model.parameters()) for model in models]
    session = initialized(models, optimizers)
    found = []
    for step in range(3):
        for which in (1, 0) if (step, rank) == (1, 1) else (0, 1):
            optimizers[which].zero_grad()
            found.append(said(lambda i=which: averaged(session, optimizers[i], models[i](torch.ones(2, 8)).sum())))
    return found


def one_optimizer_of_two(rank):
    """Rank 1 leaves the second optimizer out, in a block and then in another initialize."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizers = [sgd(each.parameters()) for each in model]
    session = initialized(model, optimizers)
    chosen = optimizers if rank == 0 else optimizers[0]
    in_block = said(averaged, session, chosen, model(torch.ones(2, 8)).sum())
    other = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    others = [sgd(each.parameters()) for each in other]
    return in_block, said(initialized, other, others if rank == 0 else others[0])


def steps_ahead(rank, level, dtype, by, ahead=1):
    """One rank makes ``by`` steps more. At O3 gradients travel in half; ``dtype`` is that of the model before."""
    model = nn.Linear(8, 8).to(dtype)
    optimizer = sgd(model.parameters())
    session = initialized(model, optimizer, level)
    averaged(session, optimizer, model(torch.ones(2, 8, dtype=dtype)).float().sum())
    for _ in range(by if rank == ahead else 0):
        optimizer.step()
    return said(averaged, session, optimizer, model(torch.ones(2, 8, dtype=dtype)).float().sum())


WIRES = [("O0", torch.float32), ("O3", torch.float32), ("O0", torch.bfloat16)]


def two_ranks(rank):
    return {
        "raises at first": a_backward_that_raises_on_rank_1(rank, in_step=0),
        "raises later": a_backward_that_raises_on_rank_1(rank, in_step=2),
        "raises alone": a_backward_without_averages_that_raises_on_rank_1(rank),
        "same size": optimizers_in_another_order(rank, width=8),
        "other size": optimizers_in_another_order(rank, width=16),
        "buffers": optimizers_in_another_order(rank, width=16, buffers=True),
        "one of two": one_optimizer_of_two(rank),
        "ahead": [steps_ahead(rank, level, dtype, by) for level, dtype in WIRES for by in (1, 2, 96)],
    }


def four_ranks(rank):
    return [steps_ahead(rank, level, dtype, 2, ahead=3) for level, dtype in WIRES]


@pytest.fixture(scope="module")
def found():
    first, second = run_ranks(two_ranks, limit=100.0)
    return {name: (first[name], second[name]) for name in first}


@pytest.mark.parametrize(("when", "in_step"), [("raises at first", 0), ("raises later", 2)])
def test_a_backward_that_raises_on_one_rank_is_an_error_on_every_rank(found, when, in_step):
    """Both catch it and go on with equal weights."""
    (first, weights), (second, other_weights) = found[when]
    assert second[in_step] == "ValueError: no such kernel"
    assert re.match(
        r"RuntimeError: A block of scale_loss raised ValueError: no such kernel\. .*on rank 1\.", first[in_step]
    )
    assert [text for step, text in enumerate(first + second) if step % 4 != in_step] == [""] * 6
    assert weights == other_weights


def test_a_rank_whose_backward_without_averages_raises_averages_what_it_has(found):
    """It then sends in the backward, the other rank after it: they must not wait for each other's order of buckets."""
    (first, weights), (second, other_weights) = found["raises alone"]
    assert first == [""] * 8
    assert second == ["ValueError: no such kernel"] + [""] * 7
    assert weights == other_weights


@pytest.mark.parametrize("sizes", ["same size", "other size"])
def test_optimizers_in_another_order_are_refused_on_every_rank(found, sizes):
    one, other = (rf"scale_loss for optimizer \d+ \(2 .*, first models\[{index}\]\.weight\)" for index in (0, 1))
    for said_in in found[sizes]:
        assert re.search(rf"this call is {one} on rank 0 and {other} on rank 1\.", said_in[2])
        assert re.search(rf"this call is {other} on rank 0 and {one} on rank 1\.", said_in[3])
        assert [said_in[place] for place in (0, 1, 4, 5)] == [""] * 4


def test_models_with_buffers_in_another_order_are_refused_on_every_rank(found):
    for said_in in found["buffers"]:
        assert "this call is a forward of models[0] on rank 0 and a forward of models[1] on rank 1." in said_in[2]
        assert "this call is a forward of models[1] on rank 0 and a forward of models[0] on rank 1." in said_in[3]
        assert [said_in[place] for place in (0, 1, 4, 5)] == [""] * 4


def test_an_optimizer_that_one_rank_leaves_out_is_named(found):
    for in_block, in_initialize in found["one of two"]:
        assert re.search(r"0\.weight\) with optimizer \d+ \(2 parameters, first 1\.weight\) on rank 0 and ", in_block)
        assert re.search(
            r"between ranks: the number of optimizers is 2 on rank 0 and 1 on rank 1\. Weights", in_initialize
        )


def test_any_number_of_steps_ahead_is_refused_on_every_rank(found):
    counts = [1, 2, 96] * len(WIRES)
    for texts in found["ahead"]:
        for by, text in zip(counts, texts, strict=True):
            assert f"the number of steps is 0 on rank 0 and {by} on rank 1." in text


def test_one_of_four_ranks_that_is_two_steps_ahead_is_refused():
    for texts in run_ranks(four_ranks, world_size=4, limit=100.0):
        for text in texts:
            assert "the number of steps is 0 on ranks 0, 1, 2 and 2 on rank 3." in text


def an_interrupt_as_a_bucket_leaves_rank_0(rank, in_step):
    """Return what each step says; Ctrl-C comes when the all_reduce of the first bucket has begun."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = Wide()
    optimizer = sgd(model.parameters())
    session = initialized(model, optimizer)
    found, all_reduce = [], dist.all_reduce

    def interrupted(*args, **arguments):
        work = all_reduce(*args, **arguments)
        dist.all_reduce = all_reduce
        signal.raise_signal(signal.SIGINT)
        return work

    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8), False).square().mean()
        if (step, rank) == (in_step, 0):
            dist.all_reduce = interrupted
        try:
            found.append(said(averaged, session, optimizer, loss))
        except KeyboardInterrupt:
            found.append("KeyboardInterrupt")
        if not found[-1]:
            optimizer.step()
    return found, [param.sum().item() for param in model.parameters()]


@pytest.mark.parametrize("in_step", [0, 2])
def test_an_interrupt_as_a_bucket_leaves_is_told_on_every_rank_and_training_goes_on(in_step):
    (first, weights), (second, others) = run_ranks(an_interrupt_as_a_bucket_leaves_rank_0, in_step, limit=60.0)
    assert first.pop(in_step) == "KeyboardInterrupt"
    assert "A block of scale_loss raised KeyboardInterrupt" in second.pop(in_step)
    assert first == second == [""] * 3
    assert weights == others
