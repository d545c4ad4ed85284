"""checkpoint: activation checkpointing whose recomputation casts as the forward did.

    hidden = amplab.checkpoint(block, hidden, use_reentrant=False)

`torch.utils.checkpoint.checkpoint` restores torch's autocast for the recomputation, but not amplab's casts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from amplab.policies import casting_state

__all__ = ["checkpoint"]


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    """Run ``function(*args)`` without keeping its activations; backward recomputes them with the same casts.

    Backward may be called inside the region of the forward, outside it, or inside another one; under `autocast`, after
    `amp.initialize`, and without either. Gradients are bitwise those without checkpointing, with one exception: if a
    Parameter is used in several reentrant checkpoints, its gradients are summed in float32 instead of the dtype that
    it was cast to.

    `torch.utils.checkpoint.checkpoint` recomputes with the casts that are active when backward is called. That is
    correct inside the region, and at O1 after `amp.initialize`, which casts until `reset`. Elsewhere it recomputes in
    float32. An op may then refuse a mix of half and float32, or the non-reentrant variant raises `CheckpointError`
    because a saved tensor has changed its dtype. If neither happens, gradients differ without an error: the reentrant
    variant checks nothing, and products with float32 accumulation save float32.

    Args:
        function: the function to run. It must be deterministic.
        args: its arguments.
        use_reentrant: which variant of torch to use. torch requires a choice and recommends False.
        kwargs: ``preserve_rng_state``, ``context_fn``, ``determinism_check``, ``debug`` and ``early_stop`` go to
            torch's checkpoint, all others to ``function``.

    Returns:
        The result of ``function``.

    Raises:
        TypeError: ``function`` cannot be called.

    Sync: none.

    Reference: torch.utils.checkpoint.checkpoint
    """
    if not callable(function):
        raise TypeError(
            f"checkpoint({function!r}): expected a function or a module whose activations are computed again; write "
            "checkpoint(block, inputs, use_reentrant=False)."
        )
    if torch.compiler.is_compiling():  # the graph contains the casts, and the graph is recomputed
        return torch_checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
    return torch_checkpoint(_SameCasts(function), *args, use_reentrant=use_reentrant, **kwargs)


class _SameCasts:
    """A function whose later calls cast as its first call did."""

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
