"""Backward ops find their forward op, their module and their parameter."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab.trace import trace_step


def backward(trace, *, op=None):
    return [record for record in trace if record.phase == "backward" and op in (None, record.op) and not record.folds]


def test_each_module_gets_the_gradients_of_its_own_ops():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3))
    trace = trace_step(model, lambda: F.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 3)))
    order = list(dict.fromkeys((record.op, record.module) for record in backward(trace)))
    assert order == [
        ("backward", ""),
        ("mse_loss", ""),
        ("linear", "4"),
        ("sigmoid", "3"),
        ("linear", "2"),
        ("tanh", "1"),
        ("linear", "0"),
    ]


def test_gradients_have_the_shapes_of_what_they_belong_to():
    """The oracle is the size of the layer: no two layers share a weight's shape."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3))
    trace = trace_step(model, lambda: model(torch.ones(2, 4)).square().sum())
    for path, shape in (("0", (6, 4)), ("1", (5, 6)), ("2", (3, 5))):
        products = [record for record in backward(trace, op="linear") if record.module == path]
        assert shape in {info.shape for record in products for info in record.outputs} | {
            info.shape[::-1] for record in products for info in record.outputs
        }


@pytest.mark.parametrize("name", ["tied", "attention", "recurrent", "cnn"])
def test_no_gradient_is_without_its_op(scenario, every_model, name):
    model, loss = scenario(name)
    for record in backward(trace_step(model, loss)):
        assert "gradient of" in record.reason or "adds the gradient" in record.reason or record.op == "backward"


def test_mirrors_name_an_earlier_record_with_their_op_and_module(scenario, every_model):
    trace = trace_step(*scenario(every_model))
    mirrors = [record for record in trace if record.reason.startswith("gradient of ")]
    assert len(mirrors) >= 3
    for record in mirrors:
        op, number = record.reason.removeprefix("gradient of ").split(" #")
        origin = trace.records[int(number)]
        assert (origin.op, origin.module) == (op, record.module)
        assert origin.index < record.index
        assert record.op in (op, "cast")


def test_gradients_of_a_value_used_twice_are_added():
    weight = nn.ParameterList([nn.Parameter(torch.ones(3))])
    trace = trace_step(weight, lambda: torch.add(weight[0].exp(), weight[0].sin()).sum())
    (added,) = backward(trace, op="accumulate_grad")
    assert added.aten == "aten.add.Tensor"
    assert added.reason == "autograd adds the gradients of a value used more than once"


def test_adding_in_the_model_is_not_taken_for_accumulation():
    model = nn.Linear(2, 2)
    trace = trace_step(model, lambda: torch.add(model(torch.ones(1, 2)), 1).sum())
    assert [record.op for record in trace if record.aten == "aten.add.Tensor"] == ["add"]


def test_accumulation_names_the_parameter(scenario):
    model, loss = scenario("reentrant checkpoint")
    reasons = {record.reason for record in trace_step(model, loss) if record.op == "accumulate_grad"}
    assert "autograd adds the gradient into block.0.weight.grad" in reasons
    assert "autograd adds the gradient into head.bias.grad" in reasons


def test_a_tied_weight_belongs_to_the_module_that_used_it(scenario):
    model, loss = scenario("tied")
    products = [record for record in backward(trace_step(model, loss)) if record.aten == "aten.mm.default"]
    assert [record.module for record in products] == ["head", "head", "first", "first", "first", "first"]


def test_the_backward_of_a_custom_function_is_its_own_code(scenario):
    model, loss = scenario("custom")
    written = [record for record in trace_step(model, loss) if record.note == "in the backward of Square"]
    assert [(record.op, record.module, record.phase) for record in written if not record.folds] == [
        ("mul", "Custom", "backward"),
        ("mul", "Custom", "backward"),
    ]


def test_adding_in_a_custom_backward_is_its_own_code():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad + grad

    model = nn.Linear(2, 2)
    trace = trace_step(model, lambda: Doubled.apply(model(torch.ones(1, 2))).sum())
    (added,) = [record for record in trace if record.aten == "aten.add.Tensor"]
    assert (added.op, added.note) == ("add", "in the backward of Doubled")


