"""The data to train on, split once by a seed, and batches that are a pure function of the step.

`digits` is scikit-learn's copy of the UCI optical digits: 1797 handwritten digits as images of 8×8 gray levels, bundled
with the package, so nothing is downloaded. scikit-learn is imported when the task is loaded. To add a task, add an
entry to `TASKS`. The models are in `models.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["HELD_OUT", "TASKS", "Task", "TaskChoice", "load_task"]

HELD_OUT = 360
"""Images kept for measuring accuracy, a fifth of the digits."""

_GRAY_LEVELS = 16.0


@dataclass(frozen=True, eq=False)
class Task:
    """Images to train on and images to measure accuracy on.

    Attributes:
        name: As in the config.
        images: `(train, 1, 8, 8)` float32 in [0, 1].
        labels: `(train,)` int64 in 0…9.
        held_out_images: `(held_out, 1, 8, 8)`, never trained on.
        held_out_labels: `(held_out,)`.
        seed: Seed of the split and of the batches.
    """

    name: str
    images: Tensor
    labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor
    seed: int

    def batches_per_epoch(self, batch_size: int) -> int:
        """Return how many whole batches an epoch has.

        Raises:
            ValueError: The batch is larger than the training set.
        """
        if batch_size > len(self.images):
            raise ValueError(
                f"batch_size={batch_size}: expected at most {len(self.images)}, the number of training images of "
                f"{self.name}; choose a smaller batch."
            )
        return len(self.images) // batch_size

    def batch(self, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return the images `(batch_size, 1, 8, 8)` and the labels `(batch_size,)` of a step, always the same.

        Each epoch is a permutation drawn from (seed, epoch); the images left over after whole batches are dropped.
        """
        epoch, position = divmod(step, self.batches_per_epoch(batch_size))
        rows = _epoch_order(len(self.images), self.seed, epoch)[position * batch_size : (position + 1) * batch_size]
        return self.images[rows], self.labels[rows]


@lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the permutation `(count,)` of an epoch."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch + 1) % 2**63)
    return torch.randperm(count, generator=generator)


@lru_cache(maxsize=1)
def _digits() -> tuple[Tensor, Tensor]:
    """Return all images `(1797, 1, 8, 8)` in [0, 1] and labels `(1797,)`."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "task=digits: its images are bundled with scikit-learn, which is not installed; "
            'run: python -m pip install "amplab[lab]"'
        ) from error
    digits = load_digits()
    images = torch.tensor(digits.images / _GRAY_LEVELS, dtype=torch.float32)
    return images.unsqueeze(1), torch.tensor(digits.target, dtype=torch.int64)  # (1797, 1, 8, 8), (1797,)


@dataclass(frozen=True)
class TaskChoice:
    """One task that a config can name.

    Attributes:
        label: Its name in the dashboard.
        load: Returns all images `(images, 1, 8, 8)` float32 in [0, 1] and their labels `(images,)` int64 in 0…9.
    """

    label: str
    load: Callable[[], tuple[Tensor, Tensor]]


TASKS = {"digits": TaskChoice("digits", _digits)}
"""Each task by the name that a config gives it."""


def load_task(name: str, seed: int) -> Task:
    """Return the task `name`, split by `seed` into training images and `HELD_OUT` held-out images.

    Raises:
        ImportError: scikit-learn, which bundles the data, is not installed.
        ValueError: There is no such task.
    """
    if name not in TASKS:
        raise ValueError(f"task={name}: expected one of {', '.join(TASKS)}.")
    images, labels = TASKS[name].load()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held_out, train = order[:HELD_OUT], order[HELD_OUT:]
    return Task(name, images[train], labels[train], images[held_out], labels[held_out], seed)
