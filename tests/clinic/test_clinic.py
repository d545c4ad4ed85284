"""Every patient is told what it has, and the healthy twin that it has nothing."""

import re
import warnings

import pytest
import torch
from loop_wards import LOOP_WARDS
from misuse_wards import MISUSE_WARDS
from patients import ONCE, SIZES, TWICE, sizes_and_seeds, train
from singular_wards import SINGULAR_WARDS
from value_wards import VALUE_WARDS

import amplab
from amplab.amp import Session
from amplab.diagnose import doctor

WARDS = VALUE_WARDS | LOOP_WARDS | MISUSE_WARDS | SINGULAR_WARDS

EARLY = {*VALUE_WARDS, *LOOP_WARDS}
RUNS = [run for name in WARDS for run in sizes_and_seeds(name, short=TWICE if name in EARLY else ONCE)]


def diagnosed(ward, size, seed, *, broken):
    """Admit a patient, train it, and examine it."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return findings_of(ward.admit(size, seed, broken))


def findings_of(patient):
    """Train, then look at the batch of the last skipped step, or else of the last, at the scale that it had."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = train(patient)
            return doctor(
                patient.model,
                step=lambda: patient.loss(*patient.last),
                train_step=lambda: patient.step(patient, patient.last),
                optimizer=patient.optimizers,
                scaler=patient.amp,
                loss_scale=patient.last_scale,
                batch=patient.last,
                run=run,
            )
    finally:
        if isinstance(patient.amp, Session):
            patient.amp.reset()


@pytest.mark.parametrize(("name", "size", "seed"), RUNS)
def test_the_first_finding_names_what_was_planted(name, size, seed):
    ward = WARDS[name]
    found = diagnosed(ward, size, seed, broken=True)
    assert (found[0].name, found[0].module) == (ward.name, ward.module), str(found)
    assert found[0].severity in ("error", "warning")


@pytest.mark.parametrize(("name", "size", "seed"), RUNS)
def test_the_healthy_twin_has_nothing_above_a_note(name, size, seed):
    found = diagnosed(WARDS[name], size, seed, broken=False)
    assert not found.harmful, str(found.harmful)


def test_the_remedy_of_the_attention_is_its_line_first_and_the_rule_for_its_module_mends_it_too():
    """What a rule for the whole module costs is said beside it."""
    ward = WARDS["attention logits"]
    line, _, rule = diagnosed(ward, SIZES[0], 0, broken=True)[0].remedy.partition("# or the whole module:\n")
    assert "self.query(x)" in line
    assert re.search(r"# costs: 9[89]\.\d % of the 16-bit multiply-adds of a step move to float32", rule)
    torch.manual_seed(0)
    patient = ward.admit(SIZES[0], 0, True)
    patient.amp.reset()
    names = {"amplab": amplab, "amp": amplab.amp, "model": patient.model, "optimizer": patient.optimizers[0]}
    try:
        exec(rule, names)
        found = doctor(patient.model, step=lambda: patient.loss(*patient.batch(0)), optimizer=patient.optimizers)
        assert not found.harmful, str(found.harmful)
    finally:
        amplab.amp.reset()
