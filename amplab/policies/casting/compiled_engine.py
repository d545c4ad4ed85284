"""CompiledEngine: the same policy carried out in C++, below Python, at the cost of torch.autocast.

    with CompiledEngine(PrecisionPolicy()).active():
        loss = F.mse_loss(model(x), y)

The rows are found by their ATen names instead of their Python spellings, so ops are cast wherever they are called
from: Python, C++ inside a composite, `torch.ops`. The kernel is `amplab.kernels.DispatchCasts`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator

from amplab.kernels import DispatchCasts
from amplab.kernels.dispatch_casts import CASTS, PRODUCT, CastPlan, overloads
from amplab.policies.casting.engine import CastingEngine
from amplab.policies.casting.explanation import Explanation
from amplab.policies.casting.function_mode import CastingMode
from amplab.policies.casting.half_on_cpu import PRODUCTS, HalfMode
from amplab.policies.casting.thread_scopes import THREAD, Scope
from amplab.policies.policy.precision_policy import PrecisionPolicy
from amplab.policies.tables.apex_table import APEX
from amplab.policies.tables.op_table import CastPolicy, OpRule, OpTable, resolve

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

    What it does differently from the default engine:

    - it sees the ops that C++ calls inside an op that is on no list, and `torch.ops`;
    - functions written in Python (F.normalize, F.local_response_norm) are cast op by op, not as a whole;
    - in inference mode it sees what the kernel of an unlisted op calls, as torch.autocast does;
    - it leaves alone what a backward pass computes, recomputation apart (enter the engine there: `amplab.checkpoint`);
    - any leaf that requires grad counts as a weight for the cache; an edit through `weight.data` between two uses
      inside one region cannot be seen (torch.autocast has the same limit), so call `clear_cache` after one;
    - it does not explain: inside `explaining()` it refuses, and the default engine gives the same casts with reasons;
    - torch.compile does not know it; compile under the default engine;
    - it carries out lists alone: a policy with rules by op, or in a simulated format, needs the default engine.

    Args:
        policy: what to carry out; None for apex's lists in float16.

    Raises:
        RuntimeError: the kernel cannot be built; says why and what to do.
        ValueError: a policy with op_rules or a simulated compute dtype.
    """

    def __init__(self, policy: PrecisionPolicy | None = None) -> None:
        """Load the kernel, built first where this machine has none yet (one file against torch's headers)."""
        if policy is not None and (policy.op_rules or policy.simulated):
            raise ValueError(
                f"CompiledEngine({str(policy)!r}): expected a policy without op_rules that computes in a dtype of "
                "torch; use CastingEngine, which carries out all of it."
            )
        self._casts = DispatchCasts.load()
        self._compiled_plans: dict[tuple[HalfMode, bool], CastPlan] = {}
        super().__init__(policy)

    def __reduce__(self) -> tuple[type[CompiledEngine], tuple[PrecisionPolicy]]:
        """Pickle the policy alone."""
        return CompiledEngine, (self.policy,)

    def require_reasons(self) -> None:
        """Raise RuntimeError: this engine gives none."""
        raise RuntimeError(
            f"explaining() with {self!r}: the compiled engine gives no reasons; "
            "use CastingEngine with the same policy, which casts the same."
        )

    def install(self) -> None:
        """Cast in the calling thread until `uninstall`; does nothing where installed already. Sync: none."""
        THREAD.own.drop_ended()
        if not self.installed:
            THREAD.own.installed.append(CompiledMode(self, self._casts))
            THREAD.own.refresh()

    def clear_cache(self) -> None:
        """Drop the casts of weights that the calling thread keeps. Sync: none."""
        self._casts.clear()

    @property
    def cache_size(self) -> int:
        """How many casts of weights the calling thread keeps."""
        return self._casts.kept

    def is_live(self) -> bool:
        """Whether the topmost mode of the calling thread is one of this engine, entered in the same backward pass."""
        # In a backward pass (a recomputation) the region around it casts nothing, so the engine is entered anew.
        modes = THREAD.own.modes
        top = modes[-1] if modes else None
        return isinstance(top, CompiledMode) and top.engine is self and top.task == self._casts.task()

    def push(self, mode: CastingMode | CompiledMode) -> None:
        """Do nothing: the kernel sees every op."""

    def new_mode(self) -> CompiledMode:
        """Return a mode of this engine that casts nothing yet."""
        if THREAD.own.explanation is not None:
            self.require_reasons()
        return CompiledMode(self, self._casts)

    def withdraw(self, mode: CastingMode | CompiledMode) -> None:
        """End the mode; does nothing the second time."""
        mode.rest()
        mode.entered_by = None

    def give_plan(self, mode: CastingMode | CompiledMode, half_mode: HalfMode, casts: bool, explained: bool) -> None:  # noqa: ARG002  there are no explanations
        """Give `mode` the plan for this combination of switches."""
        if isinstance(mode, CompiledMode):
            mode.cast_by(self._compiled_plan(half_mode, casts))

    def _build_first_plan(self) -> None:
        """Do nothing: the kernel's plan is built on first use."""

    def _compiled_plan(self, half_mode: HalfMode, casts: bool) -> CastPlan:
        """The plan in the form that the kernel reads, built on first use."""
        key = (half_mode, casts)
        if key not in self._compiled_plans:
            marks = dict(self._marks(self.policy.table if casts else None))
            self._compiled_plans[key] = self._casts.plan(
                marks, self.policy.tensor_dtype, accumulates=half_mode == "fp32_accumulate"
            )
        return self._compiled_plans[key]

    def _marks(self, table: OpTable | None) -> Iterator[tuple[int, int]]:
        """Yield place and mark of every overload that the table or the multiplication of CPU halves is about."""
        rows = filter(_is_product, APEX.rows) if table is None else table.rows
        for name, row in _claims(rows).items():
            cast = CASTS.index(_mark(row)) if table is not None else 0
            mark = cast + (PRODUCT if _is_product(row) else 0)
            for overload in overloads([name]):
                place = self._casts.place(overload, f"{row.reason}. Call .float() on the arguments first.")
                if place is not None:
                    yield place, mark


