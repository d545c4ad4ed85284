"""Settings of torch's DistributedDataParallel with amp: buffers, unused parameters, compression, uneven batches."""

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import amplab
from amplab import amp
from amplab.parallel import JoinedState


class Branches(nn.Module):
    """A trunk with BatchNorm, and a branch that only some forwards use."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.branch, self.head = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, inputs, branch=True):
        hidden = self.trunk(inputs)
        return self.head(hidden + self.branch(hidden) if branch else hidden)


class Face:
    """One of the two APIs around one training: ``level`` is an opt_level, or "autocast" for GradScaler."""

    def __init__(self, level, seed=0, init_scale=1024.0, window=2000):
        torch.manual_seed(seed)
        self.model = Branches()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.by_apex = level != "autocast"
        if self.by_apex:
            self.session = amp.Session()
            scale = {"loss_scale": "dynamic", "dynamic_init_scale": init_scale, "scale_window": window}
            self.session.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, **scale)
        else:
            self.scaler = amplab.GradScaler("cpu", init_scale=init_scale, growth_interval=window)

    def step(self, net, inputs, *, after_backward=lambda _params: None, factor=1.0, **kwargs):
        self.optimizer.zero_grad()
        if self.by_apex:
            with self.session.casting():
                loss = net(inputs, **kwargs).float().square().mean() * factor
                with self.session.scale_loss(loss, self.optimizer) as scaled:
                    scaled.backward()
                    after_backward(list(self.model.parameters()))
            self.optimizer.step()
            return
        with amplab.autocast("cpu", dtype=torch.float16):
            output = net(inputs, **kwargs)
        self.scaler.scale(output.float().square().mean() * factor).backward()
        after_backward(list(self.model.parameters()))
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def scale(self):
        return self.session.loss_scale() if self.by_apex else self.scaler.get_scale()

    def holders(self):
        """What has a state_dict that ranks should agree on."""
        return [self.model, self.optimizer, self.session if self.by_apex else self.scaler]

    def state(self):
        masters = list(self.session.master_params(self.optimizer)) if self.by_apex else []
        momenta = [each["momentum_buffer"] for each in self.optimizer.state.values()]
        tensors = [*masters, *self.model.parameters(), *self.model.buffers(), *momenta]
        return [tensor.detach().clone() for tensor in tensors], self.scale()


def batch(rank, step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def sum_of_halves(params, wire=None):
    """What DDP does; ``wire``: the dtype in which gradients travel."""
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        sent = param.grad if wire is None else param.grad.to(wire)
        dist.all_reduce(sent.div_(2))
        param.grad.copy_(sent)


def bf16_compress(state, bucket):
    """The hook of torch, which it refuses by its name where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def step_by_hand(face, inputs, wire=None, **kwargs):
    for buffer in face.model.buffers():
        dist.broadcast(buffer, 0)
    face.step(face.model, inputs, after_backward=lambda params: sum_of_halves(params, wire), **kwargs)


def with_buffers_and_branches(rank, level):
    """BatchNorm's statistics are rank 0's at each forward; the branch is used by none, one, or both ranks."""
    face, alone = Face(level), Face(level)
    wrapped = DistributedDataParallel(face.model, find_unused_parameters=True)
    for step in range(4):
        used = (rank + step) % 3 != 0
        face.step(wrapped, batch(rank, step), branch=used)
        step_by_hand(alone, batch(rank, step), branch=used)
    return face.state(), alone.state()


def with_compression(rank, level, wire, init_scale=1024.0):
    face, alone = Face(level, init_scale=init_scale), Face(level, init_scale=init_scale)
    hook = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: bf16_compress}[wire]
    wrapped = DistributedDataParallel(face.model)
    wrapped.register_comm_hook(None, hook)
    for step in range(3):
        face.step(wrapped, batch(rank, step))
        step_by_hand(alone, batch(rank, step), wire)
    return face.state(), alone.state()


