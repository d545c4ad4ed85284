"""A tool between an overflow and the step that is skipped for it, and in a step, in apex's order of calls."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab import amp
from amplab.fp16_utils import FP16_Optimizer

INF = float("inf")
X, Y = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(3, 2)


def loss_of(model):
    return F.mse_loss(model(X).float(), Y)


def iteration(model, optimizer, factor=1.0):
    optimizer.zero_grad()
    loss = loss_of(model) * factor
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def whole(model, optimizer):
    """A step= that trains by itself, as with a discriminator."""
    iteration(model, optimizer)
    optimizer.step()
    return loss_of(model)


def overflowing(model, optimizer):
    """A step= whose own gradients overflow and that leaves the step to the program."""
    iteration(model, optimizer, 1e6)
    return loss_of(model)


def with_step(tool):
    return lambda model, optimizer, step: tool(model, step=lambda: step(model, optimizer))


TOOLS = {
    tool.__name__: with_step(tool)
    for tool in (amplab.xray, amplab.first_nonfinite, amplab.gradient_range, amplab.doctor)
}
TOOLS["doctor train_step"] = lambda model, optimizer, step: amplab.doctor(
    model, (X, Y), loss=F.mse_loss, train_step=lambda batch: whole(model, optimizer), optimizer=optimizer
)


@pytest.fixture(autouse=True)
def ended():
    yield
    amp.reset()


def trained(level, tool, step):
    amp.reset()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    outcomes = []
    for number in range(4):
        iteration(model, optimizer, 1e6 if number == 1 else 1.0)
        if tool is not None and number in (1, 2):
            tool(model, optimizer, step)
        optimizer.step()
        outcomes.append(amp.last_step(optimizer).stepped)
    return [param.detach().float().clone() for param in model.parameters()], amp.state_dict(), outcomes


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("step", [whole, overflowing])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", TOOLS)
def test_the_step_that_is_due_to_be_skipped_is_the_only_one(name, level, step):
    weights, state, outcomes = trained(level, TOOLS[name], step)
    expected, expected_state, _ = trained(level, None, step)
    assert outcomes == [True, False, True, True]
    assert all(map(torch.equal, weights, expected))
    assert state == expected_state


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["xray", "first_nonfinite", "gradient_range", "doctor"])
def test_a_tool_in_a_hook_of_the_step_leaves_the_weights_of_that_step(name, level, hook):
    """At O2 the model's half weights are copied from the masters when the step has ended."""

    def after_each_step(tool):
        amp.reset()
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if tool is not None:
            getattr(optimizer, hook)(lambda *_: (tool(model, step=lambda: loss_of(model)), None)[1])
        found = []
        for number in range(4):
            iteration(model, optimizer, 1e6 if number == 1 else 1.0)
            optimizer.step()
            found += [param.detach().clone() for param in model.parameters()]
        return found

    assert all(map(torch.equal, after_each_step(getattr(amplab, name)), after_each_step(None)))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("name", [None, *TOOLS])
def test_half_weights_written_before_the_first_backward_reach_the_masters(name):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    if name is not None:
        TOOLS[name](model, optimizer, whole)
    with torch.no_grad():
        model.weight.copy_(torch.full((2, 4), 2.0))
    iteration(model, optimizer)
    assert torch.equal(next(iter(amp.master_params(optimizer))), torch.full((2, 4), 2.0))


