"""Whole runs in one file: resumed bit for bit, at the same level or another, with AMP and without."""

import contextlib
import copy
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab import amp
from amplab.trace.untouched import untouched

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
}


def network():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))


class Run:
    """A training that draws from every generator: dropout from torch, noise from numpy, the batch from random."""

    def __init__(self, problem, name="sgd", *, seed=0):
        torch.manual_seed(seed)
        self.problem, self.model = problem, network()
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.8)
        self.position = 0

    def loss(self):
        inputs, labels = self.problem.batch(random.randrange(16))
        noise = torch.from_numpy(np.random.standard_normal(inputs.shape).astype(np.float32))
        return F.cross_entropy(self.model(inputs + noise * 0.1).float(), labels)

    def train(self, steps):
        losses = []
        for _ in range(steps):
            losses.append(self.step().item())
            self.optimizer.zero_grad()
            self.schedule.step()
            self.position += 1
        return losses

    def save(self, path, **scaling):
        extra = {"schedule": self.schedule.state_dict()}
        amp.save_run_state(
            path, model=self.model, optimizer=self.optimizer, position=self.position, extra=extra, **scaling
        )

    def load(self, path, **scaling):
        state = amp.load_run_state(path, model=self.model, optimizer=self.optimizer, **scaling)
        self.schedule.load_state_dict(state.extra["schedule"])
        self.position = state.position
        return state


class ApexRun(Run):
    def __init__(self, problem, level, name="sgd", *, seed=0):
        super().__init__(problem, name, seed=seed)
        self.session = amp.Session()
        # A short window, so that the scale and its count of clean steps are in the middle of something.
        self.session.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, scale_window=4)

    def step(self):
        with self.session.casting():
            loss = self.loss()
            with self.session.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        self.optimizer.step()
        return loss


class TorchRun(Run):
    def __init__(self, problem, dtype, name="sgd", *, seed=0):
        super().__init__(problem, name, seed=seed)
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    def step(self):
        with torch.autocast("cpu", self.dtype):
            loss = self.loss()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


class Float32Run(Run):
    def step(self):
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.fixture(autouse=True)
def generators_are_restored():
    numpy_state, python_state = np.random.get_state(), random.getstate()
    random.seed(5)
    np.random.seed(6)
    yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)


def same_values(left, right):
    return all(map(torch.equal, left.state_dict().values(), right.state_dict().values()))


def same_state(left, right):
    """Whether two optimizers hold the same tensors, in the same dtypes."""
    flat = [[value for state in each.state.values() for value in state.values()] for each in (left, right)]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*flat, strict=True))


# -- resumed bit for bit -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(problem, tmp_path, level, name):
    run, path = ApexRun(problem, level, name), tmp_path / "run.pt"
    run.train(6)
    run.save(path, amp=run.session)
    losses = run.train(7)
    assert all(param.isfinite().all() for param in run.model.parameters())

    twin = ApexRun(problem, level, name, seed=1)
    twin.train(3)  # generators, weights, momenta and scale are elsewhere
    assert twin.load(path, amp=twin.session).notes == ()
    assert twin.position == 6
    assert twin.train(7) == losses
    assert same_values(run.model, twin.model)
    assert same_state(run.optimizer, twin.optimizer)
    assert run.session.state_dict() == twin.session.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_under_torch_autocast_resumes_too(problem, tmp_path, dtype, name):
    run, path = TorchRun(problem, dtype, name), tmp_path / "run.pt"
    run.train(6)
    run.save(path, scaler=run.scaler)
    losses = run.train(7)

    twin = TorchRun(problem, dtype, name, seed=1)
    assert twin.load(path, scaler=twin.scaler).notes == ()
    assert twin.train(7) == losses
    assert same_values(run.model, twin.model)
    assert run.scaler.state_dict() == twin.scaler.state_dict()
    assert twin.scaler.get_scale() > 1024.0


def test_the_module_stands_for_its_default_session(problem, tmp_path):
    run, path = Float32Run(problem), tmp_path / "run.pt"
    amp.initialize(run.model, run.optimizer, opt_level="O1", verbosity=0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}})
    run.save(path, amp=amp)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
    run.load(path, amp=amp)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}}


