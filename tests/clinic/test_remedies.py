"""The remedy that a finding prints is pasted into the broken run, which then is healthy and learns as its twin does."""

import pytest
import singular_wards
import torch
import value_wards
from pasting import final_loss, mended
from patients import SEEDS, sizes_and_seeds
from test_clinic import diagnosed, findings_of

import amplab

STEPS = 60
TABLES = {
    "singular_wards.SINGULAR_WARDS": singular_wards.SINGULAR_WARDS,
    "value_wards.VALUE_WARDS": value_wards.VALUE_WARDS,
}
WARDS = [(table, name) for table, wards in TABLES.items() for name in wards]
OTHER_WEIGHTS = ("attention logits", "large layer", "large product")


@pytest.mark.parametrize(("size", "seed"), sizes_and_seeds())
@pytest.mark.parametrize(("table", "name"), WARDS)
def test_the_pasted_remedy_mends_the_run_and_it_learns_as_its_twin_does(table, name, size, seed, tmp_path):
    finding = diagnosed(TABLES[table][name], size, seed, broken=True)[0]

    def after():
        torch.manual_seed(seed)
        return mended(table, name, finding, size, seed, tmp_path)

    try:
        found = findings_of(after())
        assert not found.harmful, str(found.harmful)
        loss = final_loss(after(), STEPS)
    finally:
        amplab.amp.reset()
    healthy = [twin_loss(table, name, size, each) for each in SEEDS]
    spread = max(healthy) - min(healthy)
    assert loss < healthy[seed] + max(0.03 * healthy[seed], spread), (finding.remedy, healthy)


def twin_loss(table, name, size, seed):
    """The last losses of the healthy twin; where it has other weights, of the broken run in float32."""
    torch.manual_seed(seed)
    admit = TABLES[table][name].admit
    patient = admit(size, seed, True, level="O0") if name.startswith(OTHER_WEIGHTS) else admit(size, seed, False)
    try:
        return final_loss(patient, STEPS)
    finally:
        patient.amp.reset()
