"""Columns that grow with a run: numpy arrays of equal length, the older rows in a file once they are many.

At most `MOST_IN_MEMORY` rows are held in memory. When these are full, the older half moves to a temporary file without
a name, which ends with its columns or with the process; the folder is Python's `tempfile.gettempdir()`. All rows are
read the same way, and none is lost: if the file cannot be written, the rows stay in memory.

The file consists of chunks of `CHUNK` rows, in each of which the columns follow one another. It is mapped into memory
only while rows are read.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

__all__ = ["CHUNK", "MOST_IN_MEMORY", "GrowingColumns"]

CHUNK = 2**17
"""Rows that move to the file together."""

MOST_IN_MEMORY = 2 * CHUNK
"""Rows that are held in memory: 262,144."""

_FIRST_CAPACITY = 1024


class GrowingColumns:
    """Columns to which rows are appended, and whose rows are read as copies.

    Not for several threads at once.

    Args:
        kinds: The numpy type of each column by its name.

    >>> columns = GrowingColumns({"step": np.int64, "loss": np.float64})
    >>> columns.extend({"step": [0, 1, 2], "loss": [2.5, 2.25, 2.0]})
    >>> len(columns), columns.read("loss", slice(1, None)), columns.read("step", np.array([2, 0]))
    (3, array([2.25, 2.  ]), array([2, 0]))
    """

    def __init__(self, kinds: Mapping[str, Any]) -> None:
        self._chunk = np.dtype([(name, kind, (CHUNK,)) for name, kind in kinds.items()])
        self._recent = {name: np.empty(_FIRST_CAPACITY, dtype=kind) for name, kind in kinds.items()}
        self._recent_rows = 0
        self._chunks = 0  # in the file
        self._file: IO[bytes] | None = None
        self._owner = os.getpid()
        self._has_room = True

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._chunks * CHUNK + self._recent_rows

    def extend(self, values: Mapping[str, Any]) -> None:
        """Append rows, given as the values of every column."""
        added = len(next(iter(values.values())))
        for first in range(0, added, CHUNK):
            self._append({name: column[first : first + CHUNK] for name, column in values.items()})

    def read(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """Return a copy of some rows of a column, given as a slice without a step or as positions >= 0."""
        if isinstance(rows, slice):
            start, end, _ = rows.indices(len(self))
            return self._read_range(name, start, max(start, end))
        moved = self._chunks * CHUNK
        old = rows < moved
        values = np.empty(len(rows), dtype=self._recent[name].dtype)
        values[~old] = self._recent[name][rows[~old] - moved]
        if old.any():
            values[old] = self._in_file(name)[rows[old] // CHUNK, rows[old] % CHUNK]
        return values

    def _read_range(self, name: str, start: int, end: int) -> np.ndarray:
        moved = self._chunks * CHUNK
        parts = [self._recent[name][max(start - moved, 0) : max(end - moved, 0)]]
        if start < moved:
            in_file = self._in_file(name)
            chunks = range(start // CHUNK, -(-min(end, moved) // CHUNK))
            spans = [(chunk, max(start - chunk * CHUNK, 0), min(end - chunk * CHUNK, CHUNK)) for chunk in chunks]
            parts = [*(in_file[chunk, first:last] for chunk, first, last in spans), *parts]
        return np.concatenate(parts)

    def _in_file(self, name: str) -> np.ndarray:
        """Return the rows of a column in the file, `(chunks, CHUNK)`."""
        assert self._file is not None
        mapped = np.memmap(self._file, self._chunk, "r", shape=(self._chunks,))
        rows: np.ndarray = mapped[name]
        return rows

    def _append(self, values: Mapping[str, Any]) -> None:
        """Append at most `CHUNK` rows."""
        start = self._recent_rows
        end = start + len(next(iter(values.values())))
        if end > MOST_IN_MEMORY and self._move_chunk():
            start, end = start - CHUNK, end - CHUNK
        for name, column in values.items():
            if end > len(self._recent[name]):
                self._recent[name] = np.resize(self._recent[name], max(2 * len(self._recent[name]), end))
            self._recent[name][start:end] = column
        self._recent_rows = end

    def _move_chunk(self) -> bool:
        """Move the oldest rows in memory to the file; return whether it was possible."""
        if not self._has_room or os.getpid() != self._owner:  # a fork has the same file: it must not write there
            return False
        block = np.empty((), dtype=self._chunk)
        for name, column in self._recent.items():
            block[name] = column[:CHUNK]
        try:
            self._write(block.tobytes())
        except OSError:
            self._has_room = False
            return False
        for column in self._recent.values():
            column[: self._recent_rows - CHUNK] = column[CHUNK : self._recent_rows]
        self._chunks, self._recent_rows = self._chunks + 1, self._recent_rows - CHUNK
        return True

    def _write(self, block: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="amplab-columns-")  # noqa: SIM115 - it ends with these columns
            weakref.finalize(self, self._file.close)
        self._file.seek(self._chunks * self._chunk.itemsize)
        self._file.write(block)
        self._file.flush()
