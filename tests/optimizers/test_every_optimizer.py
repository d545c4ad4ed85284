"""What all fused optimizers have in common: they learn, skip to the bit, and work under every scaler and opt_level."""

import copy
import functools
import inspect
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import required

from amplab import amp, optimizers
from amplab.amp import GradScaler

# A learning rate with which each halves the loss of the task in 60 steps.
RATES = {
    "FusedSGD": 0.1,
    "FusedAdam": 0.01,
    "FusedAdamW": 0.01,
    "FusedAdagrad": 0.1,
    "FusedAdadelta": 3.0,
    "FusedRMSprop": 0.01,
    "FusedRMSpropTF": 0.01,
    "FusedLAMB": 0.05,
    "FusedMixedPrecisionLamb": 0.05,
    "FusedNovoGrad": 0.5,
    "FusedAdamP": 0.01,
    "FusedBertAdam": 0.01,
    "NpuFusedSGD": 0.1,
    "NpuFusedAdam": 0.01,
    "NpuFusedAdamW": 0.01,
    "NpuFusedAdamP": 0.01,
    "NpuFusedBertAdam": 0.01,
    "NpuFusedAdadelta": 3.0,
    "NpuFusedLamb": 0.05,
    "Lamb": 0.05,
    "NpuFusedRMSprop": 0.01,
    "NpuFusedRMSpropTF": 0.01,
}
NAMES = pytest.mark.parametrize("name", RATES)
# Those with a step of their own; the others are these with other arguments.
STEPPING = pytest.mark.parametrize("name", [name for name in RATES if "Npu" not in name] + ["NpuFusedLamb"])
STEPS = 60


def make(name, params):
    return getattr(optimizers, name)(params, lr=RATES[name])


class Task:
    """A small regression: a model, and its loss on the same batch at every call."""

    def __init__(self, dtype=torch.float32):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1)).to(dtype)
        self.inputs = torch.randn(64, 8).to(dtype)

    def loss(self, model=None):
        outputs = (model or self.model)(self.inputs).float()
        return (outputs - self.inputs[:, :1].float().sin() * 2).square().mean()


def bits(optimizer):
    """Weights and state, all of it."""
    params = list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
    return copy.deepcopy([*params, *(optimizer.state[param] for param in params)])


def equal_bits(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_bits(a[key], b[key]) for key in a)
    return all(equal_bits(x, y) for x, y in zip(a, b, strict=True))


def test_there_is_no_other():
    others = {"LARC", "FusedOptimizer", "merge_groups"}
    assert set(RATES) == set(optimizers.__all__) - others


@NAMES
def test_it_learns(name):
    task = Task()
    optimizer = make(name, task.model.parameters())
    first = task.loss().item()
    for _ in range(STEPS):
        optimizer.zero_grad()
        task.loss().backward()
        optimizer.step()
    assert task.loss().item() < first / 2


@STEPPING
@pytest.mark.parametrize("scaler", [GradScaler, torch.amp.GradScaler])
def test_under_a_scaler_it_steps_as_alone_and_skips_to_the_bit(name, scaler):
    alone, scaled = Task(), Task()
    plain, fused = make(name, alone.model.parameters()), make(name, scaled.model.parameters())
    scaler = scaler("cpu", init_scale=2.0**10)
    for step in range(8):
        before = bits(fused) if step in (3, 6) else None
        spoilt = before is not None
        fused.zero_grad()
        scaler.scale(scaled.loss() * (float("inf") if spoilt else 1.0)).backward()
        scaler.step(fused)
        scaler.update()
        if spoilt:
            assert equal_bits(bits(fused), before)
            continue
        plain.zero_grad()
        alone.loss().backward()
        plain.step()
    # Scales are powers of two and exact; so is what comes of them.
    assert scaler.get_scale() == 2.0**8
    for mine, theirs in zip(scaled.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@STEPPING
def test_a_first_step_that_is_skipped_changes_nothing(name):
    task = Task()
    optimizer, scaler = make(name, task.model.parameters()), GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(list(task.model.parameters()))
    scaler.scale(task.loss() * float("inf")).backward()
    scaler.step(optimizer)
    assert not scaler.last_step.stepped
    assert equal_bits(list(task.model.parameters()), before)
    scaler.update()
    fresh = Task()
    other = make(name, fresh.model.parameters())
    for each, of in ((optimizer, task), (other, fresh)):
        each.zero_grad()
        of.loss().backward()
        each.step()
    assert equal_bits(list(task.model.parameters()), list(fresh.model.parameters()))


@STEPPING
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_under_the_apex_face(name, opt_level):
    task = Task()
    optimizer = make(name, task.model.parameters())
    try:
        model, optimizer = amp.initialize(task.model, optimizer, opt_level=opt_level, verbosity=0, loss_scale="dynamic")
        losses, skipped = [], None
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = task.loss(model)
            losses.append(loss.item())
            with amp.scale_loss(loss * (float("inf") if step == 5 else 1.0), optimizer) as scaled_loss:
                scaled_loss.backward()
            before = bits(optimizer) if step == 5 else None
            optimizer.step()
            if step == 5:
                skipped = equal_bits(bits(optimizer), before)
    finally:
        amp.reset()
    assert skipped
    assert min(losses[-5:]) < losses[0] / 2


@STEPPING
def test_sparse_gradients_are_refused(name):
    weight = nn.Parameter(torch.ones(4, 2))
    optimizer = make(name, [weight])
    weight.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


@STEPPING
def test_parameters_without_gradients_stay_and_may_come_later(name):
    first, second = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2, 5))
    optimizer = make(name, [first, second])
    first.grad = torch.ones(3, 4)
    optimizer.step()
    assert not torch.equal(first, torch.ones(3, 4))
    assert torch.equal(second, torch.ones(2, 5))
    second.grad = torch.ones(2, 5)
    optimizer.step()
    assert not torch.equal(second, torch.ones(2, 5))
    assert bool(second.isfinite().all())


