"""FP16_Optimizer against amp.initialize at O2, which does the same by other means."""

import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab import amp
from amplab.fp16_utils import FP16_Optimizer, convert_network


@pytest.fixture(autouse=True)
def no_session_stays():
    yield
    amp.reset()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def batches(steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(32, 8, generator=generator).half(), torch.arange(32) % 2) for _ in range(steps)]


def make(steps=0, **settings):
    model = convert_network(network(), torch.float16)
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), verbose=False, **settings)
    train(model, optimizer, batches(steps))
    return model, optimizer


def train(model, optimizer, data):
    for inputs, labels in data:
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(inputs).float(), labels))
        optimizer.step()


def masters(optimizer):
    return [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("level", ["static", "dynamic"])
def test_it_is_o2_bitwise(level):
    scale = {"static_loss_scale": 128.0} if level == "static" else {
        "dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**16}
    }  # fmt: skip
    model, optimizer = make(**scale)
    twin = network()
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    loss_scale = 128.0 if level == "static" else "dynamic"
    amp.initialize(twin, twin_optimizer, opt_level="O2", loss_scale=loss_scale, verbosity=0)
    # amp's masters keep what the cast to half has rounded.
    with torch.no_grad():
        for param, master in zip(twin.parameters(), amp.master_params(twin_optimizer), strict=True):
            master.copy_(param)
    data = batches(5)
    with amp.default_session().casting():  # the same arithmetic in half for both
        train(model, optimizer, data)
        for inputs, labels in data:
            twin_optimizer.zero_grad()
            with amp.scale_loss(F.cross_entropy(twin(inputs), labels), twin_optimizer) as scaled_loss:
                scaled_loss.backward()
            twin_optimizer.step()
    assert all(map(torch.equal, masters(optimizer), amp.master_params(twin_optimizer)))


def test_an_overflow_is_skipped_and_said(capsys):
    model, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**30})
    optimizer.verbose = True
    before = masters(optimizer)
    train(model, optimizer, batches(1))
    assert optimizer.overflow
    assert all(map(torch.equal, before, masters(optimizer)))
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert capsys.readouterr().out == f"Gradient overflow.  Skipping step, reducing loss scale to {2.0**29}\n"


@pytest.mark.parametrize("each", [True, False])
def test_several_backwards_add_up(each):
    (first, second), grads = batches(2), []
    for halves in ([first, second], None):
        model, optimizer = make(static_loss_scale=8.0)
        model.eval()
        losses = [F.cross_entropy(model(inputs).float(), labels) for inputs, labels in (first, second)]
        if halves:
            for loss in losses:
                optimizer.backward(loss, update_master_grads=each)
            if not each:
                optimizer.update_master_grads()
        else:
            optimizer.backward(sum(losses))
        grads.append(optimizer.inspect_master_grad_data()[0])
    for summed, at_once in zip(*grads, strict=True):
        torch.testing.assert_close(summed, at_once, rtol=2e-3, atol=1e-4)


def test_clipping_acts_on_what_is_stepped():
    model, optimizer = make(static_loss_scale=128.0)
    optimizer.backward(F.cross_entropy(model(batches(1)[0][0]).float(), batches(1)[0][1]) * 10)
    norm = optimizer.clip_master_grads(0.5)
    clipped = torch.stack([grad.norm() for grad in optimizer.inspect_master_grad_data()[0]]).norm()
    assert norm > 0.5
    assert clipped.item() == pytest.approx(0.5, rel=1e-3)


def test_a_resumed_run_is_the_run_that_went_on():
    settings = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**10, "scale_window": 4}}
    data = batches(6)
    model, optimizer = make(**settings)
    train(model, optimizer, data[:3])
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    train(model, optimizer, data[3:])
    resumed, other = make(**settings)
    checkpoint = torch.load(io.BytesIO(stream.getvalue()))
    resumed.load_state_dict(checkpoint["model"])
    other.load_state_dict(checkpoint["optimizer"])
    train(resumed, other, data[3:])
    assert all(map(torch.equal, masters(optimizer), masters(other)))
    assert all(map(torch.equal, model.state_dict().values(), resumed.state_dict().values()))
    assert other.loss_scale == optimizer.loss_scale != 2.0**10


def test_a_checkpoint_of_another_model_is_refused():
    saved = make()[1].state_dict()
    saved["fp32_from_fp16"][0][0] = torch.ones(1)
    with pytest.raises(ValueError, match="shapes"):
        make()[1].load_state_dict(saved)


def test_a_closure_works_with_a_static_scale_alone():
    model, optimizer = make(static_loss_scale=8.0)
    (inputs, labels), losses = batches(1)[0], []

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).float(), labels)
        optimizer.backward(loss)
        losses.append(loss.item())
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert losses[-1] < losses[0]
    with pytest.raises(TypeError, match="static_loss_scale"):
        make(dynamic_loss_scale=True)[1].step(closure)


def test_gradients_are_cleared_to_zeros_or_none():
    model, optimizer = make(steps=1, static_loss_scale=8.0)
    optimizer.zero_grad()
    assert not any(param.grad.any() for param in model.parameters())
    optimizer.zero_grad(set_grads_to_None=True)
    assert all(param.grad is None for param in model.parameters())


def test_it_is_not_pickled_and_not_given_to_amp():
    model, optimizer = make()
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(optimizer)
    with pytest.raises((RuntimeError, TypeError), match="FP16_Optimizer"):
        amp.initialize(model, optimizer, verbosity=0)


@pytest.mark.parametrize("first", ["step", "state_dict"])
def test_half_weights_written_before_the_first_backward_reach_the_masters(first):
    model, optimizer = make()
    optimizer.param_groups[0]["lr"] = 0.0
    model[0].weight.data.fill_(0.3)
    if first == "step":
        train(model, optimizer, batches(1))
    expected = torch.full((16, 8), 0.3).half()
    assert torch.equal(optimizer.state_dict()["fp32_from_fp16"][0][0], expected.float())
    assert torch.equal(model[0].weight, expected)


def test_half_weights_written_after_loading_reach_the_masters():
    saved = make(steps=2)[1].state_dict()
    model, optimizer = make(steps=1)
    optimizer.load_state_dict(saved)
    model[0].weight.data[0].zero_()
    master = optimizer.state_dict()["fp32_from_fp16"][0][0]
    assert torch.equal(master[0], torch.zeros(8))
    assert torch.equal(master[1:], saved["fp32_from_fp16"][0][0][1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("cleared", ["zero_grad", "by hand", "zeros", None])
def test_an_overflow_before_another_backward_is_skipped_unless_its_gradients_were_cleared(dtype, cleared):
    parameter = nn.Parameter(torch.ones(2, dtype=dtype))
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 4.0}, "verbose": False}
    optimizer = FP16_Optimizer(torch.optim.SGD([parameter], lr=0.5), **options)
    optimizer.zero_grad()
    optimizer.backward((parameter * float("inf")).sum())
    if cleared == "zero_grad":
        optimizer.zero_grad()
    elif cleared == "by hand":
        parameter.grad = None
    elif cleared == "zeros":
        parameter.grad.zero_()
    optimizer.backward(parameter.sum())
    optimizer.step()
    assert optimizer.overflow is (cleared is None)
    assert parameter.tolist() == ([1.0, 1.0] if cleared is None else [0.5, 0.5])
