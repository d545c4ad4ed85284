"""nn.RNN, nn.LSTM, nn.GRU and their cells under casts: any input dtype, any weight dtype, every engine and table."""

import copy
import itertools
import os
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import amplab
from amplab import amp
from amplab.formats import FLOAT8_E4M3
from amplab.kernels.builder.recipe import obstacle
from amplab.policies import CastingEngine, CompiledEngine, PrecisionPolicy, cpu_half, disable_casts

HALF, BFLOAT16, FLOAT = torch.float16, torch.bfloat16, torch.float32
NETS = {
    "lstm": lambda: nn.LSTM(4, 6, 2, bidirectional=True),
    "projected lstm": lambda: nn.LSTM(4, 6, proj_size=3),
    "batch first gru": lambda: nn.GRU(4, 6, batch_first=True),
    "gru without bias": lambda: nn.GRU(4, 6, 2, bias=False),
    "rnn": lambda: nn.RNN(4, 6),
    "relu rnn": lambda: nn.RNN(4, 6, nonlinearity="relu", bidirectional=True),
}
CELLS = {"lstm cell": nn.LSTMCell, "gru cell": nn.GRUCell, "rnn cell": nn.RNNCell}
EVERY_NET = pytest.mark.parametrize("net", NETS)
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
UNBUILT = obstacle() is not None or os.environ.get("AMPLAB_KERNELS") == "reference"


def drawn(net, packed=False):
    """A module, a float32 input and a float32 hidden state for it."""
    torch.manual_seed(0)
    module = NETS[net]()
    sequences = [torch.randn(length, 4) for length in (5, 3, 2)]
    lines = module.num_layers * (2 if module.bidirectional else 1)
    hidden = torch.randn(lines, 3, module.proj_size or module.hidden_size)
    if isinstance(module, nn.LSTM):
        hidden = hidden, torch.randn(lines, 3, module.hidden_size)
    return module, pack_sequence(sequences) if packed else torch.randn(3, 3, 4), hidden


def cast(value, dtype):
    return tuple(each.to(dtype) for each in value) if type(value) is tuple else value.to(dtype)


def flat(value):
    if isinstance(value, PackedSequence):
        return [value.data]
    return [value] if isinstance(value, torch.Tensor) else [tensor for item in value for tensor in flat(item)]


@EVERY_NET
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("lower", [HALF, BFLOAT16], ids=["float16", "bfloat16"])
def test_a_region_computes_what_casts_by_hand_compute(net, packed, lower):
    module, x, hidden = drawn(net, packed)
    for of_input, of_weights, given in itertools.product((FLOAT, HALF, BFLOAT16), (FLOAT, lower), (False, True)):
        model = copy.deepcopy(module).to(of_weights)
        state = (cast(hidden, FLOAT if of_weights is FLOAT else HALF),) if given else ()
        with cpu_half("native"), amplab.autocast("cpu", lower):
            ours = flat(model(x.to(of_input), *state))
        by_hand = copy.deepcopy(module).to(lower)
        theirs = flat(by_hand(x.to(of_input).to(lower), *(cast(each, lower) for each in state)))
        assert [tensor.dtype for tensor in ours] == [lower] * len(theirs)
        assert all(map(torch.equal, ours, theirs)), (of_input, of_weights, given)


@EVERY_NET
def test_the_values_are_those_of_float64_within_what_half_can_hold(net):
    module, x, hidden = drawn(net)
    with cpu_half("fp32_accumulate"), amplab.autocast("cpu", HALF):
        ours = flat(module(x.half(), hidden))
    exact = flat(copy.deepcopy(module).half().double()(x.half().double(), cast(cast(hidden, HALF), torch.float64)))
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype is HALF
        torch.testing.assert_close(one.double(), other, atol=2**-11, rtol=2**-11)


@EVERY_NET
@pytest.mark.parametrize("name", ["apex", "torch_cuda", "torch_cpu"])
@pytest.mark.parametrize(
    "kind",
    [CastingEngine, pytest.param(CompiledEngine, marks=pytest.mark.skipif(UNBUILT, reason="nothing can be built"))],
)
def test_every_engine_and_table_runs_and_trains_them(net, name, kind):
    module, x, _ = drawn(net)
    engine = kind(PrecisionPolicy(name, BFLOAT16))
    for of_input, of_weights in ((BFLOAT16, FLOAT), (HALF, FLOAT), (FLOAT, BFLOAT16)):
        model = copy.deepcopy(module).to(of_weights)
        with engine.active():
            outputs = flat(model(x.to(of_input)))
        widest = FLOAT if name == "torch_cpu" else BFLOAT16
        assert {tensor.dtype for tensor in outputs} <= {BFLOAT16, widest}
        sum(tensor.double().sum() for tensor in outputs).backward()
        for param in model.parameters():
            assert param.grad.dtype is of_weights
            assert param.grad.isfinite().all()


@EVERY_NET
def test_a_simulated_format_takes_16_bit_inputs(net):
    module, x, _ = drawn(net)
    with amplab.autocast("cpu", policy=PrecisionPolicy("torch_cuda", FLOAT8_E4M3)):
        outputs = flat(module(x.bfloat16()))
    assert all(tensor.isfinite().all() for tensor in outputs)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", ["torch_cuda", "torch_cpu"])
