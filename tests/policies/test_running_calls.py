"""is_running: frames that are on the stack, that have returned, and that have raised."""

import sys

import pytest

from amplab.policies.running_calls import is_running


def own_frame():
    return sys._getframe()


def test_a_caller_runs_and_a_call_that_returned_does_not():
    assert is_running(sys._getframe())
    assert all(map(is_running, [sys._getframe(), sys._getframe(1)]))
    assert not is_running(own_frame())


def test_a_call_that_raised_does_not_run_while_its_traceback_is_kept():
    def fails():
        frames.append(sys._getframe())
        raise ValueError("no")

    frames = []
    with pytest.raises(ValueError, match="no") as kept:
        fails()
    assert kept.traceback
    assert not is_running(frames[0])
