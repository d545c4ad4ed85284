"""What the numbers of a step look like: the statistics of every tensor that an op writes, and of the gradients.

Tensors of the forward are measured many at a time, at the latest before an op that writes into anything; those of the
backward at once, since autograd adds in place into what nobody else holds. The tables stay on the device and are read
together. With the `tensor_stats` kernel that is one pass over each tensor; its pure-torch reference counts the same
and takes several times as long.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amplab import kernels
from amplab.formats import ExponentHistogram
from amplab.formats.exponents import HIGHEST_EXPONENT, LOWEST_EXPONENT
from amplab.kernels import StatsTable, TensorStats, tensor_stats
from amplab.trace.reasons import change_of_dtype, is_view
from amplab.trace.recorder import Event

__all__ = ["OpStatistics", "Statistics"]

_MEASURED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CASTS = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
_WAITS = 32 * 2**20  # bytes that are held for measuring
_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1


@dataclass(frozen=True)
class OpStatistics:
    """The numbers that one op wrote.

    Attributes:
        outputs: of each floating-point tensor that it returned.
        cast_from: of what a cast read: the elements that half flushes to zero, or cannot hold, are counted there.
    """

    outputs: tuple[TensorStats, ...]
    cast_from: TensorStats | None = None


class Statistics:
    """An observer that measures what each op writes, and what each cast reads. Sync: none; `fetch` says its own.

    Attributes:
        by_reference: whether the pure-torch reference has measured, known after `fetch`.
    """

    def __init__(self) -> None:
        self.by_reference = False
        self._events = 0
        self._waiting: list[tuple[_Owner, Tensor]] = []
        self._bytes = 0
        self._measured: list[tuple[list[_Owner], StatsTable]] = []
        self._gradients: list[tuple[list[str], StatsTable]] = []

    def before(self, overload: torch._ops.OpOverload, args: tuple, _kwargs: dict[str, Any]) -> Tensor | None:
        """Measure what waits before an op can overwrite it; return what a cast reads."""
        if self._waiting and _writes(overload):
            self._measure()
        place = _CASTS.get(overload)
        return None if place is None or not _measurable(args[place]) else args[place]

    def after(self, seen: Tensor | None, event: Event, result: Any) -> None:
        """Let what an op wrote be measured; a view writes nothing."""
        index = self._events
        self._events += 1
        if is_view(event.overload):
            return
        if seen is not None and change_of_dtype(event) is not None:
            self._wait(_Owner(index, True), seen)
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if _measurable(tensor):
                self._wait(_Owner(index, False), tensor)
        if event.place.backward or self._bytes > _WAITS:  # autograd writes into what nobody else holds
            self._measure()

    def measure_gradients(self, model: nn.Module) -> None:
        """Measure the gradient of every parameter that has one."""
        self._measure()
        named = [(name, _dense(each.grad)) for name, each in model.named_parameters() if each.grad is not None]
        for device in dict.fromkeys(grad.device for _, grad in named):
            names, grads = zip(*((name, grad) for name, grad in named if grad.device == device), strict=True)
            self._gradients.append((list(names), tensor_stats(grads, low=LOWEST_EXPONENT, bins=_BINS)))

    def fetch(self) -> None:
        """Bring everything to the CPU. Sync: two a device, one of them for the gradients."""
        self._measure()
        self.by_reference = kernels.report().status != "built"
        by_device: dict[torch.device, list[tuple[list[_Owner], StatsTable]]] = {}
        for owners, table in self._measured:
            by_device.setdefault(table.table.device, []).append((owners, table))
        self._measured = [_joined(parts) for parts in by_device.values()]
        self._gradients = [(names, table.cpu()) for names, table in self._gradients]

    @cached_property
    def by_op(self) -> dict[int, OpStatistics]:
        """The statistics by index of the op. Sync: none after `fetch`."""
        outputs: dict[int, list[TensorStats]] = {}
        sources: dict[int, TensorStats] = {}
        for owners, table in self._measured:
            for owner, stats in zip(owners, table.read(), strict=True):
                if owner.is_source:
                    sources[owner.index] = stats
                else:
                    outputs.setdefault(owner.index, []).append(stats)
        return {index: OpStatistics(tuple(outputs[index]), sources.get(index)) for index in sorted(outputs)}

    @cached_property
    def gradients(self) -> tuple[tuple[str, ExponentHistogram], ...]:
        """The gradients' histograms over all of float32's binades, by parameter. Sync: none after `fetch`."""
        return tuple(
            (name, stats.exponents)
            for names, table in self._gradients
            for name, stats in zip(names, table.read(), strict=True)
        )

    def _wait(self, owner: "_Owner", tensor: Tensor) -> None:
        # An alias: whether torch copies a tensor or takes it over hangs on how often the tensor itself is held.
        self._waiting.append((owner, tensor.detach()))
        self._bytes += tensor.nbytes

    def _measure(self) -> None:
        """Measure all that waits, in one pass a device."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        for device in {tensor.device: None for _, tensor in waiting}:
            here = [each for each in waiting if each[1].device == device]
            table = tensor_stats([tensor for _, tensor in here])
            self._measured.append(([owner for owner, _ in here], table))


class _Owner(NamedTuple):
    """What a measured tensor belongs to: an op's index, and whether a cast read it."""

    index: int
    is_source: bool


@cache
def _writes(overload: torch._ops.OpOverload) -> bool:
    return overload._schema.is_mutable


def _joined(parts: list[tuple[list[_Owner], StatsTable]]) -> tuple[list[_Owner], StatsTable]:
    """The tables of one device as one on the CPU."""
    together = StatsTable(torch.cat([table.table for _, table in parts]), parts[0][1].low)
    return [owner for owners, _ in parts for owner in owners], together.cpu()


def _dense(grad: Tensor) -> Tensor:
    """The numbers of a gradient: what a sparse one holds, the parts of a complex one."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    return torch.view_as_real(values) if values.is_complex() else values


def _measurable(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype in _MEASURED and tensor.layout is torch.strided
