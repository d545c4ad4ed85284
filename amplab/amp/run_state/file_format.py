"""The file of a run state: which values it may hold, how it is written, and which files are refused.

A zip archive of ``torch.save`` with one dict of plain values, so that ``torch.load(path, weights_only=True)`` reads it
without amplab:

    {"amplab_run_state": 1, "amplab": "0.1.0", "torch": "2.13.0", "models": [state_dict, …], "optimizers": […], …}

Its contents are collected in `save_and_load`.
"""

import contextlib
import errno
import glob
import os
import reprlib
import secrets
import stat
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn import Parameter

from amplab import __version__
from amplab.amp.run_state.paths import short_name, special_kind, target_of
from amplab.policies.signals import DeferredSignals, deferring_signals, is_interrupt

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "FORMAT",
    "MissingRunState",
    "RunStateError",
    "is_loadable",
    "read_run_state",
    "remove_partials",
    "write_atomically",
    "write_run_state",
]

_short = reprlib.repr  # what a file holds may be long
_MOST_VISITS = 1_000_000

FORMAT = 1
"""Version of the file format, the value of "amplab_run_state"."""

_MARK = "amplab_run_state"
_DIGITS = 8  # hexadecimal, in the name of a file that is being written
_PLAIN = (Tensor, Parameter, torch.Size, torch.dtype, torch.device, type(None), bool, int, float, str, bytes)
_WITH_ATTRIBUTES = (Tensor, Parameter, OrderedDict)
_MOST_BITS = 2039  # longer ones are pickled by an opcode that torch does not read
_SEQUENCES = (list, tuple)
_MAPPINGS = (dict, OrderedDict)


class RunStateError(RuntimeError):
    """A run state that cannot be saved or loaded: what is wrong, and what to do."""


class MissingRunState(RunStateError, FileNotFoundError):
    """There is no run state at the given path."""


