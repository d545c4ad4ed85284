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


def test_its_remedy_trains_the_run_as_its_twin_is_trained():
    """The lines between backward and step, from the weights at the start: the last good checkpoint."""
    ward, size = LOOP_WARDS["learning rate"], SIZES[0]
    torch.manual_seed(0)
    _, found = alone(ward.admit(size, 0, True))

    def loss_after(seed, *, broken):
        torch.manual_seed(seed)
        patient, losses = ward.admit(size, seed, broken), []
        optimizer = patient.optimizers[0]
        names = {"torch": torch, "amp": patient.amp, "model": patient.model, "optimizer": optimizer}
        for number in range(200):
            optimizer.zero_grad()
            with patient.amp.casting():
                loss = patient.loss(*patient.batch(number))
                with patient.amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                exec(found[0].remedy if broken else "", names)
            optimizer.step()
            losses.append(loss.item())
        patient.amp.reset()
        return sum(losses[-50:]) / 50

    healthy = [loss_after(seed, broken=False) for seed in (0, 1, 2)]
    assert loss_after(0, broken=True) < healthy[0] + max(healthy) - min(healthy)
