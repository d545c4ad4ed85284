"""Text, regression, the GAN, even or odd: batches that are functions of the step, scores with an independent oracle."""

import math

import pytest
import torch
import torch.nn.functional as F

from amplab.lab import Experiment, ExperimentConfig, build_model, load_task
from amplab.lab.models import models_of
from amplab.lab.tasks import TASKS
from amplab.lab.tasks.digits import digit_images
from amplab.lab.tasks.gan import NOISE
from amplab.lab.tasks.regression import SMALL_TARGETS
from amplab.lab.tasks.text import ALPHABET, CONTEXT
from amplab.policies.nested_tensors import tensors_in

PAIRS = [(task, model) for task in TASKS for model in models_of(task)]


@pytest.mark.parametrize("task", TASKS)
def test_a_batch_depends_on_seed_and_step_alone(task: str) -> None:
    first, again = load_task(task, 3), load_task(task, 3)
    state = torch.get_rng_state()
    same = zip(tensors_in(first.batch(7, 8)), tensors_in(again.batch(7, 8)), strict=True)
    assert all(torch.equal(one, other) for one, other in same)
    assert any(
        not torch.equal(one, other)
        for one, other in zip(tensors_in(first.batch(7, 8)), tensors_in(first.batch(8, 8)), strict=True)
    )
    assert torch.equal(torch.get_rng_state(), state), "the global generator does not advance"


@pytest.mark.parametrize(("task", "model"), PAIRS)
def test_every_model_of_every_task_trains_at_o0_and_o1(task: str, model: str) -> None:
    for level in ("O0", "O1"):
        if (task, level) == ("even-bce", "O1"):
            continue  # refused, as the scenario shows
        experiment = Experiment(ExperimentConfig(task=task, model=model, hidden=16, batch_size=8, opt_level=level))
        records = [experiment.step() for _ in range(3)]
        assert all(math.isfinite(record.loss) for record in records if not record.skipped)
        score = experiment.score()
        assert (score is None) == (TASKS[task].score is None)


def test_text_is_pythons_own_and_its_examples_follow_one_another() -> None:
    task = load_task("text", 0)
    batch = task.batch(0, 16)
    assert batch.characters.shape == batch.following.shape == (16, CONTEXT)
    assert torch.equal(batch.characters[:, 1:], batch.following[:, :-1])
    words = "".join(ALPHABET[place] for place in task.text[:5000])
    assert "the" in words
    assert "statement" in words
    assert int(task.text.max()) < len(ALPHABET)


def test_perplexity_is_that_of_the_held_out_text() -> None:
    task, model = load_task("text", 0), build_model("lstm", 16, 0)

    class Uniform(torch.nn.Module):
        def forward(self, characters: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*characters.shape, len(ALPHABET))

    assert task.measure(Uniform()) == pytest.approx(len(ALPHABET), rel=1e-5)
    with torch.no_grad():
        held = task.held_out[: 128 * CONTEXT + 1]
        logits = model(held[:-1].view(-1, CONTEXT)).double()
        expected = F.cross_entropy(logits.flatten(0, 1), held[1:]).exp().item()
        assert task.measure(model) == pytest.approx(expected, rel=1e-5)


def test_a_softmax_by_hand_is_the_same_function_in_float32() -> None:
    characters = load_task("text", 0).batch(0, 4).characters
    by_hand, built_in = build_model("handmade-softmax", 32, 1), build_model("transformer", 32, 1)
    built_in.load_state_dict(by_hand.state_dict())
    torch.testing.assert_close(by_hand(characters), built_in(characters))
    future = characters.clone()
    future[:, -1] = 0
    torch.testing.assert_close(built_in(future)[:, :-1], built_in(characters)[:, :-1])  # a place sees its past alone


def test_the_units_of_the_regressions_are_beyond_float16() -> None:
    small, large = load_task("small-targets", 0), load_task("pressure", 0)
    assert small.targets.std().item() == pytest.approx(SMALL_TARGETS, rel=0.01)
    error = small.batch(0, 64).targets
    gradient = 2 * error / error.numel()
    assert (gradient.half() == 0).float().mean() > 0.95, "the gradient of the loss is zero in float16"
    assert large.inputs.half().isinf().all()
    mean = large.targets[:1536].mean()

    class Mean(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return mean.expand(len(inputs), 1)

    assert large.measure(Mean()) == pytest.approx(0.0, abs=0.02)


def test_a_gan_steps_two_optimizers_and_keeps_the_generator_out_of_the_first() -> None:
    task = load_task("gan", 0)
    assert task.batch(0, 4).noise.shape == (4, NOISE, 1, 1)
    model = build_model("dcgan", 16, 0)
    for loss in task.losses[:2]:
        loss.of(model, task.batch(0, 4)).backward()
    names = {name.split(".")[0] for name, weight in model.named_parameters() if weight.grad is not None}
    assert names == {"discriminator"}
    optimizers = task.optimizers(model, lambda weights: torch.optim.SGD(weights, lr=0.1))
    stepped = [weight for each in optimizers for group in each.param_groups for weight in group["params"]]
    assert len(stepped) == len([*model.parameters()])


def test_even_digits_are_called_even() -> None:
    task = load_task("even-logits", 0)
    _, labels = digit_images()
    assert (task.labels.sum() + task.held_out_labels.sum()).item() == (labels % 2 == 0).sum().item()


def test_gray_levels_are_scaled_and_the_split_is_the_same() -> None:
    one, many = load_task("digits", 0), load_task("digits-1023", 0)
    torch.testing.assert_close(many.images, one.images * 1023)
    assert torch.equal(one.labels, many.labels)


@pytest.mark.parametrize("task", ["small-targets", "pressure", "gan"])
def test_a_batch_larger_than_the_data_is_refused(task: str) -> None:
    with pytest.raises(ValueError, match="batch_size=5000"):
        load_task(task, 0).check_batch_size(5000)
