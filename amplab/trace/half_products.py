"""`HalfProducts`: shows the float32 ops inside a float16 product as ops on halves, without a change of what runs.

    as it runs:  float(A), float(B)  ->  op in float32  ->  round_half(C)
    as shown:    A, B                ->  op             ->  C

A product on the CPU that is accumulated in float32 (see `policies.casting.half_on_cpu`) is a cast of each operand, the
op, and a cast of its result. Its gradients have such casts too. The gradient of a gradient adds float32 tensors between
them, so a look at a training step may not replace these ops by ops on halves: the weights would get other bits.

Each float32 tensor inside a product has a half of the same values, rounded. That of an operand is the operand. That of
a result becomes what the product returns, so that who follows the memory finds the op that wrote it.

Reference: torch.multiprocessing.reductions.StorageWeakRef.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from amplab.policies.nested_tensors import map_tensors, tensors_in

__all__ = ["HalfProducts"]

_CAST = torch.ops.aten._to_copy.default
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FEWEST_TO_SEARCH = 16

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass
class _Memory:
    """The halves of the tensors in one storage.

    Args:
        storage: the float32 storage; its address is not used again while this exists.
        halves: by offset, shape and strides.
        unused: whether the halves are in memory that nobody else has.
    """

    storage: StorageWeakRef
    halves: dict[Geometry, Tensor] = field(default_factory=dict)
    unused: bool = False


class HalfProducts:
    """The float32 tensors inside the float16 products of a step, each with its half."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}
        self._next_search = _FEWEST_TO_SEARCH
        self._rounding_nodes: set[int] = set()

    def widens(
        self,
        overload: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        accumulates: bool,
        node: int | None,
    ) -> bool:
        """Whether an op casts an operand of a product, or a gradient of its result, to float32.

        Args:
            overload, args, kwargs: the op.
            accumulates: whether an engine is running a product.
            node: the sequence number of the autograd node that runs the op; None in forward.
        """
        if overload is not _CAST or kwargs.get("dtype") is not torch.float32:
            return False
        return args[0].dtype is torch.float16 and args[0].is_cpu and (accumulates or node in self._rounding_nodes)

    def widened(self, half: Tensor, wide: Tensor) -> None:
        """Record that `wide` is a cast of `half`."""
        self._memory_of(wide, renewed=True).halves[_geometry(wide)] = half

    def shown(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of an op with halves; the same objects if the op is not inside a product."""
        if not self._memories or not any(map(self._is_inside, tensors_in((*args, *kwargs.values())))):
            return args, kwargs
        shown: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors((args, kwargs), self._half)
        return shown

    def rounds(self, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an op rounds the result of a product."""
        return overload is _CAST and kwargs.get("dtype") is torch.float16 and self._is_inside(args[0])

    def rounded(self, wide: Tensor, result: Tensor, node: int | None) -> Tensor:
        """Return `result`, or the half of `wide` with the values of `result`, which nobody has yet.

        Args:
            wide: what was rounded.
            result: what the op returned.
            node: the sequence number of the autograd node of this op, whose backward casts to float32; None if none.
        """
        if node is not None:
            self._rounding_nodes.add(node)
        memory = self._memory_of(wide)
        half = memory.halves.get(_geometry(wide))
        if half is None or not memory.unused or not _same_layout(half, result):
            return result
        memory.unused = False
        memory.halves[_geometry(wide)] = half.detach()  # torch copies a gradient whose tensor another one refers to
        return half.copy_(result)

    def written(
        self,
        overload: torch._ops.OpOverload,
        shown: tuple[tuple[Any, ...], dict[str, Any]],
        result: Any,
    ) -> Any:
        """Return the result of an op inside a product with halves."""
        if overload.overloadpacket is _FLASH:
            return self._new_half(result[0]), *result[1:]  # the logsumexp of attention stays float32
        wide = [each for each in tensors_in(result) if _is_wide(each)]
        if not overload._schema.is_mutable and any(map(self._is_inside, wide)):
            halves = overload(*shown[0], **shown[1])  # a view
            for each, half in zip(tensors_in(result), tensors_in(halves), strict=True):
                self._memory_of(each).halves[_geometry(each)] = half
            return halves
        return map_tensors(result, lambda each: self._new_half(each) if _is_wide(each) else each)

    def _is_inside(self, tensor: Tensor) -> bool:
        return _is_wide(tensor) and tensor.untyped_storage()._cdata in self._memories

    def _half(self, tensor: Tensor) -> Tensor:
        """The half of a tensor; the tensor if it has none."""
        if not self._is_inside(tensor):
            return tensor
        halves, geometry = self._memory_of(tensor).halves, _geometry(tensor)
        if geometry not in halves:
            halves[geometry] = tensor.to(torch.float16)
        return halves[geometry]

    def _new_half(self, wide: Tensor) -> Tensor:
        """Round a tensor that an op has written. What was in its memory may be the operand of a product: it is kept."""
        memory = self._memory_of(wide, renewed=True)
        memory.unused = True
        half = memory.halves[_geometry(wide)] = wide.to(torch.float16)
        return half

    def _memory_of(self, wide: Tensor, *, renewed: bool = False) -> _Memory:
        storage = wide.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None or renewed:
            self._forget_freed()
            memory = self._memories[storage._cdata] = _Memory(StorageWeakRef(storage))
        return memory

    def _forget_freed(self) -> None:
        """Free the halves of freed tensors, whenever there are twice as many as after the last search."""
        if len(self._memories) >= self._next_search:
            kept = {address: each for address, each in self._memories.items() if not each.storage.expired()}
            self._memories, self._next_search = kept, max(_FEWEST_TO_SEARCH, 2 * len(kept))


def _is_wide(tensor: Any) -> bool:
    plain = type(tensor) is Tensor and tensor.dtype is torch.float32 and tensor.is_cpu
    return plain and tensor.layout is torch.strided


def _geometry(tensor: Tensor) -> Geometry:
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _same_layout(half: Tensor, result: Tensor) -> bool:
    same_memory = half.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    return same_memory and _geometry(half) == _geometry(result)
