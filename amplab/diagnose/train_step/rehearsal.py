"""`Rehearsal`: what one train step does with its gradients, as values.

    backward     delivers a gradient: its norm is recorded
    a write      changes gradients in place, such as unscaling or clipping: the factor is recorded
    step         the optimizer gets a gradient: its norm is recorded, and what 16-bit weights lose is counted
    a schedule   moves: whether it does so before the step, or without one
    an average   of the weights is written: what its 16-bit numbers lose is counted, see `weight_averages`

The norms alone show what a gradient was multiplied by between backward and step, whichever functions did it.
`loop_recorder` records, `rehearse_loop` runs the step. The rules are in `rules.gradients`, `rules.updates` and
`rules.schedule`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from amplab.diagnose.train_step.lost_updates import LostUpdates
from amplab.diagnose.train_step.schedules import ScheduleMove
from amplab.diagnose.train_step.weight_averages import LostAverage

__all__ = [
    "EmptyClip",
    "GradientWrite",
    "MisusedGradients",
    "MixedStep",
    "Rehearsal",
    "SteppedGradient",
    "UnsteppedOptimizer",
]


class GradientWrite(NamedTuple):
    """An op outside of autograd that changed gradients in place.

    Args:
        op: name of the aten op.
        names: names of the parameters whose gradients it changed.
        before: norm of these gradients before the op, divided by the norm that backward delivered.
        factor: norm after the op divided by the norm before it.
        norm: norm before the op.
        call: the function of torch that the user's code called, `clip_grad_norm_`; the op's name if it called the op.
        line: the line of that call, `train.py:12`; empty if unknown.
        ratios: `before`, for each gradient alone; NaN if one of the norms is 0 or not finite.
        added: norm of what the op added; 0 for another op.
    """

    op: str
    names: tuple[str, ...]
    before: float
    factor: float
    norm: float
    call: str = ""
    line: str = ""
    ratios: tuple[float, ...] = ()
    added: float = 0.0


class EmptyClip(NamedTuple):
    """A clipping of parameters none of which has a gradient.

    Args:
        call: the function of torch.
        line: the line of the call.
    """

    call: str
    line: str


class SteppedGradient(NamedTuple):
    """A gradient at the step of an optimizer.

    Args:
        name: of the parameter; for a master, of the model's parameter.
        optimizer: the optimizer's number.
        ratio: its norm divided by the norm that backward delivered; NaN if one of them is 0 or not finite.
        backwards: how many backwards delivered one since the last step.
        clipped: the factor of all writes that are not a power of two.
        scaled_inside: whether the optimizer itself unscales.
        of_master: whether it is the gradient of a float32 master.
        delivered: its norm when backward delivered it.
        flushed: if it is float32 and float16 holds all its values: which share of what backward delivered is now 0.
    """

    name: str
    optimizer: int
    ratio: float
    backwards: int
    clipped: float
    scaled_inside: bool
    of_master: bool
    delivered: float
    flushed: float = 0.0

    @property
    def unclipped(self) -> float:
        """The ratio without the clipping; NaN if nothing is left of the gradient."""
        return self.ratio / self.clipped if self.clipped else math.nan


class MixedStep(NamedTuple):
    """A step of an optimizer with gradients of several scales.

    Args:
        optimizer: its number.
        scales: the distinct scales of the backwards that were added up, in order.
    """

    optimizer: int
    scales: tuple[float, ...]


class MisusedGradients(NamedTuple):
    """Gradients that a step used although something had happened to them before.

    Args:
        optimizer: its number.
        names: their parameters.
        times: how often it had happened.
    """

    optimizer: int
    names: tuple[str, ...]
    times: int


class DroppedGradients(NamedTuple):
    """Gradients of a backward that were dropped before a step used them, and that nothing else used.

    Args:
        optimizer: the number of the optimizer that stepped with those of a later backward.
        names: their parameters.
        times: of how many backwards.
        of_other_batches: whether the loop had taken a batch between that backward and the one whose gradients the step
            used; False if the batches are not known.
    """

    optimizer: int
    names: tuple[str, ...]
    times: int
    of_other_batches: bool


class UnsteppedOptimizer(NamedTuple):
    """An optimizer that was not stepped.

    Args:
        optimizer: its number.
        names: its parameters with a gradient.
        others: how many other optimizers were stepped.
        named: whether the code of the train step names it, for example to set its gradients to zero.
    """

    optimizer: int
    names: tuple[str, ...]
    others: int
    named: bool = True


@dataclass(frozen=True)
class Rehearsal:
    """What one train step does with its gradients.

    Args:
        scales: the loss scales in force.
        writes: in order.
        stepped: in order, one for each parameter and step.
        overflowed: whether backward delivered inf or NaN, or was forced to.
        lost: what 16-bit weights lose of each optimizer's step.
        schedules: the schedulers that moved.
        unstepped: the optimizers that were not stepped, though their parameters got gradients and still have them.
        mixed: the steps that added up gradients of several scales.
        in_half: whether an op wrote float16.
        looked_through: parameters whose gradients a clipping read and did not change.
        empty_clips: the clippings that no gradient reached.
        clips_by_name: the clipping function that the step's code calls with the model's parameters; empty for none.
        early: gradients to which scaled ones were added after they had been unscaled.
        unscaled_by_two: gradients that two scalers unscaled, one after the other.
        unguarded: gradients that were not finite and that a step used although a scaler was in use.
        hidden: gradients that were not finite after backward and were at the step: the loop replaced values before the
            scaler checked them.
        hidden_at: the call and the line that did so; empty if unknown.
        rewritten: whether the loop wrote values to gradients by an op that can do so.
        another_scaler: if only other scalers than the one that was passed divided gradients: the scale of the first of
            them, and the scale of the one that was passed; else None.
        dropped: gradients of earlier backwards of the same step that were dropped before a step, or the loop itself,
            used them.
        cleared: whether the step leaves no gradient other than 0 behind.
        left_over: gradients that were inf or NaN before the step began, to which its backward added.
        averages: the averages of the weights in 16 bits, with what they lose.
        stale: the weights whose 16-bit copies forward read after a step had changed the weights.
        loss_gradient: the gradient of the loss itself, which is what it was scaled by; None if it was not seen.
        elsewhere: a rehearsal at another loss scale, if there was one.
        far_below: a rehearsal at a loss scale below 1, if there was one.
        skipped: a rehearsal with an overflow, if there was one.
    """

    scales: tuple[float, ...]
    writes: tuple[GradientWrite, ...]
    stepped: tuple[SteppedGradient, ...]
    overflowed: bool = False
    lost: tuple[LostUpdates, ...] = ()
    schedules: tuple[ScheduleMove, ...] = ()
    unstepped: tuple[UnsteppedOptimizer, ...] = ()
    mixed: tuple[MixedStep, ...] = ()
    in_half: bool = False
    looked_through: frozenset[str] = frozenset()
    empty_clips: tuple[EmptyClip, ...] = ()
    clips_by_name: str = ""
    early: tuple[MisusedGradients, ...] = ()
    unscaled_by_two: tuple[MisusedGradients, ...] = ()
    unguarded: tuple[MisusedGradients, ...] = ()
    hidden: tuple[MisusedGradients, ...] = ()
    hidden_at: tuple[str, str] = ("", "")
    rewritten: bool = False
    another_scaler: tuple[float, float] | None = None
    dropped: tuple[DroppedGradients, ...] = ()
    cleared: bool = False
    left_over: tuple[str, ...] = ()
    averages: tuple[LostAverage, ...] = ()
    stale: tuple[str, ...] = ()
    loss_gradient: float | None = None
    elsewhere: Rehearsal | None = None
    far_below: Rehearsal | None = None
    skipped: Rehearsal | None = None

    @property
    def scale(self) -> float:
        """The largest loss scale."""
        return max(self.scales)
