"""The rows of a policy: plain values, and a table as text and in a notebook."""

import json
from html.parser import HTMLParser

import pytest
import torch
from torch.nn import functional as F

from amplab.policies import APEX, TABLES, CastingEngine, CastPolicy, PrecisionPolicy
from amplab.policies.tables.op_table import resolve
from amplab.trace import trace_step


@pytest.mark.parametrize("table", TABLES)
def test_rows_are_plain_values_one_for_each_row_of_the_table(table):
    rows = PrecisionPolicy(table).rows()
    assert isinstance(rows, list)
    assert json.loads(json.dumps(rows)) == rows
    assert [row["op"] for row in rows] == [row.op for row in TABLES[table].rows if row.exists]
    assert {row["cast"] for row in rows} <= {cast.value for cast in CastPolicy}
    assert rows[0]["spellings"].split()[0] == "torch.conv1d"
    assert all(callable(resolve(name)) for row in rows for name in row["spellings"].split())


def test_what_a_row_runs_in():
    rows = {row["op"]: row for row in PrecisionPolicy("apex", torch.bfloat16).rows()}
    assert {op: rows[op]["runs in"] for op in ("linear", "softmax", "add", "add_", "exp_", "backward")} == {
        "linear": "bfloat16",
        "softmax": "float32",
        "add": "widest argument",
        "add_": "own dtype",
        "exp_": "float32 only",
        "backward": "argument dtype",
    }


def test_a_list_that_names_only_an_op_inside_says_so():
    rows = {row["op"]: row["list"] for row in PrecisionPolicy("torch_cuda").rows()}
    assert (rows["pow"], rows["square"]) == ("torch_cuda", "torch_cuda (inside)")


def test_without_a_table_there_are_no_rows():
    rows = PrecisionPolicy(None).rows()
    assert rows == []
    assert repr(rows).splitlines()[0] == "none/float16: 0 ops; all other ops run in the dtype of their arguments"
    assert "<table>" in rows._repr_html_()


def test_the_text_form_holds_every_row_in_columns():
    rows = PrecisionPolicy().rows()
    lines = repr(rows).splitlines()
    assert lines[0] == f"apex/float16: {len(APEX.rows)} ops; all other ops run in the dtype of their arguments"
    assert lines[1].split() == ["op", "cast", "runs", "in", "reason"]
    assert max(map(len, lines)) <= 160
    softmax = next(line for line in lines if line.startswith("softmax "))
    assert softmax.split(maxsplit=3) == [
        "softmax",
        "fp32",
        "float32",
        "softmax: probabilities below 2^-25 are zero in float16",
    ]
    starts = [line.split()[0] for line in lines[2:] if not line.startswith(" ")]
    assert starts == [row["op"] for row in rows]


class Cells(HTMLParser):
    """Collects the text of a table's rows, and checks that tags close in order."""

    def __init__(self):
        super().__init__()
        self.rows, self.open = [], []

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.rows and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def test_a_notebook_shows_the_same_rows():
    formatters = pytest.importorskip("IPython.core.formatters")
    rows = PrecisionPolicy("torch_cuda").rows()
    shown, _ = formatters.DisplayFormatter().format(rows)
    cells = Cells()
    cells.feed(shown["text/html"])
    assert cells.open == []
    assert cells.rows[0] == ["op", "cast", "runs in", "reason"]
    assert [row[1:] for row in cells.rows[1:]] == [[row["cast"], row["runs in"], row["reason"]] for row in rows]
    assert all(given[0].startswith(row["op"]) for given, row in zip(cells.rows[1:], rows, strict=True))
    assert shown["text/plain"] == repr(rows)


def test_the_dtype_view_gives_the_reasons_of_these_rows():
    rows = {row["op"]: row for row in PrecisionPolicy().rows()}
    model, batch, labels = torch.nn.Linear(4, 3), torch.randn(2, 4), torch.tensor([0, 1])
    engine = CastingEngine(PrecisionPolicy())
    trace = trace_step(model, lambda: F.cross_entropy(model(batch), labels), casting=engine.active())
    reasons = {row["reason"] for row in trace.rows()}
    for op in ("linear", "cross_entropy"):
        assert f"{rows[op]['cast']} list, {rows[op]['reason']}" in reasons


def test_rules_of_the_user_come_first_and_take_the_place_of_the_lists():
    rules = {"softmax": "bfloat16", "F.linear": "float8_e5m2", "torch.exp": "fp32", "relu": "fp32"}
    policy = PrecisionPolicy(op_rules=rules)
    rows = policy.rows()
    users = {row["op"]: row for row in rows if row["list"] == "your rule"}
    assert [row["list"] for row in rows[:4]] == ["your rule"] * 4
    runs = {op: row["runs in"] for op, row in users.items()}
    assert runs == {"softmax": "bfloat16", "linear": "float8_e5m2", "exp": "float32", "relu": "float32"}
    assert "torch.nn.functional.softmax" in users["softmax"]["spellings"].split()
    ops = [row["op"] for row in rows[4:]]
    assert "softmax" not in ops
    assert "linear" not in ops
    assert "exp" in ops  # Tensor.exp is still the list's
    assert repr(rows).startswith(f"{policy}: {len(rows)} ops")
