"""Carry out rules by module: forward hooks where a rule begins cast what goes in and what comes out.

                        around by op (O1)                          around in half weights (O2, O3)
    entry               16-bit inputs -> the rule's dtype          floating inputs -> the rule's dtype
    inside float32      no casts                                   no casts
    inside 16-bit       the policy's lists with that dtype         everything in that dtype, as the weights are
    inside simulated    the policy's lists, values rounded         the policy's lists, values rounded
    exit                to what they would have been               floating outputs -> the dtype around

What a float32 output would have been is followed op by op (`would_be_dtypes`); a 16-bit one becomes the compute dtype
around. Hooks live with the modules: copies, pickles and replicas carry them. torch.compile breaks its graph at borders.
A module whose weights are used without calling it has no border of its own: rule over the module around it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _push_mode

from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies.casting.engine import CastingEngine
from amplab.policies.casting.explanation import Decision, decided
from amplab.policies.casting.function_mode import remove
from amplab.policies.casting.thread_scopes import THREAD, CastingThread, Scope, casts_enabled, thread_engines
from amplab.policies.modules.would_be_dtypes import WouldBeDtypes
from amplab.policies.nested_tensors import cast_tree, floating_tensors_in
from amplab.policies.policy.module_rules import RuledModule, ruled_modules
from amplab.policies.policy.precision_policy import PrecisionPolicy
from amplab.policies.policy.precisions import Precision, precision_name, tensor_dtype
from amplab.policies.tables.apex_table import APEX

__all__ = ["ModuleRegion", "module_rule_at_work", "register_module_rules"]

_FLOAT32 = PrecisionPolicy(None, torch.float32)


def register_module_rules(
    model: nn.Module, policy: PrecisionPolicy, *, weights_dtype: torch.dtype | None = None
) -> list[_RegionHandles]:
    """Register the hooks for `policy`'s module rules on `model`; the handles take them off again.

    Args:
        model: its submodules are named by the rules. Weights are left as they are.
        policy: the rules, and the lists that modules in a lower precision run by.
        weights_dtype: what the model's other weights are cast to; None where ops are cast and weights are not.

    Raises:
        ValueError: a rule that names no module of `model`, or rules that contradict each other.
    """
    handles: list[_RegionHandles] = []
    engines: dict[Precision, CastingEngine] = {}
    for ruled in ruled_modules(model, policy.module_rules):
        precision = ruled.rule.precision
        if precision not in engines:
            engines[precision] = CastingEngine(_policy_inside(precision, policy, weights_dtype is not None))
        outside = weights_dtype if weights_dtype is None or ruled.around is None else ruled.around.precision
        region = ModuleRegion(ruled, engines[precision], None if outside is None else tensor_dtype(outside))
        handles.append(_RegionHandles(region, ruled.module))
    return handles


def _policy_inside(precision: Precision, policy: PrecisionPolicy, weights_are_cast: bool) -> PrecisionPolicy:
    if precision is torch.float32:
        return _FLOAT32
    table = None if weights_are_cast and isinstance(precision, torch.dtype) else policy.table or APEX
    return PrecisionPolicy(table, precision, policy.op_rules)


class ModuleRegion:
    """The two hooks of one ruled module.

    Args:
        ruled: the module and its rule; the module itself is not kept.
        engine: what casts inside; it stays at hand as `engine`.
        outside_dtype: in models with half weights, the dtype around; None where the engine around says it.
    """

    def __init__(self, ruled: RuledModule, engine: CastingEngine, outside_dtype: torch.dtype | None) -> None:
        self._name = ruled.name or type(ruled.module).__name__
        self._rule = ruled.rule
        self.engine = engine
        self._inside_dtype = tensor_dtype(ruled.rule.precision)
        self._outside_dtype = outside_dtype

    def __str__(self) -> str:
        """The rule and its module."""
        return f"{self._rule} in {self._name}"

    def before_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast what goes in, then begin to compute by the rule."""
        THREAD.own.drop_ended()
        frame = sys._getframe(1)
        around = _policy_at_work()
        by_op = self._outside_dtype is None
        if by_op and not casts_enabled():
            _Visit(self, around).enter(frame, by_hook=True)
            return None
        with self._explained("gets", self._inside_dtype):
            target = self._entry_dtype if by_op else self._inside_dtype
            cast = cast_tree(args, target), cast_tree(kwargs, target)
        visit = _Visit(self, around, self.engine)
        if by_op and self._inside_dtype is torch.float32:
            visit.follow(list(zip(floating_tensors_in(cast), floating_tensors_in((args, kwargs)), strict=True)))
        visit.enter(frame, by_hook=True)
        return cast

    def after_forward(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Leave the rule, then cast what comes out; called with None where forward has raised."""
        visit = _innermost_visit()
        if visit is None or visit.region is not self:  # a hook before ours has raised
            return output
        visit.leave()
        if visit.engine is None:
            return output
        around = self._outside_dtype or visit.around.tensor_dtype
        with self._explained("returns", around):
            cast = cast_tree(output, self._outside_dtype or functools.partial(self._exit_dtype, visit))
        self._tell_around(output, cast)
        return cast

    def leave(self) -> None:
        """Leave the forwards that this thread is still in."""
        for visit in [visit for visit in reversed(_visits()) if visit.region is self]:
            visit.leave()

    def _entry_dtype(self, tensor: Tensor) -> torch.dtype:
        return self._inside_dtype if tensor.dtype in LOW_PRECISION_DTYPES else tensor.dtype

    def _exit_dtype(self, visit: _Visit, tensor: Tensor) -> torch.dtype:
        if visit.would_be is not None:
            return visit.would_be.of(tensor)
        return visit.around.tensor_dtype if tensor.dtype is self._inside_dtype else tensor.dtype

    def _tell_around(self, output: Any, cast: Any) -> None:
        """Let a float32 module around know that what came out of this one in 16 bits is no float32 by its ops."""
        visit = _innermost_visit()
        following = None if visit is None else visit.would_be
        if following is not None and self._inside_dtype in LOW_PRECISION_DTYPES:
            for before, after in zip(floating_tensors_in(output), floating_tensors_in(cast), strict=True):
                if before.dtype is self._inside_dtype:
                    following.note(after, following.around.tensor_dtype)

    @contextlib.contextmanager
    def _explained(self, verb: str, dtype: torch.dtype) -> Iterator[None]:
        """Let a trace show which rule makes the casts of the block."""
        explanation = THREAD.own.explanation
        if explanation is None:
            yield
            return
        detail = f"your rule {self._rule}: what {self._name} {verb} is cast to {precision_name(dtype)}"
        # An active engine would record the casts as ops of the model's code.
        with decided(explanation, Decision(self._name, None, "cast", detail)), torch._C.DisableTorchFunction():
            yield


class _RegionHandles:
    """What takes a region off its module; `remove` as a RemovableHandle has it."""

    def __init__(self, region: ModuleRegion, module: nn.Module) -> None:
        self._region = region
        self._handles = (
            module.register_forward_pre_hook(region.before_forward, with_kwargs=True),
            module.register_forward_hook(region.after_forward, prepend=True, always_call=True),
        )

    def remove(self) -> None:
        """Take both hooks off; does nothing the second time."""
        self._region.leave()
        for handle in self._handles:
            handle.remove()


class _Visit(Scope):
    """One forward of a ruled module, in one thread."""

    def __init__(self, region: ModuleRegion, around: PrecisionPolicy, engine: CastingEngine | None = None) -> None:
        super().__init__(engine)
        self.region = region
        self.around = around
        self.would_be: WouldBeDtypes | None = None

    def follow(self, inputs: list[tuple[Tensor, Tensor]]) -> None:
        """Follow the dtypes that `inputs`, given as (inside, around), and what is computed from them would have."""
        if self.around.tensor_dtype in LOW_PRECISION_DTYPES or any(a is not b for a, b in inputs):
            self.would_be = WouldBeDtypes(self.around)
            for inside, around in inputs:
                self.would_be.note(inside, around.dtype)

    def _begin(self, thread: CastingThread) -> None:
        if self.would_be is not None:
            _push_mode(self.would_be)  # under the mode that casts
        super()._begin(thread)

    def _end(self, thread: CastingThread) -> None:
        if self.would_be is not None:
            remove(self.would_be)
        super()._end(thread)


def _visits() -> list[_Visit]:
    """The forwards of ruled modules that this thread is in, innermost last."""
    return [scope for scope in THREAD.own.scopes if isinstance(scope, _Visit)]


def _innermost_visit() -> _Visit | None:
    for scope in reversed(THREAD.own.scopes):
        if isinstance(scope, _Visit):
            return scope
    return None


def module_rule_at_work() -> str:
    """The module rule that the calling thread computes by: "blocks.*=float32 in blocks.0"; empty for none."""
    THREAD.own.drop_ended()
    visit = _innermost_visit()
    return "" if visit is None or visit.engine is None else str(visit.region)


def _policy_at_work() -> PrecisionPolicy:
    engines = thread_engines()
    return engines[-1].policy if engines else _FLOAT32