def with_uneven_batches(rank, level):
    """Rank 0 has two batches more. Afterwards every rank has the state of rank 0, and training goes on."""
    face = Face(level, window=3)
    wrapped = DistributedDataParallel(face.model)
    with Join([wrapped, JoinedState(wrapped, *face.holders())]):
        for step in range(5 - 2 * rank):
            face.step(wrapped, batch(rank, step), factor=float("inf") if step == 4 else 1.0)
    joined = face.state()
    for step in range(2):
        face.step(wrapped, batch(rank, step))
    return joined, face.state()


def warnings_of_a_join(rank, *, with_state):
    """Return the warnings of two forwards in an uneven ``Join``, those of torch left out."""
    face = Face("O1")
    wrapped = DistributedDataParallel(face.model)
    joined = [wrapped, JoinedState(wrapped, *face.holders())] if with_state else [wrapped]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Join(joined):
            for step in range(3 - rank):
                face.step(wrapped, batch(rank, step))
    return [str(each.message) for each in said if "JoinedState" in str(each.message)]


def collectives(rank, level):
    """How many collectives five steps need, and five forwards and backwards alone."""
    face = Face(level)
    wrapped = DistributedDataParallel(face.model)
    group = dist.distributed_c10d._get_default_group()
    for step in range(2):  # the wrapper agrees on new buckets at the second forward
        face.step(wrapped, batch(rank, step))
    counts = [group._get_sequence_number_for_group()]
    for step in range(5):
        face.step(wrapped, batch(rank, step))
    counts.append(group._get_sequence_number_for_group())
    for step in range(5):
        wrapped(batch(rank, step)).float().square().mean().backward()
    counts.append(group._get_sequence_number_for_group())
    return counts[1] - counts[0], counts[2] - counts[1]


FACES = ("O0", "O1", "O2", "O3", "autocast")
COMMON = ("O1", "O2", "autocast")
WIRES = (torch.float16, torch.bfloat16)


def every_run(rank):
    runs = {}
    for level in FACES:
        runs["branches", level] = with_buffers_and_branches(rank, level)
    for level in COMMON:
        for wire in WIRES:
            runs[wire, level] = with_compression(rank, level, wire)
        runs["collectives", level] = collectives(rank, level)
        runs["uneven", level] = with_uneven_batches(rank, level)
    runs["joins"] = [warnings_of_a_join(rank, with_state=with_state) for with_state in (False, True)]
    runs["overflow of the wire"] = with_compression(rank, "O1", torch.float16, init_scale=2.0**24)
    return runs


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(every_run)


def same(one, other):
    """Whether tensors are the same bits and scales are equal."""
    (tensors, scale), (others, other_scale) = one, other
    return scale == other_scale and len(tensors) == len(others) > 0 and all(map(torch.equal, tensors, others))


@pytest.mark.parametrize("level", FACES)
def test_buffers_and_unused_parameters(ranks, level):
    for rank in ranks:
        wrapped, by_hand = rank["branches", level]
        assert same(wrapped, by_hand)


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("level", COMMON)
def test_compressed_gradients_are_rounded_once(ranks, level, wire):
    for rank in ranks:
        wrapped, by_hand = rank[wire, level]
        assert same(wrapped, by_hand)


def test_an_overflow_of_the_compressed_gradients_backs_off_on_every_rank(ranks):
    first, second = (rank["overflow of the wire"][0] for rank in ranks)
    assert first[1] == second[1] < 2.0**24


@pytest.mark.parametrize("level", COMMON)
def test_ranks_agree_after_uneven_batches(ranks, level):
    """Weights, masters, momenta and the scale, which the rank with more batches moved further."""
    (joined, trained), (joined_of_second, trained_of_second) = (rank["uneven", level] for rank in ranks)
    assert same(joined, joined_of_second)
    assert same((trained[0][:6], trained[1]), (trained_of_second[0][:6], trained_of_second[1]))


def test_a_join_that_leaves_state_behind_warns_once(ranks):
    for rank in ranks:
        without, with_state = rank["joins"]
        assert len(without) == 1
        assert "loss scale" in without[0]
        assert with_state == []


@pytest.mark.parametrize("level", COMMON)
def test_agreeing_on_an_overflow_needs_no_collective_of_its_own(ranks, level):
    steps, backwards = ranks[0]["collectives", level]
    assert steps == backwards > 0
