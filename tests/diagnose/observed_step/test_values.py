"""Every tensor of a step is measured once and followed through views and writes in place."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab.diagnose.observed_step.dataflow import readers_by_op, upstream
from amplab.diagnose.observed_step.tensor_summary import (
    Measurements,
    counted,
    counts_by_kernel,
    counts_by_torch,
    extremes,
    measure,
    read,
)
from amplab.diagnose.observed_step.values import observe_step
from amplab.policies.nested_tensors import named_tensors_in


def read_one(measure, tensor):
    return read([measure(tensor)], [(tensor.dtype, tensor.numel())])[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_statistics_count_what_numpy_counts(dtype):
    torch.manual_seed(0)
    tensor = torch.randn(7, 33).to(dtype)
    tensor[0, :5], tensor[1, :2], tensor[2, 3] = 0, math.inf, -math.inf
    whole = tensor.double().numpy().ravel()
    finite = abs(whole[[math.isfinite(x) for x in whole]])
    seen = read_one(measure, tensor)
    assert (seen.zeros, seen.infs, seen.nans) == (5, 3, 0)
    assert (seen.lowest, seen.highest) == (-math.inf, math.inf)
    assert (seen.absmax, seen.smallest) == (finite.max(), finite[finite > 0].min())


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7, 33), (1,), (3, 1, 70)])
def test_the_kernel_counts_what_torch_counts(dtype, shape):
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * torch.tensor(10.0).pow(torch.randn(shape) * 6)).to(dtype)
    for bad in (None, math.inf, -math.inf, math.nan):
        tensor.view(-1)[0] = 0.0 if bad is None else bad
        for view in (tensor, tensor.transpose(0, -1), tensor[..., ::2], tensor[:1].expand(4, *shape[1:])):
            assert [each.item() for each in counts_by_kernel(view)] == [each.item() for each in counts_by_torch(view)]


def test_measurements_are_those_of_the_functions():
    tensors = [torch.tensor([1.0, -3.0, 0.0]), torch.tensor([math.nan, 2.0]).half(), torch.tensor([1 - 2j])]
    measured = Measurements()
    places = [measured.add(each, detailed=detailed) for each in tensors for detailed in (False, True)]
    expected = [seen for each in tensors for seen in (read_one(extremes, each), read_one(measure, each))]
    assert list(map(str, map(measured.__getitem__, places))) == list(map(str, expected))
    assert [measured.is_finite(place) for place in places] == [each.is_finite for each in expected]
    assert measured.kind(places[3]) == (torch.float16, 2)


def test_nan_shows_in_both_measures():
    tensor = torch.tensor([1.0, math.nan, -3.0])
    for taken in (extremes, measure):
        seen = read_one(taken, tensor)
        assert seen.has_nan
        assert not seen.is_finite
    assert read_one(measure, tensor).absmax == 3.0


def test_a_tensor_without_a_nonzero_number_has_no_smallest():
    assert read_one(measure, torch.zeros(3)).smallest == math.inf


def named(step, op):
    return next(
        record.index for record in step.trace if record.op == op and record.phase == "forward" and not record.is_view
    )


def test_values_are_those_of_the_tensors():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    step = observe_step(model, lambda: model(x).relu().sum(), batch={"x": x})
    linear = named(step, "linear")
    assert {value.name for value in step.inputs(linear)} == {"weight", "bias", "batch['x']"}
    (out,) = step.outputs(linear)
    expected = model(x)
    assert (out.summary.lowest, out.summary.highest) == (expected.min().item(), expected.max().item())
    assert step.values[step.loss].summary.highest == expected.relu().sum().item()
    oracle = dict(zip(("weight", "bias"), torch.autograd.grad(model(x).relu().sum(), model.parameters()), strict=True))
    for name, place in step.gradients:
        assert step.values[place].summary.highest == oracle[name].max().item()


def test_a_view_of_all_is_the_same_value_and_a_piece_is_its_own():
    x = torch.arange(6.0).reshape(2, 3)
    weight = nn.ParameterList([nn.Parameter(torch.ones(3, 2))])
    step = observe_step(weight, lambda: (x.exp().t() * weight[0]).t()[1].sum())  # noqa: PLW0108
    product = named(step, "mul")
    assert step.inputs(product)[0].op == named(step, "exp")
    (piece,) = step.inputs(named(step, "sum"))
    assert piece.summary.lowest == x.exp()[1, 0].item()
    assert piece.parts == step.ops[product].outputs


def test_writes_in_place_are_seen_in_order():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self):
            canvas = torch.zeros(2, 4)
            canvas[0] = self.weight * 3
            before = canvas.sum()
            canvas.add_(5)
            return canvas.sum() + before

    model = Writes()
    step = observe_step(model, model.forward)
    first, second = (record.index for record in step.trace if record.aten == "aten.sum.default")
    assert (step.inputs(first)[0].summary.lowest, step.inputs(first)[0].summary.highest) == (0, 3)
    assert (step.inputs(second)[0].summary.lowest, step.inputs(second)[0].summary.highest) == (5, 8)
    assert step.values[step.loss].summary.highest == 64


def test_numbers_are_values_and_no_sizes():
    model = nn.Linear(2, 2)
    step = observe_step(
        model, lambda: (model(torch.ones(3, 2)).add(1e-8).masked_fill(torch.eye(2).bool()[0], -7)).sum(dim=1).sum()
    )
    assert step.ops[named(step, "add")].numbers == (1e-8,)
    assert step.ops[named(step, "masked_fill")].numbers == (-7.0,)
    assert step.ops[named(step, "sum")].numbers == ()
    step = observe_step(model, lambda: (model(torch.ones(3, 2)) * torch.full((3, 2), 7)).sum())  # noqa: PLW0108
    assert step.ops[named(step, "full")].numbers == (7.0,)


def test_ops_are_found_from_both_ends():
    model = nn.Linear(2, 2)
    step = observe_step(model, lambda: model(torch.ones(1, 2)).exp().sin().sum())
    assert [step.trace.records[op].op for op in upstream(step, named(step, "sum"), 2)][:2] == ["sin", "exp"]
    assert named(step, "sin") in readers_by_op(step)[named(step, "exp")]


def test_batches_are_named_by_their_path():
    x = torch.ones(1)
    assert [name for name, _ in named_tensors_in({"a": [x, (x,)], "b": 3}, "batch")] == [
        "batch['a'][0]",
        "batch['a'][1][0]",
    ]


def test_every_model_is_restored():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.LSTM(4, 2))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    observe_step(model, lambda: F.relu(model(torch.randn(5, 3))[0]).sum(), detailed=True)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def overflows(x):
    return x.half() * 100


def overflows_in_place(x):
    half = x.half()
    return half.mul_(100)


def grows_out_of(x):
    return x.half().sum(0) * 1000  # two tensors read


@pytest.mark.parametrize("run", [overflows, overflows_in_place, grows_out_of])
def test_where_inf_begins_both_sides_are_counted(run):
    """The oracle is torch's own count of the tensors, also where the op has overwritten what it read."""
    model, x = nn.Linear(2, 2), torch.tensor([[0.0, 1000.0], [3.0, 4000.0]])
    step = observe_step(model, lambda: run(x).float().sum() + model(x).sum() * 0)
    (number,) = [op for op in step.begun if step.trace.records[op].op.startswith("mul")]
    read, wrote = step.begun[number]
    given = x.half() if run is not grows_out_of else x.half().sum(0)
    assert read[0] == counted([given])[0]
    assert wrote == (counted([run(x)])[0],)
    assert (wrote[0].infs, read[0].infs) == (run(x).isinf().sum().item(), 0)
    assert wrote[0].infs > 0


