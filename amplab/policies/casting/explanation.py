"""Report the current decision of an engine to a tracer.

A tracer enters `explaining()` and reads `.decision` when it sees an op. The kind is "cast" while the engine casts
arguments for an op, and "op" while the op runs. Engines report only inside `explaining()`, with a separate plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from amplab.formats import FloatFormat
from amplab.policies.policy.precision_policy import PrecisionPolicy
from amplab.policies.policy.precisions import Precision, precision_name
from amplab.policies.tables.op_table import CastPolicy, OpRule

if TYPE_CHECKING:
    from amplab.policies.casting.function_modes import CastingMode

__all__ = ["Decision", "ExplainedPlan", "Explanation", "decided", "reporting_run", "reporting_step"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision of an engine about one op.

    Attributes:
        op: the op's bare name, e.g. "softmax".
        rule: its row; None for an op on no list.
        kind: "cast" while arguments are cast for the op, "op" while it runs.
        detail: the cast, e.g. "cast to float16", or why the op is not cast.
    """

    op: str
    rule: OpRule | None
    kind: Literal["cast", "op"]
    detail: str

    @property
    def reason(self) -> str:
        """One clause: the reason of the row, for a cast preceded by the cast."""
        if self.rule is None:
            return self.detail
        if self.kind == "cast":
            return f"{self.detail} for {self.rule.reason}"
        return self.rule.reason


class Explanation:
    """What `explaining()` returns: the current decision.

    Attributes:
        decision: the Decision about the innermost op that an engine of this thread is running, else None.
        accumulates: whether that op is one that computes products of CPU halves in float32 and rounds once.
    """

    def __init__(self) -> None:
        """Start outside any op."""
        self.decision: Decision | None = None
        self.accumulates = False

    def __repr__(self) -> str:
        """Show the current decision."""
        return f"Explanation({self.decision})"


class ExplainedPlan(dict[Callable[..., Any], Callable[..., Any]]):
    """A plan with a step for every function; a function without a row gets a step that reports so."""

    def __init__(self, policy: PrecisionPolicy) -> None:
        """Start empty."""
        super().__init__()
        self._policy = policy

    def get(self, func: Callable[..., Any], _default: Any = None) -> Callable[..., Any]:
        """Return the step of `func`, or a step that runs it and reports that no row names it."""
        step = super().get(func)
        if step is None:  # stored, because finding the name of a function takes longer than most ops
            step = self[func] = reporting_run(_run_plain, self._policy.unlisted(func))
        return step


def reporting_run(run: Callable[..., Any], rule: OpRule) -> Callable[..., Any]:
    """Return `run` with the decision of the explanation set to the op while it runs."""
    listed = rule if rule.spellings else None
    decision = Decision(rule.op, listed, "op", rule.reason)

    def reporting(mode: CastingMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        with decided(mode.explanation, decision):
            return run(mode, func, args, kwargs)

    return reporting


def reporting_step(step: Callable[..., Any], rule: OpRule, precision: Precision, restores: bool) -> Callable[..., Any]:
    """Return `step` with the decision of the explanation set to the cast until the op runs."""
    detail = _cast_detail(rule, precision)
    decision = Decision(rule.op, rule, "cast", f"{detail} and back" if restores else detail)

    def reporting(mode: CastingMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        with decided(mode.explanation, decision):
            return step(mode, func, args, kwargs)

    return reporting


@contextlib.contextmanager
def decided(explanation: Explanation | None, decision: Decision) -> Iterator[None]:
    """Set the decision of the explanation inside the block."""
    if explanation is None:
        yield
        return
    outer, explanation.decision = explanation.decision, decision
    try:
        yield
    finally:
        explanation.decision = outer


def _run_plain(_mode: CastingMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _cast_detail(rule: OpRule, precision: Precision) -> str:
    if rule.cast is CastPolicy.LOWER_PRECISION_FP:
        name = precision_name(precision)
        simulated = isinstance(precision, FloatFormat)
        return f"rounded to {name} (simulated: float32 tensors)" if simulated else f"cast to {name}"
    if rule.cast in (CastPolicy.PROMOTE, CastPolicy.SEQUENCE_PROMOTE):
        return "cast to the widest dtype of the arguments"
    if rule.cast in (CastPolicy.MATCH_SELF, CastPolicy.BANNED):
        return "cast to the dtype of the tensor written to"
    return "cast to float32"
