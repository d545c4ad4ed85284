"""The writer of a run log, which loses no line that the disk can hold.

Each step reaches the operating system as it ends, so a killed process loses none; its last line may be cut off. On a
disk that needs more than 0.2 ms for a write, steps wait for a later step, which is written after at most
`FLUSH_SECONDS`; a process that is killed before that, also in a long pause of its loop, loses those that wait. A
program that ends, or a log that is not referenced any more, writes them. While a disk is full, the lines that fit are
written, and up to `MOST_WAITING` others wait in memory. A part of a line is removed from the file at once, so that no
line in the middle is torn.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet
from zlib import crc32

from amplab.display.numbers import count
from amplab.lab.config import ExperimentConfig
from amplab.lab.events import GradientSample, MixedScales, StepRecord, StepRow
from amplab.lab.history import row_of
from amplab.lab.run_log.checksums import CHECKED_LINES, check_line, file_sum
from amplab.lab.run_log.event_lines import mixed_scales_event, sample_event
from amplab.lab.run_log.header import new_header
from amplab.lab.run_log.json_lines import json_line
from amplab.lab.run_log.lock import hold
from amplab.lab.run_log.ranks import is_rank_log
from amplab.lab.run_log.step_lines import step_line
from amplab.lab.skip_explanation import SkipExplanation
from amplab.lab.watched_run import WatchedRun
from amplab.parallel.rank_state import RankState
from amplab.parallel.ranks import Rank
from amplab.policies.signals import DeferredSignals

__all__ = ["FLUSH_SECONDS", "MOST_WAITING", "ClosedLog", "DiskFull", "RunLog", "runs_elsewhere"]

FLUSH_SECONDS = 0.2
"""The longest time from one write to the next on a slow disk, while steps go on."""

MOST_WAITING = 2**18
"""Lines that wait in memory for space on a full disk: 40 MB of steps."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_QUICK = 2e-4  # seconds of a write; after a longer one the next steps are written together
_SHARE = 0.05  # of the time, at most, that writing then takes
_RETRY_SECONDS = 1.0  # between two attempts to write to a full disk
_BLOCK = 2**12  # lines that are written together: an attempt on a full disk costs at most some ms


class DiskFull(OSError):
    """A run log cannot grow now; its lines wait in memory, and a later flush writes them."""


