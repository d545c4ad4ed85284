"""Why a step was skipped: its kind, and one sentence with numbers; and how much time explanations may take.

    kind          the step is not finite, because
    scale         a gradient times the loss scale leaves its format; a smaller scale fits
    format        a value of the forward leaves its format at every loss scale, but not in float32
    data          the batch holds inf or NaN, or numbers so large that the loss grows with them
    divergence    the update steps were too large: float32 overflows too, or its loss has exploded
    injected      the lab disturbed the step
    weights       a parameter or a buffer holds inf or NaN
    float32       it is not finite in float32 either, for another reason
    other-rank    it is finite on this rank, and was not on another one
    once          it is finite when it runs again

`first_nonfinite` runs the step again; `explained` writes the sentence about what it found.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch

from amplab.diagnose import FirstNonfinite, finding_of
from amplab.diagnose.rules.out_of_float32 import large_batch
from amplab.display.numbers import count, power, short_text

__all__ = ["SKIP_KINDS", "ExplanationBudget", "SkipExplanation", "SkipKind", "explained"]

SkipKind = Literal["scale", "format", "data", "divergence", "injected", "weights", "float32", "other-rank", "once"]
SKIP_KINDS: tuple[SkipKind, ...] = get_args(SkipKind)

EXPLODED = 100.0
"""A loss this many times the first one means that the run diverges; `rules.run` uses the same factor."""

SHARE = 0.05
"""Share of the training time that explanations may take, apart from the first of each kind."""

CREDIT = 0.5
"""Seconds that they may take in any case, so that a short run is explained as a whole."""


@dataclass(frozen=True, slots=True)
class SkipExplanation:
    """Why one step was skipped.

    Attributes:
        step: Number of the step.
        kind: One of `SKIP_KINDS`.
        sentence: What was too large and which loss scale fits, in one sentence.
        fits: Largest power of two, as a loss scale, at which the step is finite, that is, each of its batches; None if
            no scale from 1 up helps. Gradients of float16 parameters, accumulated without masters, may overflow in
            their sum all the same.
        op: The op that made the first inf or NaN; "" if a tensor held it before the step.
        module: Its module, or "".
        line: The line of code that called it, `file.py:12`, or "".
        loss: The loss in float32; None if it did not run in float32, or is not finite there.
        rank: The process whose step ran again; None if one process trains.
    """

    step: int
    kind: SkipKind
    sentence: str
    fits: float | None = None
    op: str = ""
    module: str = ""
    line: str = ""
    loss: float | None = None
    rank: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, which are plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SkipExplanation | None:
        """Return what `as_dict` wrote, None if it is damaged; fields of later versions are ignored."""
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        texts = [known.get(name, "") for name in ("sentence", "op", "module", "line")]
        sound = isinstance(known.get("step"), int) and known.get("kind") in SKIP_KINDS and "sentence" in known
        if not sound or not all(isinstance(text, str) for text in texts):
            return None
        numbers = known.get("fits"), known.get("loss"), known.get("rank")
        finite = all(each is None or (isinstance(each, int | float) and abs(each) < math.inf) for each in numbers)
        return cls(**known) if finite else None


class ExplanationBudget:
    """Decides which skipped steps to explain: the first of each kind, and others within `SHARE` of the training time.

    >>> budget = ExplanationBudget()
    >>> budget.allows("a", trained=0.0)
    True
    >>> budget.took(0.4, "a")  # the first of its kind, which does not count
    >>> budget.took(0.3, "a")
    >>> budget.allows("a", trained=1.0), budget.allows("b", trained=1.0), budget.allows("a", trained=12.1)
    (False, True, True)
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._spent = self._latest = 0.0

    def allows(self, kind: Hashable, trained: float) -> bool:
        """Whether to explain a step.

        Args:
            kind: What is known of the step before it runs again, to tell kinds apart.
            trained: Seconds that the run has trained so far.
        """
        return kind not in self._seen or self._spent + self._latest <= max(CREDIT, SHARE * trained)

    def took(self, seconds: float, kind: Hashable) -> None:
        """Count an explanation of that kind."""
        self._spent += seconds if kind in self._seen else 0.0
        self._latest = seconds
        self._seen.add(kind)


def explained(
    found: FirstNonfinite | None,
    *,
    step: int,
    injected: str | None = None,
    loss: float | None = None,
    first_loss: float | None = None,
    rank: int | None = None,
) -> SkipExplanation:
    """Return the explanation of a skipped step.

    Args:
        found: What `first_nonfinite` found when the step ran again; None if it was finite.
        step: Number of the step.
        injected: The faults that the lab injected into it, as in `StepRecord`.
        loss: Its loss; None if unknown.
        first_loss: Loss of the first step of the run; None if unknown.
        rank: This process, of several that train together; None for one. The gradients of another rank may be those
            that were not finite.
    """
    if found is None and rank is not None:
        return SkipExplanation(step, "other-rank", f"finite on rank {rank}: another rank was not finite", rank=rank)
    if found is None or found.cause == "state":
        state = "finite when it runs again: it depends on state outside of the model"
        return SkipExplanation(step, "once", state, rank=rank)
    kind, sentence = _kind_and_sentence(found, _faults(injected), loss, first_loss)
    record, again = found.record, found.in_float32
    return SkipExplanation(
        step,
        kind,
        sentence,
        fits=found.fitting_scale if kind in ("scale", "divergence") else None,
        op="" if record is None else record.op,
        module="" if record is None else record.module,
        line="" if record is None or record.line is None else str(record.line),
        loss=again.loss if again is not None and math.isfinite(again.loss) else None,
        rank=rank,
    )


