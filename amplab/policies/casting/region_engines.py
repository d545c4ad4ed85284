"""Reuse the engines of regions: one engine for equal arguments.

A training loop enters ``with autocast(...)`` in every step. Building the plan of an engine costs as much as many small
steps, so the most recent engines are cached by the identity of the policy.
"""

from __future__ import annotations

import dataclasses

from torch.compiler import is_dynamo_compiling

from amplab.policies.casting.engine import CastingEngine
from amplab.policies.policy.precision_policy import PrecisionPolicy
from amplab.policies.policy.precisions import Precision

__all__ = ["engine_for"]

_MOST = 64


class _Kept:
    """Engines and their policies, as attributes.

    torch.compile sees an attribute that is added while it traces, but not an item added to a dict.
    """


_KEPT = _Kept()
_FOUND: dict[tuple[int, Precision, str, bool], tuple[CastingEngine, PrecisionPolicy]] = {}
"""The same engines and policies, found by the id of the policy and the other arguments without building a name."""


def engine_for(policy: PrecisionPolicy, dtype: Precision, device_type: str, cache_enabled: bool) -> CastingEngine:
    """Return the engine of `policy` with compute dtype `dtype` on `device_type`. Any thread may use it. Sync: none.

    Raises:
        ValueError: `dtype` is not supported.
    """
    if is_dynamo_compiling():
        return _kept(policy, dtype, device_type, cache_enabled)
    key = (id(policy), dtype, device_type, cache_enabled)
    found = _FOUND.get(key)
    if found is None:
        found = _FOUND[key] = _kept(policy, dtype, device_type, cache_enabled), policy
    return found[0]


def _kept(policy: PrecisionPolicy, dtype: Precision, device_type: str, cache_enabled: bool) -> CastingEngine:
    name = f"{device_type}_{dtype}_{cache_enabled}_{id(policy)}".replace(".", "_")
    _build(name, policy, dtype, device_type, cache_enabled)
    engine: CastingEngine = getattr(_KEPT, name)[0]
    return engine


def _build(name: str, policy: PrecisionPolicy, dtype: Precision, device_type: str, cache_enabled: bool) -> bool:
    kept = vars(_KEPT)
    if name in kept:
        return True
    while len(kept) >= _MOST:
        kept.pop(next(iter(kept)), None)
        _FOUND.clear()
    computing = policy if policy.compute_dtype is dtype else dataclasses.replace(policy, compute_dtype=dtype)
    engine = CastingEngine(computing, device_type=device_type, cache_enabled=cache_enabled)
    kept[name] = (engine, policy)  # keeps the policy alive, so that its id stays unique
    return True


# torch.compile must not trace this: a plan cannot be built in a trace. The attribute is the one that
# torch.compiler.assume_constant_result sets; calling that function would import the compiler.
_build._dynamo_marked_constant = True  # type: ignore[attr-defined]