class CompiledMode:
    """An entry of the thread's list of modes whose plan lives in C++.

    Attributes:
        engine: the engine whose plan the mode carries.
        task: the backward pass it was entered in, -1 outside of one.
        live: whether this is the mode that casts, for its device type.
        explanation, entered_by, has_ended: as in `CastingMode`; set by the thread, and not read here.
    """

    __slots__ = ("_enter", "_plan", "engine", "entered_by", "explanation", "has_ended", "live", "task")

    def __init__(self, engine: CompiledEngine, casts: DispatchCasts) -> None:
        self.engine, self.task, self._enter = engine, casts.task(), casts.enter
        self._plan: CastPlan | None = None
        self.live = False
        self.explanation: Explanation | None = None
        self.entered_by: Scope | None = None
        self.has_ended: Callable[[], bool] | None = None

    def cast_by(self, plan: CastPlan) -> None:
        """Cast the thread's ops by `plan` from here on."""
        if plan is not self._plan:
            self._plan = plan
            self._enter(plan.address, self.task)

    def rest(self) -> None:
        """Cast nothing until the next plan."""
        if self._plan is not None:
            self._plan = None
            self._enter(None, self.task)


def _claims(rows: Iterable[OpRule]) -> dict[str, OpRule]:
    """Return ATen name -> row; where two rows name one, the row whose op it is."""
    claims: dict[str, OpRule] = {}
    for row in rows:
        for name in () if row.cast is CastPolicy.FALL_THROUGH else _own_names(row):
            if name not in claims or name == row.op:
                claims[name] = row
    return claims


def _own_names(row: OpRule) -> tuple[str, ...]:
    """The ATen ops that are this row's op: of a function written in Python not the steps that it is made of."""
    functions = [func for func in map(resolve, row.spellings) if func is not None]
    if len(row.aten) == 1 or not all(isinstance(func, types.FunctionType) for func in functions):
        return row.aten
    return tuple(name for name in row.aten if row.op.strip("_") in name)


def _mark(row: OpRule) -> str:
    in_place = row.cast is CastPolicy.BANNED and row.op.endswith("_")
    return "banned_in_place" if in_place else _MARKS[row.cast]


def _is_product(row: OpRule) -> bool:
    return any(resolve(spelling) in PRODUCTS for spelling in row.spellings)