@NAMES
def test_groups_have_settings_of_their_own(name):
    first, second = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    optimizer = getattr(optimizers, name)([{"params": [first]}, {"params": [second], "lr": 0.0}], lr=RATES[name])
    first.grad, second.grad = torch.full((3, 4), 0.5), torch.full((3, 4), 0.5)
    optimizer.step()
    assert not torch.equal(first, torch.ones(3, 4))
    assert torch.equal(second, torch.ones(3, 4))


@STEPPING
def test_a_closure_is_evaluated_with_gradients(name):
    task = Task()
    optimizer = make(name, task.model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = task.loss()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure).item() != first.item()


@STEPPING
def test_empty_parameters_and_numbers(name):
    params = [nn.Parameter(torch.ones(shape)) for shape in ((), (0,), (0, 3), (1, 1))]
    optimizer = make(name, params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all(bool(param.isfinite().all()) for param in params)


def copied_by_state_dict(optimizer):
    params = [nn.Parameter(param.detach().clone()) for param in optimizer.param_groups[0]["params"]]
    fresh = type(optimizer)(params, lr=RATES[type(optimizer).__name__])
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return fresh


def copied_by_pickle(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


# What changes the rule, and must come along.
CHANGES = {
    "FusedLAMB": {"adam_w_mode": False, "use_nvlamb": True, "weight_decay": 0.1},
    "FusedMixedPrecisionLamb": {"adam_w_mode": False, "weight_decay": 0.1},
    "FusedNovoGrad": {"reg_inside_moment": True, "weight_decay": 0.1},
    "NpuFusedLamb": {"adam": True},
    "Lamb": {"adam": True},
}


@NAMES
@pytest.mark.parametrize("copied", [copy.deepcopy, copied_by_pickle, copied_by_state_dict])
@pytest.mark.parametrize("done", [0, 2])
def test_a_copy_goes_on_to_the_same_bits(name, copied, done):
    params = [nn.Parameter(torch.linspace(-1, 2, 12).reshape(3, 4)), nn.Parameter(torch.linspace(1, 3, 5))]
    optimizer = getattr(optimizers, name)(params, lr=RATES[name], **CHANGES.get(name, {}))
    assert all(optimizer.param_groups[0][key] == value for key, value in CHANGES.get(name, {}).items())
    for _ in range(done):
        for param in params:
            param.grad = param.detach().cos()
        optimizer.step()
    other = copied(optimizer)
    for each in (optimizer, other):
        for _ in range(2):
            for param in each.param_groups[0]["params"]:
                param.grad = param.detach().cos()
            each.step()
    assert equal_bits(bits(other), bits(optimizer))


@NAMES
@pytest.mark.parametrize("copied", [copy.deepcopy, copied_by_pickle, copied_by_state_dict])
@pytest.mark.parametrize("done", [0, 2])
def test_a_copy_has_the_keys_and_values_of_the_groups(name, copied, done):
    task = Task()
    optimizer = make(name, task.model.parameters())
    for _ in range(done):
        task.loss().backward()
        optimizer.step()
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    other = copied(optimizer)
    assert other.state_dict()["param_groups"] == groups
    assert copied(other).state_dict()["param_groups"] == groups


@NAMES
def test_a_group_that_is_added_later_steps_as_one_from_the_start(name):
    first, late, early = (nn.Parameter(torch.linspace(-1, 2, 12).reshape(3, 4)) for _ in range(3))
    optimizer, other = make(name, [first]), make(name, [early])
    optimizer.add_param_group({"params": [late]})
    late.grad, early.grad = late.detach().cos(), early.detach().cos()
    optimizer.step()
    other.step()
    assert equal_bits([late, optimizer.state[late]], [early, other.state[early]])


def test_the_accumulators_of_a_later_group_begin_where_they_should():
    first, late = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = optimizers.FusedAdagrad([first], lr=1.0, initial_accumulator_value=9.0)
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.full((1,), 4.0)
    optimizer.step()
    assert late.item() == pytest.approx(-0.8)  # 4 / sqrt(9 + 16)


# -- signatures ------------------------------------------------------------------------------------------------------

REQUIRED = required  # as in apex: it may be in every group instead
BETAS = (0.9, 0.999)
# Positional arguments after params, in their order, with the defaults of the code of apex and of Ascend's apex.
SIGNATURES = {
    "FusedAdagrad": {
        "lr": 1e-2,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "set_grad_none": True,
        "adagrad_w_mode": False,
    },
    "FusedLAMB": {
        **{"lr": 1e-3, "bias_correction": True, "betas": BETAS, "eps": 1e-6, "weight_decay": 0.01, "amsgrad": False},
        **{"adam_w_mode": True, "grad_averaging": True, "set_grad_none": True, "max_grad_norm": 1.0},
        "use_nvlamb": False,
    },
    "FusedMixedPrecisionLamb": {
        **{"lr": 1e-3, "step": 0, "bias_correction": True, "betas": BETAS, "eps": 1e-6, "weight_decay": 0.01},
        **{"amsgrad": False, "adam_w_mode": True, "grad_averaging": True, "max_grad_norm": 1.0, "use_nvlamb": False},
        "reduced_precision_dtype": None,
    },
    "FusedNovoGrad": {
        **{"lr": 1e-3, "bias_correction": True, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False},
        **{"reg_inside_moment": False, "grad_averaging": True, "norm_type": 2, "init_zero": False},
        "set_grad_none": True,
    },
    "NpuFusedSGD": {"lr": REQUIRED, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "NpuFusedAdam": {"lr": 1e-3, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False},
    "NpuFusedAdamW": {"lr": 1e-3, "betas": BETAS, "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False},
    "NpuFusedAdamP": {
        **{"lr": 1e-3, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.0, "delta": 0.1, "wd_ratio": 0.1},
        "nesterov": False,
    },
    "NpuFusedBertAdam": {
        **{"lr": REQUIRED, "warmup": -1, "t_total": -1, "schedule": "warmup_linear", "b1": 0.9, "b2": 0.99, "e": 1e-6},
        **{"weight_decay": 0.01, "max_grad_norm": -1},
    },
    "NpuFusedAdadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    "NpuFusedLamb": {
        **{"lr": 1e-3, "betas": BETAS, "eps": 1e-6, "weight_decay": 0.0, "adam": False},
        "use_global_grad_norm": False,
    },
    "Lamb": {"lr": 1e-3, "betas": BETAS, "eps": 1e-6, "weight_decay": 0.0, "adam": False},
    "NpuFusedRMSprop": {
        **{"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False}
    },
    "NpuFusedRMSpropTF": {
        **{"lr": 1e-2, "alpha": 0.9, "eps": 1e-10, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
        **{"decoupled_decay": False, "lr_in_momentum": True},
    },
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_those_of_the_namesake(name):
    parameters = list(inspect.signature(getattr(optimizers, name)).parameters.values())
    assert parameters[0].name == "params"
    expected = SIGNATURES[name]
    leading = parameters[1 : 1 + len(expected)]
    assert {each.name: each.default for each in leading} == expected
    assert [each.name for each in leading] == list(expected)
    rest = parameters[1 + len(expected) :]
    assert all(each.kind is each.KEYWORD_ONLY or each.name == "set_grad_none" for each in rest)


def test_the_decay_of_ascends_adam_goes_through_the_gradient():
    pairs = [
        (optimizers.NpuFusedAdam, torch.optim.Adam),
        (optimizers.NpuFusedAdamW, torch.optim.AdamW),
        (optimizers.NpuFusedSGD, functools.partial(torch.optim.SGD, momentum=0.0)),
    ]
    for ours, twin in pairs:
        weights = []
        for build in (ours, twin):
            task = Task()
            optimizer = build(task.model.parameters(), lr=0.01, weight_decay=0.3)
            for _ in range(5):
                optimizer.zero_grad()
                task.loss().backward()
                optimizer.step()
            weights.append(task.model[0].weight)
        assert torch.allclose(*weights, rtol=1e-5, atol=1e-6)
