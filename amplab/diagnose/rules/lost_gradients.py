"""A rule that runs a step again: which parameters get a wrong gradient because the loss scale is too small.

    gradients-underflow   the gradients of parameters are off from those in float32, and at a larger scale they are not

An op of backward that rounds its results to 0 makes everything computed from them 0 as well, so the share of elements
that are lost where they are lost says little. What reaches the parameters is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding
from amplab.diagnose.first_nonfinite import Setting
from amplab.diagnose.observed_step.tensor_summary import HALF_UNDERFLOWS, TensorSummary
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.remedies.api_styles import Api
from amplab.diagnose.reruns import gradients_of
from amplab.display.numbers import power
from amplab.trace.handed_step import HandedStep, Scaler

__all__ = ["gradients_lost_downstream"]

OFF = 0.5
"""Distance to the gradient in float32, relative to its norm, from which a gradient is wrong rather than rounded."""

LARGER = (2.0**8, 2.0**16, 2.0**24)
"""Factors by which the loss scale is raised in turn, until the gradients are right or overflow."""

NOISE = 1e-5
"""A norm relative to the largest below which a gradient may be rounding error in float32 too, such as that of a bias
before a norm layer."""


def gradients_lost_downstream(
    model: nn.Module, handed: HandedStep, setting: Setting, step: ObservedStep, api: Api, scaler: Scaler | None
) -> Iterator[Finding]:
    """Yield the finding if parameters get a wrong gradient at this loss scale and the right one at a larger scale.

    The step runs again only where a float16 tensor of backward is close to 0 as a whole.

    Args:
        model, handed, setting: the step, as `first_nonfinite` runs it again.
        step: the same step, observed.
        api: what the training loop uses.
        scaler: that of the loop, which may be disabled.
    """
    gradients = [step.values[place].summary for _, place in step.gradients]
    if not all(each.is_finite for each in gradients) or not any(map(_is_close_to_zero, _of_backward(step))):
        return
    run, casting = handed.run, setting.casting
    true = _above_noise(gradients_of(model, run, casting=casting(), number_format=torch.float32))
    wrong = _off(true, gradients_of(model, run, casting=casting(), loss_scale=setting.loss_scale))
    for factor in LARGER if wrong else ():
        scale = setting.loss_scale * factor
        still = _off(true, gradients_of(model, run, casting=casting(), loss_scale=scale))
        lost = [name for name in wrong if name not in still]
        if len(lost) > len(wrong) / 2 and len(still) < len(wrong):
            break
    else:
        return
    disabled = isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled()
    yield finding(
        "gradients-underflow",
        "disabled" if disabled else "dynamic" if setting.dynamic else "downstream",
        api=api,
        severity="note" if setting.dynamic else "error" if len(lost) > len(true) / 2 else "warning",
        tensor=f"gradient of {lost[0]}",
        evidence={"lost": len(lost), "parameters": len(true), "loss_scale": setting.loss_scale, "fits": scale},
        scale=power(setting.loss_scale),
        larger=power(scale),
        made="amplab" if type(scaler).__module__.startswith("amplab") else "torch.amp",
    )


def _of_backward(step: ObservedStep) -> Iterator[TensorSummary]:
    """What float16 ops of backward wrote, and the parameters' gradients."""
    for record in step.trace.records:
        if record.phase == "backward":
            yield from (each.summary for each in step.outputs(record.index) if each.summary.is_half)
    yield from (step.values[place].summary for _, place in step.gradients)


def _is_close_to_zero(written: TensorSummary) -> bool:
    """Whether even the largest element is 0 or has lost most of its bits."""
    return written.numel > 0 and written.absmax < 16 * HALF_UNDERFLOWS


def _above_noise(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    norms = {name: float(each.norm()) for name, each in gradients.items()}
    largest = max(norms.values(), default=0.0)
    return {name: each for name, each in gradients.items() if math.isfinite(largest) and norms[name] > NOISE * largest}


def _off(true: dict[str, Tensor], seen: dict[str, Tensor]) -> list[str]:
    """The parameters whose gradient differs from the true one by more than `OFF`. Sync: one for each."""
    return [
        name
        for name, each in true.items()
        if name not in seen or not float((seen[name] - each).norm()) <= OFF * float(each.norm())
    ]
