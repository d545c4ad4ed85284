"""Batches of any iterable as a function of the step: `Batches(loader, seed).batch(7)` is the same batch every time.

An epoch is one pass over the iterable, begun with random states that depend on the seed and the epoch alone, so that a
loader that shuffles gives the same order after a reset. The states of the process are restored after each batch, and
so are those of generators that the data have themselves; see `data_generators`. The latest batches are kept; an older
one is found by a second pass, so no data set is held in memory.

Data may count in attributes, as a sampler its epochs. In another process the epoch in which a run goes on begins with
what they kept when it began first; see `own_state`.
"""

from __future__ import annotations

import copy
import signal
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from amplab.amp.run_state.rng_state import capture_rng, restore_rng
from amplab.lab.data_generators import DataGenerators
from amplab.lab.own_state import State, add_state, changes, lost_changes, own_state, set_back
from amplab.policies.nested_tensors import map_tensors, tensors_in
from amplab.policies.signals import is_interrupt
from amplab.trace.random_states import random_states_kept, seed_all

__all__ = ["Batches", "ReadingStopped", "check_data", "copied"]

KEPT = 32
"""Batches that are kept at most."""

KEPT_BYTES = 2**28
"""Bytes of the kept batches together, beyond the two latest ones."""

_ROOT = "data"
_KEPT_STATES = 1_000  # of epochs; a look may read many short ones ahead
_PATIENCE = 1.0  # seconds of reading without a word
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


@dataclass(eq=False)
class _Pass:
    """One pass over the data.

    Attributes:
        data: What is read.
        iterator: What is left of the epoch.
        epoch: Its number.
        start: Its first step.
        next: The step whose batch comes next.
        random: The random states in which the iterator goes on.
        own: Restore the states of the generators of the data in which it goes on.
    """

    data: Any
    iterator: Iterator[Any]
    epoch: int
    start: int
    next: int
    random: dict[str, Any]
    own: tuple[Callable[[], object], ...]


class ReadingStopped(Exception):
    """A run that continues within an epoch reads the batches before its step first, and was paused meanwhile."""


