"""A run that diverges in float32 too is called so, with no record of the run; one that a constant ended is not."""

import warnings

import pytest
import torch
from loop_wards import LOOP_WARDS
from patients import SIZES, gaussian, train
from singular_wards import SINGULAR_WARDS
from value_wards import VALUE_WARDS

from amplab.diagnose import doctor, run_findings

OVERFLOWS = ("attention logits", "sum of a plane", "large squares")


def alone(patient, **given):
    """The findings of a step of a trained patient, by a doctor who gets the model, the step and the optimizer only."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = train(patient)
        return run, doctor(
            patient.model,
            step=lambda: patient.loss(*patient.last),
            optimizer=patient.optimizers,
            scaler=patient.amp,
            loss_scale=patient.last_scale,
            batch=patient.last,
            **dict.fromkeys(given, run),
        )
    finally:
        patient.amp.reset()


@pytest.mark.parametrize("size", SIZES)
def test_a_rerun_in_float32_tells_an_overflow_of_a_diverging_run(size):
    torch.manual_seed(0)
    _, found = alone(LOOP_WARDS["learning rate"].admit(size, 0, True))
    assert (found[0].name, found[0].certainty) == ("diverging", "certain"), str(found)
    assert all(each.certainty == "possible" for each in found if each.name == "overflow-in-half")


@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_overflow_of_a_run_that_float32_trains_is_no_divergence(name):
    torch.manual_seed(0)
    _, found = alone(VALUE_WARDS[name].admit(SIZES[0], 0, True))
    assert not found.named("diverging"), str(found)


@pytest.mark.parametrize("name", ["bound that is 1 in half", "log1p of -1"])
def test_a_run_that_a_constant_ended_does_not_diverge(name):
    """The first steps are taken; then the batches are as they usually are, and every loss is NaN."""
    torch.manual_seed(0)
    patient = SINGULAR_WARDS[name].admit(SIZES[0], 0, True)
    usual = gaussian(SIZES[0], 0, 32, SIZES[0])
    patient.batch = lambda step: (usual(step)[0] * (1e-3 if step < 2 else 1.0),)
    run, found = alone(patient, run=True)
    assert "diverging" in [each.name for each in run_findings(run)]  # the record alone looks like it
    assert found[0].name == "infinite-value", str(found)
    assert not found.named("diverging"), str(found)
