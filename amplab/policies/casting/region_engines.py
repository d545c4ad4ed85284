"""The engines of regions that are entered again and again: one for equal arguments, made once.

A training loop writes ``with autocast(...)`` in every step. Building an engine's plan costs as much as many small
steps, so the last few engines are kept, found again by the identity of the policy.
"""

from __future__ import annotations

import dataclasses

import torch

from amplab.policies.casting.engine import CastingEngine
from amplab.policies.policy.precision_policy import PrecisionPolicy
from amplab.policies.policy.precisions import Precision

__all__ = ["engine_for"]

_MOST = 64


class _Kept:
    """Engines and the policies they were made for, as attributes.

    torch.compile sees an attribute that is added while it traces; what is added to a dict it does not see.
    """


_KEPT = _Kept()


def engine_for(policy: PrecisionPolicy, dtype: Precision, device_type: str, cache_enabled: bool) -> CastingEngine:
    """The engine of `policy`, computing in `dtype`, on `device_type`. Any thread may use it. Sync: none.

    Raises:
        ValueError: nothing computes in `dtype`.
    """
    name = f"{device_type}_{dtype}_{cache_enabled}_{id(policy)}".replace(".", "_")
    if torch.compiler.is_compiling():
        _build(name, policy, dtype, device_type, cache_enabled)
        traced: CastingEngine = getattr(_KEPT, name)[0]
        return traced
    kept = vars(_KEPT).get(name)
    if kept is None:
        _build(name, policy, dtype, device_type, cache_enabled)
        kept = vars(_KEPT)[name]
    engine: CastingEngine = kept[0]
    return engine


def _build(name: str, policy: PrecisionPolicy, dtype: Precision, device_type: str, cache_enabled: bool) -> bool:
    kept = vars(_KEPT)
    if name in kept:
        return True
    while len(kept) >= _MOST:
        kept.pop(next(iter(kept)), None)
    computing = policy if policy.compute_dtype is dtype else dataclasses.replace(policy, compute_dtype=dtype)
    engine = CastingEngine(computing, device_type=device_type, cache_enabled=cache_enabled)
    kept[name] = (engine, policy)  # while the policy is kept, no other can have its id
    return True


# torch.compile runs it as it is: a plan cannot be built in a trace. The mark of torch.compiler.assume_constant_result,
# which would load the compiler with the first import.
_build._dynamo_marked_constant = True  # type: ignore[attr-defined]
