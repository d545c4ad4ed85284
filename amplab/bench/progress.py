"""How far a benchmark is, on stderr, so that stdout holds the table alone."""

import sys
from typing import TextIO

from amplab.bench.rows import Row

__all__ = ["Progress"]


class Progress:
    """Tell a run of cases: a line that is rewritten on a terminal, a line for each finished row elsewhere.

    Args:
        cases: how many there are.
        rounds: of each.
        stream: where to; stderr where None.
    """

    def __init__(self, cases: int, rounds: int, stream: TextIO | None = None) -> None:
        self._cases, self._rounds = cases, rounds
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()

    def begin(self, index: int, name: str) -> None:
        """Say that the case ``index``, from 0, is being made."""
        self._where = f"{index + 1}/{self._cases} {name}"
        self._rewrite(f"{self._where} …")

    def round(self, number: int) -> None:
        """Say that a round is over."""
        self._rewrite(f"{self._where}: round {number} of {self._rounds}")

    def end(self, row: Row) -> None:
        """Say what came out."""
        self._rewrite("")
        self._stream.write(f"{self._where}: {row.ratio:.2f} ({row.goal})\n")
        self._stream.flush()

    def _rewrite(self, text: str) -> None:
        if self._live:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
