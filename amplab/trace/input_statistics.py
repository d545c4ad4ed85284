"""`InputStatistics`: an observer that measures what one op of a step reads."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amplab.formats.stored_values import has_values, stored_values
from amplab.kernels import TensorStats, tensor_stats
from amplab.trace.recorder import Event
from amplab.trace.records import TensorInfo, shape_of

__all__ = ["InputStatistics", "MeasuredInput"]

_MEASURED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class MeasuredInput:
    """One floating-point tensor that an op reads."""

    info: TensorInfo
    stats: TensorStats


class InputStatistics:
    """Measures the floating-point inputs of one op just before it runs. Sync: one.

    Args:
        index: of the op's record in the trace.

    Attributes:
        inputs: the dense floating-point tensors that the op reads, in argument order.
    """

    def __init__(self, index: int) -> None:
        self.inputs: tuple[MeasuredInput, ...] = ()
        self.index = index
        self._events = 0

    def before(self, _overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Measure the arguments if it is the op."""
        if self._events != self.index:
            return
        read = [each for each in _tensors((*args, *kwargs.values())) if _is_measurable(each)]
        if read:
            infos = [TensorInfo(each.dtype, shape_of(each)) for each in read]
            self.inputs = tuple(map(MeasuredInput, infos, tensor_stats([*map(stored_values, read)]).read()))

    def after(self, _seen: Any, _event: Event, _result: Any) -> None:
        """Count the op."""
        self._events += 1


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, Tensor))


def _is_measurable(tensor: Tensor) -> bool:
    return tensor.dtype in _MEASURED and tensor.layout is torch.strided and has_values(tensor)
