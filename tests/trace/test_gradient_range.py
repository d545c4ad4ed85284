"""What half loses of a step's gradients, against float64 and against half itself."""

import re

import numpy as np
import pytest
import torch
from html_outline import outline
from torch import nn

from amplab.formats import BFLOAT16, exponent_histogram, overflow_fraction, underflow_fraction
from amplab.formats.known_formats import FLOAT16
from amplab.lab import ExperimentConfig
from amplab.lab.experiment import Experiment
from amplab.trace import GradientRange, gradient_range, xray


def deep_net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(16, 32)


def small_loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean() * 2.0**-18


def gradients_of(model, batch):
    small_loss(model(batch)).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("log2_scale", [0, 4, 10, 16])
def test_shares_against_half_itself(log2_scale):
    model, batch = deep_net()
    scale = 2.0**log2_scale
    found = gradient_range(model, batch, loss=small_loss, loss_scale=scale)
    for (name, grad), row in zip(gradients_of(model, batch).items(), found.rows(), strict=True):
        nonzero = int((grad != 0).sum())
        lost = int(((grad * scale).half() == 0).sum() - (grad == 0).sum()) / nonzero
        assert row["name"] == name
        assert row["lost"] == lost == underflow_fraction(grad, FLOAT16, scale=scale)
        assert row["overflowed"] == overflow_fraction(grad, FLOAT16, scale=scale)
    every = np.concatenate([grad.double().abs().flatten().numpy() for grad in gradients_of(model, batch).values()])
    assert found.lost == (every[every > 0] * scale < 2.0**-25).mean()
    assert found.lost_unscaled >= found.lost
    assert found.lost_unscaled > 0


def test_the_largest_scale_that_fits():
    model, batch = deep_net()
    found = gradient_range(model, batch, loss=small_loss, loss_scale=2.0**10)
    largest = max(float(grad.abs().max()) for grad in gradients_of(model, batch).values())
    assert largest * found.largest_fit < 2.0**16 <= largest * found.largest_fit * 2
    assert found.range_left == np.log2(found.largest_fit) - 10
    over = GradientRange(found.layers, found.largest_fit * 4)
    assert over.range_left == -2
    assert "2 powers of two too large" in over.sentence


def test_an_xray_in_float32_finds_the_same():
    model, batch = deep_net()
    expected = gradient_range(model, batch, loss=small_loss, loss_scale=2.0**8)
    found = xray(model, batch, loss=small_loss, opt_level="O0", stats=True, loss_scale=2.0**8).underflow()
    assert found.rows() == expected.rows()
    assert found.loss_scale == 2.0**8
    assert xray(model, batch, loss=small_loss, stats=True).underflow(4.0).loss_scale == 4.0


def test_the_model_is_untouched_and_casts_around_are_off():
    model, batch = deep_net()
    expected = gradient_range(model, batch, loss=small_loss).rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gradient_range(model, batch, loss=small_loss).rows() == expected
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_record_of_a_running_experiment_has_the_same_fields():
    layers = (("a", exponent_histogram(torch.tensor([2.0**-30, 1.0]))), ("b", exponent_histogram(torch.zeros(3))))
    found = GradientRange(layers, 2.0**4)
    assert [row["lost"] for row in found.rows()] == [0.5, 0.0]
    assert found.rows()[1]["largest_fit"] is None
    assert GradientRange(layers, 2.0**4, BFLOAT16).lost == 0.0


def test_a_running_experiment():
    experiment = Experiment(ExperimentConfig())
    experiment.step()
    record = experiment.gradients()
    found = GradientRange(record.layers, record.loss_scale)
    assert [row["name"] for row in found.rows()] == [name for name, _ in experiment.model.named_parameters()]
    assert found.loss_scale == experiment.loss_scale == 2.0**16


def test_nothing_and_nothing_finite():
    empty = GradientRange(())
    assert (empty.lost, empty.largest_fit, empty.range_left) == (0.0, None, None)
    assert "zero or non-finite" in str(empty)
    broken = GradientRange((("a", exponent_histogram(torch.tensor([float("inf"), float("nan")]))),))
    assert "2, 2 inf or nan" in str(broken)
    with pytest.raises(ValueError, match="loss_scale=0:"):
        GradientRange((), 0)


def test_text_and_html():
    model, batch = deep_net()
    found = gradient_range(model, batch, loss=small_loss, loss_scale=1024.0)
    said, table = str(found).split("\n\n")
    assert " ".join(said.split()) == found.sentence
    assert table.split()[:2] == ["parameter", "elements"]
    assert repr(found) == f"GradientRange({found.sentence})"
    page = outline(found._repr_html_())
    assert page.counts["tr"] == len(found.rows()) + 1
    assert page.words.startswith(found.sentence)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (2.0**15, "1 power of two is left"),
        (2.0**16, "0 powers of two are left"),
        (2.0**17, "it is 1 power of two too large"),
        (2.0**18, "it is 2 powers of two too large"),
    ],
)
def test_one_power_is_one(scale, words):
    found = gradient_range(nn.Linear(1, 1, bias=False), torch.full((1, 1), 0.5), loss_scale=scale)
    assert found.sentence.endswith(f"{words}.")


def test_a_parameter_whose_gradients_are_all_0_has_no_shares():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    found = gradient_range(model, torch.zeros(1, 4), loss=torch.sum)
    assert "The gradients of 1 of 4 parameters are all 0" in found.sentence
    (zero,) = (line.split() for line in str(found).splitlines() if line.startswith("0.weight"))
    assert zero == ["0.weight", "12", "all", "0", "–", "–", "–", "–"]


def test_a_page_without_style_sheets_speaks_of_no_bars():
    html = gradient_range(*deep_net(), loss=small_loss)._repr_html_()
    bare = re.sub(r'<div class="drawn" style="display:none">.*?</div>', "", html)
    assert "bars" in outline(html).words
    assert "bar" not in outline(bare).words
    assert "The shares are of the non-zero gradients" in outline(bare).words
