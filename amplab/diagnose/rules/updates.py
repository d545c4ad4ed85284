"""Rules about weights that do not move: pure functions from what a step did, lost or is bound to lose, to findings.

    optimizer-never-stepped   its parameters get gradients, other optimizers step, and it does not
    updates-lost-in-weights   most 16-bit weights with an update stay where they are: it is below half their last bit

Where a step was rehearsed, its losses were counted; else they follow from the rate and the largest gradient: SGD moves
no weight by more than lr |g| / (1 - momentum), Adam hardly one by more than lr.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.diagnose.finding import Finding, Number
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.remedies.api_styles import step_of
from amplab.diagnose.rules.gradients import shared_module
from amplab.diagnose.train_step.lost_updates import LostUpdates
from amplab.diagnose.train_step.rehearsal import Rehearsal

__all__ = ["never_stepped", "optimizers_left_out", "updates_bound_to_be_lost", "updates_lost"]

MOST = 0.5
"""Share of the weights, and of the norm of their updates, from which on a step is lost rather than rounded.

Training in half that works loses up to a third of its small updates, and 3 % of their norm; one that stands still, all.
"""

WARM_UP = 100
"""Steps that a critic may take before the generator's first: what Wasserstein GANs begin with."""

_HALF_GAP = {torch.float16: (2.0**-12, 2.0**-25), torch.bfloat16: (2.0**-9, 2.0**-134)}
"""Half the gap to the next number, at the least: times |w|, and absolute among the subnormal ones."""


def optimizers_left_out(rehearsal: Rehearsal, face: str = "") -> Iterator[Finding]:
    """Optimizers that a whole step does not step, beside others that it does; told where nothing overflowed.

    Where no optimizer is stepped the step may be one of several that accumulate; one whose code does not name the
    optimizer may be a critic's alone, and then that is a note.
    """
    for each in rehearsal.unstepped if not rehearsal.overflowed else ():
        if each.others:
            found = never_stepped(each.optimizer, each.names, face, {"parameters": len(each.names)})
            yield found if each.named else replace(found, severity="note", certainty="possible", cause=_ANOTHERS_STEP)


_ANOTHERS_STEP = (
    "The code of this step does not name it: it may have a step of its own. Its gradients add up unless set to zero; "
    ".detach() what this loss reads of its module."
)


def never_stepped(optimizer: int, names: Sequence[str], face: str, evidence: dict[str, Number]) -> Finding:
    """The finding that an optimizer is left out; `names` are those of its parameters that get gradients.

    Of a run with no more than `WARM_UP` steps of others, which `evidence` tells, it is a note.
    """
    early = 0 < evidence.get("steps_of_others", 0) <= WARM_UP
    return Finding(
        "optimizer-never-stepped",
        "note" if early else "error",
        f"Optimizer {optimizer} was never stepped; {len(names)} of its parameters got a gradient and keep it.",
        "Another optimizer is stepped in its place, or its step was left out: its parameters stay as they began.",
        step_of(f"optimizers[{optimizer}]", face),
        "possible" if early else "likely",
        module=shared_module(names),
        tensor=f"optimizer {optimizer}",
        evidence={"optimizer": optimizer} | evidence,
    )


def updates_lost(lost: Sequence[LostUpdates]) -> Iterator[Finding]:
    """A rehearsed step whose updates 16-bit weights have rounded away, by number and by norm."""
    for each in lost:
        if each.share > MOST and each.norm_share > MOST:
            evidence = {"updated": each.updated, "unmoved": each.unmoved, "share_of_norm": each.norm_share}
            yield _finding(each.optimizer, each.share, each.dtype, "certain", evidence)


def updates_bound_to_be_lost(
    model: nn.Module, optimizers: Sequence[Optimizer], step: ObservedStep | None
) -> Iterator[Finding]:
    """Weights of which most are too large for any update that the rate allows. Sync: one for each 16-bit parameter."""
    gradients = (
        {name: step.values[place].summary.absmax / step.loss_scale for name, place in step.gradients} if step else {}
    )
    largest = {id(each): gradients[name] for name, each in model.named_parameters() if name in gradients}
    for number, optimizer in enumerate(optimizers):
        pairs = [(group, each) for group in optimizer.param_groups for each in group["params"] if id(each) in largest]
        halves = [(group, each) for group, each in pairs if each.dtype in _HALF_GAP and largest[id(each)] > 0]
        bounds = [(each, _largest_update(group, each, largest[id(each)])) for group, each in halves]
        elements = sum(each.numel() for each, _ in bounds)
        stuck = sum(0 if bound is None else _stuck(each, bound) for each, bound in bounds)
        if elements and stuck > MOST * elements:
            evidence = {"weights": elements, "unmoved": stuck, "learning_rate": float(halves[0][0]["lr"])}
            certainty = "possible" if "betas" in halves[0][0] else "likely"  # in half Adam's own arithmetic may be off
            yield _finding(number, stuck / elements, halves[0][1].dtype, certainty, evidence)


def _largest_update(group: dict, weight: Tensor, gradient: float) -> float | None:
    """What one step moves an element by at most; None for an optimizer of which that is not known."""
    rate = float(group["lr"])
    decay = rate * float(group.get("weight_decay") or 0) * weight.detach().abs().max().item()
    if "betas" in group:
        return rate + decay
    if "momentum" in group and group["momentum"] < 1 and "alpha" not in group:
        return (rate * gradient + decay) / (1 - group["momentum"])
    return None


def _stuck(weight: Tensor, bound: float) -> int:
    relative, absolute = _HALF_GAP[weight.dtype]
    gaps = (weight.detach().float().abs() * relative).clamp_min(absolute)
    return int((gaps > bound).sum())


def _finding(optimizer: int, share: float, dtype: torch.dtype, certainty: str, evidence: dict[str, Number]) -> Finding:
    word = "half" if dtype == torch.float16 else "bfloat16"
    bits = 11 if dtype == torch.float16 else 8
    return Finding(
        "updates-lost-in-weights",
        "warning",
        f"{share:.0%} of the {word} weights that optimizer {optimizer} updates do not move.",
        f"A weight in {word} has {bits} bits, and an update smaller than half the last of them is rounded away; in "
        "float32 it would add up.",
        'model, optimizer = amp.initialize(model.float(), optimizer, opt_level="O2")  # float32 masters\n'
        "# or float32 weights, model.float(), and torch.autocast around the forward",
        certainty,
        tensor=f"weights of optimizer {optimizer}",
        evidence={"share": share} | evidence,
    )