def test_cells(cell, name):
    torch.manual_seed(0)
    module, x = CELLS[cell](4, 6), torch.randn(3, 4)
    policy = PrecisionPolicy(name, BFLOAT16)
    for of_input in (FLOAT, BFLOAT16, HALF):
        with amplab.autocast("cpu", policy=policy):
            outputs = flat([module(x.to(of_input))])
        lowered = name == "torch_cuda" or cell == "rnn cell"  # torch_cpu names only that one
        assert {tensor.dtype for tensor in outputs} == {BFLOAT16 if lowered else FLOAT}
        exact = flat([copy.deepcopy(module).double()(x.to(of_input).double())])
        torch.testing.assert_close([tensor.double() for tensor in outputs], exact, atol=0.02, rtol=0.02)


class Tagger(nn.Module):
    """Convolution, two recurrent nets and a head: what follows each is 16 bits wide."""

    def __init__(self):
        super().__init__()
        self.conv, self.first = nn.Conv1d(4, 8, 3, padding=1), nn.LSTM(8, 16, batch_first=True, bidirectional=True)
        self.norm, self.second, self.head = nn.LayerNorm(32), nn.GRU(32, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x):
        hidden, _ = self.first(self.conv(x.transpose(1, 2)).transpose(1, 2))
        hidden, _ = self.second(self.norm(hidden))
        return self.head(hidden)


def trained(model, region, scaler, steps=20):
    """The losses of a model that learns the sign of its first input."""
    torch.manual_seed(1)
    optimizer, x = torch.optim.Adam(model.parameters(), lr=0.05), torch.randn(8, 7, 4)
    labels, losses = (x[..., 0] > 0).long(), []
    for _ in range(steps):
        optimizer.zero_grad()
        with region():
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), labels.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("lower", [HALF, BFLOAT16], ids=["float16", "bfloat16"])
def test_a_recurrent_model_trains_as_in_float32(lower):
    torch.manual_seed(0)
    model = Tagger()
    wide = trained(copy.deepcopy(model), lambda: amplab.autocast("cpu", enabled=False), amplab.GradScaler("cpu"))
    ours = trained(model, lambda: amplab.autocast("cpu", lower), amplab.GradScaler("cpu"))
    assert wide[-1] < 0.1 * wide[0]
    assert ours[-1] < 0.1 * ours[0]
    assert abs(ours[0] - wide[0]) < 0.02


@EVERY_NET
def test_without_casts_torch_refuses_as_under_torch_autocast(net):
    module, x, _ = drawn(net)
    half = x.half()
    with amplab.autocast("cpu", HALF):
        module(half)
        for off in (disable_casts(), amplab.autocast("cpu", enabled=False)):
            with off, pytest.raises(ValueError, match="RNN input dtype"):
                module(half)
            module(half)
    with pytest.raises(ValueError, match="RNN input dtype"):
        module(half)


def test_inside_a_disabled_region_float32_nets_run_in_float32():
    module, x, _ = drawn("lstm")
    with amplab.autocast("cpu", BFLOAT16):
        with amplab.autocast("cpu", enabled=False):
            assert {tensor.dtype for tensor in flat(module(x))} == {FLOAT}
        with disable_casts():
            assert {tensor.dtype for tensor in flat(module(x))} == {FLOAT}


def interrupted_after(*checks):
    assert all(checks)
    raise KeyboardInterrupt


def test_nothing_of_torch_stays_switched_on():
    module, x, _ = drawn("gru without bias")
    any_autocast = torch._C._is_any_autocast_enabled
    outer, inner = amplab.autocast("cpu", HALF), amplab.autocast("cpu", BFLOAT16)
    with pytest.raises(KeyboardInterrupt), outer, inner:
        interrupted_after(any_autocast(), not torch.is_autocast_enabled("cpu"), not torch.is_autocast_enabled())
    assert not any_autocast()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)  # not in order
    assert module(x.half())[0].dtype is BFLOAT16
    inner.__exit__(None, None, None)
    assert not any_autocast()


def test_another_thread_is_not_affected():
    module, x, _ = drawn("lstm")
    refused = []

    def call():
        try:
            module(x.half())
        except ValueError:
            refused.append(True)

    with amplab.autocast("cpu", HALF):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        module(x.half())
    assert refused == [True]


@pytest.mark.skipif(UNBUILT, reason="nothing can be built")
def test_engines_inside_each_other():
    module, x, _ = drawn("lstm")
    half = x.half()
    compiled, default = CompiledEngine(PrecisionPolicy("torch_cuda", BFLOAT16)), amplab.autocast("cpu", HALF)
    with compiled.active():
        assert module(half)[0].dtype is BFLOAT16
        with default:
            assert module(half)[0].dtype is HALF
            with compiled.active():
                assert module(half)[0].dtype is BFLOAT16
            assert module(half)[0].dtype is HALF
        assert module(half)[0].dtype is BFLOAT16
    with pytest.raises(ValueError, match="RNN input dtype"):
        module(half)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_region_in_a_model_under_amp(level, capsys, request):
    torch.manual_seed(0)
    request.addfinalizer(amp.reset)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
    x = torch.randn(2, 5, 4)
    for lower in (BFLOAT16, HALF):
        with amplab.autocast("cpu", lower):
            output = model.first(torch.randn(2, 5, 8))[0]  # float32, in front of half weights at O2 and O3
            loss = model(x).double().square().mean()
        assert output.dtype is lower
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("around", [True, False], ids=["around", "inside"])
def test_compiled_models(around):
    torch.manual_seed(0)
    model, x = Tagger(), torch.randn(2, 5, 4)
    with amplab.autocast("cpu", BFLOAT16):
        expected = model(x)

    def forward(x):
        with amplab.autocast("cpu", BFLOAT16):
            return model(x)

    if around:
        with amplab.autocast("cpu", BFLOAT16):
            found = torch.compile(model, backend="eager")(x)
    else:
        found = torch.compile(forward, backend="eager")(x)
    assert found.dtype is BFLOAT16
    assert torch.equal(found, expected)
