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

    Right wherever backward is called: inside the region of the forward, outside, or inside another; under `autocast`,
    after `amp.initialize`, and without either. Gradients are bitwise those without checkpointing, save one case: a
    Parameter used in several checkpointed calls of the reentrant kind has its gradients summed in float32, and not in
    the dtype that it was cast to.

    What `torch.utils.checkpoint.checkpoint` does under amplab's casts: its recomputation is cast by what is active
    when backward is called. So it is right where backward is called inside the region, and at O1 after
    `amp.initialize`, which casts until `reset`. Outside it recomputes in float32: an op may refuse half beside
    float32; the non-reentrant kind raises `CheckpointError` where a saved tensor has another dtype than before. Where
    neither happens (the reentrant kind checks nothing; of a product with float32 accumulation float32 is saved)
    gradients are other ones without a word.

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
