"""Several processes that train together, started by torchrun's launcher on this machine."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

__all__ = ["LaunchStopped", "RankEnd", "end_with_launcher", "launch_ranks"]

_LAUNCHER = "AMPLAB_LAUNCHER"
"""The variable with the number of the process that launched a rank."""

_VARIABLES = (_LAUNCHER, "OMP_NUM_THREADS", "PYTHONSAFEPATH", "TORCHELASTIC_SIGNALS_TO_HANDLE")
"""What a launch sets for its ranks, or torchrun for itself."""

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
"""Those that torchrun handles."""

_PR_SET_PDEATHSIG = 1  # prctl(2)

_SENDERS = {
    "SIGKILL": " (if you did not send it: the system sends it when memory runs out)",
    "SIGTERM": " (the launcher sends it when another rank has failed)",
}


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended that did not do all of its work.

    Attributes:
        rank: Its number.
        exitcode: Of its process; negative: the signal that ended it.

    >>> print(RankEnd(1, -9))
    rank 1 was ended by SIGKILL (if you did not send it: the system sends it when memory runs out)
    >>> print(RankEnd(0, 1))
    rank 0 ended with exit code 1
    """

    rank: int
    exitcode: int

    def __str__(self) -> str:
        if self.exitcode >= 0:
            return f"rank {self.rank} ended with exit code {self.exitcode}"
        name = str(-self.exitcode)
        with suppress(ValueError):  # a number without a name
            name = signal.Signals(-self.exitcode).name
        return f"rank {self.rank} was ended by {name}{_SENDERS.get(name, '')}"

    @property
    def is_cause(self) -> bool:
        """Whether it ended on its own: the launcher ends the others by SIGTERM."""
        return self.exitcode != -signal.SIGTERM


class LaunchStopped(Exception):
    """A signal stopped the launcher, which has ended all ranks.

    Attributes:
        signal_number: Of the signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}")
        self.signal_number = signal_number


def launch_ranks(count: int, words: Sequence[str], *, name: str, restarts: int = 0) -> list[RankEnd]:
    """Run a command as `count` processes, and wait until all have ended. It chooses a free port.

    Each process computes with one thread unless OMP_NUM_THREADS says otherwise, and imports nothing from the working
    folder unless this process does.

    Args:
        count: Number of processes.
        words: What runs, and its arguments; the first one is a module.
        name: Of the launch; each process has it as TORCHELASTIC_RUN_ID.
        restarts: How often all processes are started again if one dies.

    Returns:
        How the ranks ended that failed, those first that ended by a signal; empty if all did their work.

    Raises:
        LaunchStopped: A signal stopped this process.

    Reference: ``torch.distributed.run``.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # torchrun would read a --log of the command as its own --log-dir, unless -- comes before it
    torchrun = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", name]
    torchrun += ["--nproc-per-node", str(count), "--max-restarts", str(restarts), "-m", "--"]
    sys.stdout.flush()
    try:
        with _process_as_before():
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            if not {"", os.getcwd()} & set(sys.path):  # which `python -m` in a process would put first on its path
                os.environ.setdefault("PYTHONSAFEPATH", "1")
            os.environ[_LAUNCHER] = str(os.getpid())
            quiet = logging.WARNING if restarts else logging.ERROR  # its errors tell why it starts the ranks again
            logging.disable(max(quiet, logging.root.manager.disable))
            run(parse_args([*torchrun, *words]))
    except ChildFailedError as error:
        ends = [RankEnd(rank, failure.exitcode) for rank, failure in error.failures.items()]
        return sorted(ends, key=lambda end: (not end.is_cause, end.exitcode >= 0, end.rank))
    except SignalException as stopped:
        raise LaunchStopped(stopped.sigval) from None
    return []


@contextmanager
def _process_as_before() -> Iterator[None]:
    """Put back what a launch changes in this process, which may go on: variables, `logging.disable`, handlers."""
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    level = logging.root.manager.disable
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        logging.disable(level)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if threading.current_thread() is threading.main_thread():  # else torchrun handles none
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def end_with_launcher() -> None:
    """Let the system send SIGTERM to this rank when the process of `launch_ranks` ends, even if that was killed.

    No effect in other processes, and on other systems than Linux.

    Raises:
        SystemExit: It has ended already.
    """
    launcher = os.environ.pop(_LAUNCHER, None)  # which processes of this one must not read
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(launcher):
        raise SystemExit("amplab train: the launcher of this rank was killed before the rank began.")
