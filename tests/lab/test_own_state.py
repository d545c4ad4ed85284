"""What objects of one's own keep in attributes goes on in another process, and nothing else is changed."""

import enum
import functools
import math
import random
import threading
import weakref
from array import array
from collections import Counter, deque
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from own_models import Tagger, registered
from own_with_state import BATCHES, CASES, X, Y, sgd
from torch import nn

from amplab.amp.run_state.file_format import RunStateError
from amplab.lab import TASKS, Experiment, Trainer
from amplab.lab.own_state import add_state, changes, lost_changes, own_state
from amplab.lab.own_task import forget_own

pytestmark = pytest.mark.usefixtures("nothing_own")


OTHER_BATCHES = ("in place", "datasets")  # for each run


def opened(case):
    """Register everything anew, as a cell does in another kernel."""
    parts = {"model": lambda: nn.Linear(16, 4), "data": lambda: BATCHES, "loss": lambda: F.cross_entropy}
    made = {name: make() for name, make in {**parts, "optimizer": lambda: sgd, **CASES[case]}.items()}
    torch.manual_seed(1)
    model = made.pop("model")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.linspace(-0.5, 0.5, weight.numel()).view_as(weight))
    with pytest.warns(match="each run has other batches") if case in OTHER_BATCHES else nullcontext():
        return registered(model, made.pop("data"), **made)


def check_it_goes_on(first, case, losses, tmp_path):
    """Continue in another kernel, with the losses of a run that was not interrupted."""
    first.save(tmp_path / "run.checkpoint", {})
    forget_own(set())
    opened(case)
    again, _ = Experiment.load(tmp_path / "run.checkpoint")
    assert [again.step().loss for _ in losses] == losses
    assert again.left_out == ()


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_in_another_kernel_with_what_its_objects_keep(case, level, tmp_path):
    whole = Experiment(opened(case).changed(opt_level=level))
    losses = [whole.step().loss for _ in range(14)]
    forget_own(set())
    first = Experiment(opened(case).changed(opt_level=level))
    for _ in range(7):
        first.step()
    check_it_goes_on(first, case, losses[7:], tmp_path)


