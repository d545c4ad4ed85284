"""One step traced: what is seen, what is left behind, and that the step computes what it computes untraced."""

import contextlib
import copy
import dataclasses
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab.amp import Session
from amplab.policies import CastingEngine, PrecisionPolicy, cpu_half
from amplab.trace import trace_step

ENGINES = {
    "no engine": lambda: None,
    "O1": CastingEngine,
    "half": lambda: CastingEngine(PrecisionPolicy(table=None)),
}


def settings(level):
    """The model dtype and the engine of a way to run a step."""
    return torch.float16 if level == "half" else torch.float32, ENGINES[level]()


def active(engine):
    return contextlib.nullcontext() if engine is None else engine.active()


def everything(model):
    """All that a step could change of a model and of the process, as comparable values."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    flags = [module.training for module in model.modules()]
    hooks = [
        (dict(module._forward_hooks), dict(module._forward_pre_hooks), dict(module._forward_hooks_always_called))
        for module in model.modules()
    ]
    return tensors, grads, flags, hooks, torch.get_rng_state(), random.getstate(), np.random.get_state()


def assert_untouched(before, after):
    for name, tensor in before[0].items():
        assert torch.equal(tensor, after[0][name]), name
    assert all(before[1][name] is after[1][name] for name in before[1])
    assert before[2:4] == after[2:4]
    assert torch.equal(before[4], after[4])
    assert before[5] == after[5]
    assert np.array_equal(before[6][1], after[6][1])
    assert before[6][2:] == after[6][2:]


@pytest.mark.parametrize("level", ENGINES)
def test_every_model_is_traced_and_restored(scenario, every_model, level):
    dtype, engine = settings(level)
    model, loss = scenario(every_model, dtype)
    with active(engine):
        loss().backward()  # gradients that the trace has to bring back
    before = everything(model)
    trace = trace_step(model, loss, casting=active(engine), loss_scale=64.0)
    assert_untouched(before, everything(model))
    assert engine is None or engine.cache_size == 0
    assert {record.phase for record in trace} == {"forward", "backward"}
    assert [record.index for record in trace] == list(range(len(trace)))
    assert all(record.reason for record in trace)
    assert trace == trace_step(model, loss, casting=active(engine), loss_scale=64.0)


@pytest.mark.parametrize("name", ["mlp", "cnn", "tied", "custom", "checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("level", ENGINES)
def test_the_traced_step_computes_the_same_gradients(scenario, name, level):
    dtype, engine = settings(level)
    model, loss = scenario(name, dtype)
    with torch.random.fork_rng(), active(engine):
        (loss().float() * 64).backward()
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    seen = {}
    for key, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, key=key: seen.__setitem__(key, grad.clone()))
    trace_step(model, loss, casting=active(engine), loss_scale=64.0)
    for key, grad in expected.items():
        assert torch.equal(seen[key], grad), key


@pytest.mark.parametrize("level", ["O1", "half"])
def test_records_are_the_same_under_native_half(scenario, every_model, level):
    dtype, engine = settings(level)
    model, loss = scenario(every_model, dtype)
    traces = []
    for mode in ("fp32_accumulate", "native"):
        with cpu_half(mode):
            traces.append(trace_step(model, loss, casting=active(engine)))
    emulated, native = traces
    assert [dataclasses.replace(record, note="") for record in emulated] == [
        dataclasses.replace(record, note="") for record in native
    ]
    assert any("fp32 accumulate" in record.note for record in emulated)
    assert not any("fp32 accumulate" in record.note for record in native)
    assert emulated.cast_bytes == native.cast_bytes


def test_a_half_product_is_one_record(scenario):
    model, loss = scenario("mlp", torch.float16)
    engine = CastingEngine(PrecisionPolicy(table=None))
    with cpu_half("fp32_accumulate"):
        trace = trace_step(model, loss, casting=engine.active())
    (product,) = [record for record in trace if record.aten == "aten.addmm.default" and record.module == "fc1"]
    assert {info.dtype for info in (*product.inputs, *product.outputs)} == {torch.float16}
    assert product.note == "fp32 accumulate, rounded once"
    # The input's own .to(float16) is the only cast of the step.
    assert [record.op for record in trace.casts] == ["cast"]


def test_half_without_an_engine_is_native_as_in_an_untraced_step(scenario):
    model, loss = scenario("mlp", torch.float16)
    with cpu_half("fp32_accumulate"):
        trace = trace_step(model, loss)
    assert not any(record.note for record in trace)


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "recurrent"])
def test_the_profiler_counts_the_same_ops(scenario, name):
    """torch's own profiler on an untraced step is the oracle for the leaf ops of a step."""
    model, loss = scenario(name)
    trace = trace_step(model, loss)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss().backward()
    counted = {event.key: event.count for event in profile.key_averages()}
    leaves = ("addmm", "mm", "bmm", "relu", "convolution_backward", "native_batch_norm_backward", "threshold_backward")
    leaves += ("_log_softmax", "nll_loss_forward", "native_layer_norm", "mkldnn_rnn_layer", "nll_loss_backward")
    mine = Counter(record.aten.split(".")[1] for record in trace)
    assert {leaf: mine[leaf] for leaf in leaves} == {leaf: counted.get(f"aten::{leaf}", 0) for leaf in leaves}
    assert sum(mine[leaf] for leaf in leaves) >= 5


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_the_same_step_through_a_session_of_each_level(scenario, opt_level):
    model, loss = scenario("cnn")
    session = Session()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    before = everything(model)
    trace = trace_step(model, loss, casting=session.casting(), loss_scale=8.0)
    assert_untouched(before, everything(model))
    convolution = next(record for record in trace if record.op == "conv2d" and not record.is_view)
    norm = next(record for record in trace if record.op == "batch_norm" and not record.is_view)
    half = opt_level != "O0"
    assert convolution.outputs[0].dtype == (torch.float16 if half else torch.float32)
    assert norm.inputs[1].dtype == (torch.float16 if opt_level == "O3" else torch.float32)
    assert trace == trace_step(model, loss, casting=session.casting(), loss_scale=8.0)
    session.reset()


