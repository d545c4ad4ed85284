"""The lines of ``verbosity=2``: one for each tensor that is cast for an op, as apex prints them.

    Float->Half (linear)
    Half->Float (cross_entropy)

A weight is printed when it is cast, not when its cached cast is reused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies import CastingEngine, CastPolicy, OpRule
from amplab.policies.casting.half_on_cpu import HalfMode
from amplab.policies.casting.steps import floating_tensors, widest

__all__ = ["VerboseEngine"]

_WORDS = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float"}

_Step = Callable[..., Any]


class VerboseEngine(CastingEngine):
    """A `CastingEngine` that prints a line for every cast. Copies in other processes print nothing.

    Args:
        policy: as `CastingEngine`.
    """

    def new_plan(self, half_mode: HalfMode, casts: bool, explained: bool) -> dict[Any, _Step]:
        """Build the plan of `CastingEngine` with steps that print their casts, except while casts are explained."""
        silent = super().new_plan(half_mode, casts, explained)
        if explained or not casts:
            return silent
        return {func: self._printing(step, self.policy.explain(func)) for func, step in silent.items()}

    def _printing(self, step: _Step, rule: OpRule) -> _Step:
        target = _TARGETS.get(rule.cast)
        if target is None:
            return step

        def printing(mode: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = floating_tensors((*args, *kwargs.values())) or []
            before, kept = [tensor.dtype for tensor in tensors], len(self.cache)
            result = step(mode, func, args, kwargs)
            dtype = target(tensors, self.policy.tensor_dtype)
            weights = len(self.cache) - kept if rule.cast is CastPolicy.LOWER_PRECISION_FP else len(tensors)
            for tensor, old in zip(tensors, before, strict=True):
                if dtype is None or old is dtype or old not in _WORDS:
                    continue
                if isinstance(tensor, Parameter):
                    weights -= 1
                    if weights < 0:
                        continue
                print(f"{_WORDS[old]}->{_WORDS.get(dtype, dtype)} ({rule.op})")  # noqa: T201  as apex does
            return result

        return printing


def _lower(tensors: list[Tensor], compute_dtype: torch.dtype) -> torch.dtype | None:
    return None if any(tensor.dtype is torch.float64 for tensor in tensors) else compute_dtype


def _fp32(tensors: list[Tensor], _compute_dtype: torch.dtype) -> torch.dtype | None:
    return torch.float32 if any(tensor.dtype in LOW_PRECISION_DTYPES for tensor in tensors) else None


def _promote(tensors: list[Tensor], _compute_dtype: torch.dtype) -> torch.dtype | None:
    return widest(tensors) if len(tensors) > 1 else None


def _match_self(tensors: list[Tensor], _compute_dtype: torch.dtype) -> torch.dtype | None:
    return tensors[0].dtype if tensors else None


_TARGETS: dict[CastPolicy, Callable[[list[Tensor], torch.dtype], torch.dtype | None]] = {
    CastPolicy.LOWER_PRECISION_FP: _lower,
    CastPolicy.FP32: _fp32,
    CastPolicy.PROMOTE: _promote,
    CastPolicy.SEQUENCE_PROMOTE: _promote,
    CastPolicy.MATCH_SELF: _match_self,
}
