"""Lesson 3, why scale the loss: a deep network on the digits, its gradients by layer, and the exercises' checks.

The network has a sigmoid after each of six hidden layers, and a sigmoid divides a gradient by four or more. At a
loss scale of 1, float16 flushes every gradient of the first layers to zero.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import amplab
from amplab.display.numbers import power
from amplab.formats import ExponentHistogram, exponent_histogram
from amplab.lab import load_task
from amplab.lessons.exercises import exercise

__all__ = [
    "check_large_enough",
    "check_scaled_step",
    "check_sum",
    "digits",
    "fresh_network",
    "gradients_between_layers",
    "train",
]

TRAINED_ON = 1437
"""Images of a batch: all that the task does not hold out."""

WIDTH, HIDDEN_LAYERS = 32, 6
SMALL_BATCH = 64
SMALL_GRADIENT = 3e-9


def digits(count: int = TRAINED_ON) -> tuple[Tensor, Tensor]:
    """Return the first `count` images `(count, 64)` in [0, 1] and labels `(count,)` of scikit-learn's digits."""
    images, labels = load_task("digits", 0).batch(0, TRAINED_ON)
    return images[:count].flatten(1), labels[:count]


def fresh_network(seed: int = 0) -> tuple[nn.Sequential, Optimizer]:
    """Return a network of seven linear layers with sigmoids between them, and Adam; float32."""
    widths = [64] + [WIDTH] * HIDDEN_LAYERS + [10]
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for number, (wide, narrow) in enumerate(pairwise(widths), 1):
            layers[f"layer{number}"] = nn.Linear(wide, narrow)
            layers[f"sigmoid{number}"] = nn.Sigmoid()
    layers.popitem()
    model = nn.Sequential(layers)
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def train(
    model: nn.Module, optimizer: Optimizer, *, dtype: torch.dtype = torch.float32, scale: float = 1.0, steps: int = 100
) -> list[float]:
    """Train on all digits and return the loss of every step. The loss scale is static: no step is skipped.

    Args:
        model: takes images `(batch, 64)`.
        optimizer: gets the gradients divided by `scale`.
        dtype: what autocast computes matrix products in; float32 for no autocast.
        scale: what the loss is multiplied by before the backward pass.
        steps: number of steps.
    """
    images, labels = digits()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with amplab.autocast("cpu", dtype=torch.float16, enabled=dtype is torch.float16):
            loss = F.cross_entropy(model(images), labels)
        (loss * scale).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        optimizer.step()
        losses.append(loss.item())
    return losses


