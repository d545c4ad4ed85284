"""Names of calls: what a reader of the model's code would call the op."""

import torch
from torch import nn
from torch.nn import functional as F

from amplab.policies import CastingEngine
from amplab.trace import trace_step


def names(run, *, casting=None):
    """The names of the ops of a loss function of one parameter, views included, without backward."""
    model = nn.ParameterList([nn.Parameter(torch.arange(1.0, 13).reshape(3, 4))])
    engine = CastingEngine()
    context = {} if casting is None else {"casting": engine.active()}
    trace = trace_step(model, lambda: run(model[0]).sum(), **context)
    saved_for_backward = "aten.detach.default"
    return [record.op for record in trace if record.phase == "forward" and record.aten != saved_for_backward][:-1]


def test_operators_methods_and_functions_go_by_their_names():
    assert names(lambda w: w + 1) == ["add"]
    assert names(lambda w: 1 - w) == ["rsub"]
    assert names(lambda w: w[0]) == ["getitem"]
    assert names(lambda w: w.T @ w) == ["T", "matmul"]
    assert names(lambda w: w.clone().mul_(2)) == ["clone", "mul_"]
    assert names(lambda w: F.gelu(torch.tanh(w))) == ["tanh", "gelu"]
    assert names(lambda w: F.max_pool1d(w[None], 2))[:2] == ["getitem", "max_pool1d"]
    assert set(names(lambda w: F.layer_norm(w, (4,)))) == {"layer_norm"}
    assert names(torch.ops.aten.relu.default) == ["relu"]


def test_a_python_composite_is_one_name_for_all_its_ops():
    ops = names(lambda w: F.cross_entropy(w, torch.tensor([0, 1, 2])))
    assert set(ops[1:]) == {"cross_entropy"}
    assert len(ops) >= 3


def test_composites_that_engines_open_show_the_calls_inside():
    assert names(lambda w: 1 / w) == ["reciprocal", "mul"] == names(lambda w: 1 / w, casting=True)


def test_attention_shows_its_linears_with_and_without_an_engine(scenario):
    model, loss = scenario("attention")
    bare = {record.op for record in trace_step(model, loss) if record.module == "attend"}
    cast = {
        record.op for record in trace_step(model, loss, casting=CastingEngine().active()) if record.module == "attend"
    }
    assert {"linear", "scaled_dot_product_attention"} <= bare
    assert "multi_head_attention_forward" not in bare
    assert cast == bare | {"cast"}


def test_names_are_the_same_under_an_engine_entered_inside_the_loss(scenario):
    """As with hooks on the model that bring their engine along, which then lies above the trace's own mode."""
    model, loss = scenario("custom")
    engine = CastingEngine()

    def inside():
        with engine.active():
            return loss()

    within = trace_step(model, inside)
    around = trace_step(model, loss, casting=engine.active())
    forward = [
        [(each.op, each.module, each.dtypes) for each in trace if each.phase == "forward"] for trace in (within, around)
    ]
    assert forward[0] == forward[1]
