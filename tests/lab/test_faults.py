"""Faults are values: switched, named in a record and read from it; the batch they go into is not changed."""

from itertools import combinations

import pytest
import torch
from torch import nn

from amplab.lab.faults import (
    FAULTS,
    after_step,
    fault_named,
    faults_in,
    faults_named,
    nan_in_first_activation,
    switched,
    with_nan,
)

SETS = [frozenset(chosen) for size in range(4) for chosen in combinations(FAULTS, size)]


@pytest.mark.parametrize("faults", SETS, ids=faults_named)
def test_a_record_names_the_faults_of_its_step(faults):
    assert faults_in(faults_named(faults)) == faults
    assert after_step(faults) == faults & {"underflow"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("faults", SETS, ids=faults_named)
def test_only_underflow_toggles(faults, fault):
    assert switched(faults, fault, True) == faults | {fault}
    assert switched(faults, fault, False) == faults - {fault}
    assert switched(faults, fault, None) == (faults ^ {fault} if fault == "underflow" else faults | {fault})


def test_a_name_that_is_no_fault_is_refused():
    with pytest.raises(ValueError, match=r"'NaN'.*overflow, underflow, nan"):
        fault_named("NaN")


def test_nan_goes_into_a_copy_of_the_batch_or_into_the_first_activation():
    batch = (torch.tensor([1, 2]), torch.ones(2, 3))
    changed = with_nan(batch)
    assert changed[0] is batch[0]
    assert changed[1].isnan().sum() == 1
    assert batch[1].isfinite().all()
    model = nn.Sequential(nn.Embedding(4, 2), nn.Tanh())
    with nan_in_first_activation(model):
        assert model(batch[0]).isnan().sum() == 1
    assert model(batch[0]).isfinite().all()
