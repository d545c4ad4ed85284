"""The models of the lab: small enough to train live on a CPU, with the layers that mixed precision treats differently.

`MLP` has linear layers and ReLU only. `CNN` has convolutions and BatchNorm, which O2 keeps in float32 and O3 does not.
To add a model, define it under `register_model`: configs, the command line and the dashboard read `MODELS`. Each model
belongs to the tasks whose batches it takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from amplab.trace.random_states import devices_in_use, random_states_kept, seed_all

__all__ = ["CLASSES", "CNN", "DIGITS", "MLP", "MODELS", "ModelChoice", "build_model", "models_of", "register_model"]

CLASSES = 10
DIGITS = ("digits", "digits-16", "digits-1023")
"""The tasks that the models of this file can train."""

_PIXELS = 8 * 8
_NAME = re.compile(r"[a-z][a-z0-9_-]*")

Build = TypeVar("Build", bound=Callable[[int], nn.Module])


@dataclass(frozen=True)
class ModelChoice:
    """One model that a config can name.

    Attributes:
        label: Its name in the dashboard.
        build: Takes the width of the hidden layers and returns the model; several models as one `ModelGroup`.
        tasks: Names of the tasks that can train it.
        draws: Whether its forward, or its loss, draws random numbers.
    """

    label: str
    build: Callable[[int], nn.Module]
    tasks: tuple[str, ...] = ("digits",)
    draws: bool = True


MODELS: dict[str, ModelChoice] = {}
"""The models, keyed by their name in a config."""


def register_model(
    name: str, *, label: str, task: str | tuple[str, ...] = "digits", draws: bool = True
) -> Callable[[Build], Build]:
    """Decorate a class or a function so that a config can name it.

    Args:
        name: The name in a config, lower case and without spaces.
        label: The name in the dashboard.
        task: Name of the task that can train it, or of several.
        draws: Whether its forward, or its loss, draws random numbers, as dropout does. Each step then seeds torch's
            generator and restores it afterwards; what other threads draw meanwhile is not what their seed says.

    Raises:
        TypeError: What is decorated cannot be called.
        ValueError: The name is not such a word, or another model has it.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"register_model({name!r}): expected a name of a-z, 0-9, _ and -, such as 'mlp'.")
    if name in MODELS:
        raise ValueError(f"register_model({name!r}): this name belongs to {MODELS[name].label}; choose another name.")

    def register(build: Build) -> Build:
        if not callable(build):
            raise TypeError(
                f"register_model({name!r}) got {build!r}: expected a class or a function that takes a width."
            )
        MODELS[name] = ModelChoice(label, build, (task,) if isinstance(task, str) else task, draws)
        return build

    return register


def models_of(task: str) -> dict[str, ModelChoice]:
    """Return the models that a task can train, by name; the first one is the task's default.

    >>> list(models_of("digits"))[:2]
    ['mlp', 'cnn']
    """
    return {name: choice for name, choice in MODELS.items() if task in choice.tasks}


@register_model("mlp", label="MLP", task=DIGITS, draws=False)
class MLP(nn.Module):
    """Two hidden layers: 64 → hidden → hidden → 10.

    Args:
        hidden: Width of the hidden layers.

    Shape: images `(batch, 1, 8, 8)` → logits `(batch, 10)`.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(_PIXELS, hidden)
        self.hidden2 = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = images.flatten(1)  # (batch, 64)
        x = F.relu(self.hidden1(x))  # (batch, hidden)
        x = F.relu(self.hidden2(x))  # (batch, hidden)
        logits: Tensor = self.output(x)  # (batch, 10)
        return logits


@register_model("cnn", label="CNN", task=DIGITS, draws=False)
class CNN(nn.Module):
    """Two convolutions with BatchNorm, one hidden layer.

    Args:
        hidden: Width of the hidden layer after the convolutions, which have 8 and 16 channels.

    Shape: images `(batch, 1, 8, 8)` → logits `(batch, 10)`.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3, padding=1, stride=2, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.hidden = nn.Linear(16 * 4 * 4, hidden)
        self.output = nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = F.relu(self.norm1(self.conv1(images)))  # (batch, 8, 8, 8)
        x = F.relu(self.norm2(self.conv2(x)))  # (batch, 16, 4, 4)
        x = F.relu(self.hidden(x.flatten(1)))  # (batch, hidden)
        logits: Tensor = self.output(x)  # (batch, 10)
        return logits


def build_model(name: str, hidden: int, seed: int) -> nn.Module:
    """Return the model `name` in float32 with weights drawn from `seed`; the random states are as before.

    Raises:
        ValueError: There is no such model.
    """
    if name not in MODELS:
        raise ValueError(f"model={name}: expected one of {', '.join(MODELS)}.")
    devices = devices_in_use()
    with random_states_kept(devices):
        seed_all(seed, devices)
        return MODELS[name].build(hidden)
