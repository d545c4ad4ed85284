"""Gradient exponents as curves and rows; the oracle is torch's own cast to float16."""

import json
from dataclasses import replace

import pytest
import torch

from amplab.display.numbers import percent
from amplab.formats import FLOAT16, exponent_histogram
from amplab.lab import ExperimentConfig, GradientRecord, History, Trainer
from amplab.views.tabs.gradients_payload import (
    HIGH,
    LOW,
    curves,
    fitting_words,
    float16_edges,
    gradients_payload,
    heat_map,
    layer_rows,
    stored_payload,
    summary,
)

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


def test_the_histogram_holds_every_element_once(record: GradientRecord) -> None:
    drawn = curves(record.sample.histogram, SCALE)
    assert (drawn["low"], drawn["scale"]) == (LOW, 12.0)
    assert len(drawn["unscaled"]) == HIGH - LOW + 1
    assert sum(drawn["unscaled"]) == pytest.approx(100, abs=0.01)


def test_a_bar_counts_the_elements_of_its_power_of_two(
    gradients: dict[str, torch.Tensor], record: GradientRecord
) -> None:
    everything = torch.cat(list(gradients.values()))
    everything = everything[everything != 0]
    inside = ((everything >= 2.0**-25) & (everything < 2.0**-24)).float().mean().item()
    assert curves(record.sample.histogram, SCALE)["unscaled"][-25 - LOW] == pytest.approx(100 * inside, abs=1e-4)


def test_the_edges_are_float16s_own() -> None:
    flushed, subnormal, top = float16_edges()
    half = torch.finfo(torch.float16)
    assert 2.0**flushed == half.smallest_normal * 2.0**-10 / 2
    assert 2.0**subnormal == half.smallest_normal
    assert 2.0 ** (top - 1) < half.max < 2.0**top


def test_gradients_that_are_broken_before_any_scaling_are_said() -> None:
    broken = exponent_histogram(torch.tensor([float("nan"), float("inf"), 1.0, 2.0]))
    record = GradientRecord(step=0, loss_scale=1.0, layers=(("layer", broken),))
    assert summary(record).endswith("; 50.0 % are NaN or inf")
    assert gradients_payload(record, History())["layers"][0]["overflowed"] == "50.0 % NaN"
    assert sum(curves(broken, 1.0)["unscaled"]) == pytest.approx(100)


def test_the_payload_is_small_json_and_its_texts_agree(
    gradients: dict[str, torch.Tensor], record: GradientRecord
) -> None:
    payload = gradients_payload(record, History())
    text = json.dumps(payload, allow_nan=False)
    assert len(text) < 5000, "it is sent once a second"
    assert payload["summary"].startswith("Step 1,234, scale 2¹²: flushed to zero ")
    assert [row["name"] for row in payload["layers"]] == list(gradients)
    assert payload["layers"][1]["zeros"] == "50.0 %"


def test_the_description_names_the_peak_and_what_float16_holds_at_the_scale() -> None:
    half = exponent_histogram(torch.tensor([2.0**-13] * 3 + [1.0]))
    record = GradientRecord(step=0, loss_scale=2.0**10, layers=(("layer", half),))
    description = str(gradients_payload(record, History())["description"])
    assert "2^-13 with 75.0 %" in description
    assert "from 2^-35 to 2^6" in description


def test_gradients_without_a_finite_element_can_be_shown() -> None:
    nothing = exponent_histogram(torch.tensor([0.0, float("nan")]))
    payload = gradients_payload(GradientRecord(step=0, loss_scale=1.0, layers=(("layer", nothing),)), History())
    assert set(payload["curves"]["unscaled"]) == {0.0}
    json.dumps(payload, allow_nan=False)


@pytest.fixture(scope="module")
def run() -> History:
    """A run at a static scale at which some gradients become zero, and which fits."""
    trainer = Trainer(ExperimentConfig(hidden=16, loss_scale=2.0**-6))
    trainer.run(250)
    return trainer.history


