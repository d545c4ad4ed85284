"""Several processes that train together, started by torchrun on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["launch_ranks"]


def launch_ranks(count: int, words: Sequence[str], *, restarts: int = 0) -> NoReturn:
    """Replace this process by torchrun, which runs a command as `count` processes.

    Signals and the exit status are then torchrun's own. It chooses a free port. Each process computes with one thread
    unless OMP_NUM_THREADS says otherwise.

    Args:
        count: Number of processes.
        words: What runs, and its arguments; the first one is a module.
        restarts: How often all processes are started again if one dies.

    Reference: ``torch.distributed.run``.
    """
    # torchrun would read a --log of the command as its own --log-dir, unless -- comes before it
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    torchrun += ["--max-restarts", str(restarts), "-m", "--"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *torchrun, *words], environment)
