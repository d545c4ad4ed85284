"""`Statistics`: an observer that measures every tensor that an op writes, and the gradients.

Tensors of the forward are measured in batches, at the latest before an op that writes in place; one whose memory the
step frees before is left out. Tensors of the backward are measured at once, since autograd adds in place to tensors
that nothing else references. The tables stay on the device and are read together. The `tensor_stats` kernel makes one
pass over each tensor; its PyTorch reference gives the same counts, but takes several times as long.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amplab import kernels
from amplab.formats import ExponentHistogram
from amplab.formats.exponents import HIGHEST_EXPONENT, LOWEST_EXPONENT
from amplab.formats.kept_property import kept_property
from amplab.formats.stored_values import has_values, stored_values
from amplab.kernels import StatsTable, TensorStats, tensor_stats
from amplab.trace.reasons import change_of_dtype, is_view
from amplab.trace.recorder import Event

__all__ = ["OpStatistics", "Statistics"]

_MEASURED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CASTS = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
_MOST_BYTES = 32 * 2**20  # of tensors that wait to be measured
_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1


@dataclass(frozen=True)
class OpStatistics:
    """The statistics of one op.

    Attributes:
        outputs: of each floating-point tensor that it returned.
        cast_from: of the input of a cast, which counts the elements that float16 flushes to zero or cannot represent.
    """

    outputs: tuple[TensorStats, ...]
    cast_from: TensorStats | None = None


class Statistics:
    """Measures the outputs of each op, and the inputs of casts. Sync: none, except for `fetch`.

    Attributes:
        by_reference: whether the PyTorch reference was used; set by `fetch`.
    """

    def __init__(self) -> None:
        self.by_reference = False
        self._events = 0
        self._waiting: list[tuple[_Owner, Tensor]] = []
        self._bytes = 0
        self._measured: list[tuple[list[_Owner], StatsTable]] = []
        self._gradients: list[tuple[list[str], StatsTable]] = []

    def before(self, overload: torch._ops.OpOverload, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Tensor | None:
        """Measure the waiting tensors if the op may overwrite them; return the input of a cast."""
        if self._waiting and _writes(overload):
            self._measure()
        place = _CASTS.get(overload)
        return None if place is None or not _measurable(args[place]) else args[place]

    def after(self, seen: Tensor | None, event: Event, result: Any) -> None:
        """Add the outputs of an op to the tensors that wait; a view has written nothing."""
        index = self._events
        self._events += 1
        if is_view(event.overload):
            return
        if seen is not None and change_of_dtype(event) is not None:
            self._wait(_Owner(index, True), seen)
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if _measurable(tensor):
                self._wait(_Owner(index, False), tensor)
        if event.place.backward or self._bytes > _MOST_BYTES:
            self._measure()

    def measure_gradients(self, model: nn.Module) -> None:
        """Measure the gradient of every parameter that has one."""
        self._measure()
        named = [(name, _dense(each.grad)) for name, each in model.named_parameters() if each.grad is not None]
        for device in dict.fromkeys(grad.device for _, grad in named):
            names, grads = zip(*((name, grad) for name, grad in named if grad.device == device), strict=True)
            self._gradients.append((list(names), tensor_stats(grads, low=LOWEST_EXPONENT, bins=_BINS)))

    def fetch(self) -> None:
        """Move everything to the CPU. Sync: two for each device, one of them for the gradients."""
        self._measure()
        self.by_reference = kernels.report().status != "built"
        by_device: dict[torch.device, list[tuple[list[_Owner], StatsTable]]] = {}
        for owners, table in self._measured:
            by_device.setdefault(table.table.device, []).append((owners, table))
        self._measured = [_joined(parts) for parts in by_device.values()]
        self._gradients = [(names, table.cpu()) for names, table in self._gradients]

    @kept_property
    def by_op(self) -> dict[int, OpStatistics]:
        """The statistics of each op by its index. Sync: none after `fetch`."""
        outputs: dict[int, list[TensorStats]] = {}
        sources: dict[int, TensorStats] = {}
        for owners, table in self._measured:
            for owner, stats in zip(owners, table.read(), strict=True):
                if owner.is_source:
                    sources[owner.op] = stats
                else:
                    outputs.setdefault(owner.op, []).append(stats)
        return {index: OpStatistics(tuple(outputs[index]), sources.get(index)) for index in sorted(outputs)}

    @kept_property
    def gradients(self) -> tuple[tuple[str, ExponentHistogram], ...]:
        """The histogram of each gradient over all exponents of float32, by parameter. Sync: none after `fetch`."""
        return tuple(
            (name, stats.exponents)
            for names, table in self._gradients
            for name, stats in zip(names, table.read(), strict=True)
        )

    def _wait(self, owner: "_Owner", tensor: Tensor) -> None:
        # An alias, since torch reuses a tensor instead of copying it depending on its reference count.
        self._waiting.append((owner, stored_values(tensor.detach())))
        self._bytes += tensor.nbytes

    def _measure(self) -> None:
        """Measure all waiting tensors, in one pass for each device."""
        waiting, self._waiting, self._bytes = [each for each in self._waiting if has_values(each[1])], [], 0
        for device in {tensor.device: None for _, tensor in waiting}:
            here = [each for each in waiting if each[1].device == device]
            table = tensor_stats([tensor for _, tensor in here])
            self._measured.append(([owner for owner, _ in here], table))


class _Owner(NamedTuple):
    """The op that a measured tensor belongs to, and whether it is the input of a cast."""

    op: int
    is_source: bool


@cache
def _writes(overload: torch._ops.OpOverload) -> bool:
    return overload._schema.is_mutable


def _joined(parts: list[tuple[list[_Owner], StatsTable]]) -> tuple[list[_Owner], StatsTable]:
    """The tables of one device, concatenated, on the CPU."""
    together = StatsTable(torch.cat([table.table for _, table in parts]), parts[0][1].low)
    return [owner for owners, _ in parts for owner in owners], together.cpu()


def _dense(grad: Tensor) -> Tensor:
    """The numbers of a gradient: the values of a sparse one, the real view of a complex one."""
    values = stored_values(grad)
    return torch.view_as_real(values) if values.is_complex() else values


def _measurable(tensor: Any) -> bool:
    dense = isinstance(tensor, Tensor) and tensor.dtype in _MEASURED and tensor.layout is torch.strided
    return dense and has_values(tensor)
