"""CompiledEngine: the same policy carried out in C++, below Python, at the cost of torch.autocast.

    with CompiledEngine(PrecisionPolicy()).active():
        loss = F.mse_loss(model(x), y)

The rows are found by their ATen names instead of their Python spellings, so ops are cast wherever they are called
from: Python, C++ inside a composite, `torch.ops`. The kernel is `amplab.kernels.DispatchCasts`.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator

from amplab.kernels import DispatchCasts
from amplab.kernels.dispatch_casts import CASTS, PRODUCT, CastPlan, overloads
from amplab.policies.apex_table import APEX
from amplab.policies.cast_policy import CastPolicy
from amplab.policies.casting_mode import THREAD
from amplab.policies.engine import CastingEngine
from amplab.policies.half_on_cpu import PRODUCTS, HalfMode
from amplab.policies.op_table import OpRule, OpTable, resolve
from amplab.policies.precision_policy import PrecisionPolicy

__all__ = ["CompiledEngine"]

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
        super().__init__(policy)

    def __reduce__(self) -> tuple[type[CompiledEngine], tuple[PrecisionPolicy]]:
        """Pickle the policy alone."""
        return CompiledEngine, (self.policy,)

    def active(self) -> _Region:
        """Cast in the calling thread inside the block. Re-entrant; ends with the block, exceptions included.

        The outermost block of this engine in the thread clears the cache as it ends. Sync: none.
        """
        return _Region(self)

    def plan(self, half_mode: HalfMode, casts: bool, explained: bool) -> CastPlan:
        """The plan in the form that the kernel reads, built on first use."""
        key = (half_mode, casts, explained)
        if key not in self._plans:
            marks = dict(self._marks(self.policy.table if casts else None))
            self._plans[key] = self._casts.plan(
                marks, self.policy.compute_dtype, accumulates=half_mode == "fp32_accumulate"
            )
        return self._plans[key]

    def require_reasons(self) -> None:
        """Raise RuntimeError: this engine gives none."""
        raise RuntimeError(
            f"explaining() with {self!r}: the compiled engine gives no reasons; "
            "use CastingEngine with the same policy, which casts the same."
        )

    def install(self) -> None:
        """Cast in the calling thread until `uninstall`; does nothing where installed already. Sync: none."""
        if not self.installed:
            mode = _CompiledMode(self, self._casts)
            THREAD.modes.insert(len(THREAD.installed), mode)
            THREAD.installed.append(mode)
            THREAD.refresh()

    def clear_cache(self) -> None:
        """Drop the casts of weights that the calling thread keeps. Sync: none."""
        self._casts.clear()

    @property
    def cache_size(self) -> int:
        """How many casts of weights the calling thread keeps."""
        return self._casts.kept

    def _is_live(self) -> bool:
        # In a backward pass (a recomputation) the region around it casts nothing: it is entered anew.
        live = THREAD.modes[-1] if THREAD.modes else None
        return live is not None and live.plans is self and live.task == self._casts.task()

    def _push(self) -> _CompiledMode:
        thread = THREAD
        if thread.explanation is not None:
            self.require_reasons()
        mode = _CompiledMode(self, self._casts)
        thread.modes.append(mode)
        thread.refresh()
        return mode

    def _withdraw(self, mode: _CompiledMode) -> None:
        mode.plan = None
        modes = THREAD.modes
        modes.remove(mode)
        if modes:
            THREAD.refresh()

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


class _Region:
    """A block in which an engine casts; what a generator would cost is much of what casting costs here."""

    __slots__ = ("_engine", "_mode")

    def __init__(self, engine: CompiledEngine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._mode = self._engine.enter()

    def __exit__(self, *_error: object) -> None:
        self._engine.leave(self._mode)


class _CompiledMode:
    """An entry of the thread's list of modes whose plan lives in C++.

    Attributes:
        plans: the engine.
        task: the backward pass it was entered in, -1 outside of one.
        explanation: None; the thread sets it.
    """

    __slots__ = ("_enter", "_plan", "explanation", "live", "plans", "task")

    def __init__(self, plans: CompiledEngine, casts: DispatchCasts) -> None:
        self.plans, self.task, self._enter = plans, casts.task(), casts.enter
        self._plan: CastPlan | None = None
        self.live, self.explanation = False, None

    @property
    def plan(self) -> CastPlan | dict:
        """What the thread's ops are cast by; empty while another mode is live."""
        return self._plan or {}

    @plan.setter
    def plan(self, plan: CastPlan | dict) -> None:
        wanted = plan or None
        if wanted is not self._plan:
            self._plan = wanted
            self._enter(wanted and wanted.address, self.task)


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
