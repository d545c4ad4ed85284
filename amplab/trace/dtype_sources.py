"""`DtypeSources`: which event gave the tensors of an op their dtype, and which parameter it reads.

An op on no list runs in the dtype of its inputs, so the reason for its dtype is further back: a hook that cast the
model's input or output, a conversion in the code, a 16-bit weight, or the op before. A tensor is known by its memory,
which its views share. Memory that is used again belongs to the op that wrote it last.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from amplab.trace.kept_tensors import memory_of

__all__ = ["DtypeSources"]

_LISTS = list, tuple


class DtypeSources:
    """The events that wrote the tensors of one step.

    Args:
        model: the model whose parameters are named.
        names: the name of each parameter by its id.
    """

    def __init__(self, model: nn.Module, names: Mapping[int, str]) -> None:
        self._writer: dict[int, int] = {}
        self._parameters = {
            memory_of(each)[0]: names[id(each)] for each in model.parameters() if id(each) in names and each.numel()
        }

    def read(self, values: Iterable[object], dtype: torch.dtype) -> tuple[int | None, str]:
        """Return the number of the event that wrote the first input of this dtype, and the first parameter of it."""
        source, parameter = None, ""
        for tensor in _tensors(values):
            if tensor.dtype == dtype:
                address = memory_of(tensor)[0]
                if not parameter and address in self._parameters:
                    parameter = self._parameters[address]
                elif source is None:
                    source = self._writer.get(address)
        return source, parameter

    def written(self, values: Iterable[object], event: int) -> None:
        """Record that an event gave these tensors their dtype."""
        for tensor in _tensors(values):
            self._writer[memory_of(tensor)[0]] = event


def _tensors(values: Iterable[object]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, _LISTS):
            yield from (each for each in value if isinstance(each, Tensor))
