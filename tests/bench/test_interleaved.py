"""The frame of every measurement: who runs when, what is timed, and what becomes of the times."""

import gc
import statistics

import pytest
import torch

from amplab.bench import Case, Contestant, Goal, Pair, measure
from amplab.bench.interleaved import one_thread

TWICE_AS_FAST = Goal("at least", 2.0)


class Clock:
    """A clock that stands still but for the work that is said to be done."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def work(self, name, *seconds):
        """Return what takes these seconds, one after the other and from the front again."""
        calls = 0

        def run():
            nonlocal calls
            self.now += seconds[calls % len(seconds)]
            calls += 1
            self.log.append(name)

        return run


def case(ours, theirs, goal=TWICE_AS_FAST, **details):
    return Case("a", "b", goal, lambda: Pair(ours, theirs, details))


@pytest.fixture
def clock():
    return Clock()


def test_the_ratio_is_that_of_the_goal(clock):
    ours, theirs = Contestant(clock.work("ours", 1.0)), Contestant(clock.work("theirs", 3.0))
    row = measure(case(ours, theirs, tensors=7), 4, clock=clock)
    assert (row.ratio, row.spread, row.met) == (3.0, (3.0, 3.0), True)
    assert row.details == {"ours_ms": 1000.0, "theirs_ms": 3000.0, "rounds": 4, "runs": 4, "tensors": 7}
    row = measure(case(ours, theirs, Goal("at most", 0.3)), 4, clock=clock)
    assert row.ratio == pytest.approx(1 / 3)
    assert not row.met


def test_extra_references_are_reported_and_not_part_of_the_ratio(clock):
    sides = Contestant(clock.work("ours", 1.0)), Contestant(clock.work("theirs", 3.0))
    extra = {"python": Contestant(clock.work("python", 5.0))}
    row = measure(Case("a", "b", TWICE_AS_FAST, lambda: Pair(*sides, {}, extra)), 10, clock=clock)
    assert (row.ratio, row.details["python_ms"]) == (3.0, 5000.0)
    assert clock.log.count("python") == 7


def test_sides_take_turns_and_swap_who_begins(clock):
    measure(case(Contestant(clock.work("A", 1.0)), Contestant(clock.work("B", 1.0))), 4, clock=clock)
    assert "".join(clock.log[-8:]) == "ABBAABBA"


def test_what_is_prepared_is_not_timed(clock):
    ours = Contestant(clock.work("run", 1.0), prepare=clock.work("prepare", 50.0))
    row = measure(case(ours, Contestant(clock.work("theirs", 2.0))), 3, clock=clock)
    assert row.ratio == 2.0
    assert clock.log.count("prepare") == clock.log.count("run")


def test_short_runs_are_repeated_and_the_median_of_a_turn_counts(clock):
    # Of every five runs one is broken into.
    ours = Contestant(clock.work("A", 0.001, 0.001, 0.7, 0.001, 0.001))
    row = measure(case(ours, Contestant(clock.work("B", 0.002))), 5, clock=clock)
    assert row.ratio == pytest.approx(2.0)
    assert row.details["runs"] == 5 * 20


def test_a_disturbed_round_is_an_outlier(clock):
    # The first three runs of each side warm up.
    times = [1.0, 1.0, 1.0, 1.0, 2.0, 100.0, 4.0, 1.0]
    row = measure(case(Contestant(clock.work("A", *times)), Contestant(clock.work("B", 4.0))), 5, clock=clock)
    ratios = [4 / seconds for seconds in times[3:]]
    assert row.ratio == statistics.median(ratios)
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
    assert row.spread == (quartiles[0], quartiles[2])


def test_rounds_are_told(clock):
    told = []
    side = Contestant(clock.work("A", 1.0))
    measure(case(side, side), 3, told.append, clock=clock)
    assert told == [1, 2, 3]


@pytest.mark.parametrize("rounds", [0, -1])
def test_no_rounds_are_refused(clock, rounds):
    with pytest.raises(ValueError, match=r"^rounds=(0|-1):"):
        measure(case(Contestant(clock.work("A", 1.0)), Contestant(clock.work("B", 1.0))), rounds, clock=clock)


def test_real_work_on_one_thread_without_collection():
    seen = []
    tensor = torch.ones(100)

    def run():
        seen.append((torch.get_num_threads(), gc.isenabled()))
        tensor.mul_(1.0)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        row = measure(case(Contestant(run), Contestant(run)), 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {(1, False)}
    assert gc.isenabled()
    assert row.ratio > 0


def test_threads_are_given_back_after_a_failure():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError), one_thread():
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
