"""Call a tool again and again while signals arrive at random times, until one of them has left something changed.

Prints how many interrupts there were; how many Python has discarded, because they came in code that it calls when it
frees an object; what the last one has left changed; and where it was.

python signalled_tools.py TOOL SECONDS SEED [AGAIN]

AGAIN is the time in seconds from one signal of a call to the next; without it there is one.
"""

import random
import signal
import sys
import time
import traceback
import warnings
from types import FrameType

import torch
from interrupts import PACKAGE
from test_interrupted_tools import Subject


def is_in_a_tool(frame: FrameType | None) -> bool:
    """Whether a function of amplab runs."""
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame is not None


def interrupt_of(tool, delay: float, again: float) -> str | None:
    """Call `tool`, with SIGINT after `delay` seconds, and after every `again` seconds; return where it stopped."""

    def send(_number: int, frame: FrameType | None) -> None:
        if is_in_a_tool(frame):
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGALRM, send)  # at a time that the system keeps
    try:
        signal.setitimer(signal.ITIMER_REAL, delay, again)
        tool()
    except KeyboardInterrupt as interrupt:
        return "".join(traceback.format_tb(interrupt.__traceback__)[-12:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return None


def main(name: str, seconds: float, seed: int, again: float = 0.0) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    discarded: list[object] = []
    sys.unraisablehook = lambda report: discarded.append(report.exc_type)
    tool, chance = getattr(Subject(), name), random.Random(seed)
    tool()  # imports, and builds what is kept
    began = time.monotonic()
    tool()
    longest, end = time.monotonic() - began, time.monotonic() + seconds
    interrupts, changed, where = 0, [], None
    while time.monotonic() < end and not changed:
        subject = Subject()
        where = interrupt_of(getattr(subject, name), chance.uniform(1e-6, longest), again)
        interrupts += where is not None
        changed = subject.changed()
    print(interrupts, discarded.count(KeyboardInterrupt), *changed, sep="\n")  # noqa: T201  the outcome
    if changed:
        print(where)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), *map(float, sys.argv[4:]))