def gradients_between_layers(model: nn.Sequential, images: Tensor, labels: Tensor) -> dict[str, ExponentHistogram]:
    """Run one float32 step and return, for each linear layer, the exponents of the gradients of its outputs.

    The backward pass computes these gradients first, from the last layer to the first; the gradients of the weights
    are made from them. The gradients of the parameters do not change.
    """
    outputs: dict[str, Tensor] = {}

    def keep(name: str, _layer: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs[name] = output  # (batch, features)

    layers = {name: layer for name, layer in model.named_children() if isinstance(layer, nn.Linear)}
    hooks = [layer.register_forward_hook(partial(keep, name)) for name, layer in layers.items()]
    try:
        loss = F.cross_entropy(model(images), labels)
    finally:
        for hook in hooks:
            hook.remove()
    gradients = torch.autograd.grad(loss, list(outputs.values()))
    return dict(zip(outputs, map(exponent_histogram, gradients), strict=True))


# ---- the checks of the exercises ----------------------------------------------------------------


@exercise("03-1")
def check_large_enough(answer: float) -> str | None:
    """Ask for the smallest power of two that keeps a gradient of 3e-9 from becoming zero in half.

    Form:
        write a power of two, such as 2, 4 or 8.

    Right:
        3e-9 × 16 = 4.8e-8, which is nearer to half's smallest number, 2^-24 = 6e-8, than to zero.
    """
    if not _is_power_of_two(answer):
        return f"{answer!r} is not a power of two, such as 2, 4 or 8."
    scaled = torch.tensor(SMALL_GRADIENT * answer)
    if scaled.half() == 0:
        return f"3e-9 × {answer:g} = {scaled.item():.1e} is still zero in half; choose a larger power of two."
    if (scaled / 2).half() != 0:
        return f"{answer:g} is large enough, and {answer / 2:g} is too; find the smallest."
    return None


@exercise("03-2")
def check_sum(answer: float) -> str | None:
    """Ask for the largest loss scale that fits at the first step if the loss is a sum over the images.

    Form:
        take `largest_fit` of what `amplab.gradient_range` returns.

    Right:
        The sum is 1437 times the mean, between 2^10 and 2^11, and so is every gradient: the largest scale that fits
        is smaller by a factor of 2^11.
    """
    model, _ = fresh_network()
    right = amplab.gradient_range(model, digits(), loss=nn.CrossEntropyLoss(reduction="sum")).largest_fit
    mean = amplab.gradient_range(model, digits(), loss=F.cross_entropy).largest_fit
    if answer == right:
        return None
    if answer == mean:
        return f"{power(answer)} is the largest scale for the mean; give the tool a loss with reduction='sum'."
    if not _is_power_of_two(answer):
        return f"{answer!r} is not a power of two; take `largest_fit` of what `amplab.gradient_range` returns."
    return f"{power(answer)} is not what the tool returns for a fresh network and all {TRAINED_ON:,} images."


@exercise("03-3")
def check_scaled_step(step: Callable[[nn.Module, Optimizer, Tensor, float], object]) -> str | None:
    """Ask for a function that scales the loss, and gives the optimizer gradients without the scale.

    Form:
        run the cell that defines `scaled_step` first.

    Right:
        The weights are those of a step without a scale: the scale was only in the backward pass.
    """
    scale = 1024.0
    start, plain, scaled = (_weights_after(each, scale) for each in (None, _plain_step, step))
    if torch.equal(scaled, start):
        return "the weights did not change; call `optimizer.step()` at the end."
    if torch.allclose(scaled, plain, rtol=0, atol=1e-6):
        if not torch.allclose(_weights_after(step, 4 * scale), plain, rtol=0, atol=1e-6):
            return "the weights are right for a scale of 1,024 and wrong for 4,096; divide each `p.grad` by `scale`."
        return _fault_inside(step, scale)
    ratio = float((scaled - start).norm() / (plain - start).norm())
    if abs(ratio / scale - 1) < 0.01:
        return "the weights moved 1,024 times too far; divide each `p.grad` by `scale` before `optimizer.step()`."
    if abs(ratio * scale - 1) < 0.01:
        return "the weights moved 1,024 times too little; multiply the loss by `scale` before `backward()`."
    return f"the weights moved {ratio:.2g} times as far as without a scale; expected the same distance."


def _is_power_of_two(answer: float) -> bool:
    return math.frexp(answer)[0] == 0.5


def _plain_step(_model: nn.Module, optimizer: Optimizer, loss: Tensor, _scale: float) -> None:
    loss.backward()
    optimizer.step()


def _small_case() -> tuple[nn.Module, Optimizer, Tensor]:
    """Return a linear model, SGD, whose steps are proportional to the gradients, and a loss."""
    images, labels = digits(SMALL_BATCH)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Linear(64, 10)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy(model(images), labels)


def _weights_after(step: Callable[[nn.Module, Optimizer, Tensor, float], object] | None, scale: float) -> Tensor:
    model, optimizer, loss = _small_case()
    if step is not None:
        step(model, optimizer, loss, scale)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _fault_inside(step: Callable[[nn.Module, Optimizer, Tensor, float], object], scale: float) -> str | None:
    """Return what is wrong in a step after which the weights are right, or None."""
    model, optimizer, loss = _small_case()
    parameters = list(model.parameters())
    right = torch.autograd.grad(loss, parameters, retain_graph=True)
    arrived: list[float] = []
    given: list[Tensor] = []
    loss.register_hook(lambda gradient: arrived.append(gradient.item()))
    optimizer.register_step_pre_hook(
        lambda *_: given.extend(each.grad.clone() for each in parameters if each.grad is not None)
    )
    step(model, optimizer, loss, scale)
    if arrived != [scale]:
        return "the backward pass had no scale; call `(loss * scale).backward()`."
    if len(given) != len(right) or not all(map(partial(torch.allclose, rtol=1e-5), given, right)):
        return "the optimizer was given other gradients; divide each `p.grad` by `scale`, and change nothing else."
    return None
