"""Which arguments of an op its result depends on. The others can hold inf or NaN without any effect on the step.

copy_                        overwrites its first argument
batch and instance norms     in training they normalize with the statistics of the batch, and only update the
                             running ones; in evaluation they read them
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["arguments_read", "statistics_updated"]

_COPY = torch.ops.aten.copy_.default
_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train", "update", "use_input_stats")
"""Names of the argument that says whether a norm, or its backward, is in training."""
_ONLY_IN_TRAINING = frozenset(
    (
        "_batch_norm_with_update",
        "_batch_norm_with_update_functional",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
        "batch_norm_update_stats",
        "cudnn_batch_norm_backward",
        "miopen_batch_norm_backward",
    )
)
"""Norms without such an argument that are called in training alone. `batch_norm_gather_stats` is of SyncBatchNorm."""


def arguments_read(overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of an op that its result depends on, in order."""
    given = (*args, *kwargs.values()) if kwargs else args
    if overload is _COPY:
        return given[1:]  # memory that was never written can contain any value, also inf
    updated = statistics_updated(overload, args)
    return tuple(each for each in given if all(each is not one for one in updated)) if updated else given


def statistics_updated(overload: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the running statistics that a norm in training updates; nothing for other ops and in evaluation."""
    places = _places(overload)
    if not places:
        return ()
    trains = overload.overloadpacket.__name__ in _ONLY_IN_TRAINING
    if trains or any(args[places[name]] for name in _TRAINING if name in places):
        return tuple(args[places[name]] for name in _STATISTICS)
    return ()


@cache
def _places(overload: torch._ops.OpOverload) -> dict[str, int]:
    """Argument name -> its place, for a norm of torch that keeps running statistics; empty for other ops."""
    if overload.namespace != "aten":  # one of somebody's own may read them in training too, as batch renormalization
        return {}
    places = {argument.name: place for place, argument in enumerate(overload._schema.arguments)}
    return places if all(name in places for name in _STATISTICS) else {}
