"""A DCGAN on the digits: three losses with a loss scale each, two optimizers.

=======  ====================  ===============  ================================
loss_id  loss                  optimizer        trained on
=======  ====================  ===============  ================================
0        discriminator, real   discriminator's  images
1        discriminator, fake   discriminator's  images of the generator, detached
2        generator             generator's      its images, called real
=======  ====================  ===============  ================================

It is apex's `examples/dcgan`, small enough for a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.lab.models import register_model
from amplab.lab.tasks.digits import digit_images
from amplab.lab.tasks.task import MakeOptimizer, Task, TaskChoice, TaskLoss, rows_of_step
from amplab.trace.handed_step import ModelGroup

__all__ = ["GAN_CHOICE", "NOISE", "Discriminator", "GanBatch", "GanTask", "Generator"]

NOISE = 32
"""Random numbers from which the generator makes an image."""


class GanBatch(NamedTuple):
    """Images `(batch, 1, 8, 8)` in [0, 1], and noise `(batch, NOISE, 1, 1)`."""

    images: Tensor
    noise: Tensor


def _judged(logits: Tensor, *, real: bool) -> Tensor:
    """The loss of calling images real or fake, from their logits `(batch,)`."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def _real(models: nn.Module, batch: GanBatch) -> Tensor:
    return _judged(models.get_submodule("discriminator")(batch.images), real=True)


def _fake(models: nn.Module, batch: GanBatch) -> Tensor:
    images = models.get_submodule("generator")(batch.noise).detach()
    return _judged(models.get_submodule("discriminator")(images), real=False)


def _deceive(models: nn.Module, batch: GanBatch) -> Tensor:
    images = models.get_submodule("generator")(batch.noise)
    return _judged(models.get_submodule("discriminator")(images), real=True)


@dataclass(frozen=True, eq=False)
class GanTask(Task):
    """Images that a generator learns to imitate.

    Attributes:
        name: As in the config.
        images: `(images, 1, 8, 8)` float32 in [0, 1].
        seed: Seed of the batches and of the noise.
    """

    name: str
    images: Tensor
    seed: int
    losses = (
        TaskLoss("discriminator, real", _real, optimizer=0),
        TaskLoss("discriminator, fake", _fake, optimizer=0),
        TaskLoss("generator", _deceive, optimizer=1),
    )

    def check_batch_size(self, batch_size: int) -> None:
        """Raise ValueError if the batch is larger than the training set."""
        if batch_size > len(self.images):
            raise ValueError(
                f"batch_size={batch_size}: expected at most {len(self.images)}, the number of images of {self.name}; "
                "choose a smaller batch."
            )

    def batch(self, step: int, batch_size: int) -> GanBatch:
        """Return the images and the noise of a step, always the same."""
        self.check_batch_size(batch_size)
        rows = rows_of_step(len(self.images), self.seed, step, batch_size)
        generator = torch.Generator().manual_seed(self.seed_of(step))
        return GanBatch(self.images[rows], torch.randn(batch_size, NOISE, 1, 1, generator=generator))

    def optimizers(self, model: nn.Module, make: MakeOptimizer | None) -> list[Optimizer]:
        """Return the discriminator's optimizer and the generator's."""
        if make is None:
            raise ValueError("task=gan: has no optimizer of its own; choose one by name.")
        return [make(model.get_submodule(name).parameters()) for name in ("discriminator", "generator")]


def _load(seed: int) -> GanTask:
    images, _ = digit_images()
    return GanTask("gan", images, seed)


GAN_CHOICE = TaskChoice(
    "GAN on digits",
    _load,
    score=None,
    optimizer="adam",
    learning_rates={"adam": 0.001, "adamw": 0.001, "sgd": 0.02},
    has_opposed_losses=True,
)


class Generator(nn.Module):
    """Noise to images, by transposed convolutions.

    Args:
        channels: Channels of the hidden layer.

    Shape: noise `(batch, NOISE, 1, 1)` → images `(batch, 1, 8, 8)` in [0, 1].
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.ConvTranspose2d(NOISE, channels, kernel_size=4, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.ConvTranspose2d(channels, 1, kernel_size=4, stride=2, padding=1)

    def forward(self, noise: Tensor) -> Tensor:
        """Return the images."""
        x = F.relu(self.norm1(self.conv1(noise)))  # (batch, channels, 4, 4)
        return torch.sigmoid(self.conv2(x))  # (batch, 1, 8, 8)


class Discriminator(nn.Module):
    """Images to logits, which are large for images that it takes for real.

    Args:
        channels: Channels of the hidden layer.

    Shape: images `(batch, 1, 8, 8)` → logits `(batch,)`.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, kernel_size=4, stride=2, padding=1)
        self.conv2 = nn.Conv2d(channels, 1, kernel_size=4)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = F.leaky_relu(self.conv1(images), 0.2)  # (batch, channels, 4, 4)
        logits: Tensor = self.conv2(x).flatten()  # (batch,)
        return logits


@register_model("dcgan", label="DCGAN", task="gan", draws=False)
def _dcgan(hidden: int) -> ModelGroup:
    channels = max(hidden // 4, 1)
    models = {"discriminator": Discriminator(channels), "generator": Generator(channels)}
    return ModelGroup(models, models)
