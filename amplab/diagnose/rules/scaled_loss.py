"""A rule that runs a step again: whether the loss, before it is scaled, depends on the loss scale.

    loss-depends-on-scale   a derivative in the loss is taken of a scaled value and not divided by the scale

A scale is a power of two, so apart from what overflows or underflows a correct loss is the same at each, bitwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding
from amplab.diagnose.first_nonfinite import Setting
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.remedies.api_styles import Api
from amplab.diagnose.train_step.loop_state import kept, scales_of, set_scale
from amplab.display.numbers import power
from amplab.trace.engines import clear_cast_caches
from amplab.trace.handed_step import HandedStep, Scaler
from amplab.trace.untouched import untouched

__all__ = ["loss_depends_on_scale"]

DIFFERS = 0.01
"""Relative difference of two losses: more than rounding or underflow at half the scale makes."""


def loss_depends_on_scale(
    model: nn.Module, handed: HandedStep, setting: Setting, step: ObservedStep, api: Api, scaler: Scaler | None
) -> Iterator[Finding]:
    """Yield the finding if the loss is another one at half the loss scale, and the same again at the whole.

    Arguments as for `gradients_lost_downstream`. Without a scaler, or with a disabled one, nothing runs.
    """
    seen = step.values[step.loss].summary
    if scaler is None or (isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled()) or not seen.is_finite:
        return
    scale = max(scales_of(scaler))
    halved = _loss_at(model, handed, setting, scaler, scale / 2)
    if _is_near(abs(halved), seen.absmax):
        return
    again = _loss_at(model, handed, setting, scaler, scale)
    if _is_near(abs(again), seen.absmax) and not _is_near(halved, again):
        yield finding(
            "loss-depends-on-scale",
            api=api,
            tensor="loss",
            evidence={"loss": again, "loss_at_half_the_scale": halved, "loss_scale": scale},
            scale=power(scale),
            half=power(scale / 2),
        )


def _loss_at(model: nn.Module, handed: HandedStep, setting: Setting, scaler: Scaler | None, scale: float) -> float:
    """The loss of a forward at another scale; all state is restored. Sync: one."""
    torch.clear_autocast_cache()
    with kept((), scaler, ()), untouched(model), setting.casting():
        clear_cast_caches()
        set_scale(scaler, scale)
        try:
            return float(handed.run().detach())
        finally:
            clear_cast_caches()
            torch.clear_autocast_cache()


def _is_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=DIFFERS)
