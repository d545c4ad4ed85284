"""`unchanged_optimizers` puts back whatever a block changes in an optimizer that it steps."""

import contextlib
import copy
import random
import subprocess
import sys
import threading
import time
from collections import deque

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import amplab
from amplab import amp, optimizers
from amplab.trace import optimizer_hooks, trace_step
from amplab.trace.as_found import Undo
from amplab.trace.optimizer_hooks import observe_steps
from amplab.trace.optimizer_states import unchanged_optimizers


class OfOnesOwn(torch.optim.Optimizer):
    """Keeps its state where code of one's own does: nested, in place, in attributes, in a group that comes later."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": torch.tensor(0.1), "history": deque(maxlen=2)})
        self.taken = 0

    def step(self):
        self.taken += 1
        for group in self.param_groups:
            group["history"].append(self.taken)
            group["lr"].mul_(0.5)
            group["seen"] = True
            for parameter in group["params"]:
                state = self.state[parameter]
                nested = state.setdefault("nested", {"moments": [torch.zeros(())], "counts": (torch.zeros(()),)})
                nested["moments"][0].add_(1)
                nested["moments"].append(torch.ones(()))
                nested["counts"][0].add_(1)
                parameter.data.add_(-group["lr"])
        if self.taken % 2 == 0:
            self.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.9),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, history_size=3),
    "FusedAdam": lambda parameters: optimizers.FusedAdam(parameters, lr=0.1),
    "FusedLAMB": lambda parameters: optimizers.FusedLAMB(parameters, lr=0.1),
    "FusedNovoGrad": lambda parameters: optimizers.FusedNovoGrad(parameters, lr=0.1),
    "one's own": OfOnesOwn,
}


def bits(optimizer):
    """The state of an optimizer and what it steps, with the identities of its tensors."""
    tensors = [
        (
            id(parameter),
            parameter.detach().clone(),
            {name: (id(slot), copy.deepcopy(slot)) for name, slot in state.items()},
        )
        for parameter, state in optimizer.state.items()
    ]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return (
        tensors,
        groups,
        [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]],
    )


def plain(value):
    """Tensors as their exact bytes, the rest as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().view(-1).view(torch.uint8).tolist(), value.dtype
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple | deque) else value


def assert_same(before, after):
    assert plain(before) == plain(after)


def train(model, optimizer):
    def backward():
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) - 1).square().sum()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(backward)
        return
    backward()
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stepped", [False, True])
def test_state_parameters_and_settings_are_put_back(kind, stepped):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if stepped:
        train(model, optimizer)
    before = bits(optimizer)
    with unchanged_optimizers():
        for _ in range(2):
            train(model, optimizer)
            optimizer.param_groups[0]["lr"] /= 2
        assert plain(bits(optimizer)) != plain(before)
    assert_same(before, bits(optimizer))


TOOLS = {
    "xray": lambda model, optimizer, step: amplab.xray(model, step=step),
    "gradient_range": lambda model, optimizer, step: amplab.gradient_range(model, step=step),
    "first_nonfinite": lambda model, optimizer, step: amplab.first_nonfinite(model, step=step),
    "doctor": lambda model, optimizer, step: amplab.doctor(
        model, (torch.ones(2, 4), torch.ones(2, 4)), loss=nn.functional.mse_loss, train_step=step, optimizer=optimizer
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("stepped", [0, 3])
def test_training_goes_on_after_a_tool_as_without_it(kind, tool, stepped):
    def trained(looks):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = OPTIMIZERS[kind](model.parameters())

        def step():
            train(model, optimizer)
            return model(torch.ones(2, 4)).square().sum()

        for _ in range(stepped):
            train(model, optimizer)
        before = plain(optimizer.state_dict()), plain(vars(optimizer).get("taken"))
        if looks:
            TOOLS[tool](model, optimizer, step)
        assert (plain(optimizer.state_dict()), plain(vars(optimizer).get("taken"))) == before
        for _ in range(3):
            train(model, optimizer)
        return plain(list(model.parameters())), plain(optimizer.state_dict())

    assert trained(True) == trained(False)


def test_inside_a_trace_and_without_a_record_of_its_own(monkeypatch):
    """A model that is not the traced one, trained on the way; the records are those of the training alone."""
    judge, model = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)
    train(judge, optimizer)
    before = bits(optimizer)

    def loss():
        train(judge, optimizer)
        return judge(model(torch.ones(2, 4))).sum()

    trace = trace_step(model, loss)
    assert_same(before, bits(optimizer))
    monkeypatch.setattr("amplab.trace.untouched.unchanged_optimizers", contextlib.nullcontext)
    assert trace == trace_step(model, loss)
    assert plain(before) != plain(bits(optimizer))


def test_masters_of_an_initialized_optimizer():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    try:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=1.0)
        masters = list(amp.master_params(optimizer))
        before = [master.detach().clone() for master in masters]

        def loss():
            with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            return model(torch.ones(2, 4)).sum()

        halves = [parameter.detach().clone() for parameter in model.parameters()]
        trace_step(model, loss)
        assert all(map(torch.equal, masters, before))
        assert all(map(torch.equal, model.parameters(), halves))
    finally:
        amp.reset()


