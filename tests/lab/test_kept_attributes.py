"""A look at a step, and a step that has failed, leave what code of one's own keeps, also what it changes in place."""

import threading
import time
from array import array
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from own_models import is_taken_back, registered
from own_with_state import Hidden, Metered, Remembering, Settling
from torch import nn

from amplab.lab import Experiment
from amplab.lab.kept_attributes import KeptAttributes
from amplab.lab.memory_count import level_memory
from amplab.lab.own_objects import holders

pytestmark = pytest.mark.usefixtures("nothing_own")

torch.manual_seed(0)
X, Y = torch.randn(64, 16), torch.randint(0, 4, (64,))
BATCHES = [*zip(X.split(16), Y.split(16), strict=True)]


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.1)


def plain():
    torch.manual_seed(1)
    return nn.Linear(16, 4)


class Notes(nn.Module):
    """Keeps what it has seen in everything that a forward can change in place, and uses all of it."""

    def __init__(self):
        super().__init__()
        self.linear = plain()
        self.log, self.by_name, self.latest = [], {"sizes": [], "count": 0}, deque(maxlen=3)
        self.counts, self.peak, self.total = Counter(), torch.zeros(16), np.zeros(2)

    def forward(self, x):
        size = float(x.detach().float().abs().mean())
        for notes in (self.log, self.by_name["sizes"], self.latest):
            notes.append(size)
        self.by_name["count"] += 1
        self.counts["calls"] += 1
        torch.maximum(self.peak, x.detach().float().amax(0), out=self.peak)
        self.total += size
        used = sum(self.log) + len(self.by_name["sizes"]) + sum(self.latest) + self.counts["calls"]
        return self.linear(x) / (1 + used + self.by_name["count"] + self.peak.mean() + self.total.sum())


class Counting:
    """A loss that counts its calls and is no module."""

    def __init__(self):
        self.calls = []

    def __call__(self, output, labels):
        self.calls.append(1)
        return F.cross_entropy(output, labels) / len(self.calls)


def counting_step():
    calls = 0

    def step(model, batch):
        nonlocal calls
        calls += 1
        return F.cross_entropy(model(batch[0]), batch[1]) / calls

    return step


def hooked():
    model, calls = plain(), []

    def note(_module, _inputs, output):
        calls.append(1)
        return output / len(calls)

    model.register_forward_hook(note)
    return model


def seeded(make):
    torch.manual_seed(1)
    return make()


CASES = {
    "model": lambda: {"model": Notes(), "loss": F.cross_entropy},
    "loss": lambda: {"model": plain(), "loss": Counting()},
    "step": lambda: {"model": plain(), "step": counting_step()},
    "hook": lambda: {"model": hooked(), "loss": F.cross_entropy},
    "objects": lambda: {"model": seeded(Metered), "loss": F.cross_entropy},
    "hidden objects": lambda: {"model": seeded(Hidden), "loss": F.cross_entropy},
    "settling": lambda: {"model": seeded(Settling), "loss": F.cross_entropy},
    "own containers": lambda: {"model": seeded(Remembering), "loss": F.cross_entropy},
}
LOOKS = ["trace", "activations", "gradients", "examine", "score", "level_memory"]


