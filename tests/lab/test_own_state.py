"""What objects of one's own keep in attributes: in another process, in another epoch, and apart from other runs."""

import random
import threading
from collections import Counter, deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from own_models import TAGS, Tagger, registered
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from amplab.lab import Experiment, Trainer
from amplab.lab.own_state import add_state, changes, lost_changes, own_copy, own_state
from amplab.lab.own_task import forget_own

pytestmark = pytest.mark.usefixtures("nothing_own")

torch.manual_seed(0)
X, Y = torch.randn(64, 16), torch.randint(0, 4, (64,))
BATCHES = [*zip(X.split(16), Y.split(16), strict=True)]


class Centered(nn.Module):
    """A loss that keeps a running mean in a buffer, and its calls in an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.calls = 0

    def forward(self, output, labels):
        self.calls += 1
        loss = F.cross_entropy(output - self.center, labels) / self.calls
        self.center.mul_(0.5).add_(output.detach().float().mean(0), alpha=0.5)
        return loss


class Recurrent(nn.Module):
    """Carries what it has seen from batch to batch, and grows a buffer from nothing."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.count = nn.Linear(16, 4), None, [0]
        self.register_buffer("mean", None)
        self.register_buffer("bank", torch.zeros(0, 16))

    def forward(self, x):
        self.seen = x.detach() if self.seen is None else 0.5 * self.seen + 0.5 * x.detach()
        self.mean = x.mean(0) if self.mean is None else 0.5 * self.mean + 0.5 * x.mean(0)
        self.bank = torch.cat([self.bank, x[:1]])
        self.count[0] += 1
        return self.linear(x + self.seen + self.mean + self.bank.mean(0)) / self.count[0]


class EpochSeed:
    """The usual way: a seed for each epoch."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        order = np.random.default_rng(17 + self.epoch).permutation(64)
        self.epoch += 1
        return ((X[order[start : start + 16]], Y[order[start : start + 16]]) for start in range(0, 64, 16))


class Shuffling:
    """Shuffles a list of its own in place, and reads it batch by batch."""

    def __init__(self):
        self.inner = type("Order", (), {})()
        self.inner.order = list(range(64))

    def __iter__(self):
        random.shuffle(self.inner.order)
        for start in range(0, 64, 16):
            here = self.inner.order[start : start + 16]
            yield X[here], Y[here]


class Curriculum(Sampler):
    def __init__(self, source):
        self.source, self.epoch = source, 0

    def __len__(self):
        return 64

    def __iter__(self):
        self.epoch += 1
        drawn = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch))
        return iter(sorted(drawn.tolist()[: 32 + 16 * self.epoch]))


def curriculum():
    data = TensorDataset(X, Y)
    return DataLoader(data, 16, sampler=Curriculum(data))


class Lookahead(torch.optim.SGD):
    """Has its slow weights and its count in attributes."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.count, self.slow = 0, None

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        params = self.param_groups[0]["params"]
        self.count += 1
        self.slow = self.slow or [param.clone() for param in params]
        if self.count % 3 == 0:
            for param, slow in zip(params, self.slow, strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)


def warmed_up(weights):
    optimizer, steps = torch.optim.SGD(weights, lr=0.1), 0

    def warm_up(*_):
        nonlocal steps
        steps += 1
        optimizer.param_groups[0]["lr"] = 0.1 * min(1, steps / 10)

    optimizer.register_step_pre_hook(warm_up)
    return optimizer


class Clip:
    """Clips by a running norm."""

    average = None

    def __call__(self, optimizer, *_):
        params = optimizer.param_groups[0]["params"]
        norm = float(torch.nn.utils.get_total_norm([param.grad for param in params]))
        self.average = norm if self.average is None else 0.9 * self.average + 0.1 * norm
        torch.nn.utils.clip_grad_norm_(params, 0.9 * self.average)


def clipped(weights):
    optimizer = torch.optim.SGD(weights, lr=0.1)
    optimizer.register_step_pre_hook(Clip())
    return optimizer


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.1)


CASES = {
    "loss": {"loss": Centered},
    "model": {"model": Recurrent},
    "epoch": {"data": EpochSeed},
    "in place": {"data": Shuffling},
    "sampler": {"data": curriculum},
    "lookahead": {"optimizer": lambda: lambda weights: Lookahead(weights, lr=0.1)},
    "hook": {"optimizer": lambda: warmed_up},
    "object": {"optimizer": lambda: clipped},
}