def test_other_threads_go_on():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with unchanged_optimizers():
        thread = threading.Thread(target=train, args=(model, optimizer))
        thread.start()
        thread.join()
    assert not torch.equal(model.weight, before)


def steps_beside(look, seconds=2.0):
    """Step in three threads while this one looks at another model again and again; return what the steps raise."""
    ended, raised, steps = threading.Event(), [], [0]

    def train_for_long():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        while not ended.is_set():
            try:
                train(model, optimizer)
            except RuntimeError as error:
                raised.append(str(error))
            steps[0] += 1

    threads = [threading.Thread(target=train_for_long) for _ in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            look()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert steps[0] > 100
    return raised


def test_threads_that_step_meanwhile_get_no_error():
    """torch iterates over the hooks of all optimizers in each step, and raises if the dict changes meanwhile."""

    def look():
        with unchanged_optimizers():
            pass

    own = [register_optimizer_step_pre_hook(lambda *_: None) for _ in range(2)]
    try:
        assert steps_beside(look) == []
    finally:
        for handle in own:
            handle.remove()


def test_a_watched_loop_does_not_see_the_steps_of_other_threads():
    seen = []
    with Undo() as undo:
        observe_steps(undo, before=lambda optimizer, *_: seen.append(optimizer))
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        thread = threading.Thread(target=train, args=(model, optimizer))
        thread.start()
        thread.join()
        assert seen == []
        train(model, optimizer)
        assert seen == [optimizer]
    train(model, optimizer)
    assert seen == [optimizer]


def test_the_observer_is_gone_afterwards_also_after_an_exception():
    observers = optimizer_hooks._OBSERVERS.before
    before, inside = list(observers), []
    with contextlib.suppress(KeyError), unchanged_optimizers():
        inside.append(len(observers))
        raise KeyError
    assert inside == [len(before) + 1]
    assert observers == before


def test_a_process_of_one_thread_keeps_no_hook():
    code = """
from torch.optim import optimizer as module
from amplab.trace.optimizer_states import unchanged_optimizers
with unchanged_optimizers():
    print(len(module._global_optimizer_pre_hooks), len(module._global_optimizer_post_hooks))
print(len(module._global_optimizer_pre_hooks), len(module._global_optimizer_post_hooks))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 1\n0 0\n"


def test_a_tool_before_the_first_step_leaves_the_order_of_a_schedulers_calls_to_the_loop():
    """The scheduler warns if it steps before its optimizer has; it notes on the optimizer that one has."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = dict(vars(optimizer))

    def train_step(x):
        model(x).sum().backward()
        optimizer.step()

    amplab.doctor(model, torch.ones(2, 4), optimizer=optimizer, train_step=train_step)
    assert vars(optimizer) == before
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()


def test_the_doctor_restores_every_scheduler_and_all_other_state():
    class Average:
        """Empty until it is first updated; one that cannot be restored is before it."""

        def __init__(self, *, fails=False):
            self.values, self.fails = {}, fails

        def state_dict(self):
            return dict(self.values)

        def load_state_dict(self, state):
            if self.fails:
                raise KeyError("cannot be restored")
            self.values = dict(state)

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    chained = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.StepLR(optimizer, 3)])
    average, broken = Average(), Average(fails=True)
    hooks = []

    def once(*_):
        hooks.pop().remove()

    hooks.append(optimizer.register_step_pre_hook(once))

    def train_step(x):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        plateau.step(loss.item())
        chained.step()
        average.values["weight"] = broken.values["weight"] = model.weight.detach().clone()

    before = copy.deepcopy((plateau.state_dict(), chained.state_dict()))
    with pytest.raises(KeyError, match="cannot be restored"):
        amplab.doctor(model, torch.ones(2, 2), optimizer=optimizer, train_step=train_step, stateful=[broken, average])
    assert (plateau.state_dict(), chained.state_dict()) == before
    assert average.values == {}
    assert len(optimizer._optimizer_step_pre_hooks) == 1


@pytest.mark.parametrize("make", [lambda: torch.Generator().manual_seed(1), lambda: random.Random(1)])
def test_a_generator_of_an_optimizer_is_as_before(make):
    class Rounds(torch.optim.SGD):
        def step(self, closure=None):
            draw(self.own)
            return super().step(closure)

    def draw(own):
        return torch.rand(1, generator=own).item() if isinstance(own, torch.Generator) else own.random()

    model = nn.Linear(2, 2)
    optimizer = Rounds(model.parameters(), lr=0.1)
    optimizer.own = make()

    def step():
        optimizer.step()
        return model(torch.ones(1, 2)).sum()

    amplab.xray(model, step=step)
    assert draw(optimizer.own) == draw(make())
