"""The models: shapes, seeds, and the layers that mixed precision treats differently."""

from unittest import mock

import pytest
import torch
from torch import nn

from amplab.lab import Experiment, ExperimentConfig, build_model
from amplab.lab.models import MODELS


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("hidden", [1, 128])
def test_ten_logits_from_images(name, hidden):
    logits = build_model(name, hidden, 0)(torch.rand(5, 1, 8, 8))
    assert logits.shape == (5, 10)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_weights_come_from_the_seed_and_the_global_generator_is_left_alone(name):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = build_model(name, 16, 1), build_model(name, 16, 1), build_model(name, 16, 2)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.output.weight, other.output.weight)


def test_hidden_is_the_width():
    assert build_model("mlp", 48, 0).hidden2.weight.shape == (48, 48)
    assert build_model("cnn", 48, 0).output.weight.shape == (10, 48)


def test_only_the_cnn_has_batchnorm():
    kinds = {name: {type(module) for module in build_model(name, 8, 0).modules()} for name in ("mlp", "cnn")}
    assert nn.BatchNorm2d in kinds["cnn"]
    assert nn.Conv2d in kinds["cnn"]
    assert nn.BatchNorm2d not in kinds["mlp"]


@pytest.mark.parametrize(
    ("task", "model"), [(task, name) for name, each in MODELS.items() if not each.draws for task in each.tasks]
)
def test_the_models_of_the_lab_draw_no_random_numbers(task, model):
    """So their steps neither seed nor restore the generator, from which other threads draw meanwhile."""
    experiment = Experiment(ExperimentConfig(task=task, model=model, hidden=16, batch_size=8, opt_level="O0"))
    before = torch.get_rng_state()
    for _ in range(3):
        experiment.step()
    experiment.score()
    assert torch.equal(torch.get_rng_state(), before)
    experiment.gradients()
    with mock.patch.object(torch, "set_rng_state", side_effect=AssertionError("restored")):
        experiment.step()
        experiment.score()
        experiment.gradients()


def test_unknown_model_is_refused():
    with pytest.raises(ValueError, match="model=vit"):
        build_model("vit", 8, 0)
