"""CompiledEngine: apply a policy in C++, inside PyTorch's dispatcher, with an overhead similar to torch.autocast.

    with CompiledEngine(PrecisionPolicy()).active():
        loss = F.mse_loss(model(x), y)

Rows are looked up by ATen name instead of Python spelling, so ops are cast no matter where they are called from:
Python, C++ code inside a composite, `torch.ops`. The kernel is `amplab.kernels.DispatchCasts`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from amplab.kernels import DispatchCasts
from amplab.kernels.dispatch_casts import CASTS, ON_CPU, PRODUCT, CastPlan, overloads
from amplab.policies.casting.engine import CastingEngine
from amplab.policies.casting.explanation import Explanation
from amplab.policies.casting.function_modes import CastingMode
from amplab.policies.casting.half_on_cpu import PRODUCTS, HalfMode
from amplab.policies.casting.thread_scopes import THREAD
from amplab.policies.policy.precision_policy import PrecisionPolicy
from amplab.policies.tables.apex_table import APEX
from amplab.policies.tables.op_table import CastPolicy, OpRule, OpTable, resolve
from amplab.policies.tables.torch_cpu_table import ON_THE_CPU

__all__ = ["CompiledEngine", "CompiledMode"]

_MARKS = {
    CastPolicy.LOWER_PRECISION_FP: "lower",
    CastPolicy.FP32: "float32",
    CastPolicy.FP32_SET_OPT_DTYPE: "set_dtype",
    CastPolicy.PROMOTE: "promote",
    CastPolicy.SEQUENCE_PROMOTE: "promote",
    CastPolicy.MATCH_SELF: "match_self",
    CastPolicy.BANNED: "banned",
}


class CompiledEngine(CastingEngine):
    """A CastingEngine that casts in PyTorch's dispatcher.

    Differences from the default engine:

    - It casts the ops that C++ code calls inside an unlisted op, and `torch.ops`.
    - Functions written in Python (F.normalize, F.local_response_norm) are cast op by op, not as a whole.
    - In inference mode it casts the ops that the kernel of an unlisted op calls, as torch.autocast does.
    - It does not cast the ops of a backward pass, except recomputation that enters the engine (`amplab.checkpoint`).
    - The cache treats any leaf that requires grad as a weight. It cannot detect a change through `weight.data`
      between two uses in one region (neither can torch.autocast); call `clear_cache` after such a change.
    - It gives no reasons: inside `explaining()` it raises an error. The default engine makes the same casts
      with reasons.
    - A disabled region of torch.autocast inside disables its casts for every device type.
    - It does not support torch.compile; use the default engine.
    - It supports lists only: a policy with rules or a simulated format needs the default engine.

    Args:
        policy: the policy to apply; None for apex's lists in float16.

    Raises:
        RuntimeError: the kernel cannot be built; the message says why and what to do.
        ValueError: the policy has rules or a simulated compute dtype.
    """

    def __init__(self, policy: PrecisionPolicy | None = None) -> None:
        """Load the kernel, and build it first if necessary (one file, with torch's headers)."""
        if policy is not None and (policy.op_rules or policy.module_rules or policy.simulated):
            raise ValueError(
                f"CompiledEngine({str(policy)!r}): expected a policy without rules and with a torch dtype as "
                "compute_dtype; use CastingEngine, and apply_policy for module_rules."
            )
        self._casts = DispatchCasts.load()
        self._compiled_plans: dict[tuple[HalfMode, bool], CastPlan] = {}
        super().__init__(policy)

    def __reduce__(self) -> tuple[type[CompiledEngine], tuple[PrecisionPolicy]]:
        """Pickle the policy only."""
        return CompiledEngine, (self.policy,)

    def require_reasons(self) -> None:
        """Raise RuntimeError, because this engine gives no reasons."""
        raise RuntimeError(
            f"explaining() with {self!r}: the compiled engine gives no reasons; "
            "use CastingEngine with the same policy, which makes the same casts."
        )

    def install(self) -> None:
        """Cast in the calling thread until `uninstall`; do nothing if already installed. Sync: none."""
        THREAD.own.drop_ended()
        if not self.installed:
            THREAD.own.installed.append(CompiledMode(self, self._casts))
            THREAD.own.refresh()

    def clear_cache(self) -> None:
        """Drop the weight casts cached by the calling thread. Sync: none."""
        self._casts.clear()

    @property
    def cache_size(self) -> int:
        """Number of weight casts cached by the calling thread."""
        return self._casts.kept

    def is_live(self) -> bool:
        """Return whether the topmost mode of the thread is of this engine and casts the next op."""
        # In a backward pass (a recomputation) and in a disabled region of torch.autocast, the enclosing region casts
        # nothing, so the engine is entered again.
        modes = THREAD.own.modes
        top = modes[-1] if modes else None
        if not isinstance(top, CompiledMode) or top.engine is not self:
            return False
        return (top.task, top.torch_nesting) == (self._casts.task(), self._casts.torch_nesting())

    def push(self, mode: CastingMode | CompiledMode, *, below_others: bool) -> None:
        """Do nothing: the kernel sees every op."""

    def new_mode(self) -> CompiledMode:
        """Return a mode of this engine that casts nothing yet."""
        if THREAD.own.explanation is not None:
            self.require_reasons()
        return CompiledMode(self, self._casts)

    def withdraw(self, mode: CastingMode | CompiledMode) -> None:
        """End the mode; a second call does nothing."""
        mode.rest()

    def give_plan(self, mode: CastingMode | CompiledMode, half_mode: HalfMode, casts: bool, explained: bool) -> None:  # noqa: ARG002  no explanations here
        """Set the plan of `mode` for these switches."""
        if isinstance(mode, CompiledMode):
            mode.cast_by(self._compiled_plan(half_mode, casts))

    def _build_first_plan(self) -> None:
        """Do nothing: the plan of the kernel is built on first use."""

    def _compiled_plan(self, half_mode: HalfMode, casts: bool) -> CastPlan:
        """Return the plan in the form that the kernel reads, built on first use."""
        key = (half_mode, casts)
        if key not in self._compiled_plans:
            marks = dict(self._marks(self.policy.table if casts else None))
            self._compiled_plans[key] = self._casts.plan(
                marks, self.policy.tensor_dtype, accumulates=half_mode == "fp32_accumulate"
            )
        return self._compiled_plans[key]

    def _marks(self, table: OpTable | None) -> Iterator[tuple[int, int]]:
        """Yield the place and mark of each overload in the table, and of each product (for float16 on the CPU)."""
        claims = _claims(filter(_is_product, APEX.rows) if table is None else table.rows)
        others = {} if table is None else _claims(ON_THE_CPU.rows)
        for name, row in {**others, **claims}.items():
            cast = CASTS.index(_mark(row)) if table is not None else 0
            mark = cast + (PRODUCT if _is_product(row) else 0) + (0 if name in claims else ON_CPU)
            for overload in overloads([name]):
                place = self._casts.place(overload, f"{row.reason}. Call .float() on the arguments first.")
                if place is not None:
                    yield place, mark


class CompiledMode:
    """An entry in the thread's list of modes whose plan is in C++.

    Attributes:
        engine: the engine that the plan belongs to.
        task: the backward pass in which it was entered, or -1.
        torch_nesting: how many regions of torch.autocast were open then.
        live: whether this is the mode that casts for its device type.
        explanation: None; the thread sets it.
        keeps_flag: True: the kernel works only while `AUTOCAST_FLAG` is set, which it sets itself.
    """

    __slots__ = ("_enter", "_plan", "engine", "explanation", "has_ended", "live", "task", "torch_nesting")
    keeps_flag = True

    def __init__(self, engine: CompiledEngine, casts: DispatchCasts) -> None:
        self.engine, self._enter = engine, casts.enter
        self.task, self.torch_nesting = casts.task(), casts.torch_nesting()
        self._plan: CastPlan | Literal["changing"] | None = None
        self.live = False
        self.explanation: Explanation | None = None
        self.has_ended: Callable[[], bool] | None = None

    def cast_by(self, plan: CastPlan) -> None:
        """From now on, cast the arguments of this thread's ops as `plan` says."""
        if plan is not self._plan:
            self._plan = "changing"  # until it is set: after an interrupt both methods set it again
            self._enter(plan.address, self.task, self.torch_nesting)
            THREAD.own.flagged = True
            self._plan = plan

    def rest(self) -> None:
        """Cast nothing until the next plan is set."""
        if self._plan is not None:
            self._enter(None, self.task, self.torch_nesting)
            THREAD.own.flagged = False
            self._plan = None


def _claims(rows: Iterable[OpRule]) -> dict[str, OpRule]:
    """Return ATen name -> row. If two rows have the name, the row whose op is called so wins."""
    claims: dict[str, OpRule] = {}
    for row in rows:
        for name in () if row.cast is CastPolicy.FALL_THROUGH else _own_names(row):
            if name not in claims or name == row.op:
                claims[name] = row
    return claims


def _own_names(row: OpRule) -> tuple[str, ...]:
    """Return the ATen ops of a row; for functions written in Python, without the ops that they are composed of."""
    functions = [func for func in map(resolve, row.spellings) if func is not None]
    if len(row.aten) == 1 or not all(isinstance(func, types.FunctionType) for func in functions):
        return row.aten
    return tuple(name for name in row.aten if row.op.strip("_") in name)


def _mark(row: OpRule) -> str:
    in_place = row.cast is CastPolicy.BANNED and row.op.endswith("_")
    return "banned_in_place" if in_place else _MARKS[row.cast]


def _is_product(row: OpRule) -> bool:
    return any(resolve(spelling) in PRODUCTS for spelling in row.spellings)
