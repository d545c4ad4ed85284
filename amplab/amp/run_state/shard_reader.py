"""Read the shards of a run folder without running code that the folder names.

torch.distributed.checkpoint keeps the places of the shards in ``.metadata``, a pickle, and unpickling can call any
function. Here an unpickler takes the names that this file needs and no others; each becomes an inert record of its
fields. The metadata are then built from these fields, checked one by one. Entries that are not tensors, which
torch.distributed.checkpoint unpickles, too, are refused. The tensors themselves are read with ``weights_only=True``.

Every file is compared with its checksum before it is read.
"""

import math
import pickle
import reprlib
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from amplab.amp.run_state.file_format import RunStateError
from amplab.amp.run_state.folder_checksums import mismatch
from amplab.amp.run_state.paths import special_kind
from amplab.policies.signals import is_interrupt

__all__ = ["ShardReader"]

_NAME = ".metadata"
_RECORDS = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("pathlib._local", "WindowsPath"),
}  # fmt: skip


class ShardReader(FileSystemReader):
    """Reads a folder that ``torch.distributed.checkpoint`` wrote from a state of tensors.

    Args:
        path: the folder.
        checksums: of its files, by name.

    Raises:
        RunStateError: a folder without ``.metadata``, or one that is damaged or names other code, other files or other
            values.
        OSError: the file cannot be read.

    Sync: none.
    """

    def __init__(self, path: Path, checksums: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._checksums = checksums
        self._file = path / _NAME
        self._metadata = self._read()

    def read_metadata(self, *_args: Any, **_named: Any) -> Metadata:
        """Return the places of all shards."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the shards of this rank. Raises: RunStateError, a file that is damaged or of another save."""
        for name in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            if reason := mismatch(self._file.with_name(name), self._checksums):
                raise RunStateError(reason)
        return super().read_data(plan, planner)

    def _read(self) -> Metadata:
        if not self._file.exists():
            self._refuse("there is no such file")
        if kind := special_kind(self._file):
            self._refuse(f"it is {kind}")
        if reason := mismatch(self._file, self._checksums):
            self._refuse(reason)
        with self._file.open("rb") as file:
            try:
                read = _Unpickler(file).load()
            except RunStateError as error:
                self._refuse(str(error))
            except Exception as error:  # altered bytes can raise anything in the unpickler
                if is_interrupt(error):
                    raise
                self._refuse(f"{type(error).__name__}: {error}")
        try:
            metadata = _metadata(read)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self._refuse(f"{type(error).__name__}: {error}")
        for name in {place.relative_path for place in metadata.storage_data.values()}:
            if kind := special_kind(self._file.with_name(name)):
                self._refuse(f"{name} is {kind}")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _refuse(self, reason: str) -> NoReturn:
        raise RunStateError(
            f"{self._file} cannot be read ({reason}): expected the file that save_run_state wrote, and nothing was "
            "loaded. Copy the folder again from an intact source, or load an earlier one."
        ) from None


class _Record:
    """What an allowed name becomes: the arguments that it is called with, and its fields."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        """Take the fields of a pickled object."""
        if isinstance(state, dict):
            self.fields = state
        else:
            self.arguments = tuple(state)


class _Unpickler(pickle.Unpickler):
    """Reads records, dtypes, sizes and plain values, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name of the file stands for. Raises: RunStateError, any other name."""
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise RunStateError(f"it names {module}.{name}, which is no part of such a file and was not imported")


def _metadata(read: Any) -> Metadata:
    """Return the metadata of the records of a file. Raises: AttributeError, LookupError, TypeError, ValueError."""
    fields = _fields(read, "Metadata")
    tensors = {_word(name): _tensor(name, each) for name, each in fields["state_dict_metadata"].items()}
    places = dict(_place(index, info) for index, info in fields["storage_data"].items())
    for name, each in tensors.items():
        filled = [chunk for chunk in each.chunks if math.prod(chunk.sizes)]
        if missing := [chunk for chunk in filled if MetadataIndex(name, chunk.offsets) not in places]:
            raise ValueError(f"no file has the part of {name} at {tuple(missing[0].offsets)}")
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def _tensor(name: Any, record: Any) -> TensorStorageMetadata:
    fields = _fields(record, "TensorStorageMetadata")
    dtype = _fields(fields["properties"], "TensorProperties", of_arguments=True)[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the dtype of {name} is a {type(dtype).__name__}")
    size = _size(fields["size"])
    chunks = [_chunk(each) for each in fields["chunks"]]
    inside = all(
        len(chunk.offsets) == len(chunk.sizes) == len(size)
        and all(at + length <= end for at, length, end in zip(chunk.offsets, chunk.sizes, size, strict=True))
        for chunk in chunks
    )
    parts = {tuple(chunk.offsets): length for chunk in chunks if (length := math.prod(chunk.sizes))}
    if not inside or sum(parts.values()) != math.prod(size):
        raise ValueError(f"the parts of {name} do not make up its {tuple(size)}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _chunk(record: Any) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(offsets=_size(fields["offsets"]), sizes=_size(fields["sizes"]))


def _place(index: Any, info: Any) -> tuple[MetadataIndex, _StorageInfo]:
    of_index, of_info = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
    file, offset, length = of_info["relative_path"], int(of_info["offset"]), int(of_info["length"])
    if not isinstance(file, str):
        raise TypeError(f"the file of a part is a {type(file).__name__}: expected its name")
    if PurePath(file).name != file or "\\" in file or min(offset, length) < 0 or of_info.get("transform_descriptors"):
        raise ValueError(f"{file!r} at {offset}, {length} bytes: expected a part of a file in the folder")
    return MetadataIndex(_word(of_index["fqn"]), _size(of_index["offset"])), _StorageInfo(file, offset, length)


def _word(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor is a {type(name).__name__}")
    return name


def _size(numbers: Any) -> torch.Size:
    if not isinstance(numbers, tuple) or not all(isinstance(each, int) and each >= 0 for each in numbers):
        raise TypeError(f"{reprlib.repr(numbers)}: expected a tuple of whole numbers >= 0")
    return torch.Size(numbers)


def _fields(record: Any, name: str, *, of_arguments: bool = False) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise TypeError(f"got a {type(record).__name__}: expected a {name}")
    return record.arguments if of_arguments else record.fields
