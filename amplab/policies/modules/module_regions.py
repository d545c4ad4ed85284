"""Apply module rules: forward hooks on the modules where a rule begins cast inputs and enter the rule.

                        around by op (O1)                          around in half weights (O2, O3)
    entry               16-bit inputs -> the rule's dtype          floating inputs -> the rule's dtype
    inside float32      no casts                                   no casts
    inside 16-bit       the policy's lists with that dtype         everything in that dtype, as the weights are
    inside simulated    the policy's lists, values rounded         the policy's lists, values rounded
    exit                outputs as they are                        outputs as they are
    what follows        casts as the lists say                     casts where dtypes differ (`mixed_arguments`)

Inside float32 and in half weights, ops whose arguments have different dtypes follow `mixed_arguments`. Where nothing
casts what follows, because no engine is active around the call, outputs are cast to the dtype around.

With `PrecisionPolicy(cast_outputs_back=True)` outputs are always cast back: a float32 output to the dtype that it would
have without the rule, which `would_be_dtypes` follows op by op, a 16-bit output to the compute dtype around, and in
half weights every floating output to the dtype around.

Hooks belong to the modules: copies, pickles and replicas have them too. torch.compile traces them into its graph. A
module whose weights are used without calling it cannot have hooks: write the rule for the enclosing module.
`uncalled_modules` warns of it. What a checkpoint inside such a module recomputes follows `recomputation`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies.casting.engine import CastingEngine
from amplab.policies.casting.explanation import Decision, decided
from amplab.policies.casting.function_modes import push_below_others, without_function_modes
from amplab.policies.casting.hook_scopes import no_graph_of_its_own
from amplab.policies.casting.thread_scopes import THREAD, CastingThread, Scope, casts_enabled, thread_engines
from amplab.policies.modules.recomputation import ended_forward, next_node
from amplab.policies.modules.uncalled_modules import UncalledModules
from amplab.policies.modules.would_be_dtypes import WouldBeDtypes
from amplab.policies.nested_tensors import cast_tree, floating_tensors_in
from amplab.policies.policy.module_rules import RuledModule, ruled_modules
from amplab.policies.policy.precision_policy import PrecisionPolicy
from amplab.policies.policy.precisions import Precision, precision_name, tensor_dtype
from amplab.policies.tables.apex_table import APEX

__all__ = ["ModuleRegion", "module_rule_at_work", "module_rule_of_op", "register_module_rules"]

_FLOAT32 = PrecisionPolicy(None, torch.float32)
"""What is in force where no engine is active."""


def register_module_rules(
    model: nn.Module, policy: PrecisionPolicy, *, weights_dtype: torch.dtype | None = None
) -> list[_RegionHandles | _WatchHandles]:
    """Register hooks for the module rules of `policy` on `model` and return the handles that remove them.

    Args:
        model: the model whose submodules the rules match. Weights are not cast.
        policy: the rules, and the lists for modules in a lower precision.
        weights_dtype: the dtype of the other weights of the model (O2, O3); None if only ops are cast (O1).

    Raises:
        ValueError: a rule matches no module of `model`, or rules contradict each other.
    """
    handles: list[_RegionHandles | _WatchHandles] = []
    regions: dict[Tensor, ModuleRegion] = {}
    engines: dict[Precision, CastingEngine] = {}
    for ruled in ruled_modules(model, policy.module_rules):
        precision = ruled.rule.precision
        if precision not in engines:
            engines[precision] = CastingEngine(_policy_inside(precision, policy, weights_dtype is not None))
        outside = weights_dtype if weights_dtype is None or ruled.around is None else ruled.around.precision
        outside_dtype = None if outside is None else tensor_dtype(outside)
        region = ModuleRegion(ruled, engines[precision], outside_dtype, casts_back=policy.cast_outputs_back)
        handles.append(_RegionHandles(region, ruled.module))
        regions.update(dict.fromkeys(ruled.module.parameters(), region))
    return [*handles, _WatchHandles(regions, model, weights_decide=weights_dtype is not None)] if handles else []


def _policy_inside(precision: Precision, policy: PrecisionPolicy, weights_are_cast: bool) -> PrecisionPolicy:
    if precision is torch.float32:
        return dataclasses.replace(policy, table=None, compute_dtype=torch.float32, op_rules=())
    table = None if weights_are_cast and isinstance(precision, torch.dtype) else policy.table or APEX
    return dataclasses.replace(policy, table=table, compute_dtype=precision)


class ModuleRegion:
    """The two hooks of one module with a rule.

    Args:
        ruled: the module and its rule; no reference to the module is kept.
        engine: the engine that casts inside, also an attribute.
        outside_dtype: in models with 16-bit weights, the dtype around; None if the engine around decides.
        casts_back: whether outputs are cast to the dtype that they would have without the rule.

    Attributes:
        was_called: whether the module has been called.
    """

    def __init__(
        self, ruled: RuledModule, engine: CastingEngine, outside_dtype: torch.dtype | None, *, casts_back: bool
    ) -> None:
        self._name = ruled.name or type(ruled.module).__name__
        self._rule = ruled.rule
        self.engine = engine
        self._inside_dtype = tensor_dtype(ruled.rule.precision)
        self._outside_dtype = outside_dtype
        self._casts_back = casts_back
        self.was_called = False

    def __str__(self) -> str:
        """Return the rule and its module."""
        return f"{self._rule} in {self._name}"

    @no_graph_of_its_own
    def before_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast the inputs, then enter the rule."""
        self.was_called = True
        THREAD.own.drop_ended()
        frame = None if is_dynamo_compiling() else sys._getframe(1)
        engines, may_cast = thread_engines(), casts_enabled()
        around = engines[-1].policy if engines else _FLOAT32
        by_op = self._outside_dtype is None
        if by_op and not may_cast:
            _Visit(self, around).enter(frame, by_hook=True)
            return None
        with self._explained("inputs", self._inside_dtype):
            target = self._entry_dtype if by_op else self._inside_dtype
            cast = cast_tree(args, target), cast_tree(kwargs, target)
        visit = _Visit(self, around, self.engine, casts_back=self._casts_back or not (engines and may_cast))
        if self._casts_back and by_op and self._inside_dtype is torch.float32:
            visit.follow(list(zip(floating_tensors_in(cast), floating_tensors_in((args, kwargs)), strict=True)))
        if by_op and frame is not None:
            visit.first_node = next_node()
        visit.enter(frame, by_hook=True)
        return cast

    @no_graph_of_its_own
    def after_forward(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Leave the rule, then cast the outputs if they are cast at all; called with None if forward raised."""
        visit = _innermost_visit()
        if visit is None or visit.region is not self:  # an earlier hook raised
            return output
        visit.leave()
        if visit.engine is not None and visit.first_node >= 0:
            ended_forward(visit.first_node, visit.engine)
        if visit.engine is None or not visit.casts_back:
            return output
        around = self._outside_dtype or visit.around.tensor_dtype
        with self._explained("outputs", around):
            cast = cast_tree(output, self._outside_dtype or functools.partial(self._exit_dtype, visit))
        self._note_around(output, cast)
        return cast

    def leave(self) -> None:
        """Leave the forward calls that this thread is still in."""
        for visit in [visit for visit in reversed(_visits()) if visit.region is self]:
            visit.leave()

    def _entry_dtype(self, tensor: Tensor) -> torch.dtype:
        return self._inside_dtype if tensor.dtype in LOW_PRECISION_DTYPES else tensor.dtype

    def _exit_dtype(self, visit: _Visit, tensor: Tensor) -> torch.dtype:
        if visit.would_be is not None:
            return visit.would_be.of(tensor)
        return visit.around.tensor_dtype if tensor.dtype is self._inside_dtype else tensor.dtype

    def _note_around(self, output: Any, cast: Any) -> None:
        """Note in an enclosing float32 module which outputs of this 16-bit module would be 16-bit without its rule."""
        visit = _innermost_visit()
        following = None if visit is None else visit.would_be
        if following is not None and self._inside_dtype in LOW_PRECISION_DTYPES:
            for before, after in zip(floating_tensors_in(output), floating_tensors_in(cast), strict=True):
                if before.dtype is self._inside_dtype:
                    following.note(after, following.around.tensor_dtype)

    @contextlib.contextmanager
    def _explained(self, tensors: str, dtype: torch.dtype) -> Iterator[None]:
        """Report the rule as the reason for the casts in the block."""
        explanation = THREAD.own.explanation
        if explanation is None:
            yield
            return
        detail = f"your rule {self._rule}: the {tensors} of {self._name} are cast to {precision_name(dtype)}"
        # An active engine would report these casts as ops of the model.
        with decided(explanation, Decision(self._name, None, "cast", detail)), without_function_modes():
            yield


class _RegionHandles:
    """The handle that removes the hooks of a region, with `remove` as in RemovableHandle."""

    def __init__(self, region: ModuleRegion, module: nn.Module) -> None:
        self._region = region
        self._handles = (
            module.register_forward_pre_hook(region.before_forward, with_kwargs=True),
            module.register_forward_hook(region.after_forward, prepend=True, always_call=True),
        )

    def remove(self) -> None:
        """Remove both hooks; a second call does nothing."""
        self._region.leave()
        for handle in self._handles:
            handle.remove()


class _WatchHandles:
    """The handle that removes the hooks of `UncalledModules`."""

    def __init__(self, regions: Mapping[Tensor, ModuleRegion], model: nn.Module, *, weights_decide: bool) -> None:
        self._watch = UncalledModules(
            regions, weights_decide=weights_decide, was_called=lambda region: bool(region.was_called)
        )
        self._handles = (
            model.register_forward_pre_hook(self._watch.before_forward),
            model.register_forward_hook(self._watch.after_forward, prepend=True, always_call=True),
        )

    def remove(self) -> None:
        """Remove both hooks; a second call does nothing."""
        self._watch.leave()
        for handle in self._handles:
            handle.remove()


class _Visit(Scope):
    """One forward call of a module with a rule, in one thread."""

    def __init__(
        self,
        region: ModuleRegion,
        around: PrecisionPolicy,
        engine: CastingEngine | None = None,
        *,
        casts_back: bool = False,
    ) -> None:
        super().__init__(engine)
        self.region = region
        self.around = around
        self.casts_back = casts_back
        self.would_be: WouldBeDtypes | None = None
        self.first_node = -1

    def follow(self, inputs: list[tuple[Tensor, Tensor]]) -> None:
        """Follow which dtypes the inputs, pairs of (inside, around), and their results would have without the rule."""
        if self.around.tensor_dtype in LOW_PRECISION_DTYPES or any(a is not b for a, b in inputs):
            self.would_be = WouldBeDtypes(self.around)
            for inside, around in inputs:
                self.would_be.note(inside, around.dtype)

    def _begin(self, thread: CastingThread) -> None:
        if self.would_be is not None:
            push_below_others(self.would_be)  # and under the mode that casts
        super()._begin(thread)

    def _end(self, thread: CastingThread) -> None:
        if self.would_be is not None:
            thread.withdraw(self.would_be)
        super()._end(thread)


def _visits() -> list[_Visit]:
    """Return the forward calls of modules with a rule that this thread is in, innermost last."""
    return [scope for scope in THREAD.own.scopes if isinstance(scope, _Visit)]


def _innermost_visit() -> _Visit | None:
    for scope in reversed(THREAD.own.scopes):
        if isinstance(scope, _Visit):
            return scope
    return None


def module_rule_at_work() -> str:
    """Return the module rule active in the calling thread: "blocks.*=float32 in blocks.0"; empty for none."""
    THREAD.own.drop_ended()
    return module_rule_of_op()


def module_rule_of_op() -> str:
    """As `module_rule_at_work`, for code that reads it at every op: it does not search for scopes that have ended."""
    visit = _innermost_visit()
    return "" if visit is None or visit.engine is None else str(visit.region)
