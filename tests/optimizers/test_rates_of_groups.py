"""A learning rate in every group is enough for optimizers that have no default rate."""

import copy
import pickle

import pytest
import torch
from torch import nn

from amplab.optimizers import FusedBertAdam, FusedSGD, NpuFusedBertAdam, NpuFusedSGD

WITHOUT_DEFAULT = pytest.mark.parametrize("make", [FusedSGD, NpuFusedSGD, FusedBertAdam, NpuFusedBertAdam])


def one(value=1.0):
    return nn.Parameter(torch.full((2,), value))


@pytest.mark.parametrize("way", [lambda each: each, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_each_group_steps_with_its_own_rate(way):
    optimizer = way(FusedSGD([{"params": one(), "lr": 0.25}, {"params": [one()], "lr": 0.5}], momentum=0.1))
    weights = [group["params"][0] for group in optimizer.param_groups]
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    assert [weight.tolist() for weight in weights] == [[0.75, 0.75], [0.5, 0.5]]


@WITHOUT_DEFAULT
def test_generators_of_groups_are_read_once(make):
    optimizer = make({"params": [weight], "lr": 0.1} for weight in (one(), one()))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


@WITHOUT_DEFAULT
def test_a_rate_that_is_nowhere_is_refused(make):
    for params in ([one()], iter([one()]), [{"params": [one()]}]):
        with pytest.raises(ValueError, match="parameter group 0 has no lr"):
            make(params)
    with pytest.raises(ValueError, match="parameter group 1 has no lr"):
        make([{"params": [one()], "lr": 0.1}, {"params": [one()]}])


@WITHOUT_DEFAULT
def test_a_group_added_later_needs_its_rate(make):
    for optimizer in (made := make([{"params": [one()], "lr": 0.1}]), copy.deepcopy(made)):
        with pytest.raises(ValueError, match="parameter group 1 has no lr"):
            optimizer.add_param_group({"params": [one()]})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": [one()], "lr": 0.2})
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


@WITHOUT_DEFAULT
def test_a_wrong_rate_of_a_group_is_refused(make):
    with pytest.raises(ValueError, match="lr=-1"):
        make([{"params": [one()], "lr": -1.0}])
