"""The printed remedy of each misuse, run as it stands in the broken loop, trains it as its healthy twin is trained."""

import warnings

import pytest
import torch
from misuse_wards import MISUSE_WARDS, average_loss
from patients import SIZES
from test_clinic import findings_of

STEPS = {"half average": 300}  # 60 for the others
SLOWS = (
    "zero_grad inside",
    "constant groups",
    "half average",
    "clipped together",
    "auxiliary loss",
    "left over",
    "scaled slope",
    "disabled scaler",
)  # clipping and momentum hide the harm of the others in this small run
NAMES = [name for name in MISUSE_WARDS if not name.endswith("apex")]  # apex's remedy is the same line


def trained(name: str, *, broken: bool, mended: str | None = None) -> float:
    """Train; return the loss of the weights, or of their average, on other batches."""
    torch.manual_seed(0)
    code = {} if mended is None else {"mended": mended}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = MISUSE_WARDS[name].admit(SIZES[0], 0, broken, **code)
        for number in range(STEPS.get(name, 60)):
            run.step(run, run.batch(number))
    held = [run.batch(1000 + number) for number in range(4)]
    if hasattr(run, "average"):
        return sum(average_loss(run, batch) for batch in held) / len(held)
    return sum(run.loss(*batch).item() for batch in held) / len(held)


@pytest.mark.parametrize("name", NAMES)
def test_the_pasted_remedy_trains_as_the_twin(name):
    torch.manual_seed(0)
    ward = MISUSE_WARDS[name]
    found = findings_of(ward.admit(SIZES[0], 0, True))[0]
    assert found.name == ward.name
    healthy = trained(name, broken=False)
    assert trained(name, broken=False, mended=found.remedy) == pytest.approx(healthy, rel=0.03)
    if name in SLOWS:
        assert trained(name, broken=True) > 1.03 * healthy
