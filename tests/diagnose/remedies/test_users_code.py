"""The user's call is found in a file, and edits of it are code that runs and gives what was asked for."""

import linecache

import pytest
import torch

from amplab.diagnose.remedies.users_code import call_on, edited
from amplab.trace.lines import CodeLine

SOURCE = """\
import torch
def forward(x, q, k):
    scores = torch.matmul(
        q, k.mT
    ) * 3
    y = torch.acos((x + 1).clamp(-1, 1))
    z = 1 - torch.sigmoid(-x)
    if x.sum() > torch.exp(x).sum(): pass
    w = x + q + k
    t = self.eps + x
    u = self.head.narrow(x, 2)
    v = (lambda a: torch.log1p(a * 2))(x)
    return scores
"""


def call(tmp_path, number, op, **given):
    file = tmp_path / "model.py"
    file.write_text(SOURCE)
    linecache.checkcache(str(file))
    return call_on(CodeLine(str(file), number), op, **given)


@pytest.mark.parametrize(
    ("number", "op", "operands", "tensor", "line"),
    [
        (3, "matmul", ("q", "k.mT"), "q", "scores = torch.matmul(\n    q.float(), k.mT\n).half() * 3"),
        (4, "matmul", ("q", "k.mT"), "q", "scores = torch.matmul(\n    q.float(), k.mT\n).half() * 3"),
        (6, "clamp", ("x + 1", "-1", "1"), "x + 1", "y = torch.acos(((x + 1).float()).clamp(-1, 1).half())"),
        (7, "rsub", ("1", "torch.sigmoid(-x)"), "torch.sigmoid(-x)", "z = (1 - torch.sigmoid(-x).float()).half()"),
        (7, "sigmoid", ("-x",), "-x", "z = 1 - torch.sigmoid((-x).float()).half()"),
        (10, "add", ("self.eps", "x"), "x", "t = (self.eps + x.float()).half()"),
        (12, "log1p", ("a * 2",), "a * 2", "torch.log1p((a * 2).float()).half()"),
    ],
)
def test_a_call_is_edited_in_place(tmp_path, number, op, operands, tensor, line):
    found = call(tmp_path, number, op)
    assert (found.operands, found.tensor) == (operands, tensor)
    assert edited(found.statement, (*found.followed_by(".half()"), *found.operand_followed_by(".float()"))) == line


def test_several_calls_or_none_give_no_call(tmp_path):
    assert call(tmp_path, 9, "add") is None
    assert call(tmp_path, 9, "add", outermost=True).code == "x + q + k"
    assert call(tmp_path, 9, "exp") is None
    assert call(tmp_path, 8, "exp") is None  # an if has no line to paste
    assert call_on(CodeLine("<not a file>", 1), "exp") is None
    assert call_on(None, "exp") is None


def test_the_call_of_a_module_has_no_module_among_its_operands(tmp_path):
    found = call(tmp_path, 11, "narrow", is_module=True)
    assert (found.operands, found.tensor) == (("x", "2"), "x")
    assert edited(found.statement, found.operand_followed_by(".float()")) == "u = self.head.narrow(x.float(), 2)"


def test_an_edited_line_computes_in_float32(tmp_path):
    found = call(tmp_path, 6, "clamp")
    names = {"torch": torch, "x": torch.full((2,), -0.5).half()}
    exec(edited(found.statement, found.operand_followed_by(".float()")), names)
    assert names["y"].dtype == torch.float32
