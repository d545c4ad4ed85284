"""Gradient exponents as curves and rows; the oracle is torch's own cast to float16."""

from functools import reduce
from operator import add

import numpy as np
import pytest
import torch

from amplab.formats import exponent_histogram
from amplab.lab import GradientRecord
from amplab.views.gradients_payload import HIGH, LOW, curves, float16_zones, layer_rows, layers_html, sentence

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
    assert drawn.exponents[0] == LOW
    assert drawn.exponents[-1] == HIGH
    assert drawn.unscaled.dtype == drawn.scaled.dtype == np.float32
    assert drawn.unscaled.sum() == pytest.approx(100, abs=0.01)
    assert drawn.scaled.sum() == pytest.approx(100, abs=0.01)
    np.testing.assert_array_equal(drawn.scaled[13:-1], drawn.unscaled[1:-13])


def test_a_bar_counts_the_elements_of_its_power_of_two(
    gradients: dict[str, torch.Tensor], record: GradientRecord
) -> None:
    everything = torch.cat(list(gradients.values()))
    everything = everything[everything != 0]
    inside = ((everything >= 2.0**-25) & (everything < 2.0**-24)).float().mean().item()
    assert curves(record).unscaled[-25 - LOW] == pytest.approx(100 * inside, rel=1e-4)


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
    assert sentence(record).endswith("; 50.0 % are NaN or inf")
    assert "50.0 % NaN" in layers_html(record)
    assert curves(record).unscaled.sum() == pytest.approx(100)


def test_the_sentence_and_the_table_say_the_same(record: GradientRecord) -> None:
    total = reduce(add, (histogram for _, histogram in record.layers))
    assert total.total == 6000
    text = sentence(record)
    assert text.startswith("Step 1,234, scale 2¹²: flushed to zero ")
    table = layers_html(record)
    assert table.count("<tr>") == 3
    assert "zeros.&lt;bias&gt;" in table
    assert "50.0 %" in table
    assert '<caption class="amp-sr">' in table
