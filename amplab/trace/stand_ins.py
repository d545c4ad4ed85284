"""`stand_ins`: for a block, other tensors in place of those of a model, so that the block leaves its own ones alone.

A parameter whose own dtype changes (`param.data = …`) gets a new AccumulateGrad node. Whatever is on the old one is
lost: the hooks with which DistributedDataParallel averages gradients, and the graphs of losses that were computed
before. Memory that other processes train in, as with Hogwild, must not get back values that they have updated since.

Reference: torch.utils.swap_tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from amplab.parallel.ranks import exchanges_in_forward, has_other_ranks
from amplab.policies.casting.function_modes import without_function_modes
from amplab.trace.as_found import Undo
from amplab.trace.engines import clear_cast_caches

__all__ = ["apart", "stand_ins"]


_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"


class _StandIn(NamedTuple):
    """A tensor, the one that it is given, the address of its own one, and the dicts of its hooks by attribute."""

    tensor: Tensor
    other: Tensor
    address: int
    hooks: dict[str, object]

    @classmethod
    def of(cls, tensor: Tensor, values: Tensor) -> _StandIn:
        hooks = {name: getattr(tensor, name) for name in _HOOKS}
        other = nn.Parameter(values, requires_grad=tensor.requires_grad)
        other.grad = tensor.grad
        for name, those in hooks.items():
            if those is not None:  # a hook that the block adds to this dict is to be called
                setattr(other, name, those)
        return cls(tensor, other, _address(tensor), hooks)

    def swap(self) -> None:
        torch.clear_autocast_cache()  # its weak references to the weights in a region would let the swap fail
        torch._C._swap_tensor_impl(self.tensor, self.other)

    def end(self) -> None:
        """Give back its own one; a second call does nothing."""
        if _address(self.tensor) != self.address:
            try:
                self.swap()
            except RuntimeError:  # something has a weak reference in C++
                self.tensor.data, self.tensor.grad = self.other.data, self.other.grad
        for name, those in self.hooks.items():
            if those is None and getattr(self.tensor, name) is not None:
                setattr(self.tensor, name, None)  # a dict of the block's, which its own one does not know


@contextmanager
def stand_ins(tensors: Iterable[Tensor], *, copied: bool = False) -> Iterator[None]:
    """Let the block change the dtypes of `tensors`, leaves of autograd; after it each is what it was. Sync: none.

    Args:
        tensors: parameters and buffers; those of a subclass of Tensor, such as the shards of FSDP2, stay, and in a
            single process those to which something in C++ has a weak reference.
        copied: whether the block gets copies of the values. Otherwise it has the same memory, so that it must be
            inside of `untouched`, which restores the values.

    Raises:
        RuntimeError: of several ranks, if something in C++ has a weak reference to one.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    with Undo() as undo:
        undo.add(clear_cast_caches)
        clear_cast_caches()  # a cached cast belongs to the graph of the tensor that was cast
        with without_function_modes():
            for tensor in tensors:
                if tensor.is_leaf and type(tensor.data) is Tensor:
                    stand_in = _StandIn.of(tensor, _copy(tensor, storages) if copied else tensor.data)
                    undo.add(stand_in.end)
                    try:
                        stand_in.swap()
                    except RuntimeError as refusal:
                        if has_other_ranks():
                            raise RuntimeError(_REFERRED) from refusal
        yield


_REFERRED = (
    "something refers to a parameter from C++, as torch.profiler.profile(record_shapes=True) and with_stack=True do; a "
    "tool would take the exchange of its gradients from the other ranks. Call it where no such profile exists: end it, "
    "and drop the object."
)


def _copy(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """Return a copy; those of tensors that share memory share it, too."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if address not in storages:
        storages[address] = storage.clone()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storages[address], tensor.storage_offset(), tensor.shape, tensor.stride())


@contextmanager
def apart(model: nn.Module) -> Iterator[None]:
    """Run a block on `model` apart from other processes.

    Of what they may train, as with Hogwild, the block gets copies: what they write meanwhile stays. The AccumulateGrad
    nodes are others: no reducer sees the gradients of the block, also one that a forward before the block has prepared
    for its backward, nor does a hook that adds them up elsewhere. FSDP is left as it is: it keeps tensors of its own.
    """
    tensors = [each for each in (*model.parameters(), *model.buffers()) if not is_lazy(each)]
    with_storage = [each for each in tensors if each.layout is torch.strided and not each.is_nested]
    shared = [each for each in with_storage if each.is_cpu and each.is_shared()]
    known = {id(each) for each in shared}
    others = [] if exchanges_in_forward(model) else [each for each in model.parameters() if id(each) not in known]
    with stand_ins(shared, copied=True), stand_ins(others):
        yield


def _address(tensor: Tensor) -> int:
    """The address of the tensor in C++ that a Python object has."""
    return int(tensor._cdata)
