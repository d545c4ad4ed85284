"""checkpoint: activation checkpointing whose recomputation casts as the forward did.

    hidden = amplab.checkpoint(block, hidden, use_reentrant=False)

`torch.utils.checkpoint.checkpoint` brings torch's autocast back for the recomputation; of amplab's it knows nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from amplab.policies import casting_state

__all__ = ["checkpoint"]


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    """Run ``function(*args)`` without keeping its activations; backward computes them again, with the same casts.

    Correct no matter where backward is called: inside the region of the forward, outside, or inside another region;
    under `autocast`, after `amp.initialize`, and without either. Gradients are bitwise equal to those without
    checkpointing, with one exception: if a Parameter is used in several reentrant checkpointed calls, its gradients
    are summed in float32 instead of the dtype that it was cast to.

    `torch.utils.checkpoint.checkpoint` under amplab's casts recomputes with the casts that are active when backward is
    called. It is therefore correct if backward is called inside the region, and at O1 after `amp.initialize`, which
    casts until `reset`. Elsewhere it recomputes in float32: an op may reject half together with float32, or the
    non-reentrant version raises `CheckpointError` because a saved tensor has a different dtype. If neither happens
    (the reentrant version has no such check; a product with float32 accumulation saves float32), the gradients
    are silently different.

    Args:
        function: what to run; it must do the same each time.
        args: its arguments.
        use_reentrant: which of torch's two kinds; torch asks to say it, and recommends False.
        kwargs: for torch's checkpoint (``preserve_rng_state``, ``context_fn``, ``determinism_check``, ``debug``,
            ``early_stop``), the rest for ``function``.

    Returns:
        What ``function`` returns.

    Sync: none.

    Reference: torch.utils.checkpoint.checkpoint
    """
    if torch.compiler.is_compiling():  # the casts are in the graph, and it is the graph that is computed again
        return torch_checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
    return torch_checkpoint(_AsAtFirst(function), *args, use_reentrant=use_reentrant, **kwargs)


class _AsAtFirst:
    """A function that casts, whenever it is called again, as in its first call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._casting = casting_state()
        self._again = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._again:
            self._again = True
            return self._function(*args, **kwargs)
        with self._casting.active():
            return self._function(*args, **kwargs)
