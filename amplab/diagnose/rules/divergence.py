"""A rule that runs a step again: whether the run would diverge in float32 too.

    diverging   a few update steps in float32, on the same batch at the same learning rates, make the loss explode

An overflow in float16 is then a consequence. Rules about the record of a run are in `rules.run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding
from amplab.diagnose.first_nonfinite import Setting
from amplab.diagnose.remedies.api_styles import Api
from amplab.diagnose.reruns import UpdateRate, losses_in_float32
from amplab.diagnose.train_step.masters import model_parameters
from amplab.display.numbers import count
from amplab.optimizers.group_settings import learning_rate
from amplab.trace.handed_step import HandedStep

__all__ = ["diverging_in_float32"]

GREW = 10.0
"""Growth of the loss on the batch that the model is trained on. With a suitable learning rate it falls."""


def diverging_in_float32(
    model: nn.Module, handed: HandedStep, setting: Setting, optimizers: Sequence[Optimizer], api: Api
) -> Iterator[Finding]:
    """Yield the finding if a few steps in float32 on this batch make the loss explode.

    Args:
        model, handed, setting: the step, as `first_nonfinite` runs it again.
        optimizers: whose learning rates are used; without one there is no finding.
        api: what the training loop uses.
    """
    rates = dict(_rates(model, optimizers))
    if not rates:
        return
    losses = losses_in_float32(model, handed, rates, casting=setting.casting())
    if handed.loss_is_made_up:
        return
    if len(losses) > 1 and not losses[-1] <= GREW * losses[0] and math.isfinite(losses[0]):
        rate = max(each.rate for each in rates.values())
        yield finding(
            "diverging",
            "in-float32",
            api=api,
            evidence={
                "float32_loss_before": losses[0],
                "float32_loss_after": losses[-1],
                "learning_rate": rate,
            },
            float32_steps=count(len(losses) - 1, "update step"),
            rate=f"{rate / 10:.2g}",
        )


def _rates(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, UpdateRate]]:
    """The name of each parameter that an optimizer, or a master of it, moves."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        groups = [group for group in optimizer.param_groups for _ in group["params"]]
        for group, own in zip(groups, model_parameters(optimizer), strict=False):
            if id(own) in names and (rate := learning_rate(group)) is not None:
                yield names[id(own)], UpdateRate(rate, "betas" in group)
