"""Goals, and the table and the JSON of results."""

import json

import pytest

from amplab.bench import BenchResults, Goal, Row, as_json, as_text


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


ROWS = (
    Row("unscale_", "torch's", Goal("at least", 3.0), 3.456, (3.1, 3.9), {"ours_ms": 0.5, "tensors": 7}),
    Row("engine, MLP", "torch.autocast", Goal("at most", 1.08), 1.1, (1.0, 1.25)),
)
RESULTS = BenchResults("scaler", {"cpu": "Abacus", "threads": 1, "load": 0.5}, ROWS)


def test_table():
    assert as_text(RESULTS) == (
        "what         against         ratio  quartiles  goal\n"
        "-------------------------------------------------------------\n"
        "unscale_     torch's         3.46   3.10–3.90  ≥ 3     met\n"
        "engine, MLP  torch.autocast  1.10   1.00–1.25  ≤ 1.08  missed\n"
        "\n"
        "1 of 2 goals met. Medians of interleaved rounds, one thread; ≥: how many times as fast, ≤: how many times the "
        "time.\n"
        "cpu Abacus, threads 1, load 0.5"
    )


def test_columns_of_extra_references():
    goal = Goal("at least", 1.8)
    extra = Row("unscale_", "torch's", goal, 2.0, (2.0, 2.0), {"ours_ms": 2.0, "python_ms": 25.0})
    bound = Row("copy", "torch's", goal, 2.0, (2.0, 2.0), {"ours_ms": 2.0, "bound_ms": 1.5})
    assert as_text(BenchResults("kernels", {}, (extra, bound))).splitlines()[:4] == [
        "what      against  ratio  quartiles  goal        python  of bound",
        "-----------------------------------------------------------------",
        "unscale_  torch's  2.00   2.00–2.00  ≥ 1.8  met  12.5 ×",
        "copy      torch's  2.00   2.00–2.00  ≥ 1.8  met          75%",
    ]


def test_json():
    whole = json.loads(as_json(RESULTS))
    first, second = whole.pop("rows")
    assert whole == {"amplab_bench": 1, "suite": "scaler", "machine": {"cpu": "Abacus", "threads": 1, "load": 0.5}}
    assert first == {
        "name": "unscale_",
        "against": "torch's",
        "ratio": 3.456,
        "spread": [3.1, 3.9],
        "goal": "≥ 3",
        "met": True,
        "details": {"ours_ms": 0.5, "tensors": 7},
    }
    assert second["met"] is False
    assert second["details"] == {}