class Batches:
    """The batches of an experiment.

    Args:
        data: An iterable of batches, or a function that returns one; see `check_data`.
        seed: Of the random numbers that the data draw.
        generators: Those of the data, if others read the data too.

    Attributes:
        goes_on: Called about once a second while older batches are read, with the number of those that are left.

    >>> import torch
    >>> batches = Batches([torch.tensor(0), torch.tensor(1), torch.tensor(2)], seed=0)
    >>> [batches.batch(step).item() for step in (0, 1, 5, 1)]
    [0, 1, 2, 1]
    """

    def __init__(self, data: Any, seed: int, generators: DataGenerators | None = None) -> None:
        self._data, self._seed, self._generators = _copy_of(data), seed, generators or DataGenerators()
        self._given = own_state({_ROOT: self._data})
        self._states: dict[int, State] = {}  # at the beginning of the latest epochs
        self._of_earlier: dict[int, State] = {}  # what the data kept in another process
        self._starts = [(0, 0)]  # the first step of an epoch, and the epoch, as far as known
        self._passes: list[_Pass] = []  # the one behind the run, and one for older batches
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self.goes_on: Callable[[int], bool] = lambda _left: True

    def batch(self, step: int) -> Any:
        """Return a copy of the batch of a step: a forward may write into it.

        Raises:
            ValueError: The data yield no batch.
        """
        if step not in self._kept:
            self._read_up_to(step)
        self._kept.move_to_end(step)
        return copied(self._kept[step])

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return the first step and the number of the epoch of a step, or of the last one before it that is known."""
        return self._starts[bisect_right(self._starts, step, key=lambda start: start[0]) - 1]

    def state_of(self, epoch: int) -> tuple[State, list[str]]:
        """Return what the data kept at the beginning of an epoch besides what they were given with, and what is lost.

        Of an epoch that has not begun it is what they keep now.
        """
        if epoch in self._of_earlier and epoch not in self._states:
            return self._of_earlier[epoch], []
        state = self._states.get(epoch) or own_state({_ROOT: self._data})
        return changes(state, self._given), lost_changes(state, self._given)

    def know_epoch(self, start: int, epoch: int, state: State | None = None) -> None:
        """Take over what `epoch_of` and `state_of` returned for another run.

        A later step is found without the epochs before.
        """
        place = bisect_left(self._starts, (start, epoch))
        if self._starts[place : place + 1] != [(start, epoch)]:
            self._starts.insert(place, (start, epoch))
        if state is not None:
            self._of_earlier[epoch] = state

    def rest(self) -> None:
        """End the passes and their workers; the next batch that is not kept begins another one."""
        self._passes.clear()

    def _read_up_to(self, step: int) -> None:
        """Read on to a step. Raises: ReadingStopped, if `goes_on` says so; what was read is kept."""
        behind = [each for each in self._passes if each.next <= step]
        chosen = max(behind, key=lambda each: each.next, default=None)
        start, epoch = self.epoch_of(step)
        if chosen is None or chosen.next < start:
            chosen = self._begin(_copy_of(self._data) if self._passes else self._data, epoch, start)
            self._passes = [*self._passes[-1:], chosen]
        told = time.monotonic()
        while chosen.next <= step:
            chosen = self._read(chosen)
            left = step - chosen.next
            if left > 0 and time.monotonic() - told > _PATIENCE:  # the batch of the step itself may take its time
                told = time.monotonic()
                if not self.goes_on(left):
                    raise ReadingStopped(f"reading the batches before step {step} was stopped at {chosen.next}")

    def _read(self, current: _Pass) -> _Pass:
        """Read one batch and return the pass; after the end of the epoch that of the next one, without a batch.

        A pass that fails is over: its iterator may have left the batch out, or have ended.
        """
        self._passes.remove(current)
        with random_states_kept(()), self._generators.kept():
            restore_rng(current.random)
            for restore in current.own:
                restore()
            batch = next(current.iterator, _OVER)
            current.random, current.own = capture_rng(), self._generators.states()
        if batch is _OVER:
            current = self._end(current)
        else:
            self._keep(current.next, batch)
            current.next += 1
        self._passes.append(current)
        return current

    def _end(self, current: _Pass) -> _Pass:
        if current.next == current.start:
            raise ValueError(f"data={type(self._data).__name__}: it yields no batch; {_SUCH}.")
        self.know_epoch(current.next, current.epoch + 1)
        return self._begin(current.data, current.epoch + 1, current.next)

    def _begin(self, given: Any, epoch: int, start: int) -> _Pass:
        seed = (self._seed * 1_000_003 + epoch + 1) % 2**63
        with random_states_kept(()), self._generators.kept():
            seed_all(seed)
            self._begin_state(given, epoch)
            data = _copy_of(given()) if _is_function(given) else given
            self._generators.begin(data, epoch, seed)
            return _Pass(given, _iterator(data), epoch, start, start, capture_rng(), self._generators.states())

    def _begin_state(self, given: Any, epoch: int) -> None:
        """Let the data keep what they kept as an epoch began, if it has begun before; else note what they keep now."""
        if epoch in self._states:
            set_back({_ROOT: given}, self._states[epoch], lambda owner: owner is given or not _is_shared(owner))
        elif epoch in self._of_earlier:  # in another process
            add_state({_ROOT: given}, self._of_earlier[epoch])
        self._states.setdefault(epoch, own_state({_ROOT: given}))
        while len(self._states) > 2 and (
            len(self._states) > _KEPT_STATES or _bytes(self._states.values()) > KEPT_BYTES
        ):
            del self._states[min(self._states)]

    def _keep(self, step: int, batch: Any) -> None:
        self._kept[step] = copied(batch)  # data may write the next one into the same memory
        while len(self._kept) > 2 and (len(self._kept) > KEPT or _bytes(self._kept.values()) > KEPT_BYTES):
            self._kept.popitem(last=False)


def _is_shared(owner: Any) -> bool:
    """Whether it is a dataset with indices, which is not copied."""
    return isinstance(owner, Dataset) and not isinstance(owner, IterableDataset)


def _copy_of(data: Any) -> Any:
    """Return a copy of an iterable, which may keep its place or count its epochs in itself; the data are not copied.

    A loader has workers that end with the pass, with their random states, and not by Ctrl-C: an interrupt of a kernel,
    or in a terminal, reaches all processes.
    """
    if type(data) in (list, tuple) or _is_function(data) or hasattr(data, "__del__"):
        return data  # the end of a copy could close a file of both
    try:
        one = copy.copy(data)
    except Exception as refusal:
        if is_interrupt(refusal):
            raise
        return data
    if isinstance(one, DataLoader):
        vars(one).update(_parts_of_loader(one))  # a loader lets no one set them
    elif isinstance(one, IterableDataset):
        vars(one).update({name: _copy_of_streams(value) for name, value in vars(one).items()})
    return one


def _copy_of_streams(data: Any) -> Any:
    """Return copies of streams, and of those in a list, which may keep their places; other data as they are."""
    if type(data) in (list, tuple):
        return (
            type(data)(map(_copy_of_streams, data)) if any(isinstance(each, IterableDataset) for each in data) else data
        )
    return _copy_of(data) if isinstance(data, IterableDataset) else data


def _parts_of_loader(loader: DataLoader[Any]) -> dict[str, Any]:
    sampler, batches = _copy_of(loader.sampler), _copy_of(loader.batch_sampler)
    if "sampler" in getattr(batches, "__dict__", ()):
        batches.sampler = sampler if batches.sampler is loader.sampler else _copy_of(batches.sampler)
    parts = {"dataset": _copy_of_streams(loader.dataset), "sampler": sampler, "batch_sampler": batches}
    if loader.num_workers:
        parts |= {"persistent_workers": False, "worker_init_fn": _Uninterrupted(loader.worker_init_fn)}
    return parts


def _iterator(data: Any) -> Iterator[Any]:
    """Begin to read. Workers that this starts have no Ctrl-C until they ignore it: they inherit the mask."""
    if not hasattr(signal, "pthread_sigmask"):
        return iter(data)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return iter(data)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Uninterrupted:
    """A `worker_init_fn` that first lets the worker ignore Ctrl-C; a class, since it may be pickled."""

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._then is not None:
            self._then(worker)


def _is_function(data: Any) -> bool:
    return callable(data) and not isinstance(data, Iterable)


def copied(batch: Any) -> Any:
    """Return a batch with copies of its tensors. Sync: none."""
    return map_tensors(batch, lambda tensor: tensor.clone(), custom=copy.deepcopy)


def _bytes(batches: Iterable[Any]) -> int:
    return sum(tensor.nbytes for batch in batches for tensor in tensors_in(batch))