class Drawn(nn.Module):
    """Has random values in what is no buffer, as it draws them when it is made."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(16, 4), kind
        self.features = {
            "tensor": lambda: torch.randn(16),
            "array": lambda: np.random.randn(16).astype(np.float32),
            "list": lambda: [torch.randn(16)],
            "order": lambda: torch.randperm(16),
            "object": lambda: Thing(value=torch.randn(16)),
            "teacher": lambda: [nn.Linear(16, 16).requires_grad_(requires_grad=False)],
        }[kind]()

    def forward(self, x):
        match self.kind:
            case "tensor":
                x = x * self.features
            case "array":
                x = x * torch.from_numpy(self.features)
            case "list":
                x = x * self.features[0]
            case "order":
                x = x[:, self.features]
            case "object":
                x = x * self.features.value
            case "teacher":
                x = self.features[0](x)
        return self.linear(x)


@pytest.mark.parametrize("kind", ["tensor", "array", "list", "order", "object", "teacher"])
def test_what_was_drawn_as_a_model_was_made_goes_on_in_a_kernel_that_draws_otherwise(kind, tmp_path):
    def run(seed):
        torch.manual_seed(seed)
        np.random.seed(seed)
        return registered(Drawn(kind), BATCHES, loss=F.cross_entropy, optimizer=sgd).changed(opt_level="O0")

    first = Experiment(run(0))
    for _ in range(5):
        first.step()
    first.save(tmp_path / "run.checkpoint", {})
    losses = [first.step().loss for _ in range(5)]
    forget_own(set())
    run(7)
    again, _ = Experiment.load(tmp_path / "run.checkpoint")
    assert [again.step().loss for _ in range(5)] == losses


def test_buffers_that_a_level_has_separated_are_separate_in_another_kernel(tmp_path):
    experiment = Experiment(opened("aliased").changed(opt_level="O0"))
    for level in ("O2", "O0"):
        experiment.step()
        experiment.switch(experiment.config.changed(opt_level=level))
    experiment.save(tmp_path / "run.checkpoint", {})
    losses = [experiment.step().loss for _ in range(4)]
    forget_own(set())
    opened("aliased")
    again, _ = Experiment.load(tmp_path / "run.checkpoint")
    assert [again.step().loss for _ in losses] == losses


@pytest.mark.parametrize("change", [{"opt_level": "O0"}, {"init_scale": 1024.0}, {"opt_level": "O2"}])
@pytest.mark.parametrize("case", ["lookahead", "hook", "object"])
def test_it_goes_on_after_a_change_that_begins_another_session(case, change, tmp_path):
    def trained(steps):
        experiment = Experiment(opened(case).changed(opt_level="O1"))
        losses = [experiment.step().loss for _ in range(4)]
        experiment.switch(experiment.config.changed(**change))
        return experiment, losses + [experiment.step().loss for _ in range(steps)]

    _, losses = trained(10)
    forget_own(set())
    first, _ = trained(3)
    check_it_goes_on(first, case, losses[7:], tmp_path)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: {"step": 0, "schedule": math.sqrt}, lambda value: value.update(step=1)),
        (
            lambda: {"device": torch.device("cpu"), "stats": {"step": 0}},
            lambda value: value["stats"].update(step=1),
        ),
        (lambda: [nn.Linear(2, 2)], lambda value: value[0].weight.data.add_(1)),
        (lambda: [(math.sqrt, torch.zeros(3))], lambda value: value[0][1].data.add_(1)),
        (lambda: [(math.sqrt, torch.tensor(0.0))], lambda value: value[0][1].add_(1)),
        (lambda: bytearray(b"a"), lambda value: value.append(1)),
        (lambda: array("d", [0.0]), lambda value: value.append(1.0)),
        (lambda: [random.Random(3)], lambda value: value[0].random()),
        (torch.Generator, lambda value: torch.rand((), generator=value)),
        (lambda: np.random.default_rng(3), lambda value: value.normal()),
    ],
)
def test_what_cannot_be_kept_is_told_when_anything_in_it_changes(make, change):
    one = Thing()
    one.value = make()
    before = own_state({"one": one})
    assert lost_changes(own_state({"one": one}), before) == []
    change(one.value)
    assert lost_changes(own_state({"one": one}), before) == ["one"]


def test_containers_of_numbers_go_on_from_any_depth():
    def deep(number):
        return {"a": {"b": {"c": {"d": [number]}}}}

    one, other = Thing(), Thing()
    one.value = deep(0)
    before = own_state({"one": one})
    one.value["a"]["b"]["c"]["d"][0] = 5
    other.value = deep(0)
    add_state({"one": other}, changes(own_state({"one": one}), before))
    assert other.value == deep(5)


def test_modules_that_a_list_names_again_are_not_told():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.layers = [*model]
    weights = [*model.parameters()]
    before = own_state({"model": model}, weights)
    with torch.no_grad():
        model[0].weight.add_(1)
    assert lost_changes(own_state({"model": model}, weights), before) == []


class Combined(torch.optim.Optimizer):
    """Has the optimizers that do its work in an attribute."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.inner = [torch.optim.SGD(params[:1], lr=0.1, momentum=0.9), torch.optim.Adam(params[1:])]

    def step(self, closure=None):
        for each in self.inner:
            each.step()


class Scheduled(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self, patience=0)

    def step(self, closure=None):
        super().step()
        self.schedule.step(1.0)


@pytest.mark.parametrize("kind", [Combined, Scheduled])
def test_an_optimizer_whose_parts_have_a_state_of_their_own_is_told_to_begin_anew(kind, tmp_path):
    experiment = Experiment(registered(nn.Linear(16, 4), BATCHES, loss=F.cross_entropy, optimizer=kind))
    for steps in (0, 3):
        for _ in range(steps):
            experiment.step()
        experiment.save(tmp_path / "run.checkpoint", {})
        assert Experiment.load(tmp_path / "run.checkpoint")[0].left_out == (("optimizer",) if steps else ())


