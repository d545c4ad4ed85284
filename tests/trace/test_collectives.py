"""A tool that runs a step on one of two ranks starts no collective of it; the other rank, and the loop, go on."""

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from amplab import doctor, first_nonfinite, gradient_range, twin, watch, xray
from amplab.diagnose import examination
from amplab.lab.watch import Watch
from amplab.parallel.ranks import NeedsOtherRanks
from amplab.trace.untouched import untouched

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from ranks import run_ranks

LIMIT = 40.0  # seconds, after which a collective that waits raises


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


def contrastive(out: Tensor, _target: Tensor) -> Tensor:
    """Compare each sample with those of all ranks, as CLIP does."""
    own = F.normalize(out.float(), dim=1)
    all_ranks = torch.cat(with_gradients.all_gather(own))
    return F.cross_entropy(own @ all_ranks.t() * 10, torch.arange(len(own)) + len(own) * dist.get_rank())


def by_count(out: Tensor, target: Tensor) -> Tensor:
    """Divide by the number of samples on all ranks."""
    number = torch.tensor(float((target > 0).sum()))
    dist.all_reduce(number)
    return F.cross_entropy(out.float(), target, reduction="sum") * 2 / number


LOSSES = {"contrastive": contrastive, "by count": by_count}


def trained(rank: int, loss_of: Callable[..., Tensor], watched: bool) -> tuple[list[Tensor], list[float], Watch | None]:
    """Train with a scale at which the first steps overflow; return the weights, the losses and the watch."""
    model = net()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    torch.manual_seed(5 + rank)
    data = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(14)]

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return loss_of(parallel(batch[0]), batch[1])

    losses = []
    with watch(parallel, optimizer, scaler=scaler, step=step) if watched else nullcontext() as w:
        for batch in data if w is None else w.batches(data):
            optimizer.zero_grad()
            loss = step(batch)
            scaler.scale(loss if w is None else w.loss(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    return [each.detach().clone() for each in model.parameters()], losses, w


def watched_and_not(rank: int, name: str) -> tuple[list[str], list[str], str, int]:
    """Compare two trainings; return the warnings and failures of the watch, its note and the number of skips."""
    expected, losses, _ = trained(rank, LOSSES[name], watched=False)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        weights, same, w = trained(rank, LOSSES[name], watched=True)
    assert w is not None
    assert same == losses
    assert all(map(torch.equal, weights, expected))
    (note,) = w.findings().named("step-not-explained")
    said = [str(each.message) for each in warned if "amplab.watch" in str(each.message)]
    return said, list(w.failures), f"{note.symptom} {note.cause}", len(w.history.skipped_steps())


@pytest.mark.parametrize("name", LOSSES)
def test_a_watched_loop_with_overflows_trains_as_one_without_a_watch(name):
    for said, failures, note, skips in run_ranks(watched_and_not, name, limit=LIMIT):
        assert skips > 2
        assert len(said) == 1
        assert "the step calls a collective of torch.distributed (c10d::all" in said[0]
        assert all("On one rank alone it would wait" in each for each in failures)
        assert "was finite" in note
        assert "on its own rank" in note


def refusals(rank: int) -> dict[str, str]:
    """Call each tool on rank 0 alone, while rank 1 goes on to the next collective of the loop."""
    model, batch = net(), torch.randn(8, 8)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = partial(contrastive, _target=batch)
    examination._RANKS_WAIT = 0.2

    def train_step() -> None:
        optimizer.zero_grad()
        value = parallel(batch).square().mean()
        value.backward()
        dist.all_reduce(value.detach())  # to print it
        optimizer.step()

    tools: dict[str, Callable[[], object]] = {
        "xray": lambda: xray(model, batch, loss=loss),
        "gradient_range": lambda: gradient_range(parallel, batch, loss=loss),
        "first_nonfinite": lambda: first_nonfinite(parallel, batch, loss=loss),
        "doctor": lambda: doctor(parallel, batch, loss=loss),
        "twin": lambda: twin(model, batch, loss=loss),
        "train_step": lambda: doctor(parallel, train_step=train_step, optimizer=optimizer),
    }
    refused = {}
    before = [each.clone() for each in model.parameters()]
    for name, tool in tools.items() if rank == 0 else ():
        with pytest.raises(NeedsOtherRanks) as raised:
            tool()
        refused[name] = str(raised.value)
    assert all(map(torch.equal, model.parameters(), before))
    train_step()
    own = torch.full((1,), float(rank))
    dist.all_reduce(own)
    assert own == 1
    return refused


def test_a_tool_on_one_rank_refuses_a_step_with_a_collective():
    refused, other = run_ranks(refusals, limit=LIMIT)
    assert len(refused) == 6
    assert other == {}
    for name, said in refused.items():
        op = "allreduce_" if name == "train_step" else "allgather_"
        assert f"a collective of torch.distributed (c10d::{op})" in said
        assert "leave the collective out of what the tool is given as loss, step or train_step" in said


class ReducedGradient(torch.autograd.Function):
    """The identity; its gradient is the sum of those of all ranks, as in tensor-parallel layers."""

    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def kinds_of_calls(rank: int) -> list[str]:
    """Call everything that torch can send, on rank 0 alone; return what was not refused."""
    model, one, alone = net(), torch.ones(2), dist.new_group([0])
    two = [torch.ones(2) for _ in range(2)]
    world = dist.group.WORLD
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(one),
        "async": lambda: dist.all_reduce(one, async_op=True),
        "broadcast": lambda: dist.broadcast(one, 0),
        "reduce": lambda: dist.reduce(one, 0),
        "all_gather": lambda: dist.all_gather(two, one),
        "gather": lambda: dist.gather(one, two),
        "scatter": lambda: dist.scatter(one, two),
        "reduce_scatter": lambda: dist.reduce_scatter(one, two),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(2), one),
        "objects": lambda: dist.all_gather_object([None, None], rank),
        "object list": lambda: dist.broadcast_object_list([rank]),
        "send": lambda: dist.send(one, 1),
        "recv": lambda: dist.recv(one, 1),
        "recv of any": lambda: dist.recv(one),
        "isend": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, one, 1)]),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "with gradients": lambda: with_gradients.all_reduce(one),
        "functional": lambda: functional.all_reduce(one, "sum", world),
        "functional with gradients": lambda: functional.all_gather_tensor_autograd(one, 0, world),
        "in backward": lambda: ReducedGradient.apply(model(torch.ones(1, 8))).sum().backward(),
    }
    passed = []
    for name, call in calls.items() if rank == 0 else ():
        with untouched(model):
            try:
                call()
                passed.append(name)
            except NeedsOtherRanks:
                pass
    if rank == 0:
        with untouched(model):
            dist.all_reduce(one, group=alone)  # waits for nobody
    dist.barrier()
    dist.all_reduce(one)
    assert one.tolist() == [2, 2]
    return passed