def test_an_installed_engine_shows_its_casts_in_every_trace(scenario):
    model, loss = scenario("mlp")
    engine = CastingEngine()
    engine.install()
    try:
        loss()  # leaves casts of the weights in the engine's cache
        trace = trace_step(model, loss)
        assert engine.cache_size == 0
        assert trace == trace_step(model, loss)
    finally:
        engine.uninstall()
    assert trace == trace_step(model, loss, casting=engine.active())
    assert sum(record.phase == "forward" for record in trace.casts) == 6  # input, 2 weights, 2 biases, logits


def test_cast_bytes_are_those_read_and_written(scenario):
    model, loss = scenario("mlp")
    trace = trace_step(model, loss, casting=CastingEngine().active())
    forward = [record.cast_bytes for record in trace.casts if record.phase == "forward"]
    # float32 -> float16 is 4 + 2 bytes: input 6x8, fc1 16x8 and 16, fc2 4x16 and 4; then the logits 6x4 back.
    assert sorted(forward) == sorted(6 * count for count in (48, 128, 16, 64, 4, 24))
    assert all(record.cast_bytes == 0 for record in trace if not record.is_cast)


def test_the_loss_scale_multiplies_the_gradients(scenario):
    model, loss = scenario("mlp")
    seen = []
    model.fc2.bias.register_hook(lambda grad: seen.append(grad.clone()))
    trace_step(model, loss)
    trace_step(model, loss, loss_scale=1024.0)
    assert torch.equal(seen[0] * 1024, seen[1])


def test_a_scale_of_one_adds_no_op(scenario):
    model, loss = scenario("mlp")
    assert not any(record.op == "scale_loss" for record in trace_step(model, loss))
    assert any(record.op == "scale_loss" for record in trace_step(model, loss, loss_scale=2.0))


def test_an_exception_in_forward_passes_and_everything_is_put_back(scenario):
    model, _ = scenario("cnn")
    before = everything(model)

    def fails():
        model(torch.randn(6, 1, 8, 8))
        model.eval()
        random.random()
        np.random.rand()
        model(torch.randn(6, 1, 5, 5))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trace_step(model, fails, casting=CastingEngine().active())
    assert_untouched(before, everything(model))


def test_a_forward_that_recovers_from_an_exception_keeps_its_paths():
    class Forgiving(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrong, self.right = nn.Linear(3, 3), nn.Linear(8, 4)

        def forward(self, x):
            try:
                return self.wrong(x)
            except RuntimeError:
                return torch.tanh(self.right(x))

    model = Forgiving()
    trace = trace_step(model, lambda: model(torch.ones(2, 8)).sum())
    computed = [(record.op, record.module) for record in trace if record.phase == "forward" and not record.is_view]
    assert computed == [("ones", ""), ("linear", "right"), ("tanh", "Forgiving"), ("sum", "")]


def test_ambient_casting_of_torch_is_recorded_too(scenario):
    model, loss = scenario("mlp")
    trace = trace_step(model, loss, casting=torch.autocast("cpu", dtype=torch.bfloat16))
    linear = [record for record in trace if record.aten == "aten.addmm.default"]
    assert [record.outputs[0].dtype for record in linear] == [torch.bfloat16] * 2
    assert "torch.autocast casts for linear" in trace.casts[0].reason


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_module_is_refused():
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="is scripted"):
        trace_step(scripted, list)


def test_halves_of_torchs_own_casting_are_native():
    model = nn.Linear(4, 4)
    with cpu_half("fp32_accumulate"):
        trace = trace_step(model, lambda: model(torch.ones(2, 4)).sum(), casting=torch.autocast("cpu", torch.float16))
    (product,) = [record for record in trace if record.aten == "aten.addmm.default"]
    assert (product.outputs[0].dtype, product.note) == (torch.float16, "")


