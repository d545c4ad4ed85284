"""Rules about ranks on states and log ends that are written here; `tests/clinic/test_ranks.py` has real ranks."""

from dataclasses import replace

import pytest
from rateless_optimizers import RATELESS
from torch import nn

from amplab.diagnose.rules.ranks import RankEnd, optimizer_differs_by_rank, rank_lost, weights_differ_by_rank
from amplab.parallel.rank_state import RankState

STATE = RankState(0, 1, 7, 3.0, 10.0, 2.0**-23, (0.1,), "SGD()", "all")
CLOSED, RUNNING, LOST = RankEnd(6, "closed"), RankEnd(6, "running"), RankEnd(4, "lost")
HUNG, STOPPED = RankEnd(5, "running", quiet=60.0), RankEnd(6, "closed", "RuntimeError: timeout", 60.0)
ELSEWHERE = RankEnd(4, "unknown", quiet=60.0)


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        ([CLOSED, LOST], ("error", "certain")),
        ([RUNNING, LOST], ("error", "certain")),
        ([LOST, LOST], ("note", "certain")),
        ([STOPPED, HUNG], ("error", "likely")),
        ([replace(CLOSED, quiet=60.0), ELSEWHERE], ("error", "likely")),
        ([CLOSED, CLOSED], None),
        ([RUNNING, RUNNING], None),
        ([CLOSED, RUNNING], None),
        ([CLOSED, ELSEWHERE], None),  # closed just now: the other one is about to
        ([ELSEWHERE, ELSEWHERE], None),
        ([HUNG, HUNG], None),  # a pause, such as in a debugger
        ([replace(STOPPED, raised=""), HUNG], None),  # the other one may save a checkpoint
    ],
)
def test_a_rank_is_lost_only_if_its_log_shows_it(ends, found):
    told = [(each.severity, each.certainty) for each in rank_lost(dict(enumerate(ends)))]
    assert told == ([] if found is None else [found])


def states(*checksums: int, total: float = 3.0) -> list[RankState]:
    return [replace(STATE, step=step, checksum=each, total=total) for step, each in enumerate(checksums)]


def test_weights_that_differ_name_the_last_equal_step_the_first_other_one_and_the_minority():
    (found,) = weights_differ_by_rank({0: states(1, 2), 1: states(1, 2), 2: states(1, 9, total=4.0)})
    assert found.symptom.startswith("After step 1, and not yet after step 0 the weights of rank 2 differ from those of")
    assert found.certainty == "certain"


def test_what_need_not_be_equal_is_not_compared():
    other = states(1, 9, total=4.0)
    assert not [*weights_differ_by_rank({0: states(1, 2), 1: states(1, 9, total=3.0 + 1e-6)})]  # another processor
    assert not [*weights_differ_by_rank({0: states(1, 2, 3), 1: states(1, 9, 3, total=4.0)})]  # averaged again
    for changed in ({"averages": "some"}, {"model": 2}, {"checksum": None}):  # local SGD, a pipeline, shards
        own, theirs = ([replace(each, **changed) for each in one] for one in (states(1, 2), other))
        assert not [*weights_differ_by_rank({0: states(1, 2) if "model" in changed else own, 1: theirs})]
    assert not [*optimizer_differs_by_rank({0: states(1, 2), 1: other})]
    assert not [*weights_differ_by_rank({0: states(1, 2)})]


@pytest.mark.parametrize("kind", RATELESS)
def test_ranks_whose_optimizer_has_no_learning_rate_are_compared(kind):
    model = nn.Linear(2, 1)
    state = RankState.of(1, model, [kind(model.parameters())])
    assert RankState.from_dict(state.as_dict()) == replace(state, rates=(0.0,))
    other = replace(state, total=state.total + 1.0, checksum=0)
    assert [*weights_differ_by_rank({0: [state], 1: [other]})]
    assert not [*optimizer_differs_by_rank({0: [state], 1: [other]})]
