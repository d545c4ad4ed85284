"""`stand_ins`: for a block, parameters that may change their dtype.

A parameter whose own dtype changes (`param.data = …`) gets a new AccumulateGrad node. Whatever is on the old one is
lost: the hooks with which DistributedDataParallel averages gradients, and the graphs of losses that were computed
before. Therefore a parameter is given another tensor for the block, which shares its memory, and after it gets back its
own.

Reference: torch.utils.swap_tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amplab.trace.as_found import Undo

__all__ = ["stand_ins"]


_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"


class _StandIn(NamedTuple):
    """A parameter, the tensor that it is given, the address of its own one, and the dicts of its hooks by attribute."""

    parameter: Tensor
    other: Tensor
    address: int
    hooks: dict[str, object]

    @classmethod
    def of(cls, parameter: Tensor) -> _StandIn:
        hooks = {name: getattr(parameter, name) for name in _HOOKS}
        other = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        other.grad = parameter.grad
        for name, those in hooks.items():
            if those is not None:  # a hook that the block adds to this dict is to be called
                setattr(other, name, those)
        return cls(parameter, other, _address(parameter), hooks)

    def begin(self) -> None:
        torch._C._swap_tensor_impl(self.parameter, self.other)

    def end(self) -> None:
        """Give the parameter its own tensor; a second call does nothing."""
        if _address(self.parameter) != self.address:
            torch._C._swap_tensor_impl(self.parameter, self.other)
        for name, those in self.hooks.items():
            if those is None and getattr(self.parameter, name) is not None:
                setattr(self.parameter, name, None)  # a dict of the block's, which the own tensor does not know


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Let the parameters of `model` change their dtype in the block; after it each has the tensor that it had.

    The block must be inside of `untouched`, since a change in place is one of the same memory. Sync: none.
    """
    with Undo() as undo:
        for parameter in model.parameters():
            if parameter.is_leaf and type(parameter.data) is Tensor:
                stand_in = _StandIn.of(parameter)
                undo.add(stand_in.end)
                stand_in.begin()
        yield


def _address(tensor: Tensor) -> int:
    """The address of the tensor in C++ that a Python object has."""
    return int(tensor._cdata)
