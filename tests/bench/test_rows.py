"""Goals: which way they point, and what meets them."""

import pytest

from amplab.bench import Goal


@pytest.mark.parametrize(
    ("goal", "met", "missed", "text"),
    [
        (Goal("at least", 3.0), 3.0, 2.99, "≥ 3"),
        (Goal("at most", 1.08), 1.08, 1.081, "≤ 1.08"),
    ],
)
def test_goals(goal, met, missed, text):
    assert goal.met_by(met)
    assert not goal.met_by(missed)
    assert str(goal) == text


def test_more_is_better_of_one_sense_and_less_of_the_other():
    assert Goal("at least", 2.0).ratio(ours=1.0, theirs=4.0) == 4.0
    assert Goal("at most", 2.0).ratio(ours=1.0, theirs=4.0) == 0.25
