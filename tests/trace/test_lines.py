"""The line of the user's code: the innermost frame that is neither torch's nor amplab's."""

import heapq
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amplab.trace import CodeLine, lines, trace_step, xray
from amplab.trace.lines import user_line


def lines_of(trace, **wanted):
    """Source lines of the records with these fields, once each, in order."""
    chosen = [record for record in trace if all(getattr(record, name) == value for name, value in wanted.items())]
    return list(dict.fromkeys(record.line.source if record.line else None for record in chosen))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        hidden = self.fc(x)  # the product
        return self.norm(hidden + x)  # the norm


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2  # doubled

    @staticmethod
    def backward(ctx, grad):
        return grad * 2  # and its gradient


def test_forward_ops_and_the_gradients_that_mirror_them():
    model, batch = Block(), torch.ones(2, 4)
    found = xray(model, batch)
    for phase in ("forward", "backward"):
        assert lines_of(found.trace, op="linear", phase=phase) == ["hidden = self.fc(x)  # the product"]
        assert lines_of(found.trace, op="layer_norm", phase=phase) == ["return self.norm(hidden + x)  # the norm"]


def test_casts_have_the_line_of_the_op_they_are_for():
    found = xray(Block(), torch.ones(2, 4), opt_level="O1")
    casts = [cast for cast in found.casts if cast.op == "linear"]
    assert {cast.line for cast in casts} == {str(found.trace.records[casts[0].index].line)}
    assert lines_of(found.trace, is_cast=True, phase="forward")[0] == "hidden = self.fc(x)  # the product"


def test_user_code_in_backward():
    model = nn.Linear(4, 4)
    trace = trace_step(model, lambda: Doubled.apply(model(torch.ones(2, 4))).sum())
    assert lines_of(trace, note="in the backward of Doubled") == ["return grad * 2  # and its gradient"]
    assert "return x * 2  # doubled" in lines_of(trace, op="mul", phase="forward")


def test_a_block_that_is_computed_again():
    model = Block()
    trace = trace_step(
        model, lambda: checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=False).sum()
    )
    assert lines_of(trace, note="recomputed for backward", op="linear") == ["hidden = self.fc(x)  # the product"]


def test_what_is_called_by_torch_and_amplab_alone_has_none():
    found = xray(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4))
    assert {row["line"] for row in found.rows()} == {""}
    assert {row["code"] for row in found.rows()} == {""}


def test_the_standard_library_is_passed_over():
    model = nn.Linear(4, 4)

    def loss():
        scores = model(torch.ones(1, 4))[0]
        return heapq.nlargest(1, [scores[0], scores[1]])[0]  # compares them inside

    trace = trace_step(model, loss)
    assert lines_of(trace, op="gt") == ["return heapq.nlargest(1, [scores[0], scores[1]])[0]  # compares them inside"]


def test_a_line_in_words(monkeypatch, tmp_path):
    here = user_line()
    assert (Path(here.file).name, here.source) == ("test_lines.py", "here = user_line()")
    assert str(CodeLine("/tmp/ipykernel_12/3456.py", 3)) == "cell:3"
    assert str(CodeLine("<string>", 3)) == "<string>:3"
    assert str(CodeLine("/somewhere/package/model.py", 7)) == "package/model.py:7"
    monkeypatch.chdir(tmp_path)
    assert str(CodeLine(str(tmp_path / "train.py"), 7)) == "train.py:7"
    assert CodeLine("/nowhere.py", 1).source == ""


def test_equal_records_from_different_lines_are_equal():
    model = nn.Linear(2, 2)
    first = trace_step(model, lambda: model(torch.ones(1, 2)).sum())
    second = trace_step(model, lambda: model(torch.ones(1, 2)).sum())
    assert first == second
    assert [record.line for record in first] != [record.line for record in second]


def test_a_working_folder_that_was_deleted(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    lines._short.cache_clear()
    (op, *_) = xray(nn.Linear(2, 1), torch.ones(1, 2)).trace.records
    assert op.op == "linear"
    assert lines._short(__file__) == "trace/test_lines.py"
    lines._short.cache_clear()
