"""The gradients that one `GradScaler.scale_loss` reaches, around its backward.

checked_optimizers    the optimizers that the caller named, each once
loss_gradients        the gradients of each optimizer: a parameter that two share belongs to the first
unscale_new           after the backward: .grad <- old + new / scale;  found_inf of each optimizer
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.arguments import as_list
from amplab.amp.backward.gradients import SetAside, add_unscaled, put_back
from amplab.amp.pytorch.optimizer_gradients import OptimizerGradients
from amplab.parallel.ranks import has_other_ranks
from amplab.parallel.shards import agree_on_found_inf

__all__ = ["LossGradients", "checked_optimizers", "loss_gradients", "unscale_new"]


class LossGradients:
    """The gradients of one optimizer that a backward reaches: an `amplab.amp.backward.gradients.ReachedGradients`.

    Args:
        optimizer: the optimizer.
        known: the record of its parameters.
        params: those of its parameters that no optimizer before it has.

    Attributes:
        shares: whether an optimizer before it has one of its parameters.
        rank_groups: the ranks that hold the shards of the parameters; empty if this rank holds all elements.
        copies_shared: whether a gradient that is a part of larger memory is copied before the backward.
    """

    def __init__(self, optimizer: Optimizer, known: OptimizerGradients, params: list[Tensor]) -> None:
        self.optimizer, self.params = optimizer, params
        self.shares = len(params) < len(known.params)
        self.rank_groups = known.rank_groups
        self._unscaler = known.unscaler
        self.copies_shared = not known.unscaler.buffers

    @property
    def model_params(self) -> list[Tensor]:
        """As `params`."""
        return self.params

    def before_backward(self) -> list[Tensor]:
        """Return the parameters whose gradients the backward may write."""
        return self.params

    def factor_in_place(self, scale: Tensor) -> Tensor | None:
        """Return the factor of gradients that a backward under no_sync may have left without an average."""
        return scale if has_other_ranks() else None

    def after_failed_backward(self) -> None:
        """Do nothing: the gradients are restored already."""

    def unscale_new(self, aside: list[SetAside], scale: Tensor, found_inf: Tensor | None) -> Tensor:
        """Divide new gradients by ``scale`` and add those in ``aside``; return found_inf of all ranks. Sync: none."""
        found_inf = add_unscaled(self.params, aside, scale, self._unscaler, found_inf)
        return agree_on_found_inf(found_inf, self.rank_groups)


def checked_optimizers(optimizers: Any) -> list[Optimizer]:
    """Return an optimizer, or the optimizers of a list, each once. Raises: TypeError, none, or something else."""
    given = as_list(optimizers) or [None]
    for each in given:
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"optimizers: got a {type(each).__name__}; expected the optimizer, or a list of the "
                "optimizers, whose parameters this backward reaches."
            )
    return list(dict.fromkeys(given))


def loss_gradients(known: Mapping[Optimizer, OptimizerGradients]) -> list[LossGradients]:
    """Return the gradients of each optimizer, in order. Raises: ValueError, float16 parameters. Sync: none."""
    reached: list[LossGradients] = []
    seen: set[int] = set()
    for optimizer, each in known.items():
        if any(param.requires_grad and param.dtype is torch.float16 for param in each.params):
            raise ValueError(
                "Attempting to unscale FP16 gradients. Keep the parameters in float32 and run the forward pass under "
                "autocast."
            )
        reached.append(LossGradients(optimizer, each, [param for param in each.params if id(param) not in seen]))
        seen.update(map(id, each.params))
    return reached


def unscale_new(aside: list[tuple[LossGradients, list[SetAside]]], scale: Tensor) -> dict[Optimizer, Tensor]:
    """Unscale the gradients that a backward has written.

    Args:
        aside: of each optimizer, the gradients that were there before.
        scale: ``()`` float32, of the loss.

    Returns:
        found_inf of each optimizer that the backward reached. An overflow counts for every optimizer that shares a
        parameter with one before it.

    Sync: none.
    """
    found: dict[Optimizer, Tensor] = {}
    for each, before in aside:
        shares = each.shares and bool(found)
        if not (shares or each.rank_groups) and all(param.grad is None for param in each.params):
            put_back(before)
            continue
        start = (
            torch.stack(list(found.values())).amax(0)
            if shares
            else torch.zeros(1, dtype=torch.float32, device=scale.device)
        )
        found[each.optimizer] = each.unscale_new(before, scale, start)
    return found