def test_an_engine_in_forward_alone_decides_the_products_of_backward_too(scenario):
    model, loss = scenario("cnn", torch.float16)
    engine = CastingEngine(PrecisionPolicy(table=None))

    def inside():
        with engine.active():
            return loss()

    with cpu_half("fp32_accumulate"):
        with torch.random.fork_rng():
            inside().backward()
        seen = {}
        for key, parameter in model.named_parameters():
            parameter.register_hook(lambda grad, key=key: seen.__setitem__(key, grad.clone()))
        trace = trace_step(model, inside)
    (convolution,) = [record for record in trace if record.aten == "aten.convolution_backward.default"]
    assert convolution.note == "fp32 accumulate, rounded once"
    assert all(torch.equal(parameter.grad, seen[key]) for key, parameter in model.named_parameters())


def test_a_gradient_penalty_is_backward_twice():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
    x = torch.randn(3, 4, requires_grad=True)

    def loss():
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.square().mean()

    trace = trace_step(model, loss)
    assert x.grad is None
    products = [record for record in trace if record.aten in ("aten.mm.default", "aten.addmm.default")]
    assert {(record.phase, record.module) for record in products} == {
        ("forward", "0"),
        ("forward", "2"),
        ("backward", "0"),
        ("backward", "2"),
    }
    penalty = next(record for record in trace if record.op == "square" and record.phase == "forward")
    assert any(record.phase == "backward" for record in trace.records[: penalty.index])


def test_gradients_computed_in_a_forward_are_backward_and_not_run_again():
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.potential = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x):
            (force,) = torch.autograd.grad(self.potential(x).sum(), x, create_graph=True)
            return force

    model = Energy()
    x = torch.ones(2, 3, requires_grad=True)
    trace = trace_step(model, lambda: model(x).square().mean())
    assert not any(record.note for record in trace)
    inside = [record for record in trace if record.phase == "backward" and record.op == "tanh"]
    assert {record.module for record in inside} == {"potential.1"}


def test_leaves_outside_the_model_get_their_gradients_back():
    model = nn.Linear(4, 2)
    x = torch.ones(3, 4, requires_grad=True)
    kept = x.grad = torch.full_like(x, 7.0)
    trace_step(model, lambda: model(x).sum())
    assert x.grad is kept
    assert torch.equal(kept, torch.full_like(x, 7.0))


def test_an_optimizer_that_steps_inside_backward_does_not_step(scenario):
    model, loss = scenario("mlp")
    stepped = []
    handle = model.fc1.weight.register_post_accumulate_grad_hook(stepped.append)
    trace_step(model, loss)
    assert not stepped
    loss().backward()
    assert len(stepped) == 1
    handle.remove()
    loss().backward()
    assert len(stepped) == 1


def test_a_traced_model_copies_without_hooks(scenario):
    model, loss = scenario("cnn")
    trace_step(model, loss)
    twin = copy.deepcopy(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in twin.modules())


REFUSALS = [
    (lambda: trace_step("model", list), TypeError, "model=str:"),
    (lambda: trace_step(nn.Linear(1, 1), 3.0), TypeError, "step=float:"),
    (lambda: trace_step(nn.Linear(1, 1), list), TypeError, "step returned list"),
    (lambda: trace_step(nn.Linear(1, 1), list, loss_scale=0.0), ValueError, "loss_scale=0.0:"),
    (lambda: trace_step(nn.Linear(1, 1), list, loss_scale=-2), ValueError, "loss_scale=-2:"),
    (lambda: trace_step(nn.Linear(1, 1), list, loss_scale=float("inf")), ValueError, "loss_scale=inf:"),
    (lambda: trace_step(nn.Linear(1, 1), list, loss_scale="dynamic"), TypeError, "loss_scale='dynamic':"),
    (lambda: trace_step(nn.LazyLinear(1), list), ValueError, "LazyLinear has uninitialized parameters"),
    (
        lambda: trace_step(nn.Linear(1, 1), lambda: torch.ones(2, requires_grad=True)),
        ValueError,
        r"of shape \(2,\):",
    ),
    (lambda: trace_step(nn.Linear(1, 1), lambda: torch.tensor(1)), ValueError, "step returned torch.int64 of shape"),
    (lambda: trace_step(nn.Linear(1, 1), lambda: torch.tensor(1.0)), ValueError, "a tensor without a gradient"),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSALS)
def test_wrong_arguments_are_refused(call, kind, message):
    with pytest.raises(kind, match=message) as caught:
        call()
    assert len(caught.value.args) == 1


def test_a_compiled_module_is_refused():
    whole = nn.Linear(2, 2)
    whole.compile(backend="eager")
    with pytest.raises(ValueError, match="Linear is compiled"):
        trace_step(whole, list)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0].compile(backend="eager")
    with pytest.raises(ValueError, match="0 is compiled"):
        trace_step(model, list)


def test_a_step_traced_in_another_thread_is_the_same(scenario):
    model, loss = scenario("cnn")
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(lambda: trace_step(model, loss, casting=CastingEngine().active())).result()
    assert elsewhere == trace_step(model, loss, casting=CastingEngine().active())


def test_dropout_draws_the_same_numbers_with_and_without_a_trace():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    x = torch.ones(4, 8)
    trace_step(model, lambda: model(x).sum())
    after_trace = F.dropout(x, 0.5)
    torch.manual_seed(3)
    nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    assert torch.equal(after_trace, F.dropout(x, 0.5))
