"""Batches of any iterable as a function of the step: `Batches(loader, seed).batch(7)` is the same batch every time.

An epoch is one pass over the iterable, begun with random states that depend on the seed and the epoch alone, so that a
loader that shuffles gives the same order after a reset. The states of the process are restored after each batch. The
latest batches are kept; an older one is found by a second pass, so no data set is held in memory.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from amplab.amp.run_state.rng_state import capture_rng, restore_rng
from amplab.policies.nested_tensors import map_tensors, tensors_in
from amplab.trace.random_states import random_states_kept, seed_all

__all__ = ["Batches", "check_data"]

KEPT = 32
"""Batches that are kept at most."""

KEPT_BYTES = 2**28
"""Bytes of the kept batches together, beyond the two latest ones."""

_OVER = object()

_SUCH = "expected an iterable of batches, such as DataLoader(dataset, batch_size=64) or a list of batches"


def check_data(data: Any) -> None:
    """Raise a TypeError unless `data` yields batches again and again.

    A function without arguments is called for each epoch.
    """
    if isinstance(data, Iterator):
        raise TypeError(
            f"data={type(data).__name__}: it can be read only once, and Reset and Compare read the data again; pass a "
            "function that returns it, data=lambda: batches(), or a list."
        )
    if isinstance(data, Tensor | Mapping | str | bytes):
        raise TypeError(f"data={type(data).__name__}: {_SUCH}; write data=[batch] for one batch.")
    if isinstance(data, tuple) and any(isinstance(each, Tensor) for each in data):
        raise TypeError(f"data=a tuple of tensors: {_SUCH}; write data=[(inputs, labels)] for one batch.")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise TypeError(f"data={type(data).__name__}: a dataset yields single examples; {_SUCH}.")
    if not isinstance(data, Iterable) and not callable(data):
        raise TypeError(f"data={type(data).__name__}: {_SUCH}.")


@dataclass
class _Pass:
    """One pass over the data.

    Attributes:
        iterator: What is left of the epoch.
        epoch: Its number.
        next: The step whose batch comes next.
        random: The random states in which the iterator goes on.
    """

    iterator: Iterator[Any]
    epoch: int
    next: int
    random: dict[str, Any]


class Batches:
    """The batches of an experiment.

    Args:
        data: An iterable of batches, or a function that returns one; see `check_data`.
        seed: Of the random numbers that the data draw.

    >>> import torch
    >>> batches = Batches([torch.tensor(0), torch.tensor(1), torch.tensor(2)], seed=0)
    >>> [batches.batch(step).item() for step in (0, 1, 5, 1)]
    [0, 1, 2, 1]
    """

    def __init__(self, data: Any, seed: int) -> None:
        self._data, self._seed = data, seed
        self._starts = [0]  # the first step of each epoch, as far as known
        self._length = _length(data)
        self._passes: list[_Pass] = []  # the one behind the run, and one for older batches
        self._kept: OrderedDict[int, Any] = OrderedDict()
        # Such a loader has one iterator, which begins again for every pass.
        self._has_one_pass = isinstance(data, DataLoader) and data.persistent_workers

    def batch(self, step: int) -> Any:
        """Return a copy of the batch of a step: a forward may write into it.

        Raises:
            ValueError: The data yield no batch.
        """
        if step not in self._kept:
            self._read_up_to(step)
        self._kept.move_to_end(step)
        return _copied(self._kept[step])

    def _read_up_to(self, step: int) -> None:
        behind = [each for each in self._passes if each.next <= step]
        chosen = max(behind, key=lambda each: each.next, default=None)
        while self._length and self._starts[-1] + self._length <= step and chosen is None:
            self._starts.append(self._starts[-1] + self._length)
        epoch = bisect_right(self._starts, step) - 1
        if chosen is None or chosen.next < self._starts[epoch]:
            chosen = self._begin(epoch)
            self._passes = [chosen] if self._has_one_pass else [*self._passes[-1:], chosen]
        while chosen.next <= step:
            self._read(chosen)

    def _read(self, current: _Pass) -> None:
        """Read one batch, of the next epoch if this one is over."""
        with random_states_kept(()):
            restore_rng(current.random)
            batch = next(current.iterator, _OVER)
            current.random = capture_rng()
        if batch is _OVER:
            self._end(current)
        else:
            self._keep(current.next, batch)
            current.next += 1

    def _end(self, current: _Pass) -> None:
        if current.next == self._starts[current.epoch]:
            raise ValueError(f"data={type(self._data).__name__}: it yields no batch; {_SUCH}.")
        if current.epoch + 1 == len(self._starts):
            self._starts.append(current.next)
        following = self._begin(current.epoch + 1)
        current.iterator, current.epoch, current.random = following.iterator, following.epoch, following.random

    def _begin(self, epoch: int) -> _Pass:
        with random_states_kept(()):
            seed_all((self._seed * 1_000_003 + epoch + 1) % 2**63)
            iterator = iter(self._data() if _is_function(self._data) else self._data)
            return _Pass(iterator, epoch, self._starts[epoch], capture_rng())

    def _keep(self, step: int, batch: Any) -> None:
        self._kept[step] = batch
        while len(self._kept) > 2 and (len(self._kept) > KEPT or _bytes(self._kept.values()) > KEPT_BYTES):
            self._kept.popitem(last=False)


def _length(data: Any) -> int:
    """Return how many batches an epoch has, 0 if that is unknown."""
    if not isinstance(data, Sized):
        return 0
    try:
        return len(data)
    except TypeError:  # a loader of a stream
        return 0


def _is_function(data: Any) -> bool:
    return callable(data) and not isinstance(data, Iterable)


def _copied(batch: Any) -> Any:
    return map_tensors(batch, lambda tensor: tensor.clone(), custom=copy.deepcopy)


def _bytes(batches: Iterable[Any]) -> int:
    return sum(tensor.nbytes for batch in batches for tensor in tensors_in(batch))