def by_hand(parts, steps):
    """Train in a loop without the lab."""
    model, step = parts["model"], parts.get("step")
    optimizer, losses = sgd(model.parameters()), []
    for number in range(steps):
        x, labels = BATCHES[number % len(BATCHES)]
        loss = step(model, (x, labels)) if step else parts["loss"](model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("case", CASES)
def test_looks_leave_what_code_keeps(case):
    """So a run with looks, and the trial step of `open`, is the loop that its owner would write."""
    whole = by_hand(CASES[case](), 14)
    parts = CASES[case]()
    config = registered(parts.pop("model"), BATCHES, optimizer=sgd, evaluate=lambda model: model(X).mean(), **parts)
    experiment, losses = Experiment(config.changed(opt_level="O0")), []
    for look in (*LOOKS, None, None):
        losses += [experiment.step().loss for _ in range(2 if look else 1)]
        if look == "level_memory":
            level_memory(experiment.config)
        elif look is not None:
            getattr(experiment, look)()
    assert losses == whole


@pytest.mark.parametrize("place", ["forward", "loss"])
def test_a_step_that_fails_leaves_what_a_model_notes_in_place(place):
    fails, model = [], Notes()

    def raising(output, labels):
        if fails:
            raise RuntimeError("out of memory")
        return F.cross_entropy(output, labels)

    if place == "forward":
        model.linear.register_forward_hook(lambda *_: 1 / 0 if fails else None)
    config = registered(model, BATCHES, loss=raising, optimizer=sgd)
    whole, experiment = Experiment(config), Experiment(config)
    losses = [whole.step().loss for _ in range(8)]
    assert [experiment.step().loss for _ in range(5)] == losses[:5]
    fails.append(1)
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        experiment.step()
    assert experiment.take_back()
    fails.clear()
    assert [experiment.step().loss for _ in range(3)] == losses[5:]


def test_a_failed_step_that_has_written_to_a_large_tensor_is_not_taken_back():
    """Its elements are not copied for each step, so the run is not said to be as before."""
    model, fails = plain(), []
    model.bank = torch.zeros(2**19)

    def raising(output, labels):
        if fails:
            model_of_run[0].bank[0] = 1
            raise RuntimeError("out of memory")
        return F.cross_entropy(output, labels)

    experiment = Experiment(registered(model, BATCHES, loss=raising, optimizer=sgd))
    model_of_run = [experiment.model]
    experiment.step()
    assert not is_taken_back(experiment, fails, RuntimeError)


def test_a_failed_step_of_a_model_with_a_large_array_is_not_taken_back():
    fails, model = [], plain()
    model.bank = np.zeros(2**18)
    config = registered(model, BATCHES, loss=lambda output, labels: 1 / 0 if fails else F.cross_entropy(output, labels))
    experiment = Experiment(config)
    experiment.step()
    assert not is_taken_back(experiment, fails)


def test_a_large_memory_costs_a_step_little():
    """As of a replay buffer; before each step some of it is kept, and a failed step is not taken back."""
    model = plain()
    model.memory = [(torch.zeros(4), 0, 0.0) for _ in range(20_000)]
    began = time.process_time()  # of this process alone: other ones may be at work
    for _ in range(10):
        kept = KeptAttributes({"model": model}, is_of_step=True)
    assert time.process_time() - began < 4  # seconds; more than 10 without a limit
    assert not kept.restore()


class Node:
    def __init__(self, depth):
        self.visits, self.children = 0, [Node(depth - 1) for _ in range(3)] if depth else []


def test_a_large_tree_of_objects_costs_a_step_little():
    model = plain()
    model.tree = Node(9)  # 29,524 objects
    followed = [names.owner for _, names in holders({"model": model}) if isinstance(names.owner, Node)]
    assert 900 < len(followed) < 4_000  # those that 1,000 objects lead to are read, and not followed


class Thing:
    """Has attributes."""


class Recent(OrderedDict):
    """Moves what is read to its end."""

    def __getitem__(self, key):
        self.move_to_end(key)
        return super().__getitem__(key)


class Image(np.ndarray):
    pass


class Points(torch.Tensor):
    pass


def sparse():
    return torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True).coalesce()


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1, 2], lambda value: value.append(3)),
        (lambda: [1, 2], lambda value: value.clear()),
        (lambda: [1.0], lambda value: value.__setitem__(0, 2.0)),
        (lambda: {"a": 1}, lambda value: value.update(b=2)),
        (lambda: OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
        (lambda: Counter(a=1), lambda value: value.update("ab")),
        (lambda: defaultdict(list, a=[1]), lambda value: value["b"].append(1)),
        (lambda: {1, 2}, lambda value: value.discard(1)),
        (lambda: deque([1, 2], maxlen=2), lambda value: value.append(3)),
        (lambda: {"a": [{"b": [1]}]}, lambda value: value["a"][0]["b"].append(2)),
        (lambda: ([1],), lambda value: value[0].append(2)),
        (lambda: np.zeros(3), lambda value: value.__setitem__(1, 5)),
        (lambda: [*range(200_000)], lambda value: value.append(3)),
        (lambda: [0.0] * 200_000, lambda value: value.__setitem__(3, 0.5)),
        (lambda: torch.zeros(3), lambda value: value.data.add_(1)),
        (lambda: Recent(a=1, b=2), lambda value: value["a"]),
        (lambda: Recent(a=1, b=2), lambda value: value.popitem(last=False)),
        (lambda: array("d", [1.0]), lambda value: value.append(2.0)),
        (lambda: bytearray(b"ab"), lambda value: value.append(2)),
        (lambda: np.zeros(4), lambda value: value.resize((2, 2), refcheck=False)),
        (lambda: np.zeros(3).view(Image), lambda value: value.__setitem__(1, 5)),
        (lambda: torch.zeros(3).as_subclass(Points), lambda value: value.add_(1)),
        (lambda: torch.zeros(3), lambda value: setattr(value, "data", value.data + 1)),
        (lambda: torch.zeros(3), lambda value: setattr(value, "data", torch.ones(2, dtype=torch.half))),
        (lambda: torch.zeros(3), lambda value: value.requires_grad_()),
        (sparse, lambda value: value.values().add_(1)),
        (sparse, lambda value: value.add_(torch.ones(3).to_sparse())),
    ],
)
def test_contents_are_put_back_into_the_same_object(make, change):
    one = Thing()
    one.value = value = make()
    kept = KeptAttributes({"one": one})
    change(value)
    one.new, one.value = 1, None
    assert kept.restore()
    assert one.value is value
    assert repr(value) == repr(make())
    assert vars(one).keys() == {"value"}