def test_what_reads_inf_begins_nothing():
    model, x = nn.Linear(2, 2), torch.tensor([[1.0, math.inf]])
    step = observe_step(model, lambda: model(x).mul(0).add(x * 2).sum() + 1)
    assert not step.begun


@pytest.mark.parametrize(("values", "spread"), [([math.nan] * 3, False), ([math.nan, -2.0, 1.0], True), ([0.0], False)])
def test_a_size_is_shown_if_a_number_has_one(values, spread):
    x = torch.tensor(values)
    assert ("|x| up to 2" in str(read([measure(x)], [(x.dtype, x.numel())])[0])) == spread
    assert ("up to" in str(read([measure(x)], [(x.dtype, x.numel())])[0])) == spread


def test_one_of_a_kind_is_in_the_singular():
    (one,) = counted([torch.tensor([0.0, math.inf, math.nan, 1.0])])
    assert str(one) == "float32, 4 elements, |x| up to 1, 1 zero, 1 inf, 1 nan"


def test_what_a_copy_overwrites_is_not_read():
    """The backward of an assignment to a row copies into memory that was never written."""
    model = nn.Linear(4, 4)

    def step():
        x = model(torch.ones(3, 4))
        moved = x.roll(1, 0)
        moved[0] = x[0]
        return (x * moved).sum()

    seen = observe_step(model, step)
    copies = [each.index for each in seen.trace if each.aten == "aten.copy_.default"]
    assert copies
    assert all(len(seen.inputs(each)) == 1 for each in copies)
