"""What a rehearsed step did with gradients: writes to them, steps with them, optimizers left out."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GradientWrite", "MixedStep", "SteppedGradient", "UnsteppedOptimizer"]


class GradientWrite(NamedTuple):
    """An op, outside of autograd, that changed gradients in place.

    Args:
        op: the aten op.
        names: of the parameters whose gradients it changed.
        before: their norm before, divided by the norm that backward had delivered.
        factor: norm after divided by norm before.
        norm: norm before.
    """

    op: str
    names: tuple[str, ...]
    before: float
    factor: float
    norm: float


class SteppedGradient(NamedTuple):
    """A gradient as an optimizer saw it.

    Args:
        name: of the parameter; of the half one where a master is stepped.
        optimizer: number of the optimizer.
        ratio: its norm divided by the norm that backward had delivered; NaN where one of them is 0 or not finite.
        backwards: how many times backward has delivered one since the last step.
        clipped: what writes other than by a power of two have multiplied it by.
        scaled_inside: the optimizer unscales by itself.
        of_master: it is that of a float32 master of a half parameter.
        delivered: its norm as backward had delivered it.
    """

    name: str
    optimizer: int
    ratio: float
    backwards: int
    clipped: float
    scaled_inside: bool
    of_master: bool
    delivered: float


class MixedStep(NamedTuple):
    """A step of an optimizer whose gradients were scaled differently.

    Args:
        optimizer: its number.
        scales: of the backwards that were added up, each once, in order.
    """

    optimizer: int
    scales: tuple[float, ...]


class UnsteppedOptimizer(NamedTuple):
    """An optimizer that a step left out.

    Args:
        optimizer: its number.
        names: of its parameters that backward gave a gradient.
        others: how many other optimizers were stepped.
        named: the code of the step names it, if only to set its gradients to zero.
    """

    optimizer: int
    names: tuple[str, ...]
    others: int
    named: bool = True
