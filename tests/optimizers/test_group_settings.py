"""What optimizers and groups refuse to be made with, and what they refuse to load; in one sentence each."""

import inspect
import math

import pytest
import torch
from torch import nn

from amplab import optimizers
from amplab.optimizers.group_settings import check_settings

NAN, INF = math.nan, math.inf
NAMES = [name for name in optimizers.__all__ if name not in ("LARC", "FusedOptimizer", "merge_groups")]
BAD = {
    "lr": [-1.0, NAN, INF, torch.tensor(-1.0)],
    "betas": [(1.0, 0.999), (0.9, 1.0), (-0.1, 0.9), (0.9,), (NAN, 0.9)],
    "eps": [-1.0, NAN, INF],
    "weight_decay": [-1.0, NAN, INF],
    "momentum": [-1.0, NAN, INF],
    "dampening": [NAN, INF],
    "rho": [-1.0, 2.0, NAN],
    "alpha": [-1.0, 1.0, NAN],
    "lr_decay": [-1.0, NAN],
    "initial_accumulator_value": [-1.0, NAN],
    "initial_square_avg": [-1.0, NAN],
    "max_grad_norm": [NAN, INF],
    "max_weight_norm": [-1.0, 0.0, NAN],
    "b1": [1.0, -1.0],
    "b2": [1.0, NAN],
    "e": [-1.0],
    "warmup": [2.0, -0.5, NAN],
    "t_total": [0, -5, NAN],
    "delta": [-1.0, NAN],
    "wd_ratio": [-1.0, NAN],
    "reduced_precision_dtype": [torch.int32],
}
NO_NUMBERS = {"lr": ["x", None, torch.ones(2)], "betas": [0.9, None, ("a", 0.9)], "weight_decay": ["a"], "eps": [None]}


def cases(settings):
    found = []
    for name in NAMES:
        known = inspect.signature(getattr(optimizers, name)).parameters
        found += [(name, each, value) for each in settings if each in known for value in settings[each]]
    return found


def made(name, params, **settings):
    return getattr(optimizers, name)(params, **{"lr": 0.1, **settings})


@pytest.mark.parametrize(("name", "setting", "value"), cases(BAD))
def test_a_number_out_of_its_range_is_refused(name, setting, value):
    with pytest.raises(ValueError, match=rf"^{setting}=.*: \w+ expected .*\.$"):
        made(name, [nn.Parameter(torch.ones(3))], **{setting: value})


@pytest.mark.parametrize(("name", "setting", "value"), cases(NO_NUMBERS))
def test_what_is_no_number_is_refused(name, setting, value):
    with pytest.raises(TypeError, match=rf"^{setting}=.*: {name} expected .*\.$"):
        made(name, [nn.Parameter(torch.ones(3))], **{setting: value})


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_of_a_group_are_checked(name):
    first, late = (nn.Parameter(torch.ones(3)) for _ in range(2))
    with pytest.raises(ValueError, match=f"^lr=-1.0: {name} expected"):
        made(name, [{"params": [first], "lr": -1.0}])
    optimizer = made(name, [first])
    with pytest.raises(ValueError, match=r"^weight_decay=nan"):
        optimizer.add_param_group({"params": [late], "weight_decay": NAN})
    assert len(optimizer.param_groups) == 1


def test_tensors_and_the_ends_of_ranges_are_numbers():
    check_settings(
        "A", {"lr": torch.tensor(0.1), "betas": [torch.tensor(0.0), 0.5], "rho": 1.0, "max_weight_norm": INF}
    )
    check_settings("A", {"warmup": -1, "t_total": -1, "max_weight_norm": INF, "max_grad_norm": None, "any": "else"})


def test_larc_checks_what_it_is_given():
    inner = torch.optim.SGD([nn.Parameter(torch.ones(3))], 0.1)
    with pytest.raises(TypeError, match=r"^LARC got a int"):
        optimizers.LARC(3)
    with pytest.raises(ValueError, match=r"^trust_coefficient=-1.0"):
        optimizers.LARC(inner, trust_coefficient=-1.0)


def test_the_state_of_another_rule_is_refused_and_nothing_loaded():
    param = nn.Parameter(torch.ones(3))
    other = torch.optim.SGD([param], 0.1, momentum=0.9)
    param.grad = torch.ones(3)
    other.step()
    optimizer = optimizers.FusedAdam([param], lr=0.25)
    with pytest.raises(ValueError, match="momentum_buffer: FusedAdam expected exp_avg"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.step()
    with pytest.raises(ValueError, match="FusedSGD expected momentum_buffer"):
        optimizers.FusedSGD([param], 0.1).load_state_dict(optimizer.state_dict())


def test_refusals_name_parameters_where_torch_was_told_their_names():
    model = nn.Linear(3, 3)
    for options in ({}, {"max_grad_norm": 1.0}):
        optimizer = optimizers.FusedAdam(model.named_parameters(), **options)
        model.weight.grad, model.bias.grad = torch.eye(3).to_sparse(), torch.zeros(3)
        with pytest.raises(RuntimeError, match="weight is not strided"):
            optimizer.step()