def write_run_state(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` with its header, atomically.

    Raises:
        RunStateError: it holds a value that ``weights_only=True`` would not load again; nothing is written.
        OSError: the file cannot be written; the previous one is untouched.
    """
    for key, value in state.items():
        for where in _unloadable(value, key):
            raise RunStateError(
                f"{where}: expected tensors, numbers, strings, None, and lists, tuples and dicts of them, which "
                "torch.load(weights_only=True) reads; convert it, e.g. with float(…), torch.as_tensor(…) or dict(…)."
            )

    def save(file: BinaryIO) -> None:
        with _checksums():
            _torch_save({_MARK: FORMAT, "amplab": __version__, "torch": str(torch.__version__), **state}, file)
        read_run_state(Path(str(file.name)), whole=False)  # before it replaces one that can be loaded

    write_atomically(path, save)


def read_run_state(path: Path, *, whole: bool = True) -> dict[str, Any]:
    """Read what `write_run_state` wrote, every tensor on the CPU, every byte checked against its checksum.

    Args:
        path: the file.
        whole: False to read no tensor and check no byte, for a look at the other values: it takes no time and memory.
            The tensors must not be used.

    Raises:
        RunStateError: a file that is cut off, damaged, of another kind, or of a newer format; a folder, pipe or device.
        OSError: there is no such file, or it cannot be read.
    """
    if kind := special_kind(path):
        raise RunStateError(
            f"{path} is not a regular file but {kind}: expected a file of save_run_state; give its path."
        )
    _refuse_damage(path, whole=whole)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=not whole and _is_text(path))
    except Exception as error:  # altered bytes can raise anything in the unpickler
        if is_interrupt(error) or _is_of_disk(error):
            raise
        reason = str(error).partition("\n")[0]
        raise RunStateError(
            f"{path} is a zip archive that torch.load(weights_only=True) cannot read ({reason}): expected a file of "
            "save_run_state; load any other checkpoint with torch.load."
        ) from None
    if _grows_by_walking(state):
        raise RunStateError(
            f"{path}: holds containers that hold themselves, or each other so often that a walk through them does not "
            "end. It was altered: use an intact copy."
        )
    if not isinstance(state, dict) or _MARK not in state:
        held = f"the keys {_listed(state)}" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise RunStateError(
            f"{path} is a checkpoint that save_run_state did not write; it holds {held}. Load it with torch.load and "
            "pass each part to its own load_state_dict."
        )
    if type(state[_MARK]) is not int or state[_MARK] != FORMAT:
        version = state.get("amplab")
        raise RunStateError(
            f"{path} has format {_short(state[_MARK])}, written by amplab {version if _is_version(version) else '?'}: "
            f"amplab {__version__} reads format {FORMAT}; install the amplab that wrote it, or a newer one."
        )
    return state


def _grows_by_walking(state: Any) -> bool:
    """Whether a walk has more than a million steps, and many for each element: lists in lists, all of them one."""
    sizes: dict[int, int] = {}  # of the walk through a container, by its id; 0 while it is being counted
    waiting, elements = [state], 0
    while waiting:
        each = waiting[-1]
        inside = [*each.keys(), *each.values()] if isinstance(each, dict) else each if _is_container(each) else ()
        if id(each) not in sizes:
            sizes[id(each)] = 0
            elements += len(inside)
            new = [child for child in inside if _is_container(child) and sizes.get(id(child)) != 0]
            if len(new) < sum(map(_is_container, inside)):
                return True  # one that holds it
            waiting += [child for child in new if id(child) not in sizes]
            continue
        waiting.pop()
        if not sizes[id(each)]:
            sizes[id(each)] = 1 + sum(sizes.get(id(child), 1) if _is_container(child) else 1 for child in inside)
    return sizes[id(state)] > _MOST_VISITS + 10 * elements


def _is_version(value: Any) -> bool:
    return isinstance(value, str) and len(value) < 20


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


def _is_text(path: Path) -> bool:
    """Whether a path is valid UTF-8; torch maps no other file."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_damage(path: Path, *, whole: bool) -> None:
    """Raise a RunStateError for a file that is not an archive, truncated or damaged; torch ignores checksums.

    Args:
        path: the file.
        whole: whether to read all of it; damage within an entry is not found otherwise.
    """
    with path.open("rb") as file:
        start = file.read(4)
        if not start.startswith(b"PK"):
            what = "is empty" if not start else "is not a zip archive, as torch.save writes it"
            raise RunStateError(f"{path} {what}: expected a file of save_run_state; load another checkpoint.")
        try:
            with DeferredSignals():  # zipfile passes over a TimeoutError
                archive = zipfile.ZipFile(file)
            with archive:
                compressed = _compressed(archive)
                damaged = archive.testzip() if whole and not compressed else None
        except Exception as error:  # altered bytes can raise anything in zipfile
            if is_interrupt(error) or _is_of_disk(error):
                raise
            raise RunStateError(
                f"{path} is truncated at {path.stat().st_size} bytes or damaged ({error}). It cannot be repaired: "
                "load an earlier checkpoint, or copy the file again from an intact source."
            ) from None
    if compressed:
        raise RunStateError(
            f"{path} is compressed ({compressed[0]}): expected a file of save_run_state, which stores every entry as "
            "it is, so that reading it takes no more memory than its size. Load another checkpoint."
        )
    if damaged is not None:
        raise RunStateError(
            f"{path} is damaged: the bytes of {damaged} do not match their checksum. It cannot be repaired: load an "
            "earlier checkpoint, or copy the file again from an intact source."
        )


def _compressed(archive: zipfile.ZipFile) -> list[str]:
    """Return the names of the entries that hold more than their bytes in the file."""
    entries = archive.infolist()
    return [each.filename for each in entries if each.compress_type or each.compress_size != each.file_size]


def _is_of_disk(error: Exception) -> bool:
    """Return whether reading failed, and not what was read: altered offsets are seeks that the system refuses."""
    return isinstance(error, OSError) and error.errno != errno.EINVAL


def is_loadable(value: Any) -> bool:
    """Whether `write_run_state` takes a value."""
    return next(_unloadable(value, ""), None) is None


def _unloadable(value: Any, where: str) -> Iterator[str]:
    """Yield the place and type of each value that is not plain, or that torch writes in a way that it does not read."""
    kind = type(value)
    if kind in _WITH_ATTRIBUTES:
        for name, item in vars(value).items():
            yield from _unloadable(item, f"{where}.{name}")
    if kind in _SEQUENCES:
        for index, item in enumerate(value):
            yield from _unloadable(item, f"{where}[{index}]")
    elif kind in _MAPPINGS:
        for key, item in value.items():
            yield from _unloadable(key, f"the key {key!r} of {where}")
            yield from _unloadable(item, f"{where}[{key!r}]")
    elif kind not in _PLAIN:
        yield f"{where} is a {kind.__module__}.{kind.__qualname__}"
    elif kind is bytes and not value:
        yield f"{where} is b'', without a byte"
    elif kind is int and value.bit_length() > _MOST_BITS:
        yield f"{where} is an int of {value.bit_length():,} bits"


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Let torch.save write checksums, even if they are disabled."""
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(True)
        yield
    finally:
        try:
            torch.serialization.set_crc32_options(before)
        except BaseException:  # of a signal
            torch.serialization.set_crc32_options(before)
            raise


def _torch_save(state: dict[str, Any], file: BinaryIO) -> None:
    """Call torch.save with the name of an empty open file.

    To an open file torch writes by calling Python, also from a C++ destructor, where a KeyboardInterrupt aborts the
    process. To a name it writes without Python.
    """
    name = str(file.name)
    if not name.isascii() and os.name == "posix":
        name = f"/dev/fd/{file.fileno()}"  # torch would open the file in Python
    try:
        torch.save(state, name)
    except RuntimeError:
        _raise_if_full(file)
        raise


def _raise_if_full(file: BinaryIO) -> None:
    """Raise the OSError of a file that cannot grow: the error of torch does not say why."""
    os.lseek(file.fileno(), 0, os.SEEK_END)
    for _ in range(2):  # the first write may end where the space ends
        os.write(file.fileno(), bytes(2**20))


@contextlib.contextmanager
def _disk_errors_named(path: Path) -> Iterator[None]:
    """Let an error of the disk name ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno is None or is_interrupt(error):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def _listed(state: dict[Any, Any], limit: int = 6) -> str:
    names = [_short(key) for key in list(state)[:limit]]
    more = f" and {len(state) - limit} more" if len(state) > limit else ""
    return (", ".join(names) or "none") + more


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call ``write`` with a new file, and replace ``path`` by it once it is on the disk.

    A write that fails leaves ``path`` as it was and no other file. A process that is killed while it writes leaves
    ``path`` as it was and a hidden file ``.NAME.….partial`` in the same folder, which the next write removes.

    Args:
        path: the file; its folder must exist.
        write: called with the file, open for writing bytes.

    Raises:
        FileNotFoundError: there is no such folder.
        OSError: ``path`` exists and is not a regular file, the disk is full, the folder is read-only, …
    """
    path = target_of(path)
    if kind := special_kind(path):
        raise OSError(
            f"{path} is not a regular file but {kind}, and would be replaced by one; give the path of a file."
        )
    folder = path.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder {folder} of {path.name} does not exist; create it first.")
    remove_partials(folder, glob.escape(short_name(path.name)))
    with _disk_errors_named(path), _new_partial(path) as (partial, file):
        write(file)
        file.flush()
        os.fsync(file.fileno())
        if path.exists():
            partial.chmod(stat.S_IMODE(path.stat().st_mode))  # a private file stays one
        if fcntl is None:
            file.close()  # Windows renames no open file; elsewhere it stays locked until it has its name
        partial.replace(path)
    _fsync_folder(folder)


@contextlib.contextmanager
def _new_partial(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Give a new hidden file beside ``path``, open and locked; it is removed if the block raises."""
    while True:
        partial = path.with_name(f".{short_name(path.name)}.{secrets.token_hex(_DIGITS // 2)}.partial")
        try:
            with partial.open("xb") as file:
                if _is_mine(file, partial):
                    yield partial, file
                    return
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@deferring_signals
def _is_mine(file: BinaryIO, partial: Path) -> bool:
    """Lock a file; return False if another process has removed it, or is about to, since it was not locked yet."""
    try:
        _lock(file)
        return os.path.samestat(os.fstat(file.fileno()), partial.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # without locks partial files stay
        return True


@deferring_signals
def remove_partials(folder: Path, pattern: str) -> None:
    """Remove what killed processes have left of files in a folder; what a process still writes is locked, and stays.

    Args:
        folder: the folder.
        pattern: of the names of the files, as `Path.glob` takes it.
    """
    for partial in folder.glob(f".{pattern}.{'[0-9a-f]' * _DIGITS}.partial"):
        if special_kind(partial):
            continue
        with contextlib.suppress(OSError), partial.open("rb") as file:
            _lock(file)
            partial.unlink()  # before its process, if it has just created it, can lock it


def _lock(file: BinaryIO) -> None:
    """Lock a file until it is closed. Raises: OSError, if another process has locked it, or locks are unavailable."""
    if fcntl is None:
        raise OSError("this system has no flock.")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@deferring_signals  # between `os.open` and its result nothing could close the descriptor
def _fsync_folder(folder: Path) -> None:
    """Make the rename durable. Windows cannot open folders and does not need it."""
    if os.name != "posix":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # it may be written to and not read: the file is there, and an error would deny it
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
