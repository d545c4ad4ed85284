"""Lesson 10, accumulation: the same batch in several backwards, in each of the ways, and the checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.amp import ScaleRecord, Session
from amplab.display.charts import bar_chart
from amplab.display.html import page
from amplab.display.numbers import count, percent, power
from amplab.lab import load_task
from amplab.lessons.exercises import exercise
from amplab.views import Choice, Explorable, Slider

__all__ = [
    "WAYS",
    "Accumulated",
    "accumulated",
    "accumulation_explorer",
    "check_accumulation",
    "check_growth",
    "check_left_over",
    "gradients_of",
    "micro_batches",
    "new_model",
]

WAYS = ("unscale after each backward", "delay_unscale", "zero_grad before each backward")
"""How a loop may treat the gradients between two backwards; the last one is a mistake."""

BATCH_SIZE = 256


def new_model(seed: int = 0, norm: bool = False) -> tuple[nn.Module, Optimizer]:
    """Return a small network for the digits, and SGD; the same weights for the same seed.

    Args:
        seed: of the weights.
        norm: with a BatchNorm after the first layer.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second = nn.Linear(64, 64), nn.Linear(64, 10)
    between = [nn.BatchNorm1d(64)] if norm else []
    model = nn.Sequential(nn.Flatten(), first, *between, nn.ReLU(), second)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def micro_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return a batch of 256 digits as `count` pairs of images and labels of equal size."""
    images, labels = load_task("digits", 0).batch(0, BATCH_SIZE)
    return list(zip(images.chunk(count), labels.chunk(count), strict=True))


def gradients_of(params: Sequence[Tensor] | nn.Module) -> Tensor:
    """Return all gradients as one float64 vector."""
    tensors = params.parameters() if isinstance(params, nn.Module) else params
    return torch.cat([param.grad.flatten().double() for param in tensors if param.grad is not None])


@dataclass(frozen=True)
class Accumulated:
    """The gradients of 256 digits, accumulated over micro-batches.

    Attributes:
        norm: their norm, after the last backward.
        true_norm: the norm of the gradients of the whole batch in float32.
        difference: the norm of the difference from those, relative to `true_norm`.
        counted: how many backwards without overflow the loss scaler has counted.
        scale: the loss scale for the next step.
        gradients: themselves, as one float64 vector.
    """

    norm: float
    true_norm: float
    difference: float
    counted: int
    scale: float
    gradients: Tensor = field(repr=False, compare=False)

    def __repr__(self) -> str:
        """Return the result in one line."""
        return self._sentence(power(self.scale))

    def _repr_html_(self) -> str:
        bars = {"whole batch in float32": self.true_norm, "accumulated": self.norm}
        return page(
            self._sentence(power(self.scale, raised=True)), bar_chart(bars, label="norm of the gradients").html()
        )

    def _sentence(self, scale: str) -> str:
        return (
            f"{self.norm / self.true_norm:.2g} times the true norm, difference {percent(self.difference)}, "
            f"{count(self.counted, 'clean backward')}, next loss scale {scale}"
        )


@lru_cache(maxsize=1)
def _whole_batch() -> Tensor:
    """The gradients of the whole batch in float32."""
    model, _ = new_model()
    ((images, labels),) = micro_batches(1)
    F.cross_entropy(model(images), labels).backward()
    return gradients_of(model)


@lru_cache(maxsize=256)
def accumulated(
    level: str = "O1", power: int = 3, way: str = WAYS[0], divide: str = "by the number", boost: float = 1.0
) -> Accumulated:
    """Accumulate the gradients of 256 digits.

    Args:
        level: the opt_level.
        power: the number of micro-batches is 2^power.
        way: one of `WAYS`.
        divide: "not" leaves out the division of each loss by the number of micro-batches.
        boost: multiplies each loss, to make its gradients overflow.
    """
    parts = 2**power
    session = Session()
    model, optimizer = session.initialize(*new_model(), opt_level=level, verbosity=0)
    try:
        for place, (images, labels) in enumerate(micro_batches(parts), 1):
            if way == WAYS[2]:
                optimizer.zero_grad()
            with session.casting():
                loss = F.cross_entropy(model(images), labels) * boost / (1 if divide == "not" else parts)
            delay = way == WAYS[1] and place < parts
            with session.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
                scaled_loss.backward()
        gradients = gradients_of(list(session.master_params(optimizer)))
        state = session.state_dict()["loss_scaler0"]
    finally:
        session.reset()
    true = _whole_batch()
    return Accumulated(
        norm=float(gradients.norm()),
        true_norm=float(true.norm()),
        difference=float((gradients - true).norm() / true.norm()),
        counted=state["unskipped"],
        scale=state["loss_scale"],
        gradients=gradients,
    )


def accumulation_explorer() -> Explorable:
    """Return the accumulation of one batch, with the level, the number of micro-batches and the way to move."""
    return Explorable(
        accumulated,
        level=Choice(("O1", "O2"), label="opt_level"),
        power=Slider(0, 5, value=3, label="micro-batches 2^"),
        way=Choice(WAYS, label="between backwards"),
        divide=Choice(("by the number", "not"), label="divide each loss"),
    )


@exercise("10-1")
def check_accumulation(answer: Callable[..., object]) -> str | None:
    """Check a function that accumulates eight micro-batches at O1, by running it.

    Form:
        complete my_accumulation and set answer = my_accumulation.

    Right:
        The gradients are those of the whole batch, and they were unscaled once.
    """
    session = Session()
    records: list[ScaleRecord] = []
    losses: list[Tensor] = []

    def scale_loss(loss: Tensor, *args: Any, **kwargs: Any) -> AbstractContextManager[Tensor]:
        losses.append(loss)
        return session.scale_loss(loss, *args, **kwargs)

    model, optimizer = session.initialize(*new_model(), opt_level="O1", verbosity=0)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    stop = session.subscribe(records.append)
    try:
        with session.casting():
            answer(model, optimizer, micro_batches(8), scale_loss)
    finally:
        stop()
        session.reset()
    if not torch.equal(nn.utils.parameters_to_vector(model.parameters()), before):
        return "the weights have changed: the exercise asks for the gradients only, without optimizer.step()."
    if not records:
        return "no gradient was unscaled: the last backward must run without delay_unscale."
    if len(records) > 1:
        return f"gradients were unscaled {len(records)} times, expected once: delay all backwards but the last."
    if any(param.grad is None for param in model.parameters()):
        return "some weights have no gradient: leave the gradients in place after the last backward."
    gradients = gradients_of(model)
    if (fault := _difference(float(gradients.norm()) / float(_whole_batch().norm()), gradients)) is not None:
        return fault
    if len(losses) != 8:
        return f"scale_loss was entered {len(losses)} times, expected 8: once for each micro-batch."
    return None


def _difference(ratio: float, gradients: Tensor) -> str | None:
    """Return what is wrong with accumulated gradients, from their norm relative to that of the whole batch."""
    if 7.0 < ratio < 9.0:
        return f"the gradients are {ratio:.1f} times as large as those of the whole batch: divide each loss by 8."
    if not float((gradients - _whole_batch()).norm() / _whole_batch().norm()) <= 0.05:  # NaN too
        return (
            f"the gradients differ from those of the whole batch (norm × {ratio:.2g}): use all eight micro-batches, "
            "and set gradients to zero only before the first one."
        )
    return None


@exercise("10-2")
def check_growth(answer: tuple[int, int]) -> str | None:
    """Check after how many optimizer steps a scale with a window of 2000 doubles: without delay, with delay.

    Form:
        write two numbers of steps, such as (10, 20): without delay, with delay.

    Right:
        The window counts unscaled backwards: 2000 / 8 = 250 steps without delay, 2000 with it.
    """
    each, delayed = answer
    if each == 2000:
        return "without delay every backward counts, not every step: a step has 8 of them."
    if each != 250:
        return f"{each} steps without delay have {8 * each} backwards; the window is 2000 backwards."
    if delayed != 2000:
        return f"{delayed}: with delay_unscale only the last backward of a step counts, one for each step."
    return None


@exercise("10-3")
def check_left_over(answer: float) -> str | None:
    """Check the divisor of each loss in the last, shorter group of an epoch.

    Right:
        The last group has 2 micro-batches, and the mean of 2 losses is their sum divided by 2.
    """
    if answer == 4:
        return "4 makes the gradients of the last step half as large: only 2 micro-batches are summed in it."
    if answer == 22:
        return "22 is the number of micro-batches of the epoch; a step sums only those of its group."
    if answer != 2:
        return f"{answer} is not their number: count the micro-batches of the last group, 22 - 5 · 4."
    return None