class Hidden(nn.Module):
    """Carries a hidden state in an attribute."""

    def __init__(self):
        super().__init__()
        self.linear, self.h = nn.Linear(16, 4), torch.zeros(16)
        nn.init.constant_(self.linear.weight, 0.1)

    def forward(self, x):
        self.h = 0.5 * self.h.detach() + x.float().mean(0)
        return self.linear(x + self.h.to(x.dtype))


def test_a_failed_forward_leaves_what_a_model_keeps_as_before_the_step():
    """So that the run that is saved then has what it had."""
    model, fails = Hidden(), []

    def raising(output, labels):
        if fails:
            raise RuntimeError("out of memory")
        return F.cross_entropy(output, labels)

    config = registered(model, BATCHES, loss=raising, optimizer=sgd)
    whole, experiment = Experiment(config), Experiment(config)
    losses = [whole.step().loss for _ in range(8)]
    assert [experiment.step().loss for _ in range(5)] == losses[:5]
    fails.append(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        experiment.step()
    assert experiment.take_back()
    fails.clear()
    assert [experiment.step().loss for _ in range(3)] == losses[5:]


def test_a_skipped_step_whose_gradients_cannot_be_looked_at_is_made():
    """The look is for a number of a chart, and code of one's own may fail in it."""
    fails = []

    class Model(nn.Linear):
        def forward(self, x):
            if fails and self.weight.dtype == torch.float32:  # as only the look has it at O3
                raise RuntimeError("out of memory")
            return 1e4 * super().forward(x)

    config = registered(Model(16, 4), BATCHES, loss=F.cross_entropy, optimizer=sgd)
    experiment = Experiment(config.changed(opt_level="O3", loss_scale="dynamic"))
    for is_finite in (True, False):
        record = experiment.step()
        assert record.skipped
        assert math.isfinite(record.grad_exponent) == is_finite
        fails.append(1)


class Noting(nn.Module):
    """Notes what it has drawn, as a model that drops layers."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropped = nn.Linear(16, 4), []

    def forward(self, x):
        self.dropped = [*self.dropped, random.random(), np.random.rand()]
        return self.linear(x)


def test_a_model_that_notes_what_it_draws_is_the_same_one_in_another_kernel():
    digests = []
    for seed in range(2):
        random.seed(seed)
        np.random.seed(seed)
        digests.append(TASKS[registered(Noting(), BATCHES, loss=F.cross_entropy).task].digests["model"])
        forget_own(set())
    assert digests[0] == digests[1]


SHARED = (*OTHER_BATCHES, "counted layer")  # by all runs of a kernel, as `lab.open` says


@pytest.mark.parametrize("case", [case for case in CASES if case not in SHARED])
def test_runs_of_one_kernel_have_what_their_objects_keep_for_themselves(case):
    config = opened(case)
    first, waiting = Experiment(config), Experiment(config)
    whole = [first.step().loss for _ in range(12)]
    losses = [waiting.step().loss for _ in range(6)]
    trainer = Trainer(config)
    assert trainer.run(12).column("loss").tolist() == whole
    trainer.reset()
    assert trainer.run(12).column("loss").tolist() == whole
    assert losses + [waiting.step().loss for _ in range(6)] == whole
    trainer.stop()
    assert trainer.wait(10)


class Shared:
    """Fills one buffer, which its batches are views of, and is told by the step how hard they shall be."""

    def __init__(self):
        self.level, self.buffer = 1.0, np.zeros((16, 16), np.float32)
        self.out, self.read, self.threads = torch.from_numpy(self.buffer), self._read, [threading.Thread()]

    def _read(self, start):
        self.buffer[:] = self.level * X[start : start + 16].numpy()
        return self.out, Y[start : start + 16]

    def __iter__(self):
        return (self.read(start) for start in range(0, 64, 16))


def test_data_that_share_memory_methods_and_settings_with_a_step_do_so_in_a_run():
    data, sums = Shared(), []

    def step(model, batch):
        sums.append(float(batch[0].abs().sum()))
        data.level *= 1.5
        return F.cross_entropy(model(batch[0]), batch[1])

    experiment = Experiment(registered(nn.Linear(16, 4), data, step=step).changed(opt_level="O0"))
    sums.clear()
    data.level = 1.0
    for _ in range(4):
        experiment.step()
    plain = [1.5**number * float(X[start : start + 16].abs().sum()) for number, start in enumerate(range(0, 64, 16))]
    assert sums == pytest.approx(plain, rel=1e-5)


class Thing:
    def __init__(self, **values):
        vars(self).update(values)


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
    assert changes(own_state({"one": other}), own_state({"one": one})) == {}


class Mode(enum.Enum):
    WARM, MAIN = 1, 2


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, Thing()),
        (Mode.WARM, Mode.MAIN),
        (None, LOOP),
        (None, functools.reduce(lambda inner, _: {"k": inner}, range(40), {})),
        (None, 1 << 11_230),
        (None, np.arange(3, dtype=">f4")),
        (np.array(["a", "b"]), np.array(["b", "a"])),
        ([(str(each), each) for each in range(2_000)], [(str(each), each) for each in range(2_000, 0, -1)]),
        (torch.zeros(2), torch.ones(2, requires_grad=True)),
        (None, torch.empty(2**26, dtype=torch.int8)),
    ],
    ids=range(10),
)
def test_an_object_with_a_value_of_another_kind_begins_anew_and_is_told(before, after):
    """As one that has opened a file and notes it: the note alone would say that it is open."""
    one = Thing()
    one.value, one.is_open = before, False
    given = own_state({"data": one})
    one.value, one.is_open = after, True
    now = own_state({"data": one})
    assert changes(now, given) == {}
    assert lost_changes(now, given) == ["data"]


class Raising:
    def __getattr__(self, name):
        raise KeyError(name)


def test_strange_objects_in_attributes_end_nothing():
    one = Thing()
    one.config, one.gone, one.alive = Raising(), weakref.proxy(Thing()), True
    assert own_state({"one": one})["one"]["alive"] is True


def test_a_value_is_set_in_place_of_the_present_one_and_never_written_into_it():
    one = Thing()
    one.window, one.order = X[:2], LIST
    add_state({"one": one}, {"one": {"window": torch.zeros(2, 16), "order": [3]}})
    assert one.order == [3]
    assert LIST == [1, 2]
    assert X[:2].abs().sum() > 0


LIST = [1, 2]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("model/", "forward", 5),
        ("model/", "words", None),
        ("model/", "__class__", 5),
        ("model/words", "weight", torch.zeros(20, 8)),
        ("model/ buffers", "center", torch.zeros(1)),
        ("model/", "count", "text"),
        ("optimizer", "step", 7),
        ("optimizer", "zero_grad", None),
        ("elsewhere", "count", 5),
    ],
)
def test_a_checkpoint_of_a_stranger_sets_no_method_no_weight_and_no_value_of_another_kind(path, name, value):
    model = Tagger()
    model.count = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    roots = {"model": model, "optimizer": optimizer}
    before = [dict(vars(model)), dict(vars(optimizer)), dict(vars(model.words))]
    add_state(roots, {path: {name: value}})
    assert [vars(model), vars(optimizer), vars(model.words)] == before


@pytest.mark.parametrize(
    "value",
    [
        {"amplab.kind": "Counter", "value": 3},
        {"amplab.kind": "dict", "value": [5]},
        {"amplab.kind": "eval", "value": ["1"]},
        {"amplab.kind": "set", "value": [[1]]},
        {"amplab.kind": "dict"},
        {},
    ],
    ids=range(6),
)
def test_a_malformed_value_of_a_stranger_is_refused_in_words(value):
    with pytest.raises(RunStateError, match=r"model/.count: expected a value of an attribute"):
        add_state({"model": Tagger()}, {"model/": {"count": value}})


def test_weights_are_not_copied():
    model = Tagger()
    model.tied, model.count = model.words.weight, 1
    assert own_state({"model": model}, tuple(model.parameters()))["model/"] == {"count": 1}
