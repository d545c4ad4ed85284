"""``amplab bench ddp``: real processes, small tensors; how times become a row."""

import io

import pytest

from amplab.bench import as_text, run_ddp
from amplab.bench.ddp import EXCHANGES, Exchange, Times, exchange_row
from amplab.bench.rows import BenchResults


def test_processes_exchange_and_the_row_has_the_bytes_on_the_wire():
    stream = io.StringIO()
    results = run_ddp([Exchange(4, 100, 2, 0.001)], rounds=12, stream=stream)
    (row,) = results.rows
    assert row.ratio is None or row.ratio > 0  # none if other programs disturb the measurement
    assert row.details["rounds"] == 12
    assert row.details["wire_mib"] * 2**20 == 4 * 4 * (112 + 32)  # of 4-byte elements: 100, rounded up, and padding
    assert row.details["their_wire_mib"] * 2**20 == 4 * 4 * 100
    assert "each rank sends" in as_text(results)
    assert stream.getvalue().startswith("1/1 exchange of 4 × 100 float32, 2 processes: ")


def test_a_ratio_is_that_of_the_time_added_to_the_backward():
    times = Times([1.0, 1.0, 9.0], [2.0, 3.0, 2.0], [3.0, 5.0, 5.0], 2**20, 2**19)
    row = exchange_row(Exchange(2, 3, 4, 1.5), times)
    assert row.ratio == 2.0
    assert row.spread == (2.0, 3.0)
    assert (row.details["wire_mib"], row.details["their_wire_mib"], row.details["elements"]) == (1.5, 0.75, 6)
    assert row.met


def test_an_exchange_that_noise_hides_is_not_measured():
    """Two rounds, in which one slow backward alone makes the median larger than a whole round."""
    times = Times([0.1, 1.1], [0.5, 0.7], [0.9, 1.0], 2**20, 2**20)
    row = exchange_row(Exchange(2, 3, 2, 1.5), times)
    assert (row.ratio, row.met) == (None, None)
    printed = " ".join(as_text(BenchResults("ddp", {}, (row,))).split())
    assert "not measured" in printed
    assert "in 1 of 2 rounds" in printed
    assert "30 rounds" in printed


def test_a_process_that_fails_is_reported():
    with pytest.raises(RuntimeError, match=r"exchange of 1 × -1 .*a process ended without a result"):
        run_ddp([Exchange(1, -1, 2, 1.0)], rounds=1, stream=io.StringIO())


def test_goals_are_those_that_are_published():
    assert [each.goal for each in EXCHANGES] == [1.5, 1.0, 0.9, 1.0, 0.9]
    assert len({each.name for each in EXCHANGES}) == len(EXCHANGES)
