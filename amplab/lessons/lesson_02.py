"""Lesson 2, rounding, swamping, underflow: sums and training with rounded weights, and the checks of the exercises.

Stochastic rounding rounds x, which lies between two neighbors a < b of a format, to b with the probability
(x - a) / (b - a), and else to a, so that the mean of many roundings is x.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from amplab.formats import FLOAT16, FloatFormat
from amplab.lab import load_task
from amplab.lessons.exercises import exercise
from amplab.lessons.forms import shown

__all__ = [
    "check_mean",
    "check_smallest_update",
    "check_stopped_counter",
    "digits",
    "layer",
    "round_stochastically",
    "running_sum",
    "share_changed",
    "train",
]

Rounding = Callable[[Tensor], Tensor]


def digits() -> tuple[Tensor, Tensor]:
    """Return images `(1437, 64)`, gray levels 0 to 16, and labels `(1437,)` of scikit-learn's digits."""
    images, labels = load_task("digits-16", 0).batch(0, 1437)
    return images.flatten(1), labels


def layer() -> nn.Linear:
    """Return a linear layer 64 → 10 in float32, the same at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Linear(64, 10)


def share_changed(weights: Tensor, update: float, fmt: FloatFormat) -> float:
    """Return the share of the weights, stored in `fmt`, that are another number after `update` is added to them."""
    stored = fmt.round(weights.detach().double())
    return (fmt.round(stored + update) != stored).double().mean().item()


def running_sum(values: Tensor, dtype: torch.dtype) -> list[float]:
    """Add the values one after the other to a total of `dtype`, and return the total after each."""
    total, totals = torch.zeros((), dtype=dtype), []
    for value in values.flatten().to(dtype):
        total = total + value
        totals.append(total.item())
    return totals


def round_stochastically(tensor: Tensor, fmt: FloatFormat, generator: Generator) -> Tensor:
    """Round each element to one of its two neighbors in `fmt`, the nearer one more often.

    Args:
        tensor: float32, below the largest number of the format.
        fmt: the format.
        generator: what the random numbers are drawn from.

    Returns:
        float32, the same shape; elements that are numbers of the format do not change.
    """
    exponent = torch.frexp(tensor.abs().clamp(min=fmt.smallest_normal)).exponent - 1
    spacing = torch.ldexp(torch.ones_like(tensor), exponent - fmt.mantissa_bits)
    return torch.floor(tensor / spacing + torch.rand(tensor.shape, generator=generator)) * spacing


def train(rounding: Rounding | None = None, *, lr: float = 3e-5, steps: int = 150) -> list[float]:
    """Train a linear layer on the digits with Adam, and return the loss of every step.

    Gradients and Adam are float32. Only the weights are rounded after each step, as if they were stored in a format.

    Args:
        rounding: what rounds the weights, such as ``FLOAT16.round``; None for float32 weights.
        lr: learning rate of Adam: about the change of each weight in one step.
        steps: number of steps.
    """
    images, labels = digits()
    model = layer()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if rounding is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(rounding(parameter))
        losses.append(loss.item())
    return losses


# ---- the checks of the exercises ----------------------------------------------------------------


@exercise("02-1")
def check_smallest_update(answer: float) -> str | None:
    """Ask for the smallest power of two that changes a weight of 0.25 in half when it is added.

    Form:
        write it as a power, such as 2**-10.

    Right:
        The gap above 0.25 is 2^-12. Half of the gap, 2^-13, is a tie and goes back to 0.25.
    """
    if answer <= 0:
        return f"{answer!r} is not a positive number; write it as a power, such as 2**-10."
    if FLOAT16.round(torch.tensor(0.25 + answer, dtype=torch.float64)).item() == 0.25:
        tie = answer == FLOAT16.ulp(0.25) / 2
        why = "is exactly halfway to the next number, and a tie goes to the even one, 0.25" if tie else "is too small"
        return f"0.25 + {answer:g} is 0.25 in half: {answer:g} {why}."
    if answer != FLOAT16.ulp(0.25):
        return (
            f"{answer:g} changes the weight, but it is not the smallest power of two; try {answer / 2:g} and smaller."
        )
    return None


@exercise("02-2")
def check_stopped_counter(answer: float) -> str | None:
    """Ask where a bfloat16 counter stops that counts in steps of one.

    Right:
        bfloat16 has 7 fraction bits: from 2^8 on its numbers are 2 apart, and 256 + 1 is a tie that goes to 256.
    """
    stops = running_sum(torch.ones(300), torch.bfloat16)[-1]
    if answer == stops:
        return None
    if answer == running_sum(torch.ones(2100), torch.float16)[-1]:
        return f"{answer:g} is where half stops; bfloat16 has 3 fraction bits less."
    return f"a bfloat16 total does not stop at {answer!r}; add ones with `running_sum` and look at the last total."


@exercise("02-3")
def check_mean(mean: Callable[[Tensor], Tensor | float]) -> str | None:
    """Ask for a function that returns the mean of many half numbers.

    Form:
        run the cell that defines `mean` first.

    Right:
        The total is float32: it neither stops growing nor overflows. Only the result has to fit into half.
    """
    every = "add all values and divide by their number"
    for values, right, advice in (
        ([6.0, 1.0, 2.0, 3.0], 3.0, every),
        ([1.0] * 4096, 1.0, "keep the total in float32"),
        ([100.0] * 2048, 100.0, "keep the total in float32"),
    ):
        found = mean(torch.tensor(values, dtype=torch.float16))
        if not isinstance(found, Tensor | float | int) or torch.as_tensor(found).numel() != 1:
            return f"it returns {shown(found)}, not one number; {every}."
        if not abs(float(found) - right) <= 1e-3 * right:  # NaN too
            what = "6, 1, 2 and 3" if advice is every else f"{len(values):,} times {right:g}"
            return f"the mean of {what} is {right:g}, and this returns {float(found):g}; {advice}."
    return None
