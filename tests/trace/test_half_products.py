"""A step that goes on is recorded as one that is restored, and keeps its bits: float16 products on the CPU."""

from collections import Counter

import pytest
import torch
from torch import nn

from amplab.policies import CastingEngine, PrecisionPolicy, cpu_half
from amplab.trace.as_found import Undo
from amplab.trace.half_products import HalfProducts
from amplab.trace.reasons import records_of
from amplab.trace.recorder import Recorder

HALF = torch.float16


def recorded(scenario, name, level, *, goes_on):
    """Records of a step, and the gradients of its parameters."""
    model, loss = scenario(name, HALF if level == "half" else torch.float32)
    engine = CastingEngine(PrecisionPolicy(table=None)) if level == "half" else CastingEngine()
    recorder = Recorder(model)
    torch.manual_seed(0)
    with cpu_half("fp32_accumulate"), engine.active(), Undo() as undo:
        if goes_on:
            recorder.follow(undo)
        else:
            undo.enter_block(recorder.recording)
            undo.add(recorder.calls.__exit__)
            recorder.calls.__enter__()
        loss().backward()
    return records_of(recorder.events), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["mlp", "cnn", "tied", "custom", "checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("level", ["O1", "half"])
def test_products_are_recorded_as_ops_on_halves(scenario, name, level):
    """Autograd may run the ops of independent nodes in another order."""
    traced, expected = recorded(scenario, name, level, goes_on=False)
    seen, grads = recorded(scenario, name, level, goes_on=True)

    def facts(records):
        return Counter((each.op, each.aten, each.phase, each.module, each.inputs, each.outputs) for each in records)

    assert facts(seen) == facts(traced)
    assert any(each.note == "fp32 accumulate, rounded once" for each in seen)
    assert [each.note for each in seen if each.note] == [each.note for each in traced if each.note]
    assert all(map(torch.equal, grads, expected))


@pytest.mark.parametrize("name", ["attention", "recurrent"])
def test_products_that_run_as_one_op_in_float32_are_recorded_as_ops_on_halves(scenario, name):
    seen, _ = recorded(scenario, name, "half", goes_on=True)
    inside = [each for each in seen if each.op in ("lstm", "scaled_dot_product_attention")]
    assert {each.phase for each in inside} == {"forward", "backward"}
    assert all(each.outputs[0].dtype is HALF for each in inside)


def test_what_reads_a_product_finds_the_op_that_wrote_it():
    """The memory that a product returns is that which its op is shown to write."""
    written = []

    class Writers:
        def before(self, overload, args, kwargs):
            return [each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)]

        def after(self, seen, event, result):
            written.append((str(event.overload), seen, result.untyped_storage().data_ptr()))

    model = nn.Linear(8, 4).half()
    recorder = Recorder(model, Writers())
    x = torch.ones(2, 8, dtype=HALF)
    with cpu_half("fp32_accumulate"), CastingEngine().active(), Undo() as undo:
        recorder.follow(undo)
        y = model(x)
        torch.relu(y)
    transposed, product, relu = written[:3]
    assert transposed[:2] == ("aten.t.default", [model.weight.data_ptr()])
    assert product[:2] == ("aten.addmm.default", [model.bias.data_ptr(), x.data_ptr(), model.weight.data_ptr()])
    assert relu[1] == [product[2]] == [y.data_ptr()]


def test_a_result_that_is_rounded_twice_gives_two_tensors():
    products = HalfProducts()
    a = torch.ones(2, 2, dtype=HALF)
    wide = a.float()
    products.widened(a, wide)
    mm = torch.ops.aten.mm.default
    result = mm(wide, wide)
    half = products.written(mm, products.shown((wide, wide), {}), result)
    first, second = (products.rounded(result, result.half(), None) for _ in range(2))
    assert first is half
    first.zero_()
    assert torch.equal(second, torch.full((2, 2), 2.0, dtype=HALF))


def test_an_op_in_place_never_writes_into_an_operand():
    products = HalfProducts()
    a = torch.ones(3, dtype=HALF)
    wide = a.float()
    products.widened(a, wide)
    add = torch.ops.aten.add_.Tensor
    shown = products.shown((wide, 1.0), {})
    assert shown[0][0] is a
    half = products.written(add, shown, add(wide, 1.0))
    assert torch.equal(a, torch.ones(3, dtype=HALF))
    assert torch.equal(half, torch.full((3,), 2.0, dtype=HALF))


def test_halves_of_freed_tensors_are_freed():
    products = HalfProducts()
    for _ in range(200):
        half = torch.ones(2, dtype=HALF)
        products.widened(half, half.float())
    assert len(products._memories) < 40
