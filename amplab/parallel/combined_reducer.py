"""Average combined gradients over ranks: buckets of the flat buffers are all-reduced while backward runs.

    send      bucket <- gradients / world_size, and the notes of this rank;  all_reduce(bucket)
    finish    wait; the bucket becomes the gradients; if a rank has left a note, all ranks compare what they have

Inf and NaN survive the sum, so that every rank finds the same found_inf without a message of its own. What a bucket
holds is in ``buckets.py``, what the notes say in ``rank_notes.py``.

A rank whose parameters or settings are no longer those that all agreed on cannot know whether the others have changed,
too. It sends the buckets as they were agreed on, with a note in each. The sum brings the note to every rank, and all
then compare what they have: either they agree on new buckets, or each raises the same error.

Every rank must send the same buckets in the same order: gloo aborts a process that receives more bytes than it expects,
and adds up two buckets of one size whatever they hold. A rank whose backward raises therefore sends zeros, with a note,
in the buckets that it has not sent. If a process group has several reducers, ranks first compare which of them takes
part, in a message of its own before each backward.

The first backward records the order in which gradients arrive; rank 0's order decides in which order every rank sends
the buckets. From then on the last parameter of each bucket starts it. `CombinedDDP` prepares the models and checks that
all ranks agree; what calls `CombinedReducer` is in ``amp/apex/hooked_optimizer.py``.
"""

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amplab.parallel.agreement import explained_absence, first_rank, refuse_disagreement, refuse_other_call
from amplab.parallel.buckets import Bucket, bucket_ends
from amplab.parallel.rank_notes import Notes
from amplab.parallel.ranks import is_alone
from amplab.policies.signals import DeferredSignals, is_interrupt
from amplab.scalers import FlatGradients, to_device
from amplab.scalers.flat_buffer import FlatBuffer

__all__ = ["CombinedReducer"]


