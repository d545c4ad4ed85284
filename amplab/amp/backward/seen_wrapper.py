"""What other ranks of torch.distributed change for one backward.

one backward        DistributedDataParallel averages the gradients while the backward runs: each rank unscales the
                    same averages and finds the same inf or NaN, so scales and skips agree at no cost
under no_sync       nothing is averaged; the next backward without it averages all that ``.grad`` holds. Until then
                    gradients stay in ``.grad``, scaled, and unchecked
"""

import warnings
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from amplab.parallel.joined_state import joins_without_state
from amplab.parallel.ranks import averages_gradients, has_other_ranks

__all__ = ["SeenWrapper"]


class SeenWrapper:
    """Sees in each forward of a model whether its DistributedDataParallel will average the gradients.

    Attributes:
        averages: False if the last forward with gradients ran under ``no_sync``. True without a wrapper.
    """

    def __init__(self) -> None:
        self.averages = True
        self._has_warned = False

    def register(self, model: nn.Module) -> list[RemovableHandle]:
        """Register a hook on ``model``; none if there are no other ranks.

        Warns:
            UserWarning: in the first forward inside ``Join`` or ``join`` without `amplab.parallel.JoinedState`.
        """
        return [model.register_forward_pre_hook(self._see)] if has_other_ranks() else []

    def _see(self, _model: nn.Module, _args: tuple[Any, ...]) -> None:
        if is_dynamo_compiling() or not torch.is_grad_enabled():
            return
        wrapper = nn.parallel.DistributedDataParallel._get_active_ddp_module()  # the one whose forward is running
        # Read here and not after the backward: DDP decides in its forward, too.
        self.averages = wrapper is None or averages_gradients(wrapper)
        if wrapper is not None and not self._has_warned and joins_without_state(wrapper):
            self._has_warned = True
            warnings.warn(
                "DistributedDataParallel joins uneven batches without amplab.parallel.JoinedState: at the end ranks "
                "get the weights of one of them, but not its momenta, masters and loss scale, and differ from the next "
                "step on. Use torch.distributed.algorithms.join.Join([ddp, JoinedState(ddp, model, optimizer, amp)]).",
                stacklevel=2,
            )
