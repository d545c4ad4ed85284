"""Gradient exponents as curves and rows; the oracle is torch's own cast to float16."""

import json

import pytest
import torch

from amplab.formats import exponent_histogram
from amplab.lab import GradientRecord
from amplab.views.tabs.gradients_payload import HIGH, LOW, curves, float16_zones, gradients_payload, layer_rows, summary

SCALE = 2.0**12


@pytest.fixture(scope="module")
def gradients() -> dict[str, torch.Tensor]:
    """Two layers whose gradients span float16's range, one of them half zeros."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.exp2(torch.empty(4000).uniform_(-40, 6, generator=generator))
    zeros = torch.cat([torch.zeros(1000), torch.exp2(torch.empty(1000).uniform_(-30, -20, generator=generator))])
    return {"wide.weight": wide, "zeros.<bias>": zeros}


@pytest.fixture(scope="module")
def record(gradients: dict[str, torch.Tensor]) -> GradientRecord:
    layers = tuple((name, exponent_histogram(tensor)) for name, tensor in gradients.items())
    return GradientRecord(step=1234, loss_scale=SCALE, layers=layers)


def lost(tensor: torch.Tensor, to: float) -> float:
    """Return the share of the non-zero elements that torch's cast to float16 makes 0 or inf."""
    alive = tensor[tensor != 0]
    return (alive.half().abs() == to).float().mean().item()


def test_shares_are_those_of_torchs_cast(gradients: dict[str, torch.Tensor], record: GradientRecord) -> None:
    for row in layer_rows(record):
        tensor = gradients[row["name"]]
        assert row["flushed_unscaled"] == pytest.approx(lost(tensor, 0.0), abs=1e-3)
        assert row["flushed"] == pytest.approx(lost(tensor * SCALE, 0.0), abs=1e-3)
        assert row["overflowed"] == pytest.approx(lost(tensor * SCALE, float("inf")), abs=1e-3)
        assert row["zeros"] == (tensor == 0).float().mean().item()


def test_the_cases_are_not_trivial(record: GradientRecord) -> None:
    wide, zeros = layer_rows(record)
    assert 0 < wide["flushed"] < wide["flushed_unscaled"] < 1
    assert wide["overflowed"] > 0
    assert zeros["zeros"] == 0.5


def test_curves_are_the_same_shape_moved_by_the_scale(record: GradientRecord) -> None:
    drawn = curves(record)
    assert drawn["low"] == LOW
    assert len(drawn["unscaled"]) == len(drawn["scaled"]) == HIGH - LOW + 1
    assert sum(drawn["unscaled"]) == pytest.approx(100, abs=0.01)
    assert sum(drawn["scaled"]) == pytest.approx(100, abs=0.01)
    assert drawn["scaled"][13:-1] == drawn["unscaled"][1:-13]


def test_a_bar_counts_the_elements_of_its_power_of_two(
    gradients: dict[str, torch.Tensor], record: GradientRecord
) -> None:
    everything = torch.cat(list(gradients.values()))
    everything = everything[everything != 0]
    inside = ((everything >= 2.0**-25) & (everything < 2.0**-24)).float().mean().item()
    assert curves(record)["unscaled"][-25 - LOW] == pytest.approx(100 * inside, abs=1e-4)


def test_zones_are_float16s_own_edges() -> None:
    (_, flushed, _), (_, subnormal, _), (_, top, _), (_, end, _) = float16_zones()
    half = torch.finfo(torch.float16)
    assert 2.0**flushed == half.smallest_normal * 2.0**-10 / 2
    assert 2.0**subnormal == half.smallest_normal
    assert 2.0 ** (top - 1) < half.max < 2.0**top
    assert end == HIGH + 1


def test_gradients_that_are_broken_before_any_scaling_are_said() -> None:
    broken = exponent_histogram(torch.tensor([float("nan"), float("inf"), 1.0, 2.0]))
    record = GradientRecord(step=0, loss_scale=1.0, layers=(("layer", broken),))
    assert summary(record).endswith("; 50.0 % are NaN or inf")
    assert gradients_payload(record)["layers"][0]["overflowed"] == "50.0 % NaN"
    assert sum(curves(record)["unscaled"]) == pytest.approx(100)


def test_the_payload_is_small_json_and_its_texts_agree(
    gradients: dict[str, torch.Tensor], record: GradientRecord
) -> None:
    payload = gradients_payload(record)
    text = json.dumps(payload, allow_nan=False)
    assert len(text) < 5000, "it is sent once a second"
    assert payload["summary"].startswith("Step 1,234, scale 2¹²: flushed to zero ")
    assert [row["name"] for row in payload["layers"]] == list(gradients)
    assert payload["layers"][1]["zeros"] == "50.0 %"


def test_the_description_names_both_peaks() -> None:
    half = exponent_histogram(torch.tensor([2.0**-13] * 3 + [1.0]))
    record = GradientRecord(step=0, loss_scale=2.0**10, layers=(("layer", half),))
    assert "2^-13 with 75.0 %" in gradients_payload(record)["description"]
    assert "2^-3 with 75.0 %" in gradients_payload(record)["description"]


def test_gradients_without_a_finite_element_can_be_shown() -> None:
    nothing = exponent_histogram(torch.tensor([0.0, float("nan")]))
    payload = gradients_payload(GradientRecord(step=0, loss_scale=1.0, layers=(("layer", nothing),)))
    assert set(payload["curves"]["unscaled"]) == {0.0}
    json.dumps(payload, allow_nan=False)
