"""A function given to torch.compile that a model calls is seen as it is written."""

import importlib
import subprocess
import sys
import threading

import torch
from torch import nn

import amplab
from amplab.diagnose import followed_step
from amplab.trace import trace_step
from amplab.trace.engines import compiled_functions_eagerly


def waves(x):
    return x.sin() + x.cos()


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 2), function

    def forward(self, x):
        return self.function(self.linear(x))


def rows(model):
    return [
        (row.op, row.phase, row.module, row.reason) for row in trace_step(model, lambda: model(torch.ones(3, 4)).sum())
    ]


def test_compiled_functions_give_the_same_trace():
    compiled = torch.compile(waves, backend="aot_eager")
    for _ in range(2):
        assert rows(Calls(compiled)) == rows(Calls(waves))
    compiled(torch.ones(2))  # compiled by now, and not undone
    assert rows(Calls(compiled)) == rows(Calls(waves))
    mirrors = [row for row in rows(Calls(compiled)) if row[:2] == ("cos", "backward")]
    assert mirrors
    assert all(reason.startswith("gradient of cos") for *_, reason in mirrors)


def test_followed_steps_see_them_too():
    model = Calls(torch.compile(waves, backend="aot_eager"))
    with followed_step(model) as step:
        step.loss(model(torch.ones(3, 4)).sum() * float("inf")).backward()
    assert [record.op for record in step.observed.trace if not record.folds][1:5] == ["linear", "sin", "cos", "add"]


def test_nothing_is_loaded_where_nothing_is_compiled():
    code = (
        "import sys, torch, amplab; amplab.xray(torch.nn.Linear(2, 1), torch.ones(1, 2)); "
        "sys.exit('torch._dynamo.eval_frame' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_xray_of_one():
    found = amplab.xray(Calls(torch.compile(waves, backend="aot_eager")), torch.ones(3, 4), opt_level="O1")
    called = [row["op"] for row in found.rows() if row["phase"] == "forward" and row["module"] == "Calls"]
    assert [op for op in called if op != "cast"] == ["sin", "cos", "add"]


def test_blocks_of_two_threads_that_overlap_leave_functions_to_the_compiler():
    """The block that begins last ends last: torch has one stance for all threads."""
    eval_frame = importlib.import_module("torch._dynamo.eval_frame")
    before, begun, ended = eval_frame._stance.stance, threading.Event(), threading.Event()

    def other():
        with compiled_functions_eagerly():
            begun.set()
            ended.wait(10)

    thread = threading.Thread(target=other)
    with compiled_functions_eagerly():
        thread.start()
        begun.wait(10)
    assert eval_frame._stance.stance == "force_eager"
    ended.set()
    thread.join()
    assert eval_frame._stance.stance == before