def test_ops_without_gradient_have_no_backward(scenario):
    model, loss = scenario("custom")
    trace = trace_step(model, loss)
    assert [record.phase for record in trace if record.op in ("abs", "amax")] == ["forward", "forward"]


def test_writing_into_a_slice_is_mirrored(scenario):
    model, loss = scenario("custom")
    assert {record.module for record in backward(trace_step(model, loss), op="setitem")} == {"Custom"}


@pytest.mark.parametrize("name", ["checkpoint", "reentrant checkpoint"])
def test_a_checkpointed_block_runs_again_in_backward(scenario, name):
    model, loss = scenario(name)
    trace = trace_step(model, loss)
    again = [record for record in trace if record.note == "recomputed for backward" and not record.folds]
    assert (again[0].op, again[0].module, again[0].phase) == ("linear", "block.0", "backward")
    mirrors = [record for record in backward(trace, op="linear") if record.module == "block.0" and record not in again]
    assert [record.aten for record in mirrors if "accumulate" not in record.op][:2] == ["aten.mm.default"] * 2


def test_a_hook_on_a_gradient_is_named():
    model = nn.Linear(2, 2)

    def loss():
        out = model(torch.ones(1, 2))
        out.register_hook(lambda grad: grad * 3)
        return out.square().sum()

    (scaled,) = [record for record in trace_step(model, loss) if record.note == "in a hook on a gradient"]
    assert (scaled.op, scaled.phase) == ("mul", "backward")


def test_an_earlier_graph_is_distinguished():
    """Nodes made before the trace have numbers that no op of it took."""
    model = nn.Linear(2, 2)
    early = nn.Parameter(torch.ones(1, 2))
    prepared = early.exp().sin()
    trace = trace_step(model, lambda: model(torch.zeros(1, 2).add(prepared)).sum())
    reasons = [record.reason for record in backward(trace) if record.aten in ("aten.cos.default", "aten.mul.Tensor")]
    assert "autograd: SinBackward0" in reasons
    assert early.grad is None


def test_two_models_in_one_step():
    """A generator judged by a discriminator, traced through one of them: the other's ops have no path."""
    torch.manual_seed(0)
    generator, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    kept = judge.weight.grad = torch.ones(1, 4)
    trace = trace_step(generator, lambda: judge(generator(torch.ones(3, 2))).mean())
    assert [record.module for record in trace if record.aten == "aten.addmm.default"] == ["Linear", ""]
    assert judge.weight.grad is kept
    both = nn.ModuleDict({"generator": generator, "judge": judge})
    trace = trace_step(both, lambda: judge(generator(torch.ones(3, 2))).mean())
    assert [record.module for record in trace if record.aten == "aten.addmm.default"] == ["generator", "judge"]


def test_no_tensor_outlives_the_trace(scenario):
    import gc
    import weakref

    model, _ = scenario("mlp")
    alive = []

    def loss():
        hidden = model(torch.ones(2, 8))
        alive.append(weakref.ref(hidden))
        return hidden.square().mean()

    trace_step(model, loss)
    gc.collect()
    assert alive[0]() is None


def test_an_observer_sees_the_tensors_before_and_after_each_op():
    """An op in place is the case that tells before from after."""

    class Values:
        def __init__(self):
            self.seen = []

        def before(self, overload, args, kwargs):
            return args[0].item() if args and isinstance(args[0], torch.Tensor) and args[0].numel() == 1 else None

        def after(self, seen, event, result):
            self.seen.append((event.overload.overloadpacket, seen, result))

    model, observer = nn.Linear(1, 1), Values()
    trace = trace_step(model, lambda: model(torch.ones(1, 1)).mul(0).add_(3).sum(), observer=observer)
    assert len(observer.seen) == len(trace)
    before, after = next((seen, result.item()) for op, seen, result in observer.seen if op == torch.ops.aten.add_)
    assert (before, after) == (0, 3)
