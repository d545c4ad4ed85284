"""A run with sharded parameters (FSDP2) as a folder: shards by torch.distributed.checkpoint, the rest by rank.

    PATH/.metadata, PATH/*.distcp     every DTensor of models and optimizers; they load on any number of ranks
    PATH/rank_0.pt, rank_1.pt, …      a file of `file_format` with everything else, such as generators and loss scales;
                                      an empty tensor on the meta device has the place of each DTensor
    PATH/checksums.pt                 the checksum of every other file, which is compared before the file is used

A folder is written beside its place and renamed. A process that is killed leaves PATH as it was, or, between two
renames, the hidden folder .PATH.previous, which is then read.
"""

import os
import re
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from amplab.amp.run_state.file_format import MissingRunState, RunStateError, read_run_state, write_run_state
from amplab.amp.run_state.folder_checksums import CHECKSUMS, checksum, mismatch, read_checksums, write_checksums
from amplab.amp.run_state.paths import short_name, target_of
from amplab.policies.signals import DeferredSignals
from amplab.scalers import is_sharded

__all__ = [
    "difference_of_ranks",
    "has_shards",
    "is_run_folder",
    "lost_shardings",
    "on_every_rank",
    "rank_file",
    "read_shards",
    "refuse_other_shards",
    "tensors_of",
    "write_run_folder",
]

Value = TypeVar("Value")
_OF_A_RUN = re.compile(rf"\.metadata|.*\.distcp|rank_\d+\.pt|{re.escape(CHECKSUMS)}")
_Place = tuple[Any, ...]
"""The keys and indices that lead to a tensor: ("optimizers", 0, "state", "state", 3, "exp_avg")."""


_DEEPEST = 100  # levels of dicts and lists; each is a call in what reads and writes a state


def has_shards(state: Mapping[str, Any]) -> bool:
    """Return whether the models or optimizers of a state of `save_run_state` hold a DTensor: on every rank, or none."""
    return any(is_sharded(tensor) for name in ("models", "optimizers") for _, tensor in tensors_of(state[name]))


def refuse_other_shards(state: Mapping[str, Any]) -> None:
    """Raise RunStateError for a DTensor for which a load would know no sharding, as one of ``extra``."""
    for place, tensor in tensors_of(state):
        if is_sharded(tensor) and not _has_like(place):
            raise RunStateError(
                f"{_text(place)} is a DTensor: expected DTensors among the parameters of models and the state of their "
                "optimizers only, which a load shards as the models are then. Pass the model that it belongs to, as in "
                "model=[model, ema], or call its full_tensor() on every rank and save the result."
            )


def lost_shardings(state: Mapping[str, Any], filled: Mapping[str, Any]) -> list[str]:
    """Return the places in ``position`` and ``extra`` that held DTensors, which earlier versions saved.

    Args:
        state: of `rank_file`.
        filled: the same after `read_shards`.
    """
    pairs = zip(tensors_of(state), tensors_of(filled), strict=True)
    return [_text(at) for (at, was), (_, now) in pairs if _is_the_callers(at) and was.is_meta and not now.is_meta]


def is_run_folder(path: Path) -> bool:
    """Return whether a sharded run was saved to ``path``."""
    return _present(path).is_dir()


def write_run_folder(path: Path, state: dict[str, Any]) -> None:
    """Write a state with DTensors. Every rank calls it, each with its own state. A link stays: its target is written.

    Raises:
        RunStateError: a value that a file cannot hold, a DTensor in ``position`` or ``extra``, or shards that cannot be
            written, on any rank.
        OSError: the folder cannot be written, or ``path`` is a file. A folder at ``path`` is unchanged.
        KeyboardInterrupt: on every rank if the shards of one were interrupted.

    Sync: many.
    """
    import torch.distributed.checkpoint as dcp  # takes a second, which only sharded runs need

    from amplab.amp.run_state.shard_writer import ShardWriter

    path = target_of(path)
    partial = path.with_name(f".{short_name(path.name)}.partial")
    first = dist.get_rank() == 0
    file = partial / _name(dist.get_rank())
    on_every_rank(lambda: refuse_other_shards(state))
    on_every_rank(lambda: _make_folder(path, partial) if first else None)
    shards = {_key(place): tensor for place, tensor in tensors_of(state) if is_sharded(tensor)}
    on_every_rank(lambda: write_run_state(file, _without_shards(state)))
    writer = ShardWriter(partial)
    with _errors_of_ranks(f"The shards cannot be written, and {path} is unchanged.", "Save again when that is mended."):
        dcp.state_dict_saver.save(shards, storage_writer=writer)
    own = on_every_rank(lambda: {file.name: checksum(file), **writer.checksums})
    of_ranks: list[dict[str, int]] | None = [{}] * dist.get_world_size() if first else None
    dist.gather_object(own, of_ranks)

    def finish() -> None:
        write_checksums(partial, {name: value for each in of_ranks or () for name, value in each.items()})
        _put_in_place(path, partial)

    on_every_rank(lambda: finish() if first else None)


