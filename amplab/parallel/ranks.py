"""Which of the processes that train together this one is, and how a tool runs on one of them without the others.

A collective waits for every rank, so a tool that runs on one rank only, such as a watch on rank 0, must not call one.
`AgreedText`, `texts_of_ranks` and `PostedTexts` use the key-value store of the process group instead;
`on_this_rank_alone` runs a step without the exchange of gradients, buffers and statistics.
"""

from __future__ import annotations

import os
import platform
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from amplab.policies.signals import DeferredSignals, is_interrupt

__all__ = [
    "AgreedText",
    "NeedsOtherRanks",
    "PostedTexts",
    "Rank",
    "averages_gradients",
    "data_parallel",
    "exchanges_in_forward",
    "has_other_ranks",
    "is_alone",
    "on_this_rank_alone",
    "texts_of_ranks",
    "this_rank",
]


@dataclass(frozen=True)
class Rank:
    """One process of several that train together.

    Attributes:
        rank: its number in the default process group, from 0.
        world_size: number of processes.
        launch: the name of their launch; processes that torchrun restarts have that of the first ones. On several
            nodes it may differ by node: see `_launch`.
    """

    rank: int
    world_size: int
    launch: str = ""


class NeedsOtherRanks(RuntimeError):
    """A step exchanges values with the other ranks: on one rank alone it would wait for them without end."""


def has_other_ranks() -> bool:
    """Return whether several processes train together. Sync: none."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def this_rank() -> Rank | None:
    """Return the rank of this process; None if it trains alone. Sync: none."""
    if not has_other_ranks():
        return None
    return Rank(dist.get_rank(), dist.get_world_size(), _launch())


class AgreedText:
    """The same text on every rank: what the first one to make this object chooses.

    A rank waits for no call of the others, only for the choice of the first one, and chooses itself if that one has
    ended. Which calls belong together: see `_next_call`.

    Args:
        name: what the ranks agree on.
        choose: returns the text. It is called on the first rank, and on those that have waited in vain.
        timeout: seconds to wait for the choice.

    Attributes:
        text: what they agree on.

    Raises:
        RuntimeError: there is no process group.

    Reference: ``torch.distributed.Store.compare_set``.
    """

    def __init__(self, name: str, choose: Callable[[], str], *, timeout: float = 10.0) -> None:
        store, self._key = _store(), _next_call(name)
        if store.add(f"{self._key}/callers", 1) > 1:
            _wait(store, [self._key], timeout)
        own = "" if store.check([self._key]) else choose()
        self.text = str(store.compare_set(self._key, "", own).decode())

    def end(self) -> None:
        """What was agreed on is over on this rank."""
        _end_call(self._key)


def texts_of_ranks(name: str, own: str, *, timeout: float) -> Sequence[str | None]:
    """Return what every rank gave in one call under one name, by rank; None of a rank that did not call in time.

    Which calls belong together: see `_next_call`; a call is over on all ranks when one rank has waited in vain.

    Args:
        name: what is exchanged.
        own: the text of this rank.
        timeout: seconds to wait for the others.

    Raises:
        RuntimeError: there is no process group.
    """
    store, call = _store(), _next_call(name)
    keys = [f"{call}/rank {each}" for each in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], own)
    try:
        _wait(store, keys, timeout)
    finally:
        _end_call(call)
    return [store.get(key).decode() if store.check([key]) else None for key in keys]


class PostedTexts:
    """A text of each rank that the others can read at any time, in the store of the process group. Nothing waits.

    Which objects belong together: see `_next_call`.

    Args:
        name: what is posted.

    Raises:
        RuntimeError: there is no process group.
    """

    def __init__(self, name: str) -> None:
        self._key = _next_call(name)

    def post(self, text: str) -> None:
        """Replace the text of this rank. Raises RuntimeError: there is no process group, or its store has ended."""
        _store().set(f"{self._key}/rank {dist.get_rank()}", text)

    def read(self) -> dict[int, str]:
        """Return the texts of the other ranks that have posted one. Raises RuntimeError: as `post`."""
        store, own = _store(), dist.get_rank()
        keys = {rank: f"{self._key}/rank {rank}" for rank in range(dist.get_world_size()) if rank != own}
        return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}

    def end(self) -> None:
        """What the texts are about is over on this rank."""
        _end_call(self._key)


def _next_call(name: str) -> str:
    """Return the key of the call that begins now, which belongs together with those of the other ranks under this key.

    The calls of a rank under one name are numbered, and those of one number belong together. A rank leaves out a number
    that another line of the program has begun and that is over, as of a tool that one rank alone has used: the next
    calls of all ranks then have one number again. What the same line has begun may be over because a rank is late.
    """
    store, rank = _store(), dist.get_rank()
    lines = " ".join(f"{frame.f_code.co_name}:{line}" for frame, line in traceback.walk_stack(None))
    while True:
        key = f"amplab/{name}/{store.add(f'amplab/{name}/calls of rank {rank}', 1)}"
        begun_by = store.compare_set(f"{key}/lines", "", lines).decode()
        if begun_by == lines or not store.check([f"{key}/over"]):
            return key


def _end_call(key: str) -> None:
    """Let no call of another line take part in this one from now on; in vain without a process group."""
    try:
        _store().set(f"{key}/over", "yes")
    except RuntimeError as error:
        if is_interrupt(error):
            raise


def data_parallel(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the DistributedDataParallel wrappers of a model: among its modules, and around a forward that runs now."""
    around = DistributedDataParallel._get_active_ddp_module()
    inside = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    return inside if around is None or around in inside else [around, *inside]


