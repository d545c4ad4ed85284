"""An interrupt at any point of a training step: the step after it is bitwise right, and `reset` leaves nothing on."""

import copy
import inspect
import random
import signal
from contextlib import nullcontext, suppress

import pytest
import torch
from interrupts import interrupted, interrupted_everywhere
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from amplab import amp, kernels
from amplab.fp16_utils import FP16_Optimizer, network_to_half
from amplab.optimizers import FusedAdam
from amplab.policies import thread_engines
from amplab.policies.casting.thread_scopes import AUTOCAST_FLAG
from amplab.scalers import Unscaler

# Python swallows what a finalizer raises.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([0, 1, 2, 0])
SESSIONS = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O1 combined": {"opt_level": "O1", "combine_grad": True},
    "O2 combined": {"opt_level": "O2", "combine_grad": True},
}


class Training:
    """A small model under a session, with one step of each kind."""

    def __init__(self, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = amp.initialize(model, optimizer, verbosity=0, on_collapse="warn", **options)

    def backward(self, factor=1.0, **delays):
        loss = F.cross_entropy(self.model(X).float(), TARGET) * factor
        with amp.scale_loss(loss, self.optimizer, **delays) as scaled_loss:
            scaled_loss.backward()

    def stepped(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def skipped(self):
        self.backward(1e35)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def accumulated(self):
        self.backward(delay_unscale=True)
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        masters = [param.detach() for param in amp.master_params(self.optimizer)]
        parts = self.model.state_dict(), self.optimizer.state_dict(), amp.state_dict(), masters
        return copy.deepcopy(parts)

    def restore(self, state):
        model, optimizer, scalers, masters = copy.deepcopy(state)
        self.optimizer.zero_grad()
        self.model.zero_grad()  # at O2 a backward with delay_unscale leaves its gradients on the half parameters
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        amp.load_state_dict(scalers)
        for param, values in zip(amp.master_params(self.optimizer), masters, strict=True):
            param.data.copy_(values)


def values(state):
    if isinstance(state, dict):
        return [value for each in state.values() for value in values(each)]
    if isinstance(state, list | tuple):
        return [value for each in state for value in values(each)]
    return [state.tolist() if isinstance(state, Tensor) else state]


def right_step(options):
    """The state after one step, and the state after the next."""
    training = Training(**options)
    training.stepped()
    start = training.state()
    training.stepped()
    return start, values(training.state())


def interrupts_of_first_steps(kind, options, every, first):
    """Yield a session whose first step, which builds what later steps use, was interrupted, for each point."""
    for at in range(first, 20_000, every):
        training = Training(**options)
        interrupt = interrupted(getattr(training, kind), at)
        torch.set_grad_enabled(True)  # torch's own step leaves it off when it is interrupted as it ends
        if interrupt is None:
            return
        yield interrupt, training
    pytest.fail("the step has no end")


def check_steps(kind, options, every, first=1):
    start, right = right_step(options)
    casts = options["opt_level"] == "O1"
    for interrupt, training in interrupts_of_first_steps(kind, options, every, first):
        assert (X @ X.T).dtype is (torch.float16 if casts else torch.float32), interrupt
        training.restore(start)
        training.stepped()
        assert values(training.state()) == right, interrupt
        amp.reset()
        assert thread_engines() == (), interrupt
        assert _get_current_function_mode_stack() == [], interrupt
        assert not torch.is_autocast_enabled(AUTOCAST_FLAG), interrupt
        model, optimizer = training.model, training.optimizer
        assert not {**model._forward_hooks, **model._forward_pre_hooks}, interrupt
        assert not {**optimizer._optimizer_step_pre_hooks, **optimizer._optimizer_step_post_hooks}, interrupt


@pytest.fixture(autouse=True)
def _ends_clean():
    yield
    amp.reset()


@pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped")
@pytest.mark.parametrize("options", SESSIONS.values(), ids=SESSIONS)
@pytest.mark.parametrize("kind", ["stepped", "skipped", "accumulated"])
def test_the_step_after_an_interrupt_is_right(kind, options):
    check_steps(kind, options, every=101)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped")
@pytest.mark.parametrize("options", SESSIONS.values(), ids=SESSIONS)
@pytest.mark.parametrize("kind", ["stepped", "skipped", "accumulated"])
def test_the_step_after_an_interrupt_at_any_point_is_right(kind, options):
    check_steps(kind, options, every=1)


def test_parameters_whose_grouping_was_interrupted_are_grouped_again():
    """Before, their gradients stayed scaled and found_inf 0: the list of parameters was known before its groups."""
    param = nn.Parameter(torch.zeros(4))
    for interrupt in interrupted_everywhere(lambda: first_use(param)):
        torch.set_grad_enabled(True)  # an interrupt may have ended torch's own block of no_grad
        param.grad = torch.full((4,), 8.0)
        found_inf = UNSCALER[0].unscale_([param], 2.0)
        assert param.grad.tolist() == [4.0] * 4, interrupt
        param.grad = torch.full((4,), torch.inf)
        assert UNSCALER[0].unscale_([param], 2.0, found_inf=found_inf).item() == 1.0, interrupt


UNSCALER = [Unscaler()]


def first_use(param):
    UNSCALER[0] = Unscaler()
    param.grad = torch.full((4,), 8.0)
    UNSCALER[0].unscale_([param], 2.0)


def scaler_step():
    """A function that does one step with GradScaler."""
    model = nn.Linear(8, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), amp.GradScaler("cpu")

    def step():
        try:
            scaler.scale(F.cross_entropy(model(X), TARGET)).backward()
            scaler.step(optimizer)
            scaler.update()
        finally:
            optimizer.zero_grad()

    return step


def scale_loss_step():
    """A function that does one step with scale_loss at O1."""
    training = Training(opt_level="O1")

    def step():
        try:
            training.stepped()
        finally:
            training.optimizer.zero_grad()

    return step


GRAD_MODE = torch.autograd.grad_mode, torch.optim.Optimizer, torch.utils._contextlib
"""What turns grad mode off and on in a step."""


@pytest.mark.parametrize("make", [scaler_step, scale_loss_step])
def test_gradients_are_on_after_an_interrupt_in_torchs_own_blocks(make):
    step, number = make(), 0
    step()
    for interrupt in interrupted_everywhere(step, folders=[inspect.getfile(each) for each in GRAD_MODE]):
        X + 1  # at O1 an op finds out that the step has ended
        assert torch.is_grad_enabled(), interrupt
        number += 1
    assert number > 50


def half_step():
    """A function that does one step with masters at O2; no part of it is an optimizer of torch."""
    model = nn.Linear(8, 3)
    model, optimizer = amp.initialize(model, FusedAdam(model.parameters()), opt_level="O2", verbosity=0)

    def step():
        try:
            with amp.scale_loss(F.cross_entropy(model(X).float(), TARGET), optimizer) as loss:
                loss.backward()
            optimizer.step()
        finally:
            optimizer.zero_grad()

    return step


def fp16_step():
    """The same with FP16_Optimizer."""
    model = network_to_half(nn.Linear(8, 3))
    optimizer = FP16_Optimizer(FusedAdam(model.parameters()), static_loss_scale=128.0, verbose=False)

    def step():
        try:
            optimizer.backward(F.cross_entropy(model(X).float(), TARGET))
            optimizer.step()
        finally:
            optimizer.zero_grad()

    return step


@pytest.mark.parametrize("make", [half_step, fp16_step])
def test_gradients_are_on_after_an_interrupt_in_a_step_of_amplabs_own(make):
    step, off, number = make(), [], 0
    step()
    for interrupt in interrupted_everywhere(step, folders=[inspect.getfile(each) for each in GRAD_MODE]):
        off += [] if torch.is_grad_enabled() else [interrupt.where]
        torch.set_grad_enabled(True)
        number += 1
    assert off == []
    assert number > 5


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="timers of POSIX")
def test_gradients_are_on_after_an_interrupt_in_a_kernel():
    """The calls at the ends of a block of `torch.no_grad` can be interrupted themselves: in 9 of 100 such loops."""
    grads, found_inf, inv_scale = [torch.ones(16)], torch.zeros(1), torch.ones(1)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    draw, off = random.Random(0), 0
    try:
        for _ in range(300):
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.001 * draw.random())
                while True:
                    kernels.unscale_(grads, found_inf, inv_scale)
            off += not torch.is_grad_enabled()
            torch.set_grad_enabled(True)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert off == 0