def test_several_models_and_optimizers(problem, tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        models = [nn.Linear(4, 3), nn.Linear(3, 4)]
        return models, [OPTIMIZERS[name](model.parameters()) for name, model in zip(OPTIMIZERS, models, strict=True)]

    (models, optimizers), path = make(0), tmp_path / "run.pt"
    for _ in range(2):
        models[1](models[0](torch.ones(2, 4))).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    amp.save_run_state(path, model=models, optimizer=optimizers)
    others, other_optimizers = make(1)
    amp.load_run_state(path, model=others, optimizer=other_optimizers)
    assert all(map(same_values, models, others))
    assert all(map(same_state, optimizers, other_optimizers))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_generators_of_cuda_and_tensors_on_it(problem, tmp_path):
    path, model = tmp_path / "run.pt", network().cuda()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    model(torch.randn(4, 16, device="cuda")).sum().backward()
    optimizer.step()
    amp.save_run_state(path, model=model, optimizer=optimizer)
    drawn = torch.rand(3, device="cuda")
    twin = network().cuda()
    twin_optimizer = OPTIMIZERS["adam"](twin.parameters())
    amp.load_run_state(path, model=twin, optimizer=twin_optimizer)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert same_values(model, twin)
    assert same_state(optimizer, twin_optimizer)
    amp.load_run_state(path, model=network())  # and on the CPU


def test_position_and_extra_come_back_as_they_were(tmp_path):
    path = tmp_path / "run.pt"
    position = {"epoch": 3, "order": torch.randperm(5), "seen": (1, 2.5, None, True, "α", b"\x00")}
    own = torch.Generator().manual_seed(3)
    amp.save_run_state(str(path), position=position, extra=[own.get_state()])
    state = amp.load_run_state(str(path))
    assert {**state.position, "order": None} == {**position, "order": None}
    assert torch.equal(state.position["order"], position["order"])
    assert torch.equal(state.extra[0], own.get_state())


# -- with AMP and without ------------------------------------------------------------------------------


def test_from_amp_to_float32(problem, tmp_path):
    run, path = TorchRun(problem, torch.bfloat16), tmp_path / "run.pt"
    run.train(4)
    run.save(path, scaler=run.scaler)
    plain = Float32Run(problem, seed=1)
    notes = plain.load(path).notes
    assert notes == ("the saved loss scale of scaler is ignored: scaler was not passed, or is disabled",)
    assert same_values(run.model, plain.model)
    assert same_state(run.optimizer, plain.optimizer)
    assert all(np.isfinite(plain.train(3)))


def test_from_float32_to_amp(problem, tmp_path):
    plain, path = Float32Run(problem), tmp_path / "run.pt"
    plain.train(4)
    plain.save(path)
    run = TorchRun(problem, torch.float16, seed=1)
    assert run.load(path, scaler=run.scaler).notes == (
        "the file has no loss scale of scaler: scaler keeps its initial loss scale",
    )
    assert run.scaler.get_scale() == 1024.0
    assert same_values(run.model, plain.model)
    assert all(np.isfinite(run.train(3)))


@pytest.mark.parametrize(("before", "after"), [("O2", "O0"), ("O0", "O2"), ("O1", "O3"), ("O3", "O1")])
def test_from_level_to_level(problem, tmp_path, before, after):
    run, path = ApexRun(problem, before, "adam"), tmp_path / "run.pt"
    run.train(3)
    run.save(path, amp=run.session)
    other = ApexRun(problem, after, "adam", seed=1)
    scale = other.session.loss_scale()
    other.session.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": 0}})
    notes = other.load(path, amp=other.session).notes
    assert notes == (f"saved at opt_level {before}, loaded at {after}",)
    for name, value in run.model.state_dict().items():
        rounded = value.half().float() if after == "O3" and value.is_floating_point() else value
        assert torch.equal(other.model.state_dict()[name], rounded)
    assert all(np.isfinite(other.train(2)))


def test_a_disabled_scaler_and_a_disabled_session_have_nothing_to_save(problem, tmp_path):
    run, path = Float32Run(problem), tmp_path / "run.pt"
    run.save(path, scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert run.load(path).notes == ()
    session = amp.Session()
    session.initialize(run.model, run.optimizer, enabled=False)
    run.save(path, amp=session)
    assert run.load(path, amp=session).notes == ()


def test_weights_alone_can_be_loaded(problem, tmp_path):
    run, path = TorchRun(problem, torch.bfloat16), tmp_path / "run.pt"
    run.train(2)
    run.save(path, scaler=run.scaler)
    model = network()
    notes = amp.load_run_state(path, model=model).notes
    assert same_values(model, run.model)
    assert notes[0] == "1 saved optimizer(s) ignored: none was passed"
    assert len(notes) == 2


def test_adam_goes_on_as_adamw(tmp_path):
    path, model = tmp_path / "run.pt", nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    amp.save_run_state(path, optimizer=optimizer)
    other = torch.optim.AdamW(model.parameters())
    amp.load_run_state(path, optimizer=other)
    assert same_state(optimizer, other)


def test_a_scaler_is_saved_between_iterations_alone(tmp_path):
    param = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([param], lr=0.1), amp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"call update\(\) before saving"):
        amp.save_run_state(tmp_path / "run.pt", optimizer=optimizer, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    amp.save_run_state(tmp_path / "run.pt", optimizer=optimizer, scaler=scaler)
    disabled = amp.GradScaler("cpu", enabled=False)
    notes = amp.load_run_state(tmp_path / "run.pt", optimizer=optimizer, scaler=disabled).notes
    assert any("or is disabled" in note for note in notes)
    with pytest.raises(TypeError, match="scaler: got a int, expected a GradScaler"):
        amp.save_run_state(tmp_path / "run.pt", scaler=3)


def save_in_a_handler(model, path, tool):
    """Save in a signal's handler while the second layer of `model` runs in `tool`, as a preempted job may."""

    class Signals(nn.Module):
        def forward(self, x):
            signal.raise_signal(signal.SIGUSR1)
            return x

    before = signal.signal(signal.SIGUSR1, lambda *_: amp.save_run_state(path, model=model))
    model.insert(1, Signals())
    try:
        tool(model)
    finally:
        signal.signal(signal.SIGUSR1, before)


TOOLS = {
    "xray": lambda model: amplab.xray(model, torch.ones(1, 2), opt_level="O2"),
    "first_nonfinite": lambda model: amplab.first_nonfinite(model, step=lambda: model(torch.ones(1, 2)).sum()),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_tool_has_changed_is_not_saved(tmp_path, tool):
    model, path = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), tmp_path / "run.pt"
    with pytest.raises(RuntimeError, match="xray, or another tool that tries a step"):
        save_in_a_handler(model, path, TOOLS[tool])
    assert not path.exists()
    save_in_a_handler(model, path, lambda model: model(torch.ones(1, 2)))
    other = nn.Linear(2, 2)
    amp.save_run_state(path, model=other)
    with untouched(model):
        with pytest.raises(RuntimeError, match="is running this model"):
            amp.load_run_state(path, model=[other, model[0]])
        amp.load_run_state(path, model=other)


def test_the_same_names_in_another_order_are_refused_and_other_names_are_not(tmp_path):
    """A new version of a model defines two layers of one shape in another order; a wrapper adds a prefix."""

    def made(order, prefix=""):
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in order})
        named = [(prefix + name, each) for name, each in model.named_parameters()]
        optimizer = torch.optim.Adam(named, lr=0.01)
        sum(layer(torch.ones(2, 4)).sum() for layer in model.values()).backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made("ab")
    amp.save_run_state(tmp_path / "run.pt", model=model, optimizer=optimizer)
    other, swapped = made("ba")
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(amp.RunStateError, match=r"is 'a.weight' in the file and 'b.weight' in the optimizer"):
        amp.load_run_state(tmp_path / "run.pt", model=other, optimizer=swapped)
    assert all(map(torch.equal, other.state_dict().values(), before.values()))
    wrapped, prefixed = made("ab", "module.")
    amp.load_run_state(tmp_path / "run.pt", model=wrapped, optimizer=prefixed)
    assert torch.equal(wrapped["a"].weight, model["a"].weight)


