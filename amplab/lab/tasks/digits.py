"""Tasks on the digits: classification, at three ranges of gray levels, and even or odd with two losses.

scikit-learn bundles a copy of the UCI optical digits: 1797 handwritten digits as images of 8×8 pixels with gray levels
0 to 16. Its file is read without importing scikit-learn, which would take seconds; nothing is downloaded.

============  =================  =======================================================================
task          gray levels        what it shows
============  =================  =======================================================================
digits        0 to 1             mixed precision that works
digits-16     0 to 16            small learning rates: updates that float16 weights lose
digits-1023   0 to 1023          a variance above 65,504, which a float16 BatchNorm cannot hold
even-bce      0 to 1             binary cross-entropy of a sigmoid, which O1 refuses
even-logits   0 to 1             the same from logits, which works
============  =================  =======================================================================
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amplab.lab.models import MLP, register_model
from amplab.lab.tasks.task import ACCURACY, Task, TaskChoice, TaskLoss, rows_of_step

__all__ = ["DIGITS_CHOICES", "HELD_OUT", "OF_TEN", "OF_TWO", "EvenTask", "ImageBatch", "ImageTask", "digit_images"]

HELD_OUT = 360
"""Images kept for measuring accuracy, a fifth of the digits."""

OF_TEN = replace(ACCURACY, chance=0.18)
"""Ten digits: one is at most 12.5 % of the held-out images, and three standard errors are 5 %."""

OF_TWO = replace(ACCURACY, chance=0.63)
"""Even or odd: one is at most 55 % of the held-out images, and three standard errors are 8 %."""

_GRAY_LEVELS = 16


class ImageBatch(NamedTuple):
    """Images `(batch, channels, height, width)` and labels `(batch,)`."""

    images: Tensor
    labels: Tensor


def _cross_entropy(model: nn.Module, batch: ImageBatch) -> Tensor:
    return F.cross_entropy(model(batch.images), batch.labels)


@dataclass(frozen=True, eq=False)
class ImageTask(Task):
    """Images to train on and images to measure accuracy on.

    Attributes:
        name: As in the config.
        images: `(train, 1, 8, 8)` float32.
        labels: `(train,)` int64 in 0…9.
        held_out_images: `(held_out, 1, 8, 8)`, never trained on.
        held_out_labels: `(held_out,)`.
        seed: Seed of the split and of the batches.
        losses: One, the cross-entropy.
    """

    name: str
    images: Tensor
    labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor
    seed: int
    losses: tuple[TaskLoss, ...] = (TaskLoss("cross-entropy", _cross_entropy),)
    score = OF_TEN

    def batches_per_epoch(self, batch_size: int) -> int:
        """Return how many whole batches an epoch has.

        Raises:
            ValueError: The batch is larger than the training set.
        """
        self.check_batch_size(batch_size)
        return len(self.images) // batch_size

    def check_batch_size(self, batch_size: int) -> None:
        """Raise ValueError if the batch is larger than the training set."""
        if batch_size > len(self.images):
            raise ValueError(
                f"batch_size={batch_size}: expected at most {len(self.images)}, the number of training images of "
                f"{self.name}; choose a smaller batch."
            )

    def batch(self, step: int, batch_size: int) -> ImageBatch:
        """Return the images `(batch_size, 1, 8, 8)` and the labels `(batch_size,)` of a step, always the same.

        Each epoch is a permutation drawn from (seed, epoch); the images left over after whole batches are dropped.
        """
        self.check_batch_size(batch_size)
        rows = rows_of_step(len(self.images), self.seed, step, batch_size)
        return ImageBatch(self.images[rows], self.labels[rows])

    def measure(self, model: nn.Module) -> float:
        """Return the share of held-out images that the model classifies correctly. Sync: one."""
        predicted = model(self.held_out_images).argmax(dim=1)  # (held_out,)
        return float((predicted == self.held_out_labels).float().mean().item())


def _bce(model: nn.Module, batch: ImageBatch) -> Tensor:
    return F.binary_cross_entropy(torch.sigmoid(model(batch.images)), batch.labels)


def _bce_with_logits(model: nn.Module, batch: ImageBatch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch.images), batch.labels)


_BCE = TaskLoss("binary cross-entropy", _bce)
_BCE_WITH_LOGITS = TaskLoss("binary cross-entropy with logits", _bce_with_logits)


@dataclass(frozen=True, eq=False)
class EvenTask(ImageTask):
    """Digits labeled 1.0 if they are even, else 0.0; the loss is binary cross-entropy of a sigmoid.

    Attributes:
        losses: One, that loss; `even-logits` computes it from the logits.
    """

    losses: tuple[TaskLoss, ...] = (_BCE,)
    score = OF_TWO

    def measure(self, model: nn.Module) -> float:
        """Return the share of held-out images that are called even or odd correctly. Sync: one."""
        predicted = model(self.held_out_images) > 0  # (held_out,)
        return float((predicted == (self.held_out_labels > 0)).float().mean().item())


@register_model("even-mlp", label="MLP, one output", task=("even-bce", "even-logits"), draws=False)
class EvenMLP(nn.Module):
    """The MLP of the digits with one logit, which is positive for even digits.

    Args:
        hidden: Width of the hidden layers.

    Shape: images `(batch, 1, 8, 8)` → logits `(batch,)`.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.body = MLP(hidden)
        self.body.output = nn.Linear(hidden, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.body(images).squeeze(1)
        return logits


@lru_cache(maxsize=1)
def digit_images() -> tuple[Tensor, Tensor]:
    """Return all images `(1797, 1, 8, 8)` in [0, 1] and labels `(1797,)`.

    Raises:
        ImportError: scikit-learn, which bundles them, is not installed.
    """
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ImportError(
            "task=digits: its images are bundled with scikit-learn, which is not installed; "
            'run: python -m pip install "amplab[lab]"'
        )
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = torch.tensor(np.loadtxt(file, delimiter=","), dtype=torch.float32)  # (1797, 65), the label last
    return table[:, :-1].reshape(-1, 1, 8, 8) / _GRAY_LEVELS, table[:, -1].long()


def _split(seed: int) -> tuple[Tensor, Tensor]:
    """Return which digits to train on, and which to keep for measuring."""
    images, _ = digit_images()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return order[HELD_OUT:], order[:HELD_OUT]


def _load(name: str, levels: float, seed: int) -> ImageTask:
    (images, labels), (train, held_out) = digit_images(), _split(seed)
    images = images * levels
    return ImageTask(name, images[train], labels[train], images[held_out], labels[held_out], seed)


def _load_even(name: str, loss: TaskLoss, seed: int) -> EvenTask:
    (images, labels), (train, held_out) = digit_images(), _split(seed)
    even = (labels % 2 == 0).float()
    return EvenTask(name, images[train], even[train], images[held_out], even[held_out], seed, (loss,))


DIGITS_CHOICES = {
    "digits": TaskChoice("digits", partial(_load, "digits", 1.0), score=OF_TEN),
    "digits-16": TaskChoice("digits, gray levels to 16", partial(_load, "digits-16", 16.0), score=OF_TEN),
    "digits-1023": TaskChoice("digits, gray levels to 1023", partial(_load, "digits-1023", 1023.0), score=OF_TEN),
    "even-bce": TaskChoice("even or odd, BCE", partial(_load_even, "even-bce", _BCE), score=OF_TWO),
    "even-logits": TaskChoice(
        "even or odd, BCE with logits", partial(_load_even, "even-logits", _BCE_WITH_LOGITS), score=OF_TWO
    ),
}
"""The tasks of this file, each by the name that a config gives it."""
