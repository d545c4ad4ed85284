"""The engines of regions that are entered again and again: one for equal arguments, made once.

A training loop writes ``with autocast(...)`` in every step. Building an engine's plan costs as much as many small
steps, so the last few engines are kept, found again by the identity of the policy.
"""

from __future__ import annotations

import dataclasses

import torch

from amplab.policies.engine import CastingEngine
from amplab.policies.precision_policy import PrecisionPolicy

__all__ = ["engine_for"]

_MOST = 64
_ENGINES: dict[tuple[int, torch.dtype, str, bool], tuple[PrecisionPolicy, CastingEngine]] = {}


def engine_for(policy: PrecisionPolicy, dtype: torch.dtype, device_type: str, cache_enabled: bool) -> CastingEngine:
    """The engine of `policy`, computing in `dtype`, on `device_type`. Any thread may use it. Sync: none.

    Raises:
        ValueError: nothing computes in `dtype`.
    """
    key = (id(policy), dtype, device_type, cache_enabled)
    if torch.compiler.is_compiling() or key not in _ENGINES:  # a trace does not see what is built while it looks
        _build(policy, dtype, device_type, cache_enabled)
    return _ENGINES[key][1]


@torch.compiler.assume_constant_result  # torch.compile runs it as it is: a plan cannot be built in a trace
def _build(policy: PrecisionPolicy, dtype: torch.dtype, device_type: str, cache_enabled: bool) -> bool:
    key = (id(policy), dtype, device_type, cache_enabled)
    if key in _ENGINES:
        return True
    while len(_ENGINES) >= _MOST:
        _ENGINES.pop(next(iter(_ENGINES)), None)
    computing = policy if policy.compute_dtype is dtype else dataclasses.replace(policy, compute_dtype=dtype)
    engine = CastingEngine(computing, device_type=device_type, cache_enabled=cache_enabled)
    _ENGINES[key] = (policy, engine)  # holds the policy, hence its id
    return True
