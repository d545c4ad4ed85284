"""Two regressions on made data whose units float16 cannot hold: one too small, one too large.

==================  ================================  =====================================================
task                data                              in float16
==================  ================================  =====================================================
small-targets       64 targets of about 1e-5          the gradient of the loss, 2·error/(batch·64) ≈ 5e-9, is
                                                      below 6e-8 and becomes zero
pressure            16 air pressures of about         infinite: the largest float16 number is 65,504
                    101,325 pascals
==================  ================================  =====================================================

Both are learned in float32 within 300 steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amplab.lab.models import register_model
from amplab.lab.tasks.task import Score, Task, TaskChoice, TaskLoss, rows_of_step

__all__ = [
    "PRESSURE_CHOICE",
    "SMALL_TARGETS",
    "SMALL_TARGETS_CHOICE",
    "BarometerNet",
    "RegressionBatch",
    "RegressionTask",
    "SmallTargetsNet",
]

SMALL_TARGETS = 1e-5
"""Standard deviation of the targets of small-targets."""

_FEATURES = 16
_OUTPUTS = 64
_TRAIN, _HELD_OUT = 1536, 512
_PASCALS, _PASCALS_DEVIATION = 101_325.0, 800.0

R_SQUARED = Score("R²", higher_is_better=True, chance=0.0)
"""1 - error² / variance: 1 is perfect, 0 is as good as the mean of the targets."""


class RegressionBatch(NamedTuple):
    """Inputs `(batch, features)` and targets `(batch, outputs)`, float32."""

    inputs: Tensor
    targets: Tensor


def _mean_squared_error(model: nn.Module, batch: RegressionBatch) -> Tensor:
    return F.mse_loss(model(batch.inputs), batch.targets)


@dataclass(frozen=True, eq=False)
class RegressionTask(Task):
    """Inputs and targets, the last `_HELD_OUT` of which are never trained on.

    Attributes:
        name: As in the config.
        inputs: `(examples, features)` float32.
        targets: `(examples, outputs)` float32.
        seed: Seed of the data and of the batches.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    seed: int
    losses = (TaskLoss("mean squared error", _mean_squared_error),)
    score = R_SQUARED

    def check_batch_size(self, batch_size: int) -> None:
        """Raise ValueError if the batch is larger than the training set."""
        if batch_size > _TRAIN:
            raise ValueError(
                f"batch_size={batch_size}: expected at most {_TRAIN}, the number of training examples of {self.name}; "
                "choose a smaller batch."
            )

    def batch(self, step: int, batch_size: int) -> RegressionBatch:
        """Return the examples of a step, always the same."""
        self.check_batch_size(batch_size)
        rows = rows_of_step(_TRAIN, self.seed, step, batch_size)
        return RegressionBatch(self.inputs[rows], self.targets[rows])

    def measure(self, model: nn.Module) -> float:
        """Return R² of the held-out examples, in float64. Sync: one."""
        targets = self.targets[_TRAIN:].double()
        errors = model(self.inputs[_TRAIN:]).double() - targets
        return float((1 - errors.square().sum() / (targets - targets.mean(dim=0)).square().sum()).item())


def _teacher(seed: int, outputs: int, *, sum_free: bool = False) -> tuple[Tensor, Tensor]:
    """Return standardized inputs `(examples, 16)` and what a random net of tanh makes of them `(examples, outputs)`.

    Args:
        seed: Seed of both.
        outputs: Number of targets, each with mean 0; their common standard deviation is 1.
        sum_free: Whether the inputs of each example sum to zero.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(_TRAIN + _HELD_OUT, _FEATURES, generator=generator)
    if sum_free:
        inputs = inputs - inputs.mean(dim=1, keepdim=True)
    first = torch.randn(_FEATURES, 8, generator=generator) / math.sqrt(_FEATURES)
    second = torch.randn(8, outputs, generator=generator)
    targets = torch.tanh(inputs @ first) @ second
    return inputs, (targets - targets.mean(dim=0)) / targets.std()


def _load_small_targets(seed: int) -> RegressionTask:
    inputs, targets = _teacher(seed, _OUTPUTS)
    return RegressionTask("small-targets", inputs, targets * SMALL_TARGETS, seed)


def _load_pressure(seed: int) -> RegressionTask:
    inputs, targets = _teacher(seed, 1, sum_free=True)
    return RegressionTask("pressure", _PASCALS + _PASCALS_DEVIATION * inputs, targets, seed)


SMALL_TARGETS_CHOICE = TaskChoice(
    "small targets", _load_small_targets, score=R_SQUARED, learning_rates={"sgd": 2.0, "adam": 1e-5, "adamw": 1e-5}
)
PRESSURE_CHOICE = TaskChoice("air pressure", _load_pressure, score=R_SQUARED, learning_rates={"sgd": 0.03})


@register_model("small-targets-mlp", label="MLP", task="small-targets", draws=False)
class SmallTargetsNet(nn.Module):
    """Two hidden layers; the output layer starts at zero, as is usual for small targets: 16 → hidden → hidden → 64.

    Args:
        hidden: Width of the hidden layers.

    Shape: inputs `(batch, 16)` → predictions `(batch, 64)`.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(_FEATURES, hidden)
        self.hidden2 = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, _OUTPUTS)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the predictions."""
        x = F.relu(self.hidden1(inputs))  # (batch, hidden)
        x = F.relu(self.hidden2(x))  # (batch, hidden)
        predictions: Tensor = self.output(x)  # (batch, 64)
        return predictions


@register_model("barometer", label="LayerNorm + MLP", task="pressure", draws=False)
class BarometerNet(nn.Module):
    """LayerNorm over the pressures, then two hidden layers: 16 → hidden → hidden → 1.

    Args:
        hidden: Width of the hidden layers.

    Shape: pressures `(batch, 16)` in pascals → predictions `(batch, 1)`.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_FEATURES)
        self.hidden1 = nn.Linear(_FEATURES, hidden)
        self.hidden2 = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, 1)

    def forward(self, pressures: Tensor) -> Tensor:
        """Return the predictions."""
        x = self.norm(pressures)  # (batch, 16), of size 1
        x = F.relu(self.hidden1(x))  # (batch, hidden)
        x = F.relu(self.hidden2(x))  # (batch, hidden)
        predictions: Tensor = self.output(x)  # (batch, 1)
        return predictions