class ClosedLog(NamedTuple):
    """A closed log that a run can continue, and what tells it from another file at its place.

    Attributes:
        size: in bytes.
        place: the device and the inode.
        header: the first line.
        checksum: the CRC-32 of its bytes.
    """

    size: int
    place: tuple[int, int]
    header: bytes
    checksum: int

    @classmethod
    def of(cls, path: Path) -> ClosedLog:
        """Return what the file at `path` is now. Raises: OSError."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return cls(size, _place_of(file.fileno()), file.readline(), file_sum(path, size))

    def is_at(self, path: Path) -> bool:
        """Return whether the file at `path` is this one, however long it is now. Raises: OSError."""
        return _place_of(path) == self.place


class _Written(NamedTuple):
    """What is in the file: its size and its CRC-32 up to the last whole line, what no checksum holds yet, the step."""

    size: int = 0
    checksum: int = 0
    unchecked: int = 0  # lines
    last_step: int | None = None  # of this process


class RunLog:
    """The log of one run, open for appending; it never overwrites another file. A forked process writes nothing to it.

    Every method that writes raises an OSError if lines are lost: the log was deleted or shortened meanwhile, more than
    `MOST_WAITING` lines wait for a full disk, the disk has another error; in a forked process, for a step. Before
    that, a full disk is a `DiskFull`, once for each attempt to write.

    Args:
        path: A file that does not exist yet; its folder is created, on a full disk by a later flush.
        config: What the run starts with.
        continues: The closed log of the same run at `path`; None for a new one.
        rank: This process, of several that train together.

    Attributes:
        is_mixed: Whether another program has written to the file since it was opened; no reader understands its lines.

    Raises:
        OSError: The file cannot be created or written (FileExistsError if it exists and is not continued), or it is
            to be continued and is not there, has lost its end, or is another one.
    """

    def __init__(
        self,
        path: Path,
        config: ExperimentConfig | WatchedRun,
        *,
        continues: ClosedLog | None = None,
        rank: Rank | None = None,
    ) -> None:
        self.path = path
        self._config, self._continues, self._rank = config, continues, rank
        self._process, self._thread = os.getpid(), threading.get_ident()  # the thread that appends
        self._file: FileIO | None = None  # until a full disk has space for it
        self._is_closed = self.is_mixed = False
        self._pending: list[str] = []  # lines that are not in the file yet
        self._written = _Written(continues.size, continues.checksum) if continues else _Written()
        self._place, self._header = (0, 0), continues.header if continues else b""
        self._is_torn = False  # whether a write has begun that did not end
        self._retry = 0.0  # when a full disk is tried again
        self._due = 0.0  # when the next step is written
        self._took = 0.0  # seconds of the last write
        try:
            self._open()
            self.flush()
        except OSError as error:
            if error.errno not in _FULL:  # of a full disk the next flush says so
                raise
        _OPEN.add(self)

    def __del__(self) -> None:
        """Write what waits, and close the file: the loop has ended by an exception that nobody has told the log."""
        if not self._is_closed:
            with suppress(OSError):
                self.flush()
            if self._file is not None:
                self._file.close()

    def _open(self) -> FileIO:
        """Open the file; a new one begins with the header."""
        if self._continues is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(str(self.path), "x" if self._continues is None else "r+", opener=_open_to_append)
        try:
            return self._begin(file)
        except BaseException:
            if self._file is not file:
                file.close()
            raise

    def _begin(self, file: FileIO) -> FileIO:
        if self._continues is not None:
            self._refuse_another(file, self._continues)
        size = self._end_of_file(file)
        is_held = is_rank_log(self.path) and hold(file.fileno())
        lines = list(self._pending)
        if self._continues is None:
            lines.insert(0, json_line(new_header(self.path, self._config, self._rank, is_held=is_held)))
            self._header = lines[0].encode()
        self._place = _place_of(file.fileno())
        written = self._written._replace(size=size)
        self._file, self._written, self._pending = file, written, lines  # no interrupt leaves a file without a header
        return file

    def append(self, record: StepRecord) -> None:
        """Write one step; on a slow disk together with the next ones."""
        self.append_row(row_of(record))

    def append_row(self, row: StepRow) -> None:
        """Write one step as its values."""
        if self._is_forked():
            raise OSError(errno.EPERM, "the process was forked from the one that writes it", str(self.path))
        self._thread = threading.get_ident()
        self._pending.append(step_line(row))
        if time.monotonic() >= self._due:
            self.flush()

    def note(self, event: str, *, step: int, **details: object) -> None:
        """Write an event at `step`: its name, and words or numbers that describe it."""
        if self._is_forked():
            return
        self._add({"event": event, "step": step, **details})
        self.flush()

    def keep(self, sample: GradientSample) -> None:
        """Write a histogram of the gradients as an event."""
        self.note("gradients", **sample_event(sample))

    def explain(self, explanation: SkipExplanation) -> None:
        """Write why a step was skipped as an event."""
        self.note("explanation", **explanation.as_dict())

    def keep_scales(self, mixed: MixedScales) -> None:
        """Write the scales of a step whose backwards had different ones as an event."""
        self.note("scales", **mixed_scales_event(mixed))

    @property
    def last_step(self) -> int | None:
        """The number of the last step that was appended; None before the first of this process."""
        return _last_step(self._pending, self._written.last_step)

    @property
    def closed(self) -> ClosedLog:
        """What `continues` takes once it is closed, up to the last whole line that was written."""
        return ClosedLog(self._written.size, self._place, self._header, self._written.checksum)

    @property
    def waiting(self) -> int:
        """The number of lines that are not in the file yet."""
        return len(self._pending)

    def flush(self) -> None:
        """Pass every line to the operating system; after an interrupt or on a full disk, the next flush does."""
        began = time.monotonic()
        if self._is_forked() or not self._pending or began < self._retry:
            return
        try:
            file = self._file or self._open()
            while self._pending:
                self._write_block(file)
        except OSError as error:
            if error.errno not in _FULL or self.waiting > MOST_WAITING:
                raise
            self._retry = self._due = began + _RETRY_SECONDS
            raise DiskFull(error.errno, error.strerror, str(self.path)) from None
        ended = time.monotonic()
        before, self._took = self._took, ended - began
        shorter = min(before, self._took)  # in the longer one the system may have run another process
        self._due = ended + min(FLUSH_SECONDS, shorter / _SHARE) if shorter > _QUICK else 0.0

    def _write_block(self, file: FileIO, *, checked: bool = False) -> None:
        """Write the first of the lines that wait, and a checksum if it is due. Raises OSError after those that fit."""
        lines, before = self._pending[:_BLOCK], self._written
        # A file name that is no UTF-8, in the text of an exception, must not end the training.
        data = "".join(lines).encode("utf-8", "backslashreplace")
        if is_checked := checked or before.unchecked + len(lines) >= CHECKED_LINES:
            data += check_line(_last_step(lines, before.last_step) or 0, crc32(data, before.checksum))
        end = self._end_of_file(file)
        self._is_torn = True
        written, refusal = self._write_lines(file, data, end)
        done = min(data.count(b"\n", 0, written), len(lines))
        after = _Written(
            size=end + written,
            checksum=crc32(data[:written], before.checksum),
            unchecked=0 if is_checked and written == len(data) else before.unchecked + done,
            last_step=_last_step(lines[:done], before.last_step),
        )
        rest = self._pending[done:]
        # One line without a call: CPython lets no interrupt in between.
        self._pending, self._written, self._is_torn = rest, after, refusal is not None
        if refusal is not None:
            raise refusal

    def _refuse_another(self, file: FileIO, closed: ClosedLog) -> None:
        """Raise if a file is not the one that was closed: its run was moved away, and another one has its name."""
        file.seek(0)
        if _place_of(file.fileno()) != closed.place or file.read(len(closed.header)) != closed.header:
            raise FileExistsError(errno.EEXIST, "another file has its name now", str(self.path))

    def _end_of_file(self, file: FileIO) -> int:
        """Return where the next line begins; what a write that was interrupted has left there is removed."""
        found = os.fstat(file.fileno())
        if not found.st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was deleted during the run", str(self.path))
        if found.st_size < self._written.size:
            raise OSError(errno.EIO, "another program has shortened it during the run", str(self.path))
        if self._is_torn and found.st_size > self._written.size:
            file.truncate(self._written.size)
            return self._written.size
        self.is_mixed = self.is_mixed or found.st_size > self._written.size
        return found.st_size

    def _write_lines(self, file: FileIO, data: bytes, end: int) -> tuple[int, OSError | None]:
        """Write lines to the end of the file; return the bytes of those in it, and why there are no more, or None."""
        written = 0
        try:
            while written < len(data):
                written += file.write(memoryview(data)[written:])
        except OSError as error:
            written = data.rfind(b"\n", 0, written) + 1
            with DeferredSignals(), suppress(OSError):  # else the next write does it, or a reader drops the part
                file.truncate(end + written)
            return written, error
        return written, None

    def keep_state(self, state: RankState) -> None:
        """Write the state of this rank as an event."""
        self.note("state", **state.as_dict())

    def close(self, *, steps: int = 0, raised: str = "") -> None:
        """Flush and close; no effect if closed already. The log of a rank then says that it ended in order.

        Args:
            steps: the number of its steps.
            raised: the exception that ended the loop, in words; "" for none.
        """
        if self._is_closed:
            return
        self._retry = 0.0
        try:
            if is_rank_log(self.path):
                self.note("end", step=steps, raised=raised)
            self.flush()
            if self._file is not None and self._written.unchecked and not self._is_forked():
                with suppress(OSError):  # of a full disk: the steps are written, and load without a checksum
                    self._write_block(self._file, checked=True)
        except DiskFull as error:
            lost = f"{error.strerror}; its last {count(self.waiting, 'line')} are lost"
            raise OSError(error.errno, lost, str(self.path)) from None
        finally:
            self._is_closed = True
            if self._file is not None:
                self._file.close()

    def _add(self, values: object) -> None:
        """Add a line that is not a step."""
        self._pending.append(json_line(values))

    def _is_forked(self) -> bool:
        """Return whether this is a copy of the process that opened the log, which goes on to write the same steps."""
        return os.getpid() != self._process


_OPEN: WeakSet[RunLog] = WeakSet()


def _close_in_fork() -> None:
    """In a forked process: its copy of the descriptor would keep the lock beyond the end of the one that writes."""
    for log in list(_OPEN):
        if log._file is not None:
            with suppress(OSError):
                log._file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)


def runs_elsewhere(thread: int) -> bool:
    """Whether a thread runs that is not the calling one."""
    return thread != threading.get_ident() and any(each.ident == thread for each in threading.enumerate())


@atexit.register
def _flush_all() -> None:
    """Write what waits, as the program ends; not for a daemon thread that goes on to write."""
    for log in list(_OPEN):
        if not runs_elsewhere(log._thread):
            with suppress(OSError):
                log.flush()


def _place_of(file: int | Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _open_to_append(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_APPEND, 0o666)


def _last_step(lines: list[str], before: int | None) -> int | None:
    """Return the number of the last step among lines; `before` if there is none."""
    return next((int(each[1 : each.index(",")]) for each in reversed(lines) if each.startswith("[")), before)
