"""An exception anywhere in a training step: the next step is bitwise as if it had been left out; nothing stays on."""

import copy
import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from failures import compiled, failing, place
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, Dataset

import amplab
from amplab import amp
from amplab.policies import CastingEngine, casts_enabled, cpu_half_mode, thread_engines
from amplab.trace import optimizer_hooks

pytestmark = pytest.mark.filterwarnings("ignore:amplab.watch")  # a watch that fails says so, and the loop goes on

BATCHES = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([0, 1, 2, 0])


class Square(torch.autograd.Function):
    """A function that can fail between its ops, in both directions."""

    @staticmethod
    def forward(ctx, x):
        place("forward of a function")
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        place("backward of a function")
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        place("forward")
        return self.last(Square.apply(torch.relu(self.norm(self.first(x)))))


class Plain(nn.Sequential):
    """Without code that graphs break at."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


class Batches(Dataset):
    """A dataset that can fail."""

    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, number):
        place("the dataset")
        return BATCHES[number]


def loaded(number):
    """A batch, by a loader."""
    (batch,) = DataLoader(Batches(), batch_size=None, sampler=[number])
    return batch


def add_hooks(layer):
    """Add hooks of every kind to a layer, each of which can fail."""
    layer.register_forward_pre_hook(lambda *_: place("forward pre-hook"))
    layer.register_forward_hook(lambda *_: place("forward hook"))
    layer.register_full_backward_pre_hook(lambda *_: place("full backward pre-hook"))
    layer.register_full_backward_hook(lambda *_: place("full backward hook"))
    layer.weight.register_hook(lambda _: place("tensor hook"))
    layer.weight.register_post_accumulate_grad_hook(lambda _: place("post-accumulate hook"))


class Training:
    """A float32 loop; the faces derive from it.

    Attributes:
        stepping: whether the optimizer's own step has begun and not ended. What of it is done when it fails is torch's.
    """

    parts = 1  # backwards for each step
    fused = False
    watches = False

    def __init__(self, model=Net, overflows=False):
        torch.manual_seed(0)
        self.model, self.overflows, self.stepping, self.fails = model(), overflows, False, False
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, fused=self.fused)
        self.prepare()
        self.forward = compiled(self.model) if model is Plain else self.model
        if model is Net:
            add_hooks(self.model.norm)
        self.optimizer.register_step_pre_hook(self.begin)
        self.optimizer.register_step_post_hook(self.end)

    def begin(self, *_):
        place("step pre-hook")
        self.stepping = True

    def end(self, *_):
        self.stepping = False
        place("step post-hook")

    def prepare(self):
        pass

    def loss(self, batch):
        place("before the forward")
        loss = F.cross_entropy(self.forward(batch).float(), TARGET)
        return loss * 1e35 if self.overflows and self.fails else loss

    def step(self, number):
        batch = loaded(number)
        self.clear()
        for part in range(self.parts):
            self.backward(batch * (1 + part), is_last=part == self.parts - 1)
        place("before the step")
        self.finish()
        place("after the step")

    def clear(self):
        self.optimizer.zero_grad()

    def backward(self, batch, *, is_last):
        self.loss(batch).backward()

    def finish(self):
        self.optimizer.step()

    def scaler_state(self):
        return None

    def weights(self):
        params = [param.detach() for param in self.model.parameters()]
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict(), params])

    def restore(self, weights):
        model, optimizer, _ = copy.deepcopy(weights)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def end_iteration(self):
        """What a loop can do if its next step is refused."""
        raise AssertionError("the next step was refused")

    def close(self):
        pass


class Apex(Training):
    options: ClassVar = {}

    def prepare(self):
        amp.initialize(self.model, self.optimizer, verbosity=0, on_collapse="warn", **self.options)

    def clear(self):
        self.optimizer.zero_grad()
        self.model.zero_grad()  # what a delayed backward has left on half parameters, which the optimizer does not have

    def backward(self, batch, *, is_last):
        with amp.scale_loss(self.loss(batch), self.optimizer, delay_unscale=not is_last) as scaled_loss:
            place("in scale_loss")
            scaled_loss.backward()
            place("end of scale_loss")

    def scaler_state(self):
        return amp.state_dict()

    def close(self):
        amp.reset()


class Scaled(Training):
    options: ClassVar = {}

    def prepare(self):
        self.scaler = amplab.GradScaler("cpu", init_scale=1024.0, **self.options)

    def loss(self, batch):
        with amplab.autocast("cpu", torch.float16):
            return super().loss(batch)

    def backward(self, batch, *, is_last):
        self.scaler.scale(self.loss(batch)).backward()

    def finish(self):
        self.scaler.step(self.optimizer)
        place("before update")
        self.scaler.update()

    def scaler_state(self):
        return self.scaler.state_dict()

    def end_iteration(self):
        self.scaler.update()


class Closure(Apex):
    options: ClassVar = {"opt_level": "O1", "loss_scale": 128.0}

    def step(self, number):
        batch = loaded(number)

        def closure():
            self.optimizer.zero_grad()
            self.backward(batch, is_last=True)

        place("before the step")
        self.optimizer.step(closure)
        place("after the step")


class Clipped(Scaled):
    def finish(self):
        self.scaler.unscale_(self.optimizer)
        place("after unscale_")
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        super().finish()


class Blocks(Scaled):
    def backward(self, batch, *, is_last):
        with self.scaler.scale_loss(self.loss(batch), self.optimizer) as scaled_loss:
            place("in scale_loss")
            scaled_loss.backward()
            place("end of scale_loss")


class Engine(Training):
    def prepare(self):
        self.engine = CastingEngine()

    def loss(self, batch):
        with self.engine.active():
            return super().loss(batch)


class Watched(Scaled):
    watches = True

    def prepare(self):
        super().prepare()
        self.watch = amplab.watch(self.model, self.optimizer, scaler=self.scaler)
        self.watch.__enter__()

    def close(self):
        self.watch.__exit__(None, None, None)


class WatchedApex(Apex):
    watches = True

    def prepare(self):
        super().prepare()
        self.watch = amplab.watch(self.model, self.optimizer)
        self.watch.__enter__()

    def close(self):
        self.watch.__exit__(None, None, None)
        super().close()


def variant(base, **attributes):
    return type(base.__name__, (base,), attributes)


def at_level(level, base=Apex, parts=1, **options):
    return variant(base, options={"opt_level": level, "dynamic_init_scale": 1024.0, **options}, parts=parts)


COMBINED = {"combine_grad": True}
FACES = {
    "float32": Training,
    **{level: at_level(level) for level in ("O0", "O1", "O2", "O3")},
    **{f"{level} combined": at_level(level, **COMBINED) for level in ("O0", "O1", "O2")},
    **{f"{level} accumulated": at_level(level, parts=2) for level in ("O1", "O2")},
    "O2 combined, accumulated": at_level("O2", parts=2, **COMBINED),
    "O1 closure": Closure,
    "GradScaler": Scaled,
    "GradScaler accumulated": variant(Scaled, parts=2),
    "GradScaler clipped": Clipped,
    "GradScaler combined": variant(Clipped, options=COMBINED),
    "GradScaler fused": variant(Scaled, fused=True),
    "GradScaler blocks": Blocks,
    "engine": Engine,
    "watch": Watched,
    "watch of O2": at_level("O2", WatchedApex),
}


def ambient():
    """What is on in this thread."""
    return {
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": list(map(type, _get_current_function_mode_stack())),
        "engines": len(thread_engines()),
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "casts": casts_enabled(),
        "half": cpu_half_mode(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "observers of steps": len(optimizer_hooks._OBSERVERS.before) + len(optimizer_hooks._OBSERVERS.after),
    }


def hooks(training):
    """The number of hooks of each kind on the model and the optimizer."""
    owners = [training.optimizer, *training.model.modules(), *training.model.parameters()]
    found = [{**vars(owner), "_backward_hooks": getattr(owner, "_backward_hooks", None)} for owner in owners]
    return [{name: len(each) for name, each in one.items() if name.endswith("hooks") and each} for one in found]


def values(state):
    if isinstance(state, dict):
        return [value for each in state.values() for value in values(each)]
    if isinstance(state, list | tuple):
        return [value for each in state for value in values(each)]
    return [state.tolist() if isinstance(state, Tensor) else state]


@dataclass
class State:
    """What a training has come to, as plain values."""

    weights: Any
    scaler: Any

    @classmethod
    def of(cls, training):
        return cls(values(training.weights()), values(training.scaler_state()))


class Attack:
    """Fails a step of one kind of training, and compares the next one with those of trainings without a failure.

    Attributes:
        start: the weights before the step that fails.
        taken: the state after it, without a failure.
        left_out: the state after the next step, without the one that fails.
        then: the state after both.
    """

    def __init__(self, face, *, warm=False, overflows=False, model=Net):
        self.face, self.warm, self.overflows, self.model = face, warm, overflows, model
        self.nothing = ambient()
        with self.training() as training:
            self.start, self.ambient = training.weights(), ambient()
            self.next(training)
            self.left_out, self.hooks = State.of(training), hooks(training)
        with self.training() as training:
            self.fail(training)
            self.taken = State.of(training)
            self.next(training)
            self.then = State.of(training)

    @contextmanager
    def training(self):
        training = self.face(self.model, overflows=self.overflows)
        try:
            if self.warm:
                training.step(0)
            yield training
        finally:
            training.close()

    def fail(self, training):
        training.fails = True
        training.step(1)

    def next(self, training):
        training.fails = training.stepping = False
        training.step(2)

    def at(self, number):
        """Attack one place; return what failed, None if the step has fewer places."""
        with self.training() as training:
            failure = failing(lambda: self.fail(training), number, ops=self.model is Net)
            if failure is not None:
                self.check(failure, training)
        assert ambient() == self.nothing, failure
        return failure

    def check(self, failure, training):
        self.check_ambient(failure)
        if training.stepping:
            training.restore(self.start)
        state = State.of(training)
        right = [after.weights for before, after in self.outcomes() if state.weights == before]
        assert right, failure
        self.next_even_if_refused(failure, training)
        if self.overflows and State.of(training).weights == state.weights:
            self.next(training)  # the verdict on the step that failed was still to come, as with apex and torch
        after = State.of(training)
        assert after.weights in right, failure
        assert self.overflows or after.scaler in (self.left_out.scaler, self.then.scaler), failure
        self.check_ambient(failure)
        assert self.face.watches or hooks(training) == self.hooks, failure

    def outcomes(self):
        """The weights that a failed step may leave, and the state after the next step. A skipped step leaves both."""
        return [(values(self.start), self.left_out), (self.taken.weights, self.then)]

    def check_ambient(self, failure):
        if not self.face.watches:  # a watch looks at some steps, and ends its look early if one fails
            assert ambient() == self.ambient, failure

    def next_even_if_refused(self, failure, training):
        """Take the next step. A scaler may refuse it until its iteration has ended."""
        before = State.of(training).weights
        refusal = self.refusal_of_next(training)
        if refusal:
            assert "update()" in refusal, failure
            assert State.of(training).weights == before, failure
            training.end_iteration()
            self.next(training)

    def refusal_of_next(self, training):
        try:
            self.next(training)
        except RuntimeError as refusal:
            return str(refusal)
        return ""


def attack(*args, every, first=1, **kwargs):
    """Attack each `every`-th place of a step; return how many failed."""
    attacked = Attack(*args, **kwargs)
    return sum(1 for _ in itertools.takewhile(lambda at: attacked.at(at) is not None, itertools.count(first, every)))


SKIPS = [name for name in FACES if name not in ("float32", "O0", "O0 combined", "O3", "O1 closure", "engine")]
WHEN = pytest.mark.parametrize("warm", [False, True], ids=["first step", "later step"])


@pytest.mark.parametrize("face", FACES)
def test_the_next_step_is_right(face):
    assert attack(FACES[face], every=67) >= 2
    assert attack(FACES[face], every=67, first=34, warm=True) >= 2


@pytest.mark.parametrize("face", SKIPS)
def test_the_next_step_is_right_after_one_that_overflows(face):
    assert attack(FACES[face], every=97, warm=True, overflows=True) >= 1


COMPILED = ["O1", "O2", "GradScaler"]


@pytest.mark.parametrize("face", COMPILED[1:])
def test_the_next_step_is_right_where_a_compiled_graph_fails(face):
    assert attack(FACES[face], every=45, first=15, warm=True, model=Plain) >= 1


@pytest.mark.long
@WHEN
@pytest.mark.parametrize("face", FACES)
def test_the_next_step_is_right_after_a_failure_anywhere(face, warm):
    assert attack(FACES[face], every=1, warm=warm) > 100


@pytest.mark.long
@WHEN
@pytest.mark.parametrize("face", SKIPS)
def test_the_next_step_is_right_after_a_failure_anywhere_in_one_that_overflows(face, warm):
    assert attack(FACES[face], every=1, warm=warm, overflows=True) > 100


@pytest.mark.long
@pytest.mark.parametrize("face", [*COMPILED, "engine", "float32"])
def test_the_next_step_is_right_after_a_failure_anywhere_in_compiled_graphs(face):
    assert attack(FACES[face], every=1, warm=True, model=Plain) > 40


def assert_untouched(model, before, at):
    assert values(model.state_dict()) == before, at
    assert all(param.grad is None for param in model.parameters()), at
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()), at
    assert not any(param._backward_hooks for param in model.parameters()), at


def fails(tool, model, at):
    """Call a tool with a failure in place number `at`, which it may wrap; return whether it has that many places."""
    given = {"loss": lambda output: F.cross_entropy(output.float(), TARGET), "opt_level": "O1"}
    try:
        return failing(lambda: tool(model, BATCHES[0], **given), at) is not None
    except Exception:  # noqa: BLE001
        return True


def attack_tool(tool, every):
    """Fail a tool; return how many times."""
    torch.manual_seed(0)
    model, nothing = Net(), ambient()
    before = values(model.state_dict())
    for at in itertools.count(1, every):
        if not fails(tool, model, at):
            return at // every
        assert ambient() == nothing, at
        assert_untouched(model, before, at)
    return None


TOOLS = pytest.mark.parametrize("tool", [amplab.xray, amplab.first_nonfinite], ids=["xray", "first_nonfinite"])


@TOOLS
def test_a_tool_that_fails_leaves_the_model_as_it_was(tool):
    assert attack_tool(tool, 151) >= 2


@pytest.mark.long
@TOOLS
def test_a_tool_that_fails_anywhere_leaves_the_model_as_it_was(tool):
    assert attack_tool(tool, 1) > 100