def with_a_hole():
    counts = dict.fromkeys("xabc", 0)
    del counts["x"]
    return counts


@pytest.mark.parametrize(
    "make", [with_a_hole, lambda: OrderedDict.fromkeys("abc", 0), lambda: defaultdict(int, a=0, b=0, c=0)]
)
def test_a_loop_over_a_dict_goes_on_after_its_values_were_put_back(make):
    one = Thing()
    one.value, visited = make(), []
    for key in one.value:
        kept = KeptAttributes({"one": one})
        one.value[key] += 1
        assert kept.restore()
        visited.append(key)
    assert (visited, dict(one.value)) == ([*"abc"], {"a": 0, "b": 0, "c": 0})


def test_a_loop_over_a_deque_goes_on_after_its_values_were_put_back():
    one = Thing()
    one.value, visited = deque([0, 0, 0]), 0
    for place, _ in enumerate(one.value):
        kept = KeptAttributes({"one": one})
        one.value[place] += 1
        assert kept.restore()
        visited += 1
    assert (visited, one.value) == (3, deque([0, 0, 0]))


def test_of_what_has_another_size_and_may_have_views_that_is_told():
    one = Thing()
    one.value, one.bytes = np.zeros(3), bytearray(b"ab")
    view = memoryview(one.bytes)
    kept = KeptAttributes({"one": one})
    view[0] = 0
    assert kept.restore()
    assert one.bytes == b"ab"
    one.value.resize(4, refcheck=False)
    assert not kept.restore()
    one.value.resize(3, refcheck=False)
    assert kept.restore()
    view.release()
    one.bytes.append(0)
    view = memoryview(one.bytes)
    assert not kept.restore()


def test_a_tensor_that_is_written_to_is_put_back_and_its_graph_stays():
    one, weight = Thing(), torch.ones(3, requires_grad=True)
    one.state, one.unchanged = torch.zeros(3), torch.ones(3)
    product = weight * one.state
    kept = KeptAttributes({"one": one})
    with torch.no_grad():
        one.state[0] = 5
    version = one.unchanged._version
    assert kept.restore()
    assert one.state.tolist() == [0, 0, 0]
    assert one.unchanged._version == version
    assert product.shape == (3,)


def test_a_list_that_a_thread_fills_meanwhile_ends_nothing():
    one, ends = Thing(), threading.Event()
    one.notes = {}

    def fill():
        number = 0
        while not ends.is_set():
            one.notes[number % 1000] = number
            one.notes.pop((number * 7) % 1000, None)
            number += 1

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in range(200):
            KeptAttributes({"one": one})
    finally:
        ends.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_that_cannot_be_compared_end_nothing():
    one = Thing()
    one.values = [
        torch.zeros(3).to(torch.float8_e4m3fn),
        torch.zeros(3, dtype=torch.complex32),
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ]
    kept = KeptAttributes({"one": one})
    one.values.clear()
    assert kept.restore()
    assert len(one.values) == 5


def test_a_tensor_that_got_other_data_has_its_memory_back():
    one = Thing()
    one.value = torch.zeros(3)
    one.view = one.value[1:]
    kept = KeptAttributes({"one": one})
    one.value.data = torch.ones(3)
    assert kept.restore()
    one.value.fill_(2.0)
    assert one.view.tolist() == [2.0, 2.0]
