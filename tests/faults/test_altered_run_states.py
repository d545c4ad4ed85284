"""Run states that somebody altered, with valid checksums: refused whole by one class of error, or loaded and usable."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from alterations import altered, altered_archive, altered_bytes
from torch import nn

from amplab import GradScaler, amp, optimizers


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Run:
    """A model, its optimizer and its loss scale, of apex's API at O2 or of PyTorch's."""

    def __init__(self, kind, *, apex, seed=0):
        torch.manual_seed(seed)
        self.model, self.apex = network(), apex
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        self.scaler, self.session = GradScaler("cpu", init_scale=1024.0), amp.Session()
        if apex:
            self.model, self.optimizer = self.session.initialize(
                self.model, self.optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0
            )

    def step(self):
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 6)).float().square().mean()
        if self.apex:
            with self.session.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    @property
    def parts(self):
        scale = {"amp": self.session} if self.apex else {"scaler": self.scaler}
        return {"model": self.model, "optimizer": self.optimizer, **scale}

    def bits(self):
        """Everything that loading writes, as something that compares bitwise."""
        scale = self.session.state_dict() if self.apex else self.scaler.state_dict()
        name, *words = np.random.get_state()
        generators = torch.get_rng_state(), random.getstate(), name, [each.tolist() for each in words[:1]], words[1:]
        masters = list(self.session.master_params(self.optimizer)) if self.apex else []
        own = [*self.model.parameters(), *self.model.buffers()]
        return frozen((own, masters, self.optimizer.state_dict(), scale, generators))


def frozen(value):
    """A copy of nested values in which a tensor is its dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().clone().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: frozen(each) for key, each in value.items()}
    return [frozen(each) for each in value] if isinstance(value, list | tuple) else copy.copy(value)


KINDS = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "FusedAdam": optimizers.FusedAdam,
    "RMSprop": torch.optim.RMSprop,
}


@pytest.fixture(autouse=True)
def kept_generators():
    states = np.random.get_state(), random.getstate()
    yield
    np.random.set_state(states[0])
    random.setstate(states[1])


@pytest.fixture
def saved(tmp_path, request):
    kind, apex = request.param
    run = Run(KINDS[kind], apex=apex)
    for _ in range(2):
        run.step()
    amp.save_run_state(tmp_path / "run.pt", **run.parts, position=2)
    return tmp_path / "run.pt", KINDS[kind], apex


def load_or_refuse(path, run):
    """Load into a run: whether the file was accepted. An error leaves the run bit for bit, and its message says so."""
    before = run.bits()
    refused = ""
    try:
        amp.load_run_state(path, **run.parts)
    except amp.RunStateError as refusal:
        refused = str(refusal)
    if refused:
        assert str(path) in refused
        assert run.bits() == before
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # values may be absurd, but a step does not raise
        run.step()
    return True


def attack(saved, seeds, alter):
    path, kind, apex = saved
    whole, run = path.read_bytes(), Run(kind, apex=apex, seed=1)
    run.step()
    accepted = 0
    for seed in seeds:
        path.write_bytes(whole)
        alter(path, random.Random(seed))
        if load_or_refuse(path, run):
            accepted += 1
            run = Run(kind, apex=apex, seed=1)
    path.write_bytes(whole)
    assert load_or_refuse(path, run)
    return accepted


def alter_values(path, random):
    state = torch.load(path, weights_only=True)
    part = random.choice([key for key in state if key not in ("position", "extra", "opt_level", "torch", "amplab")])
    if random.random() < 0.1:
        del state[part]
    else:
        state[part] = altered(state[part], random)
    torch.save(state, path)


def alter_bytes(path, random):
    path.write_bytes(altered_bytes(path.read_bytes(), random))


RUNS = [("SGD", False), ("AdamW", True), ("FusedAdam", False), ("RMSprop", False), ("FusedAdam", True)]
every_run = pytest.mark.parametrize(
    "saved", RUNS, indirect=True, ids=[f"{k}-{'O2' if a else 'scaler'}" for k, a in RUNS]
)
ALTERATIONS = {"values": alter_values, "archive": altered_archive, "bytes": alter_bytes}


@every_run
def test_an_altered_file_is_refused_whole_or_usable(saved, capsys):
    for alter in ALTERATIONS.values():
        attack(saved, range(30), alter)


