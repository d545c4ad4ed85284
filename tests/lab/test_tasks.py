"""The digits: real images, a split by the seed, batches that depend on nothing but the step."""

import subprocess
import sys

import pytest
import torch
from sklearn.datasets import load_digits

from amplab.lab import load_task
from amplab.lab.tasks import HELD_OUT


def as_set(images: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(image.flatten().tolist()) for image in images}


def test_every_image_is_there_once_in_scikit_learns_own_values():
    task = load_task("digits", 0)
    assert task.images.shape == (1797 - HELD_OUT, 1, 8, 8)
    assert task.held_out_images.shape == (HELD_OUT, 1, 8, 8)
    reference = load_digits()
    pairs = zip(reference.images, reference.target, strict=True)
    labelled = {tuple(image.flatten().tolist()): label for image, label in pairs}
    for images, labels in [(task.images, task.labels), (task.held_out_images, task.held_out_labels)]:
        for image, label in zip(images, labels, strict=True):
            assert labelled[tuple((image.flatten() * 16).tolist())] == label
    assert len(as_set(task.images) | as_set(task.held_out_images)) == len(labelled)


def test_split_and_batches_depend_on_the_seed_alone():
    first, second, other = load_task("digits", 3), load_task("digits", 3), load_task("digits", 4)
    torch.manual_seed(1)
    assert torch.equal(first.images, second.images)
    assert not torch.equal(first.images, other.images)
    state = torch.get_rng_state()
    assert torch.equal(first.batch(77, 64)[0], second.batch(77, 64)[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_an_epoch_shows_each_image_at_most_once_and_the_next_in_another_order():
    task = load_task("digits", 0)
    count = task.batches_per_epoch(64)
    assert count == 1437 // 64
    epoch = torch.cat([task.batch(step, 64)[0] for step in range(count)])
    assert len(as_set(epoch)) == count * 64
    assert not torch.equal(task.batch(0, 64)[0], task.batch(count, 64)[0])


def test_batches_are_copies():
    task = load_task("digits", 0)
    task.batch(0, 64)[0].zero_()
    assert task.batch(0, 64)[0].abs().sum() > 0


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="task=mnist"):
        load_task("mnist", 0)
    with pytest.raises(ValueError, match="batch_size=2000"):
        load_task("digits", 0).batch(0, 2000)


WITHOUT_SKLEARN = """
import sys
sys.modules["sklearn"] = None  # as on a machine without it
from amplab.lab import Experiment, ExperimentConfig
try:
    Experiment(ExperimentConfig())
except ImportError as error:
    print(error)
"""


def test_missing_scikit_learn_is_a_sentence_and_is_not_needed_to_import():
    result = subprocess.run([sys.executable, "-c", WITHOUT_SKLEARN], capture_output=True, text=True, check=True)
    assert 'python -m pip install "amplab[lab]"' in result.stdout
    code = "import sys, amplab.lab; print('sklearn' in sys.modules, 'ipywidgets' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
