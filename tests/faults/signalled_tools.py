"""Call a tool again and again while signals arrive at random times, until one of them has left something changed.

Prints how many interrupts there were, what the last one has left changed, and where it was.

python signalled_tools.py TOOL SECONDS SEED
"""

import random
import signal
import sys
import time
import traceback
import warnings

import torch
from test_interrupted_tools import Subject


def interrupt_of(tool, delay: float) -> str | None:
    """Call `tool`, with a KeyboardInterrupt where Python handles signals after `delay` seconds; return where it was."""

    def raise_(_number: int, _frame: object) -> None:
        if armed:
            raise KeyboardInterrupt

    armed = [True]
    signal.signal(signal.SIGALRM, raise_)  # as SIGINT, at a time that the system keeps
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        tool()
        armed.clear()
    except KeyboardInterrupt as interrupt:
        return "".join(traceback.format_tb(interrupt.__traceback__)[-12:])
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    return None


def main(name: str, seconds: float, seed: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None  # Python swallows an interrupt of a finalizer
    tool, chance = getattr(Subject(), name), random.Random(seed)
    tool()  # imports, and builds what is kept
    began = time.monotonic()
    tool()
    longest, end = time.monotonic() - began, time.monotonic() + seconds
    interrupts, changed, where = 0, [], None
    while time.monotonic() < end and not changed:
        subject = Subject()
        where = interrupt_of(getattr(subject, name), chance.uniform(1e-6, longest))
        interrupts += where is not None
        changed = subject.changed()
    print(interrupts, *changed, sep="\n")  # noqa: T201  the outcome
    if changed:
        print(where)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
