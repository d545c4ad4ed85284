"""The faults that are injected into training steps, as a frozen set of names.

    overflow     gradients of the next step overflow in float16 (in float32 where the level has its range)
    nan          one element of the next batch is NaN, or of the first activation if the batch holds whole numbers only
    underflow    loss <- loss * 2^-16, from the next step on until it is switched off

They are real: an overflow is a gradient that float16 cannot represent, not a flag.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from amplab.formats import FLOAT16, FloatFormat
from amplab.policies.nested_tensors import floating_tensors_in, map_tensors

__all__ = [
    "FAULTS",
    "after_step",
    "fault_named",
    "faults_in",
    "faults_named",
    "nan_in_first_activation",
    "overflowing",
    "shrunk",
    "switched",
    "with_nan",
]

FAULTS = ("overflow", "underflow", "nan")

_LASTING = {"underflow"}
_SHRINK = 2.0**-16
_OVERFLOW_LOG2 = 60  # gradients from 2^-44 on then overflow in float16, and no gradient here overflows in float32
_FLOAT32_TOP = 2.0**127


def fault_named(fault: str) -> str:
    """Return the one of `FAULTS` that equals `fault`, which may be a member of an enum.

    Raises:
        ValueError: There is no such fault.
    """
    for each in FAULTS:
        if each == fault:
            return each
    raise ValueError(f"{fault!r}: expected a fault that can be injected; choose from {', '.join(FAULTS)}.")


def switched(faults: Set[str], fault: str, on: bool | None) -> frozenset[str]:
    """Return the faults after one is switched on or off.

    Args:
        faults: Those of the next step.
        fault: One of `FAULTS`.
        on: None switches on what lasts one step, and toggles "underflow".
    """
    if on is None:
        on = fault not in faults or fault not in _LASTING
    return frozenset({*faults, fault} if on else {*faults} - {fault})


def after_step(faults: Set[str]) -> frozenset[str]:
    """Return the faults of the step after the next one: those that last."""
    return frozenset(faults & _LASTING)


def faults_named(faults: Set[str]) -> str | None:
    """Return the faults of a step as its record has them, None if there are none; see `faults_in`.

    >>> faults_named({"nan", "overflow"})
    'overflow+nan'
    """
    return "+".join(fault for fault in FAULTS if fault in faults) or None


def faults_in(injected: str | None) -> frozenset[str]:
    """Return the faults that a record of a step names.

    >>> sorted(faults_in("overflow+nan")), faults_in(None)
    (['nan', 'overflow'], frozenset())
    """
    return frozenset(injected.split("+") if injected else ())


def shrunk(loss: Tensor, faults: Set[str]) -> Tensor:
    """Return a loss, times 2^-16 under "underflow". Sync: none."""
    return loss * _SHRINK if "underflow" in faults else loss


def overflowing(scaled: Tensor, scale: float, range_format: FloatFormat) -> Tensor:
    """Return a scaled loss so large that gradients overflow.

    Args:
        scaled: `()`, the loss times the scale.
        scale: The scale.
        range_format: The format whose range the gradients have.

    Sync: none.
    """
    if range_format is not FLOAT16:
        return scaled * _FLOAT32_TOP * _FLOAT32_TOP
    return scaled * math.ldexp(1.0 / scale, _OVERFLOW_LOG2)


def with_nan(batch: Any) -> Any:
    """Return a copy of a batch in which one element is NaN; the batch itself if it holds whole numbers only."""
    tensors = iter(floating_tensors_in(batch))
    first = next((tensor for tensor in tensors if tensor.numel()), None)
    return map_tensors(batch, lambda tensor: _with_nan_in(tensor) if tensor is first else tensor)


def _with_nan_in(tensor: Tensor) -> Tensor:
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[0] = math.nan
    return changed


@contextmanager
def nan_in_first_activation(model: nn.Module) -> Iterator[None]:
    """Put NaN into one element of the first floating-point tensor that a module without children returns."""
    is_done = False

    def disturb(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        nonlocal is_done
        if is_done or not floating_tensors_in(output):
            return None
        is_done = True
        return with_nan(output)

    leaves = [module for module in model.modules() if not [*module.children()]]
    handles = [module.register_forward_hook(disturb) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
