"""A loop whose skipped steps run again for their reason computes what it computes without a watch."""

import contextvars
import enum
import importlib
import threading
from collections import ChainMap, UserDict, UserList, deque
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import warm_up
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from watched_training import trained

import amplab
from amplab.lab import watch

CALLS = 0
SEEN = deque(maxlen=5)


class Normed(nn.Module):
    """Divides by an average of its outputs, in a tensor that is no buffer, and counts its calls in a dict."""

    def __init__(self):
        super().__init__()
        self.linear, self.average, self.calls = nn.Linear(8, 1), torch.ones(1), {"number": 0}

    def forward(self, x):
        y = self.linear(x).float()
        self.calls["number"] += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.abs().mean() * 0.1)
        return y / self.average


class Annealed:
    """A loss whose weight grows with its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, outputs):
        self.calls += 1
        return outputs.square().mean() * min(1, self.calls / 60)


def plain(model):
    return lambda x: model(x).float().square().mean()


def annealed(model):
    loss = Annealed()
    return lambda x: loss(model(x))


def counted(model):
    calls = [0]

    def step(x):
        calls[0] += 1
        return model(x).float().square().mean() / calls[0]

    return step


def counted_in_a_global(model):
    global CALLS  # noqa: PLW0603 - as in a notebook
    CALLS = 0
    SEEN.clear()

    def step(x):
        global CALLS  # noqa: PLW0603
        CALLS += 1
        SEEN.append(float(x.sum()))
        return model(x).float().square().mean() / CALLS + sum(SEEN)

    return step


def followed_by_a_teacher(model):
    teacher = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(x):
        teacher.update_parameters(model)
        return (model(x) - teacher(x).detach() + 1).float().square().mean()

    return step


def noisy(model):
    generator = np.random.default_rng(0)
    return lambda x: (model(x) + generator.normal()).float().square().mean()


class Trainer:
    def __init__(self, model):
        self.model, self.average = model, torch.zeros(())

    def loss_of(self, x):
        loss = self.model(x).float().square().mean()
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss / (1 + self.average)


class State:
    """A class as a namespace."""

    step, seen = 0, []


class OfThisRun(State):
    pass


class CountsInItsClass(nn.Linear):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x) / self.calls


class CountsElsewhere(nn.Linear):
    """Counts where only the code of its methods leads: in a base class, a variable, a static method's class."""

    def forward(self, x):
        OfThisRun.__base__.step += 1
        return self.scaled(super().forward(x)) / warm_up.step

    def scaled(self, x):
        Meter.note(x)
        return x / (State.step + Meter.total)


class Meter:
    total = 0.0

    @staticmethod
    def note(x):
        Meter.total += 0.1
        warm_up.next_step()


class Doubled(torch.autograd.Function):
    """Counts its backward passes, and gives a part of the gradient by their number."""

    backwards = 0

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        Doubled.backwards += 1
        return 2 * gradient / Doubled.backwards


class Noise:
    generator = torch.Generator()

    @classmethod
    def drawn(cls):
        return torch.randn((), generator=cls.generator) + torch.randn((), generator=warm_up.generator)


def counted_in_a_class(model):
    def step(x):
        State.step += 1
        State.seen.append(State.step)
        return model(x).float().square().mean() / len(State.seen) + State.step

    return step


def counted_in_an_attribute_of_a_function(model):
    def step(x):
        step.calls += 1
        return model(x).float().square().mean() / step.calls

    step.calls = 0
    return step


def counted_in_another_file(model):
    def step(x):
        warm_up.step += 1
        return model(x).float().square().mean() / warm_up.step

    return step


def counted_by_a_function_of_another_file(model):
    return lambda x: model(x).float().square().mean() / (warm_up.next_step() + len(warm_up.drawn))


def counted_in_a_file_that_the_step_imports(model):
    def step(x):
        import warm_up as other

        other.step += 1
        return model(x).float().square().mean() / other.step

    return step


def counted_in_a_thread_and_a_context(model):
    of_thread, of_context = threading.local(), contextvars.ContextVar("calls", default=0)
    of_thread.calls = 0

    def step(x):
        of_thread.calls += 1
        of_context.set(of_context.get() + 1)
        return model(x).float().square().mean() / (of_thread.calls + of_context.get())

    return step


def counted_in_arguments_of_every_call(model):
    def step(factor, x, kept=(), *, by_name=()):
        kept[0] += 1
        by_name["calls"] += 1
        factor["calls"] += 1
        return model(x).float().square().mean() / (kept[0] + by_name["calls"] + factor["calls"])

    step.__defaults__, step.__kwdefaults__ = ([0],), {"by_name": {"calls": 0}}
    return partial(step, {"calls": 0})


