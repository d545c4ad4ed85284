"""Several processes that train together, started by torchrun on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["launch_ranks"]


def launch_ranks(count: int, words: Sequence[str], *, restarts: int = 0) -> int:
    """Run a command as `count` processes and return the exit status of torchrun.

    torchrun chooses a free port. Each process computes with one thread unless OMP_NUM_THREADS says otherwise.

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
    with subprocess.Popen([sys.executable, *torchrun, *words], env=environment) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                pass  # torchrun gets it too, and ends when every rank has stopped