def test_every_kind_of_exchange_is_refused_and_a_group_of_one_rank_is_not():
    assert run_ranks(kinds_of_calls, limit=LIMIT) == [[], []]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, values: Tensor) -> Tensor:
        attended, _ = self.attend(values, values, values)
        return self.out(self.norm(attended).amax(1)) * 2.0**-12


def records(rank: int = 0) -> list[object]:
    """Return what tools say of a step without collectives."""
    torch.manual_seed(0)
    model, batch, target = Attention(), torch.randn(6, 5, 8), torch.randint(0, 4, (6,))
    step = {"batch": batch, "loss": lambda out: F.cross_entropy(out.float(), target)}
    examination._RANKS_WAIT = 0.2
    traced = xray(model, opt_level="O1", stats=True, **step)
    gradients = gradient_range(model, **step)
    found = doctor(model, opt_level="O1", **step)
    bad = first_nonfinite(model, batch=batch * float("nan"), loss=step["loss"], opt_level="O1")
    return [traced.rows(), gradients.rows(), str(found), str(bad)]


def test_tools_on_ranks_record_what_they_record_of_one_process():
    alone = records()
    for each in run_ranks(records):
        assert each == alone


def graphs_compiled(rank: int) -> list[list[str]]:
    """Return the ops of each graph that a tool lets torch.compile make, of a compiled model."""
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    gradient_range(torch.compile(net(), backend=backend), torch.ones(2, 8), loss=torch.sum)
    return graphs


def test_the_refusal_of_collectives_is_not_compiled_with_the_model():
    assert run_ranks(graphs_compiled, limit=LIMIT) == [[], []]