def test_the_largest_scale_that_fits_is_the_largest_that_does(run: History) -> None:
    words = fitting_words(run)
    exponents = run.column("grad_exponent")
    power_of_two = int(
        words.split("fits every step so far: 2")[1].split(";")[0].translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    )
    largest = 2.0 ** (exponents.max() + 1) * (1 - 2.0**-11)  # the largest float16 number of the highest binade
    assert torch.tensor(largest * 2.0**power_of_two).half().isfinite()
    assert not torch.tensor(2.0 ** exponents.max() * 2.0 ** (power_of_two + 1)).half().isfinite()
    assert f"at step {int(exponents.argmax()):,}," in words
    assert fitting_words(History()) == ""


def test_the_heat_map_has_what_each_layer_loses_over_the_run(run: History) -> None:
    drawn = heat_map(run.gradient_samples)
    samples = {sample.step: sample for sample in run.gradient_samples}
    assert drawn["steps"] == list(samples)
    assert max(max(row) for row in drawn["underflow"]) > 0
    for name, row in zip(drawn["layers"], drawn["underflow"], strict=True):
        for step, share in zip(drawn["steps"], row, strict=True):
            (layer,) = [each for each in samples[step].layers if each.name == name]
            assert share == pytest.approx(100 * layer.underflow, abs=0.01)
    assert heat_map([])["layers"] == []


def test_a_long_heat_map_keeps_the_worst_and_stays_small(run: History) -> None:
    sample = run.gradient_samples[-1]
    many = tuple(replace(sample.layers[0], name=f"layer{at}.weight", underflow=0.0) for at in range(100))
    bad = (*many[:77], replace(many[77], overflow=1.0), *many[78:])
    samples = [replace(sample, step=200 * at, layers=bad if at == 433 else many) for at in range(1000)]
    drawn = heat_map(samples)
    assert len(drawn["steps"]) == 120
    assert (len(drawn["layers"]), drawn["left_out"]) == (40, 60)
    assert max(drawn["overflow"][drawn["layers"].index("layer77.weight")]) == 100.0


def test_one_scale_holds_for_all_that_a_selected_step_shows() -> None:
    """Step 44 used another scale than step 40, the nearest one whose gradients are stored."""
    trainer = Trainer(ExperimentConfig(hidden=16, loss_scale=2.0**-12))
    trainer.run(41)
    trainer.change(loss_scale=1.0)
    trainer.run(5)
    stored = [each for each in trainer.history.gradient_samples if each.step == 40]
    of_40, of_44 = (stored_payload(trainer.history, step) for step in (40, 44))
    for name in ("layers", "curves", "description"):
        assert of_44[name] == of_40[name]
    assert of_40["summary"].startswith("Selected step 40, scale 2⁻¹²: flushed")
    nearest = "histogram of step 40, the nearest that is stored, at the scale of that step; step 44 used the scale 1"
    assert of_44["summary"] == of_40["summary"].replace("step 40,", f"step 44 ({nearest}),")
    lost_of_layers = [each.underflow for each in stored[0].layers]
    assert min(lost_of_layers) <= stored[0].histogram.lost_share(2.0**-12, FLOAT16) <= max(lost_of_layers)
    assert f"{percent(stored[0].histogram.shifted(-12).underflow_fraction(FLOAT16))} scaled" in of_44["summary"]
    trainer.stop()


def test_a_selected_step_shows_what_was_stored_nearest_at_its_own_scale(run: History) -> None:
    payload = stored_payload(run, 47)
    assert "Selected step 47 (histogram of step 40, the nearest that is stored), scale 2⁻⁶" in payload["summary"]
    assert payload["curves"]["scale"] == -6.0
    assert len(payload["layers"]) == 6
    assert stored_payload(run, 10_000) is None
    assert stored_payload(History(), 0) is None