@pytest.mark.long
@every_run
def test_many_altered_files(saved, capsys):
    for alter in ALTERATIONS.values():
        attack(saved, range(1000, 2000), alter)


def of_adam(change):
    """An alteration of the state_dict of the one optimizer in a file."""

    def alter(state):
        change(state["optimizers"][0]["state"])

    return alter


def of_model(name, change):
    def alter(state):
        state["models"][0][name] = change(state["models"][0][name])

    return alter


def nested(weight):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these may change
        return torch.nested.nested_tensor(list(weight))


SINGLE = {
    "mark": (lambda state: state.update(amplab_run_state=torch.ones(3)), "has format tensor([1., 1., 1.])"),
    "no exp_avg": (of_adam(lambda each: each["state"][0].pop("exp_avg")), "parameter 0: its state has no exp_avg"),
    "lr -1": (of_adam(lambda each: each["param_groups"][0].update(lr=-1.0)), "lr is -1.0: expected a number >= 0"),
    "lr nan": (of_adam(lambda each: each["param_groups"][0].update(lr=float("nan"))), "lr is nan"),
    "betas": (of_adam(lambda each: each["param_groups"][0].update(betas=(0.9, 1.5))), "refuses its options"),
    "groups": (of_adam(lambda each: each["param_groups"].append({"params": [6]})), "groups of [6, 1] parameters"),
    "unknown": (of_adam(lambda each: each["state"].update({9: {}})), "its state has parameter 9, which no group has"),
    "step": (of_adam(lambda each: each["state"][0].update(step=torch.tensor(-1.0))), "step is tensor(-1.)"),
    "sparse": (of_adam(lambda each: each["state"][0].update(exp_avg=torch.zeros(8, 6).to_sparse())), "sparse_coo"),
    "kind": (of_adam(lambda each: each["state"][0].update(exp_avg=torch.zeros(8, 6).cfloat())), "complex (8, 6)"),
    "int8": (of_model("0.weight", torch.Tensor.char), "0.weight is torch.int8, torch.strided in the file and torch.f"),
    "bool": (of_model("0.weight", torch.Tensor.bool), "0.weight is torch.bool"),
    "complex": (of_model("0.weight", torch.Tensor.cfloat), "0.weight is torch.complex64"),
    "meta": (of_model("0.weight", lambda each: each.to("meta")), "tensors without values"),
    "sparse lr": (of_adam(lambda each: each["param_groups"][0].update(lr=torch.ones(1).to_sparse())), "lr is tensor"),
    "nested": (of_model("0.weight", nested), "cannot be compared"),
    "shape": (of_model("0.weight", torch.Tensor.t), "0.weight is (6, 8) in the file and (8, 6) in the model"),
    "no models": (lambda state: state.pop("models"), 'the file has no "models"'),
    "growth": (lambda state: state["scaler"].update(growth_factor=float("nan")), "growth_factor"),
    "words": (lambda state: state["rng"]["numpy"].update(position=10**6), "position 1000000"),
}


@pytest.mark.parametrize("saved", [("AdamW", False)], indirect=True)
def test_each_alteration_is_named(saved):
    path, kind, apex = saved
    run = Run(kind, apex=apex, seed=1)
    before = run.bits()
    whole = torch.load(path, weights_only=True)
    for name, (alter, said) in SINGLE.items():
        state = copy.deepcopy(whole)
        alter(state)
        torch.save(state, path)
        with pytest.raises(amp.RunStateError) as refusal:
            amp.load_run_state(path, **run.parts)
        assert said in str(refusal.value), name
        assert name == "mark" or "nothing was loaded" in str(refusal.value)
        assert run.bits() == before, name


class Suspicious(nn.Linear):
    """A module that refuses its extra state only while it is loaded."""

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        raise KeyError("a key of my own")


@pytest.mark.parametrize("saved", [("AdamW", False)], indirect=True)
def test_an_error_while_values_are_copied_takes_everything_back(saved):
    path, kind, apex = saved
    run = Run(kind, apex=apex, seed=1)
    last = Suspicious(2, 2)
    amp.save_run_state(path, model=[run.model, last], optimizer=run.optimizer, scaler=run.scaler)
    run.step()
    before = run.bits(), frozen(last.weight)
    with pytest.raises(amp.RunStateError, match="a key of my own"):
        amp.load_run_state(path, model=[run.model, last], optimizer=run.optimizer, scaler=run.scaler)
    assert (run.bits(), frozen(last.weight)) == before