class MatrixStep(torch.optim.SGD):
    """Multiplies matrices in its step, as Muon does, and notes the dtype."""

    def step(self, closure=None):
        self.seen = [
            (each @ each.T).dtype for group in self.param_groups for each in group["params"] if each.dim() == 2
        ]
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("name", [None, *TOOLS])
def test_a_step_in_which_a_tool_is_called_has_no_casts(name):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = MatrixStep(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    if name is not None:
        optimizer.register_step_pre_hook(lambda *_: None if optimizer.busy else call(name))
        optimizer.busy = False

    def call(name):
        optimizer.busy = True
        TOOLS[name](model, optimizer, whole)

    iteration(model, optimizer)
    optimizer.step()
    assert optimizer.seen == [torch.float32]


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_forward_in_a_hook_of_the_step_leaves_the_weights_of_that_step(hook):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    getattr(optimizer, hook)(lambda *_: (loss_of(model), None)[1])
    for _ in range(3):
        iteration(model, optimizer)
        optimizer.step()
        pairs = zip(model.parameters(), amp.master_params(optimizer), strict=True)
        assert all(torch.equal(half, master.half()) for half, master in pairs)


@pytest.mark.parametrize("overflows", [True, False])
def test_a_tool_between_backward_and_step_of_fp16_optimizer(overflows):
    def trained(is_examined):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).half()
        optimizer = FP16_Optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 256.0},
            verbose=False,
        )
        other = torch.randn(3, 4).half() * (6e4 if overflows else 1)

        def step():
            loss = model(other).float().square().mean()
            optimizer.backward(loss, retain_graph=True)
            return loss

        for number in range(4):
            optimizer.zero_grad()
            optimizer.backward(loss_of(lambda x: model(x.half())))
            if is_examined and number == 2:
                amplab.xray(model, step=step)
            optimizer.step()
        return [*model.parameters()], optimizer.loss_scale

    found, scale = trained(True)
    expected, expected_scale = trained(False)
    assert scale == expected_scale
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_session_that_another_thread_trains_goes_on_during_a_tool(level):
    begun = threading.Event()  # the weights are drawn: threads share the generator

    def trained():
        torch.manual_seed(0)
        model, session = nn.Linear(4, 2), amp.Session()
        begun.set()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session.initialize(model, optimizer, opt_level=level, verbosity=0)
        with session.casting():
            for number in range(150):
                optimizer.zero_grad()
                loss = loss_of(model) * (INF if number % 8 == 1 else 1.0)
                with session.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
        return [param.detach().clone() for param in model.parameters()], session.state_dict()

    expected, expected_state = trained()
    begun.clear()
    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(trained)
        begun.wait()
        while not training.done():
            amplab.gradient_range(nn.Linear(4, 2), X)
    found, state = training.result()
    assert all(map(torch.equal, found, expected))
    assert state == expected_state


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["xray", "first_nonfinite", "gradient_range"])
def test_a_second_model_that_the_step_trains_is_as_before(name, level):
    """A loss that trains the discriminator."""
    torch.manual_seed(0)
    models = generator, discriminator = nn.Linear(4, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in models]
    amp.initialize([*models], optimizers, opt_level=level, verbosity=0)

    def step():
        optimizers[1].zero_grad()
        loss = discriminator(generator(X).detach()).float().square().mean()
        with amp.scale_loss(loss, optimizers[1]) as scaled_loss:
            scaled_loss.backward()
        optimizers[1].step()
        return discriminator(generator(X)).float().mean()

    step()
    weights = [*discriminator.parameters(), *amp.master_params(optimizers[1])]
    before = [each.detach().clone() for each in weights]
    getattr(amplab, name)(generator, step=step)
    assert all(map(torch.equal, weights, before))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", TOOLS)
def test_gradients_in_flat_buffers_wait_for_their_step(name, level):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, combine_grad=True)
    iteration(model, optimizer)
    optimizer.step()
    iteration(model, optimizer, 3.0)
    grads = [each.grad for each in amp.master_params(optimizer)]
    before = [each.clone() for each in grads]
    TOOLS[name](model, optimizer, whole)
    assert all(each.grad is grad for each, grad in zip(amp.master_params(optimizer), grads, strict=True))
    assert all(map(torch.equal, grads, before))


def test_edits_after_a_step_that_raised_are_kept():
    """As averages of the weights that are put in for an evaluation; the first forward shows the step's own weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    iteration(model, optimizer)
    optimizer.step()
    iteration(model, optimizer)

    def fail(*_):
        raise KeyError("as of a hook")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        optimizer.step()
    hook.remove()
    model(X)
    for _ in range(2):
        with torch.no_grad():
            model.weight.fill_(2.0)
        model(X)
        assert torch.equal(model.weight, torch.full((2, 4), 2.0).half())