def counted_in_containers_of_the_standard_library(model):
    kept, calls, seen = UserDict(calls=0), ChainMap({}, {"calls": 0}), UserList()

    def step(x):
        kept["calls"] += 1
        calls["calls"] += 1
        seen.append(calls["calls"])
        return model(x).float().square().mean() / (kept["calls"] + len(seen) + calls["calls"])

    return step


def counted_in_an_array_of_objects(model):
    kept = np.array([0, [], None], dtype=object)

    def step(x):
        kept[0] += 1
        kept[1].append(kept[0])
        return model(x).float().square().mean() / (kept[0] + len(kept[1]))

    return step


class Phase(enum.Enum):
    TRAIN = 1


def counted_in_a_member_of_an_enum(model):
    Phase.TRAIN.calls = 0

    def step(x):
        Phase.TRAIN.calls += 1
        return model(x).float().square().mean() / Phase.TRAIN.calls

    return step


def drawn_from_a_bare_bit_generator(model):
    bits = np.random.PCG64(1)
    return lambda x: (model(x) + float(bits.random_raw() % 1000) / 1000).float().square().mean()


def forget_counts():
    State.step, warm_up.step, Meter.total, CountsInItsClass.calls, Doubled.backwards = 0, 0, 0.0, 0, 0
    Noise.generator.manual_seed(0), warm_up.generator.manual_seed(0)
    State.seen.clear()
    warm_up.drawn.clear()


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, amplab.GradScaler])
@pytest.mark.parametrize(
    ("make_model", "make_step"),
    [
        (Normed, plain),
        (lambda: nn.Linear(8, 1), annealed),
        (lambda: nn.Linear(8, 1), counted),
        (lambda: nn.Linear(8, 1), counted_in_a_global),
        (lambda: nn.Linear(8, 1), followed_by_a_teacher),
        (lambda: nn.Linear(8, 1), noisy),
        (lambda: nn.Linear(8, 1), lambda model: Trainer(model).loss_of),
        (lambda: nn.Linear(8, 1), counted_in_a_class),
        (lambda: CountsInItsClass(8, 1), plain),
        (lambda: nn.Sequential(CountsElsewhere(8, 1)), plain),
        (lambda: nn.Linear(8, 1), counted_in_an_attribute_of_a_function),
        (lambda: nn.Linear(8, 1), counted_in_another_file),
        (lambda: nn.Linear(8, 1), counted_by_a_function_of_another_file),
        (lambda: nn.Linear(8, 1), counted_in_a_file_that_the_step_imports),
        (lambda: nn.Linear(8, 1), counted_in_a_thread_and_a_context),
        (lambda: nn.Linear(8, 1), counted_in_arguments_of_every_call),
        (lambda: nn.Linear(8, 1), counted_in_containers_of_the_standard_library),
        (lambda: nn.Linear(8, 1), counted_in_an_array_of_objects),
        (lambda: nn.Linear(8, 1), counted_in_a_member_of_an_enum),
        (lambda: nn.Linear(8, 1), drawn_from_a_bare_bit_generator),
        (lambda: nn.Linear(8, 1), lambda model: lambda x: Doubled.apply(model(x)).float().square().mean()),
        (lambda: nn.Linear(8, 1), lambda model: lambda x: (model(x) + Noise.drawn()).float().square().mean()),
    ],
)
def test_weights_are_those_of_the_loop_without_a_watch(make_model, make_step, scaler_type):
    weights = []
    for watched in (False, True):
        forget_counts()
        weights.append(trained(make_model, make_step, scaler_type, watched))
    assert all(map(torch.equal, *weights))