def rank_file(path: Path) -> tuple[dict[str, Any], bool]:
    """Read the file of this rank in a folder; that of rank 0 if fewer ranks have saved.

    Returns:
        The state, with meta tensors for DTensors; and whether it is the state of this rank.

    Raises:
        As `read_run_state`; RunStateError, too, if the file does not match its checksum in the folder.
    """
    folder = _present(path)
    rank = dist.get_rank() if dist.is_initialized() else 0
    checksums = read_checksums(folder) if (folder / _name(0)).exists() else {}
    own = _name(rank) in checksums
    file = folder / _name(rank if own else 0)
    if not file.exists():
        raise MissingRunState(f"{path} has no {file.name}: expected a folder of save_run_state; give the path of one.")
    state = read_run_state(file)
    if reason := mismatch(file, checksums):
        raise RunStateError(
            f"{path} cannot be loaded, and nothing was loaded: {reason}. Copy the folder again from an intact source, "
            "or load an earlier one."
        )
    return state, own


def read_shards(
    path: Path, state: dict[str, Any], models: Sequence[Module], optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """Return the ``state`` of `rank_file` with values in place of meta tensors, sharded as the models are now.

    What earlier versions saved of ``position`` and ``extra`` (`lost_shardings`) is whole.

    Args:
        path: the folder.
        state: checked against ``models`` and ``optimizers``.
        models: sharded over any number of ranks, or not sharded.
        optimizers: of their parameters.

    Raises:
        RunStateError: the shards are damaged, belong to another run, or their list names code to run; on every rank.

    Sync: many.
    """
    import torch.distributed.checkpoint as dcp  # takes a second, which only sharded runs need

    from amplab.amp.run_state.shard_reader import ShardReader

    model_states = [model.state_dict() for model in models]
    params = [[param for group in each.param_groups for param in group["params"]] for each in optimizers]
    targets = {
        _key(place): torch.empty_like(like, dtype=tensor.dtype, requires_grad=False)
        for place, tensor in tensors_of(state)
        if tensor.is_meta and (like := _like(place, model_states, params, tensor)) is not None
    }
    if targets:
        callers = {_key(place) for place, _ in tensors_of(state) if _is_the_callers(place)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            reader = on_every_rank(lambda: ShardReader(_present(path), read_checksums(_present(path))))
            for key in callers - reader.read_metadata().state_dict_metadata.keys():
                targets.pop(key, None)  # on the meta device in the caller's program, too
            with _errors_of_ranks(
                f"The shards in {path} cannot be read, and nothing was loaded.",
                "Copy the folder again from an intact source, or load an earlier one.",
            ):
                dcp.state_dict_loader.load(targets, storage_reader=reader)
    filled: dict[str, Any] = _replaced(state, (), lambda place, tensor: targets.get(_key(place), tensor))
    return filled


def on_every_rank(action: Callable[[], Value]) -> Value:
    """Call ``action`` and wait for the other ranks to do so; raise on every rank if it raises on one.

    Raises:
        RunStateError: it raised on another rank; the message has the rank and the reason.
    """
    error: Exception | None = None
    try:
        value = action()
    except Exception as raised:  # noqa: BLE001  raised below, after the others know
        error = raised
    if dist.is_initialized():
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, None if error is None else f"{type(error).__name__}: {error}")
        failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
        if error is None and failed:
            raise RunStateError(f"Another rank failed, so nothing was done here. {failed[0]}")
    if error is not None:
        raise error
    return value


def difference_of_ranks(found: str) -> str:
    """Say which rank finds something else than rank 0; "" if none does. Every rank calls it with what it finds itself.

    Sync: waits for every rank.
    """
    if not dist.is_initialized():
        return ""
    of_ranks = [found] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    other = next((rank for rank, theirs in enumerate(of_ranks) if theirs != of_ranks[0]), None)
    return "" if other is None else f"rank 0 finds {of_ranks[0]} there, and rank {other} {of_ranks[other]}"


@contextmanager
def _errors_of_ranks(problem: str, remedy: str) -> Iterator[None]:
    """Raise a RunStateError for what torch.distributed.checkpoint collects from all ranks, and an interrupt as such."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:  # on every rank
        for rank, (raised, _) in error.failures.items():
            if isinstance(raised, KeyboardInterrupt):
                raise KeyboardInterrupt(f"on rank {rank}") from None
        rank, (raised, _) = next(iter(error.failures.items()))
        raise RunStateError(f"{problem} Rank {rank}: {type(raised).__name__}: {raised}. {remedy}") from None


def _name(rank: int) -> str:
    return f"rank_{rank}.pt"


def _previous(path: Path) -> Path:
    return path.with_name(f".{short_name(path.name)}.previous")


def _present(path: Path) -> Path:
    target = target_of(path)
    return target if target.exists() or not _previous(target).exists() else _previous(target)


def _make_folder(path: Path, partial: Path) -> None:
    if path.exists() and not path.is_dir():
        raise OSError(f"{path} is a file, and a sharded run is saved as a folder; give the path of a folder.")
    for replaced in (path, _previous(path)):
        if other := _not_of_a_run(replaced):
            raise OSError(
                f"{replaced} holds {other}, which save_run_state has not written, and a save replaces the folder; give "
                "the path of a new folder, or move what else is in this one."
            )
    _remove(partial)
    partial.mkdir()


def _not_of_a_run(folder: Path) -> str:
    """Return the first thing in a folder that `write_run_folder` has not written there, "" if there is none."""
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    is_run = _name(0) in names  # torch.distributed.checkpoint names its files as in a run
    return next((name for name in names if not is_run or not _OF_A_RUN.fullmatch(name)), "")


def _put_in_place(path: Path, partial: Path) -> None:
    if path.exists():  # else the previous folder is the only one
        _remove(_previous(path))
        path.rename(_previous(path))
    with DeferredSignals():  # a load reads the previous folder when path is removed, so it must not stay there
        os.replace(partial, path)
        with suppress(FileNotFoundError):
            _previous(path).rename(partial)
    _remove(partial)


def _remove(folder: Path) -> None:
    signals = DeferredSignals()  # after one, shutil of Python 3.11 closes a file twice, and raises an OSError
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        signals.end()


def _without_shards(state: dict[str, Any]) -> dict[str, Any]:
    def empty(_place: _Place, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if is_sharded(tensor) else tensor

    plain: dict[str, Any] = _replaced(state, (), empty)
    return plain


def _has_like(place: _Place) -> bool:
    """Return whether `_like` knows the sharding of a tensor if its model or optimizer is passed."""
    match place:
        case ("models", int(), str()) | ("optimizers", int(), "state", "state", int(), *_):
            return True
    return False


def _is_the_callers(place: _Place) -> bool:
    return place[0] in ("position", "extra")


def _like(
    place: _Place, models: Sequence[Mapping[str, Any]], optimizers: Sequence[Sequence[Tensor]], tensor: Tensor
) -> Tensor | None:
    """Return the tensor whose sharding ``tensor`` at ``place`` gets; None if its model or optimizer was not passed."""
    match place:
        case ("models", int(index), str(name)) if index < len(models):
            value: Tensor = models[index][name]
            return value
        case ("optimizers", int(index), "state", "state", int(number), *_) if index < len(optimizers):
            return optimizers[index][number]
    return torch.empty_like(tensor, device="cpu") if _is_the_callers(place) else None


def tensors_of(value: Any, place: _Place = ()) -> Iterator[tuple[_Place, Tensor]]:
    """Yield every tensor of a state with its place."""
    if isinstance(value, Tensor):
        yield place, value
    if len(place) > _DEEPEST:
        raise RunStateError(
            f"{_text(place[:2])} contains itself, or has more than {_DEEPEST} levels: save a flat copy."
        )
    for key, child in _items(value):
        yield from tensors_of(child, (*place, key))


def _replaced(value: Any, place: _Place, change: Callable[[_Place, Tensor], Tensor]) -> Any:
    """Return a state with ``change(place, tensor)`` for every tensor; containers of other types stay as they are."""
    if isinstance(value, Tensor):
        return change(place, value)
    items = [(key, _replaced(child, (*place, key), change)) for key, child in _items(value)]
    if type(value) in (dict, OrderedDict):
        return type(value)(items)
    return type(value)(child for _, child in items) if type(value) in (list, tuple) else value


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if type(value) in (dict, OrderedDict):
        return list(value.items())
    return list(enumerate(value)) if type(value) in (list, tuple) else []


def _text(place: _Place) -> str:
    """Write a place as it is read in Python: extra['ema']['weight']."""
    return str(place[0]) + "".join(f"[{key!r}]" for key in place[1:])


def _key(place: _Place) -> str:
    return ".".join(map(str, place))
