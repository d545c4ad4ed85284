"""Tensors without memory and nested tensors in a step: the tools measure what can be read, and leave out the rest.

Called by an observer, torch's ops read memory that is not there for some of these; a tool then ended the process.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab

BATCH = torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.0, 3.0, -0.5, 1.5], [-2.0, 0.5, 1.0, 1.0]])


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def parts(batch, layout=torch.strided):
    return torch.nested.nested_tensor([batch[:1], batch], layout=layout)


def tangent(model, batch):
    return torch.func.jvp(model, (batch,), (torch.ones_like(batch),))[1].square().mean()


def tangent_of_two(model, batch):
    given, ones = (batch, torch.tensor(0.5)), (torch.ones_like(batch), torch.tensor(1.0))
    value, change = torch.func.jvp(lambda x, t: model(x * t), given, ones)
    return (value - change.detach()).square().mean()


def curvature(model, batch):
    named = dict(model.named_parameters())

    def loss(bias):
        return torch.func.functional_call(model, named | {"bias": bias}, (batch,)).square().mean()

    return torch.func.hessian(loss)(named["bias"]).sum() + model(batch).mean()


def zeros_without_memory(model, batch):
    zeros = torch._efficientzerotensor((4,))  # what forward-mode AD takes for a missing tangent
    return model(batch).mean() + zeros.sum() + zeros.view(2, 2).detach().half().sum()


def freed(model, batch):
    gathered = (batch * 1).detach().clone()
    tail = gathered[1:]
    gathered.untyped_storage().resize_(0)  # as FSDP frees weights that it has gathered
    return model(batch).mean() + 0 * tail.shape[0]


def meta(model, batch):
    shape = torch.ones(4, device="meta", dtype=torch.half).softmax(-1).float().log()
    shape.copy_(batch[0])
    return model(batch).mean()


def jagged(model, batch):
    return model(parts(batch, torch.jagged)).values().mean()  # the first one of a process runs ops on meta tensors


def jagged_in_half(model, batch):
    return model(parts(batch, torch.jagged).half().float()).values().mean()


def nested(model, batch):
    return model(parts(batch)).to_padded_tensor(0.0).square().mean()


def nested_in_turn(model, batch):
    scores = F.softmax(model(parts(batch).half().float()), -1).transpose(1, 2) * 2
    return scores.transpose(1, 2).contiguous().to_padded_tensor(0.0).mean()


STEPS = [
    *(tangent, tangent_of_two, curvature, zeros_without_memory, freed, meta),
    *(jagged, jagged_in_half, nested, nested_in_turn),
]
TOOLS = {
    "xray": amplab.xray,
    "statistics": lambda *given, **named: amplab.xray(*given, **named, stats=True),
    "first_nonfinite": amplab.first_nonfinite,
    "first_nonfinite at a large scale": lambda *given, **named: amplab.first_nonfinite(
        *given, **named, loss_scale=2.0**126
    ),
    "doctor": amplab.doctor,
    "doctor under O1": lambda *given, **named: amplab.doctor(*given, **named, opt_level="O1"),
    "gradient_range": amplab.gradient_range,
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:.*torch.jit.script:DeprecationWarning"
)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_every_tool_runs_a_step_with_such_tensors(step, tool):
    step(model(), BATCH).backward()  # torch itself runs it
    found = TOOLS[tool](model(), BATCH, step=step)
    if "doctor" in tool:
        assert "step-raised" not in [each.name for each in found]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_watch_looks_at_such_a_step(step):
    own = model()
    optimizer, scaler = torch.optim.SGD(own.parameters(), lr=0.0), amplab.GradScaler("cpu", init_scale=1024.0)
    factor = [1.0]

    def loss_of(own, batch):
        return step(own, batch) * factor[0]

    with warnings.catch_warnings(), amplab.watch(own, optimizer, scaler=scaler, step=loss_of) as watched:
        warnings.simplefilter("error", RuntimeWarning)  # a look that failed
        for number, batch in enumerate(watched.batches([BATCH] * 6)):
            optimizer.zero_grad()
            factor[0] = 1e39 if number == 3 else 1.0
            loss = watched.loss(loss_of(own, batch))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert len(watched.history) == 6


def measured(step):
    found = amplab.xray(model(), BATCH, step=step, stats=True)
    return [(row["aten"], row["statistics"]) for row in found.rows(every=True) if row["phase"] == "forward"]


def test_a_zerotensor_is_measured_as_zeros():
    rows = dict(measured(zeros_without_memory))
    (statistics,) = rows["aten._efficientzerotensor.default"]
    assert (statistics["zeros"], statistics["numel"], statistics["absmax"]) == (4, 4, 0.0)


def test_what_is_not_in_memory_has_no_statistics():
    rows = dict(measured(freed))
    assert rows["aten.clone.default"] in (None, [])
    assert rows["aten.mul.Tensor"][0]["absmax"] == 3.0
    assert dict(measured(meta))["aten._softmax.default"] in (None, [])


def test_a_nested_tensor_is_measured_with_all_its_parts():
    def doubled(model, batch):
        return model((parts(batch) * 2).to_padded_tensor(0.0)).mean()

    rows = measured(doubled)
    (statistics,) = next(found for aten, found in rows if aten == "aten.mul.Tensor")
    assert (statistics["numel"], statistics["absmax"], statistics["smallest_nonzero"]) == (16, 6.0, 0.5)


def test_the_op_on_a_nested_tensor_that_overflows_is_named():
    def overflowing(model, batch):
        return model((parts(batch) * 1e38 * 1e10).to_padded_tensor(0.0)).mean()

    found = amplab.first_nonfinite(model(), BATCH, step=overflowing)
    assert (found.record.op, found.inputs[0].absmax) == ("mul", pytest.approx(3e38))
