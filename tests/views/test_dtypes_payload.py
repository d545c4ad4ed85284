"""The rows and the modules of the tab of op dtypes, from traces of a real model."""

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

from amplab.lab import Experiment, ExperimentConfig
from amplab.policies import PrecisionPolicy
from amplab.trace import Trace, trace_step
from amplab.trace.input_statistics import InputStatistics
from amplab.views.tabs.dtypes_payload import TracedLevel, dtypes_payload, measured_inputs


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    """One step of the same model at each level."""
    return {level: Experiment(ExperimentConfig(hidden=16, opt_level=level)).trace() for level in ("O0", "O1", "O2")}


def payload_of(traces: dict[str, Trace], level: str, before: str | None = None, other: str | None = None) -> dict:
    def traced(name: str | None) -> TracedLevel | None:
        return None if name is None else TracedLevel(name, traces[name])

    return dtypes_payload(traced(level), before=traced(before), other=traced(other))


def test_a_row_for_each_op_that_computes(traces: dict[str, Trace]) -> None:
    payload = payload_of(traces, "O1")
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
    assert linear["code"].startswith("x = F.relu(self.hidden1(x))"), "the line of the model's own code"


def test_only_equal_neighbors_are_counted_together(traces: dict[str, Trace]) -> None:
    sides = [row[side] for row in payload_of(traces, "O1")["rows"] for side in ("inputs", "outputs")]
    assert all(left[0] != right[0] for side in sides for left, right in pairwise(side))


def test_casts_are_counted_and_o0_has_none(traces: dict[str, Trace]) -> None:
    o0, o1 = (payload_of(traces, level) for level in ("O0", "O1"))
    assert not any(row["cast"] for row in o0["rows"])
    assert "no casts" in o0["summary"]
    casts = sum(row["times"] for row in o1["rows"] if row["cast"])
    assert casts == len(traces["O1"].casts) > 0
    assert f" ops · {casts} casts, " in o1["summary"]


def test_what_changed_since_the_level_before_is_marked(traces: dict[str, Trace]) -> None:
    payload = payload_of(traces, "O1", before="O0")
    changed = {row["op"] for row in payload["rows"] if row["changed"]}
    assert "linear" in changed, "float32 at O0, float16 at O1"
    assert all(row["changed"] for row in payload["rows"] if row["cast"]), "O0 has none"
    kept = {row["op"] for row in payload["rows"] if not row["changed"]}
    assert "cross_entropy" in kept, "float32 at both"
    count = sum(row["changed"] for row in payload["rows"])
    assert payload["summary"].endswith(f"since O0: {count} rows changed, casts 0 → {len(traces['O1'].casts)}")


def test_the_same_step_twice_has_no_changes(traces: dict[str, Trace]) -> None:
    payload = payload_of(traces, "O2", before="O2")
    assert not any(row["changed"] for row in payload["rows"])
    assert "since the change: 0 rows changed" in payload["summary"]


def test_another_level_is_compared_op_by_op(traces: dict[str, Trace]) -> None:
    payload = payload_of(traces, "O1", other="O0")
    rows = payload["rows"]
    linear = next(row for row in rows if row["op"] == "linear")
    assert linear["other"]["outputs"] == [["float32", 1]]
    assert all(row["other"]["outputs"] == [] for row in rows if row["cast"]), "O0 has no cast"
    softmax = next(row for row in rows if row["op"] == "cross_entropy")
    assert softmax["other"] is None, "float32 at both"
    assert payload["comparison"].startswith("At O0: ")
    assert "The run is not changed." in payload["comparison"]


def test_what_decided_is_a_value_to_filter_by(traces: dict[str, Trace]) -> None:
    def decided(level: str) -> dict[str, str]:
        return {row["op"]: row["list"] for row in payload_of(traces, level)["rows"] if row["phase"] == "forward"}

    o1, o2 = decided("O1"), decided("O2")
    assert (o1["linear"], o1["cross_entropy"], o1["relu"]) == ("lower_precision_fp", "fp32", "none")
    assert (o2["linear"], o2["cast"], o2["cross_entropy"]) == ("weights", "hook", "hook")


@pytest.mark.parametrize(
    ("level", "dtype", "why"),
    [
        (
            "O1",
            "float32",
            "fp32 list, softmax: probabilities below 2^-25 are zero in float16",
        ),
        ("O2", "float16", "; the weights of block1.attention.qkv are float16"),
    ],
)
def test_a_newcomer_reads_in_which_dtype_softmax_ran_and_why(level: str, dtype: str, why: str) -> None:
    trace = Experiment(ExperimentConfig(task="text", hidden=32, opt_level=level)).trace()
    rows = dtypes_payload(TracedLevel(level, trace))["rows"]
    softmax = next(row for row in rows if (row["op"], row["module"]) == ("softmax", "block1.attention"))
    assert softmax["dtype"] == dtype
    assert softmax["reason"].endswith(why)


def test_modules_are_nested_as_in_the_model() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(block, nn.Linear(4, 4))
    trace = trace_step(model, lambda: model(torch.ones(2, 4)).sum())
    modules = dtypes_payload(TracedLevel("O0", trace))["modules"]
    lines = [(each["path"], each["parent"], each["depth"]) for each in modules]
    assert lines[:5] == [
        ("Sequential", "", 0),
        ("0", "Sequential", 1),  # no op of its own
        ("0.0", "0", 2),
        ("0.1", "0", 2),
        ("1", "Sequential", 1),
    ]
    assert lines[5][0] == ""


def test_an_op_and_its_module_can_be_put_into_float32_if_a_rule_can_name_them(traces: dict[str, Trace]) -> None:
    payload = dtypes_payload(TracedLevel("O1", traces["O1"]), policy=PrecisionPolicy(), modules=["hidden1", "output"])
    by_op = {(row["op"], row["module"], row["phase"]): row for row in payload["rows"]}
    linear = by_op["linear", "hidden1", "forward"]
    assert (linear["canOp"], linear["canModule"]) == (True, True)
    assert linear["policy"].startswith("linear [lower_precision_fp]")
    assert not by_op["linear", "hidden2", "forward"]["canModule"], "not among the modules"
    assert not by_op["scale_loss", "", "forward"]["canOp"], "no op of torch"


def test_the_inputs_of_one_op_are_measured() -> None:
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1e-9, 1.0, 2.0, 7e4]]))
    batch = torch.tensor([[0.0, 1.0, torch.nan, 3.0]])
    trace = trace_step(model, lambda: model(batch).sum())
    product = next(record for record in trace if record.op == "linear" and not record.is_view)
    measured = InputStatistics(product.index)
    trace_step(model, lambda: model(batch).sum(), observer=measured)
    rows = measured_inputs(measured.inputs)
    by_tensor = {row["tensor"]: row for row in rows}
    given, weight = by_tensor["float32[1, 4]"], by_tensor["float32[4, 1]"]
    assert (given["absmax"], given["nans"]) == ("3", "25.0 %")
    assert (weight["absmax"], weight["flushed"], weight["overflowed"]) == ("7e+04", "25.0 %", "25.0 %")
