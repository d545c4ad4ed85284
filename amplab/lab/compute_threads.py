"""The number of intra-op threads of one thread, which decides the bits of its sums.

`torch.set_num_threads` sets the number of the calling thread, and the number that later threads start with.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["compute_with", "own_number_kept"]


def compute_with(number: int) -> None:
    """Set the number of the calling thread, and leave that of later threads."""
    of_later = torch.get_num_threads()  # takes the process's number now; otherwise the first op would
    torch.set_num_threads(number)
    restoring = threading.Thread(target=torch.set_num_threads, args=(of_later,))
    restoring.start()
    restoring.join()


@contextmanager
def own_number_kept() -> Iterator[None]:
    """Run code that may set the number, as a function that scores on all cores, and restore that of this thread."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            compute_with(before)