def _kind_and_sentence(
    found: FirstNonfinite, faults: list[str], loss: float | None, first_loss: float | None
) -> tuple[SkipKind, str]:
    if faults:
        return "injected", f"injected {' and '.join(faults)}: {_what_happened(found)}"
    batch, grown = _batch_at_fault(found), _growth(found, loss, first_loss)
    if batch is not None and grown:
        return "data", f"{_what_happened(found)}: the batch contains numbers up to {short_text(batch)}"
    if grown:
        return "divergence", f"diverged: {grown}; {_what_happened(found)}. Lower the learning rate"
    if found.record is None:
        in_weights = found.cause in ("parameter", "buffer")
        return ("weights" if in_weights else "data"), _what_happened(found)
    if found.cause == "scale":
        return "scale", f"{_what_happened(found)}; fits at {power(found.fitting_scale or 1.0, raised=True)}"
    if found.cause == "format":
        return "format", f"{_what_happened(found)}; no loss scale helps, float32 does"
    return "float32", f"not finite in float32 either: {_what_happened(found)}"


def _batch_at_fault(found: FirstNonfinite) -> float | None:
    """The largest number of a batch that makes a loss large at any weights: it is read first, or leaves float32."""
    if found.record is None or found.phase != "forward":
        return None
    read = any(value.kind == "batch" for value in found.step.inputs(found.record.index))
    return large_batch(found) if read or finding_of(found).name == "nonfinite-in-float32" else None


def _faults(injected: str | None) -> list[str]:
    """The injected faults that make a step non-finite; an underflow does not."""
    named = {"overflow": "overflow", "nan": "NaN"}
    return [named[fault] for fault in (injected or "").split("+") if fault in named]


def _growth(found: FirstNonfinite, loss: float | None, first_loss: float | None) -> str:
    """Say how far the loss has grown since the first step; "" if it has not, or if that is unknown."""
    if found.cause == "parameter" and found.setting.dynamic:  # what a dynamic scale lets pass was a finite gradient
        return "an update step was too large for the weights' format"
    if first_loss is None or not math.isfinite(first_loss) or found.cause in ("batch", "buffer", "input", "parameter"):
        return ""
    again = found.in_float32
    now = again.loss if again is not None else loss
    if again is not None and not math.isfinite(again.loss):
        return "it overflows in float32 too" if finding_of(found).name == "nonfinite-in-float32" else ""
    if now is None or not now > EXPLODED * first_loss > 0:
        return ""
    where = " in float32" if again is not None else ""
    return f"the loss is {short_text(now, digits=2)}{where}, and was {short_text(first_loss)} in the first step"


def _what_happened(found: FirstNonfinite) -> str:
    """The tensor or the op, and the size that it reaches."""
    if found.record is None:
        return _held(found)
    top = torch.finfo(found.output.dtype).max
    if found.reaches is None or found.reaches <= top:
        return finding_of(found).symptom.rstrip(".")
    return f"{_subject(found)} reaches {_rounded(found.reaches)}, above {short_text(top, digits=2)}"


def _rounded(value: float) -> str:
    """Return two digits: 81234.0 is 8.1e4."""
    digits, mark, exponent = f"{value:.1e}".partition("e")
    return f"{digits}{mark}{int(exponent)}"


def _subject(found: FirstNonfinite) -> str:
    record = found.record
    if record is None:
        return found.tensor
    name = next((value.name for value in found.step.inputs(record.index) if value.name), "") if record.is_cast else ""
    where = f"{record.op} in {record.module}" if record.module else f"{record.op} outside of the modules"
    if record.phase == "forward":
        return f"{name}, cast to {_dtype(found)}," if name else f"{where} (forward)"
    times = f"× {power(found.setting.loss_scale, raised=True)}"
    if len(found.chain) == 1 and found.result != "loss":
        return f"{found.result.removeprefix('gradient of ')}: the gradient {times}"
    reader = next((each.module for each in found.chain[1:] if each.module), "") if record.is_cast else ""
    return f"{reader}: the gradient of its output {times}" if reader else f"{where}: the gradient {times}"


def _dtype(found: FirstNonfinite) -> str:
    return str(found.output.dtype).removeprefix("torch.")


def _held(found: FirstNonfinite) -> str:
    """Which tensor held inf or NaN before the step, how many, and where the first one is."""
    output = found.output
    words = "NaN" if output.nans else "inf"
    number = (output.nans or 0) + (output.infs or 0)
    first = f", the first in sample {found.at[0]:,}" if found.at and found.cause in ("batch", "input") else ""
    share = f" in {number:,} of {count(output.numel, 'element')}{first}" if number else first
    return f"{found.tensor or 'a tensor that no op wrote'} holds {words}{share}"