@contextmanager
def on_this_rank_alone() -> Iterator[None]:
    """In the block, forwards and backwards of this thread wait for no other rank; gradients are those of this rank.

    DistributedDataParallel, SyncBatchNorm, ``combine_ddp`` and `Reducer` exchange nothing in the block, wherever they
    are: a step may call a wrapper that its model does not contain. Other collectives run as they are: those of
    ``fully_shard`` (see `exchanges_in_forward`), which every rank must call, and those of the caller's own code, which
    `amplab.trace.untouched` refuses.

    Sync: none.
    """
    if this_rank() is None or is_alone():
        yield
        return
    alone = _Alone()
    try:
        with DeferredSignals():
            alone.begin()
        yield
    finally:
        try:
            with DeferredSignals():
                alone.end()
        except BaseException:  # of a signal that came before it let them wait
            alone.end()
            raise


def is_alone() -> bool:
    """Return whether a block of `on_this_rank_alone` runs in this thread. Sync: none."""
    return any(block.is_here() for block in _blocks)


def averages_gradients(wrapper: DistributedDataParallel) -> bool:
    """Return whether a forward that runs now is not under ``no_sync``, apart from `on_this_rank_alone`. Sync: none."""
    kept = [each.before[wrapper] for each in _blocks if wrapper in each.before]
    return bool(kept[0]["require_backward_grad_sync"] if kept else wrapper.require_backward_grad_sync)


class _Alone:
    """Lets each forward of a module that exchanges values run without the other ranks.

    Both kinds of module decide in the forward whether their backward exchanges values, too.

    Attributes:
        before: the settings of each module whose forward runs.
    """

    def __init__(self) -> None:
        self.before: dict[nn.Module, dict[str, Any]] = {}
        self._thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """Begin the block."""
        self._handles.append(register_module_forward_pre_hook(self.before_forward))
        # Also after a forward that raises.
        self._handles.append(register_module_forward_hook(self.after_forward, always_call=True))
        _blocks.append(self)

    def end(self) -> None:
        """End the block; a second call finishes what an interrupt has left."""
        for each in self._handles:
            each.remove()
        while self in _blocks:
            _blocks.remove(self)
        self._restore()

    def is_here(self) -> bool:
        """Return whether the calling thread runs the block, or computes a backward for threads that may."""
        here = threading.get_ident()
        return here == self._thread or here not in _threads_of_python()

    def before_forward(self, module: nn.Module, _args: object) -> None:
        alone = _settings_alone(module) if self.is_here() else None
        if alone:
            self.before[module] = {name: getattr(module, name) for name in alone}
            _set(module, alone)

    def after_forward(self, module: nn.Module, _args: object, _output: object) -> None:
        if self.is_here():
            _set(module, self.before.pop(module, {}))

    def _restore(self) -> None:
        """Restore the modules whose forward was interrupted: torch calls no hook after one."""
        while self.before:
            module, values = next(iter(self.before.items()))
            _set(module, values)
            del self.before[module]


def _threads_of_python() -> set[int | None]:
    """Return the threads that Python has started; autograd has threads of its own for the backward on each device."""
    return {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}


def _settings_alone(module: nn.Module) -> dict[str, Any]:
    """Return the attributes with which the forward of a module exchanges nothing; {} if it does not anyway."""
    if isinstance(module, DistributedDataParallel):
        alone = {"require_backward_grad_sync": False, "require_forward_param_sync": False, "static_graph": False}
        return {**alone, "reducer": _ReducerAlone(module.reducer)}
    if _is_a(module, "SyncBatchNorm"):
        return {"process_group": dist.GroupMember.NON_GROUP_MEMBER}  # so it normalizes with its own batch
    return {}


class _ReducerAlone:
    """A reducer of DistributedDataParallel that does not agree on its buckets with other ranks.

    The first forward after the first backward does, once: the next one of the loop then.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        if name == "_reducer":  # of a copy that is still empty
            raise AttributeError(name)
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _set(module: nn.Module, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(module, name, value)


def exchanges_in_forward(model: nn.Module) -> str:
    """Return the module whose forward needs the other ranks, one of FSDP, in words; "" for none."""
    if this_rank() is None:
        return ""
    for name, module in model.named_modules():
        if _is_a(module, "FSDPModule", "FullyShardedDataParallel"):
            return f"{name or 'the model'}, a {type(module).__name__},"
    return ""


def _is_a(module: nn.Module, *names: str) -> bool:
    """By name: torch and amplab have a SyncBatchNorm each, and importing FSDP takes long."""
    return any(kind.__name__ in names for kind in type(module).__mro__)


_blocks: list[_Alone] = []
"""The blocks of `on_this_rank_alone` that run now. Not by thread: autograd runs backwards on threads of its own."""


def _store() -> Any:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group: expected a call after torch.distributed.init_process_group.")
    return group.get_group_store()


def _wait(store: Any, keys: list[str], timeout: float) -> None:
    """Wait until a store has all keys, `timeout` seconds at most."""
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:  # a timeout; that of a TCPStore is a DistError
        if is_interrupt(error):
            raise


def _launch() -> str:
    """Name the launch of all ranks; a restart by torchrun has the same name.

    A run id of "none" is torchrun's default, which other launches have too; the process of torchrun tells them apart.
    Each node has a torchrun of its own, and so a name of its own.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else f"process {os.getppid()} of {platform.node()}"
