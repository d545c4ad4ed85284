"""What the numbers of a step look like: the statistics of every tensor that an op writes, and of the gradients.

Each op's tensors are measured as it runs, before anything can overwrite them; the tables wait on the device and are
read all at once. With the `tensor_stats` kernel that is one pass over each tensor; its pure-torch reference counts the
same and takes several times as long.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amplab.formats import ExponentHistogram
from amplab.formats.exponents import HIGHEST_EXPONENT, LOWEST_EXPONENT
from amplab.kernels import StatsTable, TensorStats, tensor_stats
from amplab.trace.reasons import change_of_dtype, is_view
from amplab.trace.recorder import Event

__all__ = ["OpStatistics", "Statistics"]

_MEASURED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
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
    """An observer that measures what each op writes, and what each cast reads. Sync: none, one a device in `read`."""

    def __init__(self) -> None:
        self._events = 0
        self._owners: dict[torch.device, list[tuple[int, int]]] = {}
        self._tables: dict[torch.device, list[StatsTable]] = {}
        self._casts: set[int] = set()
        self._gradients: list[tuple[str, StatsTable]] = []

    def before(self, overload: torch._ops.OpOverload, args: tuple, _kwargs: dict[str, Any]) -> StatsTable | None:
        """Measure what a cast reads."""
        reads = args[0] if overload is torch.ops.aten._to_copy.default else None
        return tensor_stats([reads]) if reads is not None and _measurable(reads) else None

    def after(self, seen: StatsTable | None, event: Event, result: Any) -> None:
        """Measure what an op wrote; a view writes nothing."""
        index = self._events
        self._events += 1
        if is_view(event.overload):
            return
        if seen is not None and change_of_dtype(event) is not None:
            self._casts.add(index)
            self._keep(index, seen)
        tensors = [tensor for tensor in _tensors(result) if _measurable(tensor)]
        if tensors:
            self._keep(index, tensor_stats(tensors))

    def measure_gradients(self, model: nn.Module) -> None:
        """Measure the gradient of every parameter that has one."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
                self._gradients.append((name, tensor_stats([grad], low=LOWEST_EXPONENT, bins=_BINS)))

    def read(self) -> dict[int, OpStatistics]:
        """Return the statistics by index of the op. Sync: one a device."""
        found: dict[int, list[TensorStats]] = {}
        for device, owners in self._owners.items():
            tables = self._tables[device]
            together = StatsTable(torch.cat([table.table for table in tables]), tables[0].low)
            rows = iter(together.read())
            for index, count in owners:
                found.setdefault(index, []).extend(next(rows) for _ in range(count))
        return {index: self._of_op(index, stats) for index, stats in sorted(found.items())}

    def read_gradients(self) -> tuple[tuple[str, ExponentHistogram], ...]:
        """Return the gradients' histograms over all of float32's binades, by parameter. Sync: one."""
        if not self._gradients:
            return ()
        home = self._gradients[0][1].table.device
        tables = torch.cat([table.table.to(home, non_blocking=True) for _, table in self._gradients])
        stats = StatsTable(tables, LOWEST_EXPONENT).read()
        return tuple((name, each.exponents) for (name, _), each in zip(self._gradients, stats, strict=True))

    def _keep(self, index: int, table: StatsTable) -> None:
        device = table.table.device
        self._owners.setdefault(device, []).append((index, len(table)))
        self._tables.setdefault(device, []).append(table)

    def _of_op(self, index: int, stats: list[TensorStats]) -> OpStatistics:
        if index in self._casts:
            return OpStatistics(tuple(stats[1:]), stats[0])
        return OpStatistics(tuple(stats))


def _measurable(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype in _MEASURED and tensor.layout is torch.strided


def _tensors(result: Any) -> Iterable[Any]:
    return result if isinstance(result, list | tuple) else (result,)