def test_a_later_step_that_writes_to_what_is_too_large_to_restore_is_told():
    model = nn.Linear(8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), amplab.GradScaler("cpu", init_scale=2.0)
    seen, batches = torch.zeros(2**26 + 1), torch.randn(3, 4, 8)
    batches[1] = float("inf")

    def step(x):
        if x.isinf().any():
            seen[0] += 1
        return model(x).square().mean()

    warns = pytest.warns(RuntimeWarning, match="its code has changed what it keeps")
    with warns, watch(model, optimizer, scaler=scaler, step=step) as w:
        for x in w.batches(batches):
            optimizer.zero_grad()
            scaler.scale(w.loss(step(x))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert len(w.failures) == 2
    assert "its code has changed what is not restored after that" in w.failures[1]


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, None])
@pytest.mark.parametrize("gives", [True, False])
def test_a_step_whose_loss_the_loop_does_not_give_is_explained_as_well(gives, scaler_type):
    """A missing loss is not NaN: neither in what runs again, nor in the reason, nor in what is said of the run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler_type and scaler_type("cpu", init_scale=2.0**17)

    def step(x):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(20 * x)
        loss = nn.functional.cross_entropy(logits.float(), torch.tensor([0, 1, 2, 0]))
        return loss if scaler else loss * 3e38 * 1e3

    with watch(model, optimizer, scaler=scaler, step=step) as w:
        for x in w.batches(torch.randn(2, 4, 8)):
            optimizer.zero_grad()
            loss = w.loss(step(x)) if gives else step(x)
            (scaler.scale(loss) if scaler else loss).backward()
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
    assert w.failures == ()
    assert w.history.explanations[0].kind == ("scale" if scaler else "float32")
    assert "step-not-explained" not in [each.name for each in w.findings()]


def test_a_step_that_another_optimizer_has_changed_says_so():
    parts = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e4) for each in parts]
    scaler = amplab.GradScaler("cpu", init_scale=64.0)

    def loss_of(x):
        return parts[0](x).square().mean() + parts[1](x).square().mean()

    warns = pytest.warns(RuntimeWarning, match="another optimizer has changed the model's weights since its batch")
    with warns, watch(parts, optimizers, scaler=scaler, step=loss_of) as w:
        for x in w.batches(torch.randn(1, 4, 4)):
            loss = w.loss(loss_of(x))
            scaler.scale(loss).backward()
            parts[0].weight.grad.fill_(float("inf"))
            for each in optimizers:
                scaler.step(each)
            scaler.update()
    assert w.history.skip_count == 1


def explained(model, step):
    """Train with a step that is skipped and runs again, and return the watch."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), amplab.GradScaler("cpu", init_scale=2.0**24)
    with watch(model, optimizer, scaler=scaler, step=step) as w:
        for x in w.batches(torch.randn(4, 4, 8)):
            optimizer.zero_grad()
            scaler.scale(w.loss(step(x))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert w.history.explanations
    return w


class OfARun:
    """An object whose other methods lead to large data, which a step does not change."""

    def __init__(self, model):
        self.model = model

    def loss_of(self, x):
        return self.model(x).half().square().mean()

    def evaluate(self):
        return LARGE["array"].sum()


LARGE = {"array": np.zeros(1)}


def test_data_of_methods_that_run_in_no_step_is_not_kept(monkeypatch):
    monkeypatch.setitem(LARGE, "array", np.zeros(2**28 + 1, dtype=np.uint8))
    run = OfARun(nn.Linear(8, 1))
    assert explained(run.model, run.loss_of).failures == ()


@pytest.mark.parametrize(
    ("make", "is_explained"),
    [
        (lambda: np.zeros(12_000_000), True),
        (lambda: dict.fromkeys(range(1_200_000), 0), True),
        (lambda: [0] * 1_200_000, True),
        (lambda: np.zeros(40_000_000), False),
        (lambda: torch.zeros(80_000_000), False),
        (lambda: [0] * 4_200_000, False),
    ],
)
def test_each_step_counts_once_in_a_large_table(make, is_explained):
    table, model = make(), nn.Linear(8, 1)

    def step(x):
        table[0] += 1
        return model(x).half().square().mean()

    with nullcontext() if is_explained else pytest.warns(RuntimeWarning, match="of which no copy is kept"):
        w = explained(model, step)
    assert int(table[0]) == w.history.skip_count == 4
    assert (w.history.explanations[0].kind == "scale") == is_explained


def test_a_large_array_that_is_said_to_be_only_read_is_no_bar():
    data, model = np.zeros(40_000_000), nn.Linear(8, 1)
    data.flags.writeable = False
    assert explained(model, lambda x: model(x + data[0]).half().square().mean()).failures == ()


def test_an_installed_package_is_left_alone(tmp_path, monkeypatch):
    """It may count what runs in it, as for its own caches."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "counting_package.py").write_text(
        "step = 0\nclass Kept:\n    step = 0\ndef count():\n    global step\n    step += 1\n    Kept.step += 1\n"
    )
    monkeypatch.syspath_prepend(folder)
    package = importlib.import_module("counting_package")
    runs = []
    model = nn.Linear(8, 1)

    def step(x):
        package.count()
        runs.append(1)
        return model(x).half().square().mean()

    explained(model, step)
    assert package.step == package.Kept.step > len(runs) == 4