def test_a_learning_rate_of_numpy_is_saved_as_a_number(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.param_groups[0]["lr"] = np.float64(0.3) * 0.9
    amp.save_run_state(tmp_path / "run.pt", optimizer=optimizer)
    other = torch.optim.SGD([parameter], lr=0.1)
    amp.load_run_state(tmp_path / "run.pt", optimizer=other)
    assert other.param_groups[0]["lr"] == 0.3 * 0.9
    assert type(other.param_groups[0]["lr"]) is float


class Interrupted(nn.Linear):
    """A layer that meets Ctrl-C at some of the calls that load it."""

    at: tuple[int, ...] = ()
    calls = 0

    def load_state_dict(self, *args, **kwargs):
        self.calls += 1
        if self.calls in self.at:
            signal.raise_signal(signal.SIGINT)
        return super().load_state_dict(*args, **kwargs)


@pytest.mark.parametrize("at", [(1,), (1, 2), (2,)])
def test_a_load_that_is_interrupted_loads_all_or_nothing(tmp_path, at):
    """The second call takes the values back; a second Ctrl-C waits for its end."""
    saved, now = Interrupted(4, 4), Interrupted(4, 4)
    amp.save_run_state(tmp_path / "run.pt", model=saved, optimizer=OPTIMIZERS["sgd"](saved.parameters()))
    before, now.at = copy.deepcopy(now.state_dict()), at
    optimizer = torch.optim.SGD(now.parameters(), lr=7.0)
    with pytest.raises(KeyboardInterrupt) if 1 in at else contextlib.nullcontext():
        amp.load_run_state(tmp_path / "run.pt", model=now, optimizer=optimizer)
    expected = before if 1 in at else saved.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in now.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == (7.0 if 1 in at else 0.05)
