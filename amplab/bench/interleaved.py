"""Time two implementations alternately, and keep the ratio of each round.

    round 1: ours × n, theirs × n      median time of ours / median time of theirs = ratio 1
    round 2: theirs × n, ours × n      ratio 2
    …                                  the median of the ratios, and their quartiles

A machine that slows down slows both sides of a round, so the ratio is stable when times are not. A round disturbed by
another process is an outlier, which does not move the median. One thread is used, because on a busy machine a parallel
region waits milliseconds for the scheduler. What a side needs before each run (new gradients, a scaler in its first
state) is prepared outside the timed part.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from amplab.bench.rows import Goal, Row

__all__ = ["Case", "Contestant", "Pair", "measure", "one_thread", "quartiles"]

_WARM_UP = 3
_TURN_SECONDS = 0.02  # of one side in one round, if a single run is shorter
_MOST_RUNS = 200
_EXTRA_ROUNDS = 7


@dataclass(frozen=True)
class Contestant:
    """One side of a comparison.

    Attributes:
        run: what is timed.
        prepare: called before each run, not timed.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] | None = None


@dataclass(frozen=True)
class Pair:
    """Both sides of a comparison, and the sizes of their inputs.

    Attributes:
        ours: amplab.
        theirs: what it is compared with.
        details: for the row.
        extra: further references by name, such as plain Python or the bandwidth bound: timed in the first rounds, one
            run each, and reported in the details as ``<name>_ms``.
    """

    ours: Contestant
    theirs: Contestant
    details: Mapping[str, float | int | str] = field(default_factory=dict)
    extra: Mapping[str, Contestant] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A comparison to measure.

    Attributes:
        name: what is timed.
        against: what it is compared with.
        goal: the bound of the ratio.
        make: makes both sides; called just before they are measured, after the memory of the case before is freed.
    """

    name: str
    against: str
    goal: Goal
    make: Callable[[], Pair]


def measure(
    case: Case,
    rounds: int,
    on_round: Callable[[int], object] | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Row:
    """Measure one case with one thread.

    Args:
        case: what to compare.
        rounds: how often each side is timed, > 0.
        on_round: called after each round with its number, from 1.
        clock: returns the time in seconds.

    Raises:
        ValueError: ``rounds`` < 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: expected a whole number > 0; 30 gives a steady median.")
    with one_thread(), _no_collection():
        pair = case.make()
        sides = (pair.ours, pair.theirs)
        runs = [_runs_per_turn(side, clock) for side in sides]
        times: tuple[list[float], list[float]] = ([], [])
        extra: dict[str, list[float]] = {name: [] for name in pair.extra}
        for number in range(rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                times[side].append(_seconds(sides[side], runs[side], clock))
            for name, contestant in pair.extra.items() if number < _EXTRA_ROUNDS else ():
                extra[name].append(_seconds(contestant, 1, clock))
            if on_round is not None:
                on_round(number + 1)
    ratios = [case.goal.ratio(ours, theirs) for ours, theirs in zip(*times, strict=True)]
    ratio = statistics.median(ratios)
    details = {
        "ours_ms": statistics.median(times[0]) * 1e3,
        "theirs_ms": statistics.median(times[1]) * 1e3,
        "rounds": rounds,
        "runs": rounds * runs[0],
        **{f"{name}_ms": statistics.median(seconds) * 1e3 for name, seconds in extra.items()},
        **pair.details,
    }
    return Row(case.name, case.against, case.goal, ratio, quartiles(ratios), details)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _runs_per_turn(side: Contestant, clock: Callable[[], float]) -> int:
    """Warm up, and return how many runs one turn needs for a stable median."""
    shortest = min(_seconds(side, 1, clock) for _ in range(_WARM_UP))
    return max(1, min(_MOST_RUNS, round(_TURN_SECONDS / max(shortest, 1e-9))))


def _seconds(side: Contestant, runs: int, clock: Callable[[], float]) -> float:
    """Return the median time of the runs, which a run interrupted by the scheduler does not move."""
    times = []
    for _ in range(runs):
        if side.prepare is not None:
            side.prepare()
        start = clock()
        side.run()
        times.append(clock() - start)
    return statistics.median(times)


def quartiles(ratios: list[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    if len(ratios) == 1:
        return ratios[0], ratios[0]
    first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return first, third
