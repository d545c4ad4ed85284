"""Rules about weights that do not change: pure functions of what a step did, or of what it can do at most.

    optimizer-never-stepped   its parameters receive gradients, other optimizers are stepped, and it is not
    updates-rounded-away      most 16-bit weights do not change: the update is smaller than half of their last bit
    average-in-half           most elements of a 16-bit average of the weights do not change
    stale-half-weights        forward reads half copies of weights from before an optimizer step

Where a step was rehearsed, the lost updates were counted. Otherwise they follow from the learning rate and the largest
gradient: SGD changes no weight by more than lr |g| / (1 - momentum), and Adam hardly any by more than lr.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Certainty, Finding, Number
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.remedies.api_styles import Api
from amplab.diagnose.rules.gradients import shared_module
from amplab.diagnose.train_step.lost_updates import LostUpdates
from amplab.diagnose.train_step.rehearsal import Rehearsal
from amplab.diagnose.train_step.weight_averages import LostAverage
from amplab.optimizers.group_settings import learning_rate

__all__ = [
    "averages_lost",
    "copies_outdated",
    "never_stepped",
    "optimizers_left_out",
    "updates_bound_to_be_lost",
    "updates_lost",
]

MOST, LOST, LOST_OF_NORM = 0.5, 0.4, 0.25
"""Shares above which a step is lost: of the weights that cannot change, of those that did not, and of the norm.

A working training in float16 loses up to a third of its small updates, and 3 % of their norm; a stalled one loses all.
"""

LAGS = 0.1
"""Share of the elements of an average that must differ from the weights; an average that has followed them has none."""

WARM_UP = 100
"""Number of steps that a critic may take before the first of the generator, as in Wasserstein GANs."""

_HALF_GAP = {torch.float16: (2.0**-12, 2.0**-25), torch.bfloat16: (2.0**-9, 2.0**-134)}
"""Lower bounds of half the gap to the next number: relative to |w|, and absolute for subnormal numbers."""


def optimizers_left_out(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """Optimizers that a whole step does not step although it steps others; only where nothing overflowed.

    A step that steps no optimizer may be one of several that accumulate. If the code of the step does not name the
    optimizer, it may be stepped elsewhere: that is a note.
    """
    for each in rehearsal.unstepped if not rehearsal.overflowed else ():
        if each.others:
            yield never_stepped(each.optimizer, each.names, api, {"parameters": len(each.names)}, named=each.named)


def never_stepped(
    optimizer: int, names: Sequence[str], api: Api, evidence: dict[str, Number], *, named: bool = True
) -> Finding:
    """Return the finding that an optimizer is never stepped.

    Args:
        optimizer: its number.
        names: its parameters that receive gradients.
        api: what the loop uses.
        evidence: with `steps_of_others` where it is known: up to `WARM_UP` steps make the finding a note.
        named: whether the code of the step names the optimizer; if not, the finding is a note.
    """
    steps = evidence.get("steps_of_others", 0)
    early = isinstance(steps, int) and 0 < steps <= WARM_UP
    return finding(
        "optimizer-never-stepped",
        "" if named else "not-named",
        api=api,
        severity="note" if early or not named else "error",
        certainty="possible" if early or not named else "likely",
        module=shared_module(names),
        tensor=f"optimizer {optimizer}",
        evidence={"optimizer": optimizer} | evidence,
        with_gradient=len(names),
        name=f"optimizers[{optimizer}]",
    )


def updates_lost(lost: Sequence[LostUpdates]) -> Iterator[Finding]:
    """A rehearsed step most of whose updates to 16-bit weights are rounded away, by number and by norm."""
    for each in lost:
        if each.share > LOST and each.norm_share > LOST_OF_NORM:
            evidence: dict[str, Number] = {
                "updated": each.updated,
                "unmoved": each.unmoved,
                "share_of_norm": each.norm_share,
            }
            yield _finding(each.optimizer, each.share, each.dtype, "certain", evidence)


def averages_lost(averages: Sequence[LostAverage]) -> Iterator[Finding]:
    """Averages of the weights that lag behind them and hardly move; the one with the most elements is reported."""
    stuck = [each for each in averages if each.unmoved > MOST * each.updated and each.updated > LAGS * each.elements]
    if stuck:
        largest = max(stuck, key=lambda each: each.elements)
        updated, unmoved = (sum(numbers) for numbers in zip(*((e.updated, e.unmoved) for e in stuck), strict=True))
        yield finding(
            "average-in-half",
            tensor=largest.name,
            evidence={"averages": len(stuck), "updated": updated, "unmoved": unmoved},
            share=unmoved / updated,
            dtype=str(largest.dtype).removeprefix("torch."),
        )


def copies_outdated(names: Sequence[str]) -> Iterator[Finding]:
    """Forward read 16-bit copies of weights that an optimizer had stepped since."""
    if names:
        yield finding("stale-half-weights", tensor=names[0], evidence={"weights": len(names)})


def updates_bound_to_be_lost(
    model: nn.Module, optimizers: Sequence[Optimizer], step: ObservedStep | None
) -> Iterator[Finding]:
    """Most weights are too large for the largest possible update. Sync: one per 16-bit parameter."""
    gradients = (
        {name: step.values[place].summary.absmax / step.loss_scale for name, place in step.gradients} if step else {}
    )
    largest = {id(each): gradients[name] for name, each in model.named_parameters() if name in gradients}
    for number, optimizer in enumerate(optimizers):
        pairs = [(group, each) for group in optimizer.param_groups for each in group["params"] if id(each) in largest]
        low = [(group, each) for group, each in pairs if each.dtype in _HALF_GAP and largest[id(each)] > 0]
        bounds = [(each, _largest_update(group, each, largest[id(each)])) for group, each in low]
        elements = sum(each.numel() for each, _ in bounds)
        stuck = sum(0 if bound is None else _stuck(each, bound) for each, bound in bounds)
        if elements and stuck > MOST * elements:
            evidence: dict[str, Number] = {
                "weights": elements, "unmoved": stuck, "learning_rate": learning_rate(low[0][0]) or 0.0
            }  # fmt: skip
            # In float16, Adam's own arithmetic may differ from the bound.
            certainty: Certainty = "possible" if "betas" in low[0][0] else "likely"
            yield _finding(number, stuck / elements, low[0][1].dtype, certainty, evidence)


def _largest_update(group: dict[str, Any], weight: Tensor, gradient: float) -> float | None:
    """The largest change of an element in one step; None for an optimizer for which it is unknown."""
    rate = learning_rate(group)
    if rate is None:
        return None
    decay = rate * float(group.get("weight_decay") or 0) * float(weight.detach().abs().max().item())
    if "betas" in group:
        return rate + decay
    if "momentum" in group and group["momentum"] < 1 and "alpha" not in group:
        return (rate * gradient + decay) / (1 - float(group["momentum"]))
    return None


def _stuck(weight: Tensor, bound: float) -> int:
    relative, absolute = _HALF_GAP[weight.dtype]
    gaps = (weight.detach().float().abs() * relative).clamp_min(absolute)
    return int((gaps > bound).sum())


def _finding(
    optimizer: int, share: float, dtype: torch.dtype, certainty: Certainty, evidence: dict[str, Number]
) -> Finding:
    return finding(
        "updates-rounded-away",
        certainty=certainty,
        tensor=f"weights of optimizer {optimizer}",
        evidence={"share": share} | evidence,
        optimizer=optimizer,
        dtype=str(dtype).removeprefix("torch."),
        bits=11 if dtype == torch.float16 else 8,
    )