def test_a_step_that_ends_in_a_block_without_gradients_leaves_them_off():
    step = scale_loss_step()
    step()
    with torch.no_grad():
        interrupted(step, 1)
        X + 1
        assert not torch.is_grad_enabled()


class AfterTheStep:
    """A hook of an optimizer that raises at the end of the second step: where the weights are not copied yet."""

    def __init__(self, optimizer, *, raises):
        self.calls, self.raises = 0, raises
        optimizer.register_step_post_hook(self)

    def __call__(self, *_):
        self.calls += 1
        if self.raises and self.calls == 2:
            raise KeyboardInterrupt


def apex_loop(raises):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    AfterTheStep(optimizer, raises=raises)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=128.0)

    def step(inputs):
        optimizer.zero_grad()
        with amp.scale_loss(model(inputs).square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()

    return step, model


def fp16_loop(raises):
    model = network_to_half(nn.Linear(8, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    AfterTheStep(inner, raises=raises)
    optimizer = FP16_Optimizer(inner, static_loss_scale=128.0, verbose=False)

    def step(inputs):
        optimizer.zero_grad()
        optimizer.backward(model(inputs).float().square().mean())
        optimizer.step()

    return step, model


@pytest.mark.parametrize("loop", [apex_loop, fp16_loop])
def test_a_step_whose_weights_an_interrupt_left_uncopied_counts_in_the_next_one(loop):
    weights = []
    for raises in (False, True):
        torch.manual_seed(0)
        step, model = loop(raises)
        inputs = torch.randn(4, 4, 8)
        step(inputs[0])
        with pytest.raises(KeyboardInterrupt) if raises else nullcontext():
            step(inputs[1])
        step(inputs[2])
        step(inputs[3])
        weights.append([each.detach().clone() for each in model.parameters()])
        amp.reset()
    assert all(map(torch.equal, *weights))
