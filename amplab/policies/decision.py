"""Decision: what an engine is doing at this moment and why, for whoever watches the ops run.

A tracer enters `explaining()` and reads `.decision` when it sees an op: during the casts that an
engine makes for an op the kind is "cast", during the op itself "op". Without a reader nothing
of this is computed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from amplab.policies.op_table import OpRule

__all__ = ["Decision", "Explanation"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the engine does for one op.

    Attributes:
        op: the op's bare name, e.g. "softmax".
        rule: its row; None for an op on no list.
        kind: "cast" while arguments are cast for the op, "op" while it runs.
        detail: what is done, e.g. "casts to float16".
    """

    op: str
    rule: OpRule | None
    kind: Literal["cast", "op"]
    detail: str

    @property
    def reason(self) -> str:
        """One sentence: why the op runs as it does, or what the cast is for."""
        if self.rule is None:
            return self.detail
        if self.kind == "cast":
            return f"{self.detail} for {self.rule.reason}"
        return self.rule.reason


class Explanation:
    """The reading end of `explaining()`.

    Attributes:
        decision: the Decision of the innermost op that an engine of this thread is handling, else None.
    """

    def __init__(self) -> None:
        """Start outside any op."""
        self.decision: Decision | None = None

    def __repr__(self) -> str:
        """Show the current decision."""
        return f"Explanation({self.decision})"
