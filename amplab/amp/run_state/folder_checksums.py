"""The file checksums.pt of the folder of a sharded run, with a CRC-32 of every other file in it.

The files of a folder are copied one by one, so each can be damaged, or be of another save. torch.distributed.checkpoint
notices neither.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amplab.amp.run_state.file_format import RunStateError, read_run_state, write_run_state

__all__ = ["CHECKSUMS", "checksum", "mismatch", "read_checksums", "write_checksums"]

CHECKSUMS = "checksums.pt"
_KEY = "checksums"
_BLOCK = 2**20  # bytes


def checksum(file: Path) -> int:
    """Return the CRC-32 of the bytes of a file, which is read in blocks."""
    value = 0
    with file.open("rb", buffering=0) as opened:
        while block := opened.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def mismatch(file: Path, checksums: Mapping[str, Any]) -> str:
    """Return why a file is not the one that was saved; "" if it is."""
    if file.name not in checksums:
        return f"{CHECKSUMS} has no checksum of {file.name}, so it is of another save"
    if checksum(file) != checksums[file.name]:
        return f"the bytes of {file.name} do not match their checksum: it is damaged, or of another save"
    return ""


def write_checksums(folder: Path, checksums: Mapping[str, int]) -> None:
    """Write the checksums of the files of a folder, by name."""
    write_run_state(folder / CHECKSUMS, {_KEY: dict(checksums)})


def read_checksums(folder: Path) -> dict[str, Any]:
    """Read what `write_checksums` wrote.

    Raises:
        RunStateError: there is no such file, or it is damaged.
        OSError: it cannot be read.
    """
    file = folder / CHECKSUMS
    checksums = read_run_state(file).get(_KEY) if file.exists() else None
    if not isinstance(checksums, dict):
        raise RunStateError(
            f"{file} does not exist or holds no checksums, so the other files of the folder cannot be checked, and "
            "nothing was loaded. Copy the folder again from an intact source, or load an earlier one."
        )
    return checksums