class CombinedReducer:
    """Average the gradients of some parameters over the ranks.

    ::

        reducer.prepare(params, halves)  once, on every rank
        reducer.follow(params, halves)   before a backward; they may be others than before
        reducer.begin()                  send each bucket as soon as the backward has filled it
        loss.backward()
        reducer.finish()                 param.grad <- sum over ranks (param.grad / world_size), in the flat buffers

    Without `begin` the backward only writes gradients of this rank, which a later `finish` averages.

    Args:
        replica_count: the number of buckets to cut each flat buffer into; see `bucket_ends`.
        group: the ranks; None for all.
        name: returns the name of a parameter, all of whose values are equal on all ranks; None for any other, whose
            values are then compared.
        awaiting: returns the reducers that take part in the current backward. Buckets are sent early only if this is
            the only one, since every rank has to send all buckets in one order.

    Reference: ``combine_ddp`` of Ascend's apex; ``torch.nn.parallel.DistributedDataParallel``.
    """

    def __init__(
        self,
        replica_count: int = 4,
        *,
        group: dist.ProcessGroup | None = None,
        name: Callable[[Tensor], str | None] = lambda _param: "a parameter",
        awaiting: Callable[[], Iterable["CombinedReducer"]] = lambda: (),
    ) -> None:
        self._replica_count, self._group, self._known_name, self._awaiting = replica_count, group, name, awaiting
        self._number = 0  # of all reducers of the group, in the order of `prepare`
        self.flats: tuple[FlatGradients, ...] = ()
        self._listed: list[list[Tensor]] = []  # those of the plan
        self._wanted: list[list[Tensor]] = []  # those of the backward
        self._agreed: dict[str, str] = {}  # settings
        self._settings: dict[str, str] = {}
        self._steps = 0
        self._notes = Notes()
        self._problems: list[str] = []  # why this rank has no gradients to average
        self._due = False  # whether the other ranks wait for the buckets of this backward
        self._buffers: tuple[FlatBuffer, ...] = ()
        self._buckets: list[Bucket] = []
        self._handles: list[Any] = []
        self._arrived: list[int] | None = None  # positions in the order of arrival, while they are recorded
        self._recorded = False  # whether a backward with `begin` has been recorded
        self._early = False  # whether the last parameter of a bucket may start it
        self._awaited, self._sending = False, False
        self._ready: set[int] = set()
        self._works: list[Any] = []
        self._factor: dict[torch.device, Tensor] = {}
        self._strays: list[tuple[Tensor, Tensor, int]] = []

    @property
    def is_awaiting(self) -> bool:
        """Whether a backward is between `follow` and its end."""
        return self._awaited

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The flat buffers ``(elements,)``."""
        return tuple(buffer.tensor for buffer in self._buffers)

    def prepare(self, *params: Iterable[Tensor]) -> None:
        """Agree with the other ranks on the parameters, make the flat buffers and cut them into buckets.

        Args:
            params: one list for each of `flats`.

        Raises:
            RuntimeError: the parameters that require a gradient differ between ranks, or one of them is complex.

        Sync: waits for every rank.
        """
        self._wanted = [list(each) for each in params]
        self._compare(params=True)
        group = self._group or dist.group.WORLD
        self._number = _reducer_counts.get(group, 0)
        _reducer_counts[group] = self._number + 1
        self._plan()

    def follow(self, *params: Iterable[Tensor]) -> None:
        """Expect gradients of these parameters in a backward that follows.

        If they are others than before, the ranks agree on them in `finish`.

        Raises:
            RuntimeError: as `refuse_strays`.

        Sync: none.
        """
        self.refuse_strays()
        self._wanted = [list(each) for each in params]
        known = len(self._wanted) == len(self._listed) and all(map(_same, self._wanted, self._listed))
        unfrozen = any(param.requires_grad for flat in self.flats for param in flat.outside)
        rebuilt = not _same(_buffers_of(self.flats), self._buffers)
        self._notes = Notes(of_params=not known or unfrozen or rebuilt)
        self._awaited = True

    def begin(self, settings: Mapping[str, str] | None = None, *, steps: int = 0, early: bool = True) -> None:
        """Send each bucket as soon as it is full, until `finish`; nothing if this rank runs alone.

        Args:
            settings: what must be equal on all ranks: values as text, by name. Those that have changed since ranks
                compared them are compared in `finish`.
            steps: the number of steps that were made with the averages of this object. Ranks of which one is ahead have
                other weights. They are told apart unless they differ by a multiple of 2^14 = 16384.
            early: send in the backward; False: leave everything to `finish`.

        Raises:
            RuntimeError: on every rank: other reducers take part on another rank.

        Sync: none with one reducer in the group. With several it waits for every rank; one.
        """
        self._settings, self._steps = dict(settings or {}), steps
        differ = any(self._agreed.get(name) != value for name, value in self._settings.items())
        self._notes = self._notes._replace(of_values=differ).with_steps(steps)
        if is_alone():
            return
        self._refuse_other_reducers()
        self._due = True
        if not early:
            return
        self._sending = True
        if self._arrived is not None:
            self._arrived, self._recorded = [], True

    def finish(self) -> None:
        """Send what has not been sent, wait, and make the averages the gradients.

        Raises:
            RuntimeError: on every rank: the parameters, the settings or the steps differ between ranks; a gradient is
                sparse, or of another dtype or shape than its parameter; the backward of a rank raised; a rank does not
                take part. On this rank: a gradient was written after its bucket had been sent.

        Sync: as `torch.distributed.Work.wait`; one for each device; one for each bucket of which this rank has not
        reached every parameter.
        """
        notes = self._exchange(self._buckets)
        self._settle(notes)
        if notes.of_params:
            self._notes = Notes()
            self._exchange_added()
            self._plan()
        elif self._arrived is not None and self._recorded and not notes.without_order:
            self._schedule(self._arrived)
        self._end()

    def _exchange(self, buckets: Sequence[Bucket]) -> Notes:
        """Average over ranks, and make the averages the gradients; return the notes of all ranks."""
        late = (param for bucket in buckets[: len(self._works)] for param in bucket.params if param.grad is not None)
        self._problems += [
            f"{self._name(param)} got another gradient after its first one had been averaged over the ranks: "
            "run one backward in each block of scale_loss, and checkpoint with use_reentrant=False."
            for param in itertools.islice(late, 1)
        ]
        notes = self._send_and_wait(buckets)
        for bucket in buckets:
            bucket.lend()
        return notes

    def _send_and_wait(self, buckets: Sequence[Bucket], *, empty: bool = False) -> Notes:
        """Send the buckets that have not been sent, wait for all, and return the notes of all ranks."""
        for bucket in buckets[len(self._works) :]:
            self._send(bucket, empty=empty)
        try:
            notes = Notes() if is_alone() else self._await(buckets)
        except RuntimeError as error:
            self._due = is_interrupt(error)  # else there is nobody to exchange with
            raise
        self._due, self._works = False, []
        return notes

    def _await(self, buckets: Sequence[Bucket]) -> Notes:
        """Wait for what was sent; return the notes of all ranks. Without buckets they are a message of their own."""
        with explained_absence("average gradients"):
            if not buckets:
                own = torch.tensor(self._told(), device=self._device())
                dist.all_reduce(own, group=self._group)
                return Notes.heard(own.tolist())
            for work in self._works:
                work.wait()
        return _heard(buckets)

    def _told(self) -> list[float]:
        """Return the numbers of the notes of this rank."""
        of_values = self._notes.of_values or bool(self._problems)
        return self._notes._replace(of_values=of_values, without_order=not self._recorded).numbers()

    def _settle(self, notes: Notes) -> None:
        """Compare what the notes ask for; raise if this rank has a problem that came too late for a note."""
        if notes.ask_for_comparison:
            self._compare(params=notes.of_params)
        if self._problems:
            raise RuntimeError(self._problems[0])

    def keep_local(self) -> None:
        """End a backward whose gradients stay as they are, for a later `finish` to average with others."""
        self._end()

    def cancel(self) -> None:
        """End a backward that failed, whose gradients have been put back.

        The other ranks wait for every bucket, so those that have not been sent are sent as zeros. All other ranks then
        raise what this one has raised, unless all buckets had left before; nothing is raised here.
        """
        try:
            if self._due:
                self._problems = [_failure()]
                notes = self._send_and_wait(self._buckets, empty=True)
                for bucket in self._buckets:
                    bucket.clear_padding()
                self._settle(notes)
        except RuntimeError as error:  # the failure of the backward is reported
            if is_interrupt(error):
                raise
        finally:
            self._end()

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _end(self) -> None:
        self._awaited, self._sending, self._due, self._ready, self._works = False, False, False, set(), []
        self._notes, self._problems, self._recorded = Notes(), [], False

    def _send(self, bucket: Bucket, *, empty: bool = False) -> None:
        misfit = None if empty else bucket.misfit()
        if misfit is not None and is_alone():
            raise RuntimeError(self._describe_misfit(misfit))
        device = bucket.tensor.device
        if is_alone():
            bucket.fill(torch.ones(1, dtype=torch.float32, device=device))
            return
        if misfit is not None:
            self._problems.append(self._describe_misfit(misfit))
        if misfit is not None or empty:  # the other ranks wait for this bucket
            bucket.fill_with_zeros()
        else:
            if device not in self._factor:
                share = 1.0 / dist.get_world_size(self._group)
                self._factor[device] = torch.full((1,), share, dtype=torch.float32, device=device)
            bucket.fill(self._factor[device])
        bucket.notes.copy_(to_device(torch.tensor(self._told()), bucket.notes.device))
        # A bucket that has left and is not listed would be sent twice, and the other ranks would take it for the next.
        with DeferredSignals(), explained_absence("average gradients"):
            self._works.append(dist.all_reduce(bucket.tensor, group=self._group, async_op=True))

    def _device(self) -> torch.device | None:
        """The device of a message of its own."""
        return next((param.device for listed in self._listed for param in listed), None)

    def _name(self, param: Tensor) -> str:
        return self._known_name(param) or "a parameter of no initialized model"

    def _describe_misfit(self, param: Tensor) -> str:
        grad = param.grad
        given = "no gradient" if grad is None else f"{grad.layout}, {grad.dtype}, {tuple(grad.shape)}"
        return (
            f"{self._name(param)} has a gradient of {given}: combine_ddp=True averages dense gradients in the dtype "
            f"and shape that the parameter had in amp.initialize; now it is {param.dtype}, {tuple(param.shape)}. Call "
            "amp.initialize again after converting a model; for sparse gradients use DistributedDataParallel instead."
        )

    # -- what the ranks agree on -------------------------------------------------------------------------

    def _compare(self, *, params: bool) -> None:
        """Compare settings with the other ranks, and parameters for new buckets; raise on every rank if they differ."""
        listed = [param for each in self._wanted for param in each if params and param.requires_grad]
        problems = self._problems + [
            f"{self._name(param)} is {param.dtype}: combine_ddp=True averages the gradients of real parameters; use "
            "DistributedDataParallel instead."
            for param in listed
            if param.is_complex()
        ]
        planned = set(map(id, self._all_params()))
        refuse_disagreement(
            "gradients",
            [(self._name(param), param) for param in listed],
            self._group,
            with_values=[param for param in listed if id(param) not in planned and self._known_name(param) is None],
            settings=self._settings | {"the number of steps": str(self._steps)},
            problem=next(iter(problems), ""),
        )
        self._agreed |= self._settings

    def _refuse_other_reducers(self) -> None:
        """Compare with the other ranks which reducers take part, and in which order, if the group has several."""
        if _reducer_counts.get(self._group or dist.group.WORLD, 0) < 2:
            return
        others = sorted((each for each in self._awaiting() if each is not self), key=lambda each: each._number)
        titles = " with ".join(each._title() for each in (self, *others))
        refuse_other_call(f"scale_loss for {titles}", self._group, self._device())

    def _title(self) -> str:
        """Name the optimizer by its place among those of all calls of `initialize`, from 0."""
        params = [param for listed in self._listed for param in listed]
        first = f", first {self._name(params[0])}" if params else ""
        return f"optimizer {self._number} ({len(params)} parameters{first})"

    def _exchange_added(self) -> None:
        """Average the gradients of the parameters that the old buckets lack. All ranks have the same ones now."""
        planned = set(map(id, self._all_params()))
        added = [param for params in self._wanted for param in params if id(param) not in planned]
        if not any(param.requires_grad for param in added):
            return
        grads = [param.grad for param in added]
        for param in added:
            param.grad = None
        flat = FlatGradients(added, reserve=True)  # in the dtypes of the parameters, whatever the gradients are
        for param, grad in zip(added, grads, strict=True):
            param.grad = grad
        self._settle(self._exchange(self._cut(flat.flat_buffers)))

    # -- the order of the buckets ------------------------------------------------------------------------

    def _plan(self) -> None:
        """Make the buffers, cut them into buckets, and record the order of the next backward."""
        self._listed = self._wanted
        self.flats = tuple(FlatGradients(each, reserve=True) for each in self._listed)
        self._buffers = _buffers_of(self.flats)
        self._buckets = self._cut(self._buffers)
        self.release()
        self._early, self._recorded, self._arrived = False, False, []
        for position, param in enumerate(self._all_params()):
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(self._recorder(position)))

    def _cut(self, buffers: Iterable[FlatBuffer]) -> list[Bucket]:
        buckets: list[Bucket] = []
        for buffer in buffers:
            cuts = bucket_ends(buffer.ends, buffer.tensor.itemsize, self._replica_count)
            buckets += [Bucket(buffer, first, last) for first, last in zip([0, *cuts], cuts, strict=False)]
        return buckets

    def _all_params(self) -> list[Tensor]:
        return [param for bucket in self._buckets for param in bucket.params]

    def _recorder(self, position: int) -> Callable[[Tensor], None]:
        def record(param: Tensor) -> None:
            if self._sending and self._arrived is not None:
                self._arrived.append(position)
            self._see_stray(param)

        return record

    def _schedule(self, arrived: list[int]) -> None:
        """Order the buckets by rank 0's last arrival in each, and let the parameter that arrived last start it."""
        self._arrived = None
        if not self._buckets:
            return
        latest = torch.full((len(self._all_params()) + 1,), -1, dtype=torch.int64)
        latest[torch.tensor(arrived, dtype=torch.int64)] = torch.arange(len(arrived))
        latest[-1] = len(arrived) == len(set(arrived))  # a gradient that is written in several parts is sent at the end
        here = latest.to(self._buckets[0].tensor.device)
        with explained_absence("agree on the order of the gradients"):
            dist.broadcast(here, first_rank(self._group), group=self._group)
        *places, once = here.tolist()
        self.release()
        self._early = bool(once)
        at = 0
        last: list[tuple[int, Bucket, Tensor]] = []
        for bucket in self._buckets:
            own = places[at : at + len(bucket.params)]
            last.append((max(own), bucket, bucket.params[own.index(max(own))]))
            at += len(own)
        last.sort(key=lambda each: each[0])
        self._buckets = [bucket for _, bucket, _ in last]
        for number, (place, _, param) in enumerate(last):
            if place >= 0:
                self._handles.append(param.register_post_accumulate_grad_hook(self._starter(number)))

    def _starter(self, number: int) -> Callable[[Tensor], None]:
        def start(param: Tensor) -> None:
            self._see_stray(param)
            if not (self._sending and self._early and all(each is self for each in self._awaiting())):
                return
            if self._buckets[number].is_complete():
                self._ready.add(number)
            while (following := len(self._works)) in self._ready:
                self._send(self._buckets[following])

        return start

    # -- gradients that no one averages ------------------------------------------------------------------

    def _see_stray(self, param: Tensor) -> None:
        grad = param.grad
        if not self._awaited and grad is not None:
            self._strays = [each for each in self._strays if each[0] is not param]
            self._strays.append((param, grad, grad._version))

    def refuse_strays(self) -> None:
        """Refuse gradients of this rank only, from a backward outside of `follow` and `finish`.

        Raises:
            RuntimeError: there are some.
        """
        strays, self._strays = self._strays, []
        for param, grad, version in strays:
            if param.grad is grad and grad._version == version:
                self._strays = strays
                raise RuntimeError(
                    f"{self._name(param)} has a gradient of this rank only, from a backward outside of scale_loss: "
                    "run every backward in `with amp.scale_loss(loss, optimizer) as scaled_loss: "
                    "scaled_loss.backward()`, which averages over the ranks, or clear it with optimizer.zero_grad()."
                )


_reducer_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many reducers were prepared in each process group. It never falls, so that all ranks know the same number."""


def _heard(buckets: Sequence[Bucket]) -> Notes:
    """Return the notes of all ranks from buckets that have arrived. Sync: one for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for bucket in buckets:
        by_device.setdefault(bucket.notes.device, []).append(bucket.notes.float())
    largest = [torch.stack(notes).amax(0).tolist() for notes in by_device.values()]
    return Notes.heard([max(numbers) for numbers in zip(*largest, strict=True)])


def _failure() -> str:
    """Say what the block that ends now has raised."""
    error = sys.exception()
    said = str(error).splitlines()
    return (
        f"A block of scale_loss raised {type(error).__name__}{f': {said[0][:200]}' if said else ''}. No rank has "
        "averaged its gradients, and those from before the block are restored. Skip the step on every rank, or end all."
    )


def _is(left: object, right: object) -> bool:
    return left is right


def _buffers_of(flats: Iterable[FlatGradients]) -> tuple[FlatBuffer, ...]:
    return tuple(buffer for flat in flats for buffer in flat.flat_buffers)


def _same(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(map(_is, left, right))
