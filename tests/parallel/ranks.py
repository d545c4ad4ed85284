"""Real ranks for tests: processes of one gloo group that call a function of a test file and send back its value.

    def half_of_the_batch(rank, seed): ...             # at the top level of the test file

    first, second = run_ranks(half_of_the_batch, 0)    # RankError with every rank's traceback if a rank fails
    outcomes = rank_outcomes(dies_on_one_rank)         # never raises: for ranks that are to fail or to die

The ranks are forked from a server that has imported torch and amplab once, so that a start takes about 0.1 s.

A rank ends only after its process group has. Otherwise gloo's threads outlive Python: a thread that then frees a
finished all_reduce asks for Python's lock, Python ends the thread inside a C++ destructor, and the process aborts
("terminate called without an active exception", exit status 134). Three references keep a group alive after
``destroy_process_group``:

* a DistributedDataParallel that still exists, for example a global variable of a script;
* the default arguments of ``torch.distributed.nn.functional``, if the module is imported after
  ``init_process_group``; the constructor of DistributedDataParallel imports it. ``amplab.parallel`` imports it first.
  ``torch.distributed.fsdp.sharded_grad_scaler`` does the same. A test file is loaded before its group is made.
* the caches of DTensor, which FSDP2 fills; this module clears them.
"""

import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Outcome", "RankError", "rank_outcomes", "run_ranks"]

_LIMIT = 200.0  # seconds; some seconds of work on a machine that other programs use, too. Less than that of a test
_TO_END = 60.0  # seconds, for what takes a fraction of one
_THREADS_END = 5.0  # seconds, for the threads of a group that is gone
_AT_LIMIT = 1  # the exit code of a rank that faulthandler ends
_context = multiprocessing.get_context("forkserver")
_IMPORTED_ONCE = ["torch", "torch._dynamo", "amplab.amp", "amplab.parallel"]


class RankError(Exception):
    """A rank raised, died or reached the limit. The message has the outcome of every rank."""


@dataclass(frozen=True)
class Outcome:
    """What came of one rank.

    Attributes:
        value: what the function returned; None if it did not return.
        error: the traceback, or why there is no value; None if there is one.
        exitcode: of the process; negative: the signal that ended it.
        output: what it printed, standard error included.
    """

    value: Any
    error: str | None
    exitcode: int | None
    output: str


def run_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, limit: float = _LIMIT, backend: str | None = "gloo"
) -> list[Any]:
    """Call ``function(rank, *args)`` in ``world_size`` processes; return what each returned, by rank.

    Args:
        function: at the top level of a file; it takes the rank and ``args``.
        args: anything that can be pickled.
        world_size: number of processes.
        limit: seconds after which a rank writes its stacks and ends, counted from when it has begun. It is the timeout
            of the group too.
        backend: of the process group that exists during the call; None: the function makes its own.

    Raises:
        RankError: a rank raised, died, reached the limit, or left its process group alive.
    """
    outcomes = rank_outcomes(function, *args, world_size=world_size, limit=limit, backend=backend)
    if any(outcome.error for outcome in outcomes):
        raise RankError("\n".join(f"rank {rank}: {_told(outcome)}" for rank, outcome in enumerate(outcomes)))
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    function: Callable[..., Any], *args: Any, world_size: int = 2, limit: float = _LIMIT, backend: str | None = "gloo"
) -> list[Outcome]:
    """Do `run_ranks`, but return the outcome of every rank, however it ended."""
    if not isinstance(function, FunctionType) or "<locals>" in function.__qualname__:
        raise ValueError(f"{function}: expected a function at the top level of a file, which other processes can load.")
    _context.set_forkserver_preload(_IMPORTED_ONCE)
    with tempfile.TemporaryDirectory(prefix="amplab-ranks-") as folder:
        started = [
            _start(function, args, _Place(rank, world_size, Path(folder), limit, backend)) for rank in range(world_size)
        ]
        try:
            _await_begun([connection for _, connection in started])
            _await([connection for _, connection in started], limit)
            return [_outcome(*started[rank], Path(folder) / f"{rank}.txt") for rank in range(world_size)]
        finally:
            for process, connection in started:
                process.kill()
                process.join()
                connection.close()


@dataclass(frozen=True)
class _Place:
    """Where a rank runs."""

    rank: int
    world_size: int
    folder: Path
    limit: float
    backend: str | None


def _start(function: FunctionType, args: tuple[Any, ...], place: _Place) -> tuple[Any, Connection]:
    """Start one rank; return its process and the end of a pipe from which its value comes."""
    receives, sends = _context.Pipe(duplex=False)
    source = (function.__module__, function.__code__.co_filename, function.__name__)
    # Pickled here: multiprocessing would share the memory of tensors with processes that are about to end.
    process = _context.Process(target=_rank, args=(source, pickle.dumps(args), place, dict(os.environ), sends))
    process.start()
    sends.close()  # the rank has its own; without this one the pipe ends when the rank does
    return process, receives


