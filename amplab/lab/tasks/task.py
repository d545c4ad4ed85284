"""What is trained: a task gives the batch of each step, the losses of a batch, the optimizers and the held-out score.

    batch = task.batch(step, batch_size)              # the same for the same step
    for loss in task.losses:                          # one for each loss_id
        loss.of(model, batch).backward()              # then the optimizer number loss.optimizer steps
    task.measure(model)                               # on data that are never trained on

Most tasks have one loss and one optimizer. A GAN has several: each loss has a loss scale of its own, and an optimizer
steps after the last of its losses.

The tasks themselves are in the other files of this folder.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.display.numbers import percent

__all__ = [
    "ACCURACY",
    "MakeOptimizer",
    "Score",
    "Task",
    "TaskChoice",
    "TaskLoss",
    "rows_of_step",
]

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


@dataclass(frozen=True)
class Score:
    """What is measured on held-out data.

    Attributes:
        name: In field terms, such as "accuracy" or "perplexity".
        higher_is_better: Its direction.
        is_share: Whether it is a share in [0, 1], which is shown in percent.
        chance: The best score that is explained by guessing, three standard errors included; None if unknown.
    """

    name: str
    higher_is_better: bool = False
    is_share: bool = False
    chance: float | None = None

    def is_chance(self, value: float) -> bool | None:
        """Return whether a score is no better than chance, as NaN is; None if that is unknown.

        >>> digits = Score("accuracy", higher_is_better=True, is_share=True, chance=0.17)
        >>> digits.is_chance(0.125), digits.is_chance(0.336), ACCURACY.is_chance(0.1)
        (True, False, None)
        """
        if self.chance is None:
            return None
        return not (value > self.chance if self.higher_is_better else value < self.chance)

    def text(self, value: float | None) -> str:
        """Return a value as text.

        >>> ACCURACY.text(0.9361), Score("perplexity").text(8.25), ACCURACY.text(None), ACCURACY.text(math.nan)
        ('93.6 %', '8.25', '–', 'NaN')
        """
        if value is None:
            return "–"
        if math.isnan(value):
            return "NaN"
        return percent(value) if self.is_share else f"{value:.4g}"


ACCURACY = Score("accuracy", higher_is_better=True, is_share=True)
"""The share of held-out examples that are classified correctly."""


@dataclass(frozen=True)
class TaskLoss:
    """One loss of a step; its place among the losses of its task is its loss_id.

    Attributes:
        name: In field terms, such as "loss" or "discriminator, real".
        of: Runs the forward of a batch and returns the loss, from (model, batch).
        optimizer: Number of the optimizer whose parameters it trains. Losses of one optimizer follow each other.
    """

    name: str
    of: Callable[[nn.Module, Any], Tensor]
    optimizer: int = 0


class Task(ABC):
    """What an experiment trains.

    Attributes:
        name: As in the config.
        seed: Seed of the data and of the random numbers of each step.
        losses: The losses of a step, in order.
        score: What `measure` measures; None if nothing does.
    """

    name: str
    seed: int
    losses: tuple[TaskLoss, ...]
    score: Score | None = None

    @abstractmethod
    def batch(self, step: int, batch_size: int) -> Any:
        """Return the batch of a step: a tensor or any nesting of tensors, always the same for the same step."""

    def place_in_data(self, step: int) -> dict[str, Any]:  # noqa: ARG002  most tasks compute their batches
        """Return what `know_place` of the task in another process takes, to find the batches from a step on."""
        return {}

    def know_place(self, place: Mapping[str, Any]) -> None:  # noqa: B027
        """Take over what `place_in_data` returned in another process."""

    def parts_with_state(self) -> dict[str, nn.Module]:
        """Return the losses that are modules, by name: their buffers and attributes may change in a run."""
        return {}

    def code_of_steps(self) -> dict[str, Any]:
        """Return the functions and modules of one's own that compute the losses, by name."""
        return {}

    def tell_of_reading(self, goes_on: Callable[[int], bool]) -> None:  # noqa: B027
        """Call a function now and then while many batches are read before that of a step; it says whether to go on."""

    def rest(self) -> None:  # noqa: B027
        """End what reads the data ahead; a later batch is read anew."""

    def check_batch_size(self, batch_size: int) -> None:  # noqa: B027  any size will do
        """Raise ValueError if there are no such batches."""

    def optimizers(self, model: nn.Module, make: MakeOptimizer | None) -> list[Optimizer]:
        """Return the optimizers, as many as the losses name.

        Args:
            model: As `models.build_model` returns it.
            make: Makes an optimizer of the config's kind of some parameters; None for the task's own kind.
        """
        return [self.optimizer_of(list(model.parameters()), make)]

    def optimizer_of(self, weights: Sequence[Tensor], make: MakeOptimizer | None) -> Optimizer:
        """Return the optimizer of a task that has one, of the parameters of a copy; `make` as in `optimizers`."""
        if make is None:
            raise ValueError(f"task={self.name}: has no optimizer of its own; choose one by name.")
        return make(weights)

    def measure(self, model: nn.Module) -> float:
        """Return the score of a model in evaluation mode. Sync: one."""
        raise NotImplementedError(f"task={self.name} has no score.")

    def seed_forward(self, step: int, place: int = 0) -> None:
        """Seed torch's CPU generator for one forward: dropout depends on the step and the place in it alone."""
        torch.default_generator.manual_seed(self.seed_of(step, place))

    def seed_of(self, step: int, place: int = 0) -> int:
        """Return the seed of the random numbers of one forward."""
        return ((self.seed * 1_000_003 + step + 1) * 1_009 + place) % 2**63

    @contextmanager
    def random_states_kept(self) -> Iterator[None]:
        """Run a block and restore what `seed_forward` seeds: the process has random numbers of its own."""
        state = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(state)


def rows_of_step(count: int, seed: int, step: int, batch_size: int) -> Tensor:
    """Return which of `count` examples `(batch_size,)` a step trains on.

    Each epoch is a permutation drawn from (seed, epoch); the examples left over after whole batches are dropped.
    """
    epoch, position = divmod(step, count // batch_size)
    return _epoch_order(count, seed, epoch)[position * batch_size : (position + 1) * batch_size]


@lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the permutation `(count,)` of an epoch."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch + 1) % 2**63)
    return torch.randperm(count, generator=generator)


@dataclass(frozen=True)
class TaskChoice:
    """One task that a config can name.

    Attributes:
        label: Its name in the dashboard.
        load: Returns the task of a seed.
        score: What is measured on held-out data; None if nothing is.
        optimizer: Name of the optimizer that a config has unless it names one.
        learning_rates: Learning rate of lr=None by optimizer, where it differs from that of the optimizer.
        has_own_optimizer: Whether the task makes optimizers itself, as "own".
        has_batch_size: Whether batch_size has an effect.
        has_opposed_losses: Whether a loss falls as another one rises, so that they do not say whether it learns.
        digests: Of the parts of code of one's own, see `amplab.lab.code_digests`.
    """

    label: str
    load: Callable[[int], Task]
    score: Score | None = ACCURACY
    optimizer: str = "sgd"
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    has_own_optimizer: bool = False
    has_batch_size: bool = True
    has_opposed_losses: bool = False
    digests: Mapping[str, str] = field(default_factory=dict)
