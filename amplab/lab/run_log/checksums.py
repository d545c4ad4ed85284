"""The checksums in a run log, in lines of their own: a digit that was altered would go unseen otherwise.

    {"event":"check","step":63,"crc32":"1a2b3c4d"}

The number is the CRC-32 of all bytes of the file before the line. A log has such a line after every `CHECKED_LINES`
lines, and at its end if it was closed in order. Logs of earlier versions have none, and load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from amplab.lab.run_log.json_lines import json_line

__all__ = ["CHECKED_LINES", "LineSums", "check_line", "file_sum", "is_check"]

CHECKED_LINES = 64
"""Lines from one checksum to the next, at most; of a process that was killed, those after the last are unchecked."""

_BLOCK = 2**20  # bytes that are read together

_START = b'{"event":"check",'


def check_line(step: int, checksum: int) -> bytes:
    """Return the line after the bytes that have a checksum; `step` is the last step among them, 0 before the first."""
    return json_line({"event": "check", "step": step, "crc32": _digits(checksum)}).encode()


def _digits(checksum: int) -> str:
    return f"{checksum:08x}"


def is_check(line: bytes) -> bool:
    """Return whether a line holds a checksum."""
    return line.startswith(_START)


def file_sum(path: Path, size: int) -> int:
    """Return the CRC-32 of the first `size` bytes of a file. Raises: OSError."""
    checksum = 0
    with path.open("rb") as file:
        while size > 0 and (block := file.read(min(size, _BLOCK))):
            checksum, size = crc32(block, checksum), size - len(block)
    return checksum


class LineSums:
    """The checksums of a log that is being read, beside those that it states.

    Args:
        header: the first line.
    """

    def __init__(self, header: bytes) -> None:
        self._sum = crc32(header)
        self._found: dict[int, str] = {}  # by the number of the line that states it
        self._first = 1  # line after the last checksum

    def add(self, lines: Sequence[bytes], number: int, places: Sequence[int]) -> None:
        """Take the next lines, the first of which has this number; those at some places hold checksums."""
        start = 0
        for place in places:
            self._sum = crc32(b"".join(lines[start:place]), self._sum)
            self._found[number + place], start = _digits(self._sum), place
        self._sum = crc32(b"".join(lines[start:]), self._sum)

    def check(self, path: Path, number: int, entry: dict[str, Any]) -> None:
        """Compare what a line states. Raises: ValueError, if the lines before it are not those that were written."""
        first, self._first = self._first, number + 1
        if entry.get("crc32") != self._found.pop(number, None):
            raise ValueError(
                f"{path}: lines {first} to {number} are not all as they were written: they differ from the checksum in "
                f"line {number}. Use an intact copy; to load only what is before them, delete line {first} and all "
                'lines after it; to load what is there, delete every line that begins with {"event":"check".'
            )