def opened(case):
    """Register everything anew, as a cell does in another kernel."""
    parts = {"model": lambda: nn.Linear(16, 4), "data": lambda: BATCHES, "loss": lambda: F.cross_entropy}
    made = {name: make() for name, make in {**parts, "optimizer": lambda: sgd, **CASES[case]}.items()}
    torch.manual_seed(1)
    model = made.pop("model")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.linspace(-0.5, 0.5, weight.numel()).view_as(weight))
    return registered(model, made.pop("data"), **made)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_in_another_kernel_with_what_its_objects_keep(case, level, tmp_path):
    whole = Experiment(opened(case).changed(opt_level=level))
    losses = [whole.step().loss for _ in range(14)]
    forget_own(set())
    first = Experiment(opened(case).changed(opt_level=level))
    for _ in range(7):
        first.step()
    first.save(tmp_path / "run.checkpoint", {})
    forget_own(set())
    opened(case)
    again, _ = Experiment.load(tmp_path / "run.checkpoint")
    assert [again.step().loss for _ in range(7)] == losses[7:]
    assert again.left_out == ()


@pytest.mark.parametrize("case", CASES)
def test_runs_of_one_kernel_have_what_their_objects_keep_for_themselves(case):
    config = opened(case)
    whole = [each.loss for each in (lambda one: [one.step() for _ in range(12)])(Experiment(config))]
    waiting = Experiment(config)
    losses = [waiting.step().loss for _ in range(6)]
    trainer = Trainer(config)
    assert trainer.run(12).column("loss").tolist() == whole
    trainer.reset()
    assert trainer.run(12).column("loss").tolist() == whole
    assert losses + [waiting.step().loss for _ in range(6)] == whole
    trainer.stop()
    assert trainer.wait(10)


class Thing:
    pass


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0, 3),
        (None, "text"),
        (None, [torch.ones(2), (1, None)]),
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(2), torch.ones(3)),
        (np.arange(3), np.array([2.0, 0.0])),
        (np.float32(1), np.float32(2)),
        ([1, 2], [2, 1, 3]),
        ({"a": 1}, {"b": {"c": 2}}),
        (deque([1], 2), deque([2, 3], 2)),
        ({1}, {2, 3}),
        (Counter("a"), Counter("ab")),
        (float("nan"), 1.0),
        (list(range(5_000)), list(range(5_000, 0, -1))),
    ],
)
def test_values_of_these_kinds_are_kept(before, after):
    one, other = Thing(), Thing()
    one.value = other.value = before
    given = own_state({"one": one})
    assert changes(own_state({"one": one}), given) == {}
    one.value = after
    state = changes(own_state({"one": one}), given)
    add_state({"one": other}, state)
    assert type(other.value) is type(after)
    assert own_state({"one": other}).keys() == {"one"}
    assert changes(own_state({"one": other}), own_state({"one": one})) == {}


def test_an_object_is_left_as_it_is_if_not_all_that_changed_can_be_kept(tmp_path):
    """As one that has opened a file and notes it: the note alone would say that it is open."""
    one = Thing()
    one.is_open, one.file = False, None
    given = own_state({"data": one})
    with (tmp_path / "file").open("w") as file:
        one.is_open, one.file = True, file
        now = own_state({"data": one})
    assert changes(now, given) == {}
    assert lost_changes(now, given) == ["data"]


def test_a_copy_has_lists_and_objects_of_its_own_and_shares_tensors_threads_and_locks():
    one = Thing()
    one.part, one.order, one.data, one.table = Thing(), [2, 1], torch.ones(2), np.arange(3)
    one.part.order = one.order
    one.worker, one.lock = Thing(), Thing()
    one.worker.thread, one.lock.lock = threading.Thread(), threading.Lock()
    one.worker.queue = []
    other = own_copy(one)
    other.order.append(3)
    other.table[0] = 9
    assert (one.order, one.table.tolist()) == ([2, 1], [0, 1, 2])
    assert other.part is not one.part
    assert other.part.order is other.order
    assert other.data is one.data
    assert other.worker.queue is one.worker.queue, "its thread fills that of the original"
    assert {*own_state({"one": one})} == {"one", "one.part"}, "its thread changes it meanwhile"


def test_what_is_there_is_written_in_place_and_a_method_stays_one():
    one = Thing()
    one.order = one.alias = [1, 2]
    one.run = print
    add_state({"one": one}, {"one": {"order": [3], "run": 7}})
    assert one.alias == [3]
    assert one.run is print


def test_weights_results_with_a_graph_and_large_tensors_are_not_copied():
    model = Tagger()
    model.tied, model.result, model.table = model.words.weight, model(TAGS[0][0]), torch.empty(2**26, dtype=torch.int8)
    model.extra = torch.empty(1)
    given = own_state({"model": model}, tuple(model.parameters()))
    assert {*given["model/"]} & {"tied", "result"} == set()
    model.result, model.extra = None, torch.ones(1)
    assert changes(own_state({"model": model}), given)["model/"]["extra"].tolist() == [1.0]
