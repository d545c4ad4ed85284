"""The table of op dtypes, from traces of a real model."""

import json
from itertools import pairwise

import pytest

from amplab.lab import Experiment, ExperimentConfig
from amplab.trace import Trace
from amplab.views.tabs.dtypes_payload import dtypes_payload


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    """One step of the same model at each level."""
    return {level: Experiment(ExperimentConfig(hidden=16, opt_level=level)).trace() for level in ("O0", "O1", "O2")}


def test_a_row_for_each_op_that_computes(traces: dict[str, Trace]) -> None:
    payload = dtypes_payload(traces["O1"], levels=(None, "O1"))
    rows = payload["rows"]
    assert json.loads(json.dumps(payload)) == payload
    assert [row["index"] for row in rows] == [row["index"] for row in traces["O1"].rows()]
    assert sum(row["times"] for row in rows) == sum(not record.folds for record in traces["O1"])
    assert {row["phase"] for row in rows} == {"forward", "backward"}
    assert all(row["reason"] for row in rows)
    assert not any(row["changed"] for row in rows)
    linear = next(row for row in rows if row["op"] == "linear")
    assert (linear["inputs"], linear["outputs"]) == ([["float16", 3]], [["float16", 1]])
    assert linear["module"] == "hidden1"


def test_only_equal_neighbors_are_counted_together(traces: dict[str, Trace]) -> None:
    sides = [row[side] for row in dtypes_payload(traces["O1"])["rows"] for side in ("inputs", "outputs")]
    assert all(left[0] != right[0] for side in sides for left, right in pairwise(side))


def test_casts_are_counted_and_o0_has_none(traces: dict[str, Trace]) -> None:
    o0, o1 = (dtypes_payload(traces[level], levels=(None, level)) for level in ("O0", "O1"))
    assert not any(row["cast"] for row in o0["rows"])
    assert "no casts" in o0["summary"]
    casts = sum(row["times"] for row in o1["rows"] if row["cast"])
    assert casts == len(traces["O1"].casts) > 0
    assert f" ops · {casts} casts, " in o1["summary"]


def test_what_changed_since_the_level_before_is_marked(traces: dict[str, Trace]) -> None:
    payload = dtypes_payload(traces["O1"], before=traces["O0"], levels=("O0", "O1"))
    changed = {row["op"] for row in payload["rows"] if row["changed"]}
    assert "linear" in changed, "float32 at O0, float16 at O1"
    assert all(row["changed"] for row in payload["rows"] if row["cast"]), "O0 has none"
    kept = {row["op"] for row in payload["rows"] if not row["changed"]}
    assert "cross_entropy" in kept, "float32 at both"
    count = sum(row["changed"] for row in payload["rows"])
    assert payload["summary"].endswith(f"since O0: {count} rows changed, casts 0 → {len(traces['O1'].casts)}")


def test_the_same_step_twice_has_no_changes(traces: dict[str, Trace]) -> None:
    payload = dtypes_payload(traces["O2"], before=traces["O2"], levels=("O2", "O2"))
    assert not any(row["changed"] for row in payload["rows"])
    assert "since the change: 0 rows changed" in payload["summary"]