def _await_begun(connections: list[Connection]) -> None:
    """Wait until every rank has imported the file of its function, or died."""
    until = time.monotonic() + _LIMIT
    for connection in connections:
        if connection.poll(max(0.0, until - time.monotonic())):
            with suppress(EOFError):  # it has died; the pipe says so again when its value is read
                connection.recv_bytes()


def _await(connections: list[Connection], limit: float) -> None:
    """Wait until every rank has sent its value or ended; each ends itself at ``limit``, unless it is stopped."""
    until = time.monotonic() + limit + _TO_END
    silent = list(connections)
    while silent and (left := until - time.monotonic()) > 0:
        ready = wait(silent, left)
        silent = [connection for connection in silent if connection not in ready]


def _outcome(process: Any, connection: Connection, printed: Path) -> Outcome:
    """Read what a rank has sent, and end it if it is still alive."""
    try:
        sent = connection.recv_bytes() if connection.poll() else pickle.dumps((None, "stopped before it had a value"))
        value, error = pickle.loads(sent)
        process.join(_TO_END)
    except EOFError:
        process.join(_TO_END)
        why = "reached the limit" if process.exitcode == _AT_LIMIT else "ended before it had a value"
        value, error = None, f"{why}, with exit code {process.exitcode}"
    process.kill()
    process.join()
    output = printed.read_text(errors="replace") if printed.exists() else ""
    return Outcome(value, error, process.exitcode, output)


def _told(outcome: Outcome) -> str:
    return f"{outcome.error or 'returned'}\n{outcome.output[-4000:]}"


def _rank(
    source: tuple[str, str, str], pickled: bytes, place: _Place, environment: dict[str, str], connection: Connection
) -> None:
    """The process of one rank: call the function within a process group, send ``(value, error)``."""
    printed = (place.folder / f"{place.rank}.txt").open("w")
    for standard in (1, 2):
        os.dup2(printed.fileno(), standard)
    os.environ.update(environment)
    os.environ.update(RANK=f"{place.rank}", LOCAL_RANK=f"{place.rank}", WORLD_SIZE=f"{place.world_size}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    sent = _called(source, pickled, place, connection)
    sys.stdout.flush()
    connection.send_bytes(sent)
    connection.close()


def _called(source: tuple[str, str, str], pickled: bytes, place: _Place, connection: Connection) -> bytes:
    """Return the pickled ``(value, error)``. Whatever the function made is gone by then, the process group too."""
    try:
        try:  # before the group: modules of torch keep a group that exists when they are imported
            function = _loaded(source)
        finally:
            connection.send_bytes(b"begun")
        faulthandler.dump_traceback_later(place.limit, file=2, exit=True)  # to standard error; exit code 1
        if place.backend is not None:
            store = f"file://{place.folder / 'store'}"
            limit = timedelta(seconds=place.limit)
            ranks = {"rank": place.rank, "world_size": place.world_size}
            dist.init_process_group(place.backend, init_method=store, timeout=limit, **ranks)
        value = pickle.dumps((function(place.rank, *pickle.loads(pickled)), None))
    except BaseException:  # noqa: BLE001  # KeyboardInterrupt and SystemExit too: the test is to see them
        return pickle.dumps((None, traceback.format_exc()))
    gc.collect()
    _forget_meshes()
    if dist.is_initialized():
        dist.destroy_process_group()
    end = time.monotonic() + _THREADS_END
    while (left := _gloo_threads()) and time.monotonic() < end:
        time.sleep(0.05)
    if left:
        return pickle.dumps((None, f"left its process group alive, with the threads {left}: this process may abort"))
    return value


def _loaded(source: tuple[str, str, str]) -> Callable[..., Any]:
    """Return the function from its file, which pytest imports under a name that other processes cannot import."""
    name, path, function = source
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    loaded: Callable[..., Any] = getattr(sys.modules[name], function)
    return loaded


def _forget_meshes() -> None:
    """Clear the caches of DTensor: what they know of a mesh keeps the mesh, and so its groups."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _collective_utils, _redistribute, debug

        debug._clear_sharding_prop_cache()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        gc.collect()


def _gloo_threads() -> list[str]:
    """Return the names of gloo's threads in this process. The system without /proc has no such list."""
    names = []
    for comm in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(comm.read_text().strip())
        except OSError:  # the thread has just ended
            continue
    return sorted(name for name in names if "gloo" in name)
