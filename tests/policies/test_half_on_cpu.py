"""CPU halves under fp32 accumulation: nearly every bit as native half, rounded where a float64 result would be."""

import pytest
import torch
from torch.nn import functional as F

from amplab.policies import (
    APEX,
    TORCH_CPU,
    TORCH_CUDA,
    CastingEngine,
    CastPolicy,
    PrecisionPolicy,
    cpu_half,
    cpu_half_mode,
)
from amplab.policies.casting.half_on_cpu import PRODUCTS

ENGINE = CastingEngine(PrecisionPolicy(table=None))
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}


def half(*shape):
    return torch.randn(shape).half().requires_grad_()


CASES = {
    "linear": (F.linear, (64, 96), (32, 96), (32,)),
    "matmul": (torch.matmul, (4, 32, 64), (64, 32)),
    "@": (lambda a, b: a @ b, (32, 64), (64, 32)),
    "mm": (torch.mm, (32, 64), (64, 32)),
    "mv": (torch.mv, (256, 64), (64,)),
    "bmm": (torch.bmm, (4, 16, 64), (4, 64, 16)),
    "addmm": (torch.addmm, (32, 32), (32, 64), (64, 32)),
    "baddbmm": (torch.baddbmm, (4, 16, 16), (4, 16, 64), (4, 64, 16)),
    "conv1d": (F.conv1d, (4, 8, 32), (16, 8, 3), (16,)),
    "conv2d": (F.conv2d, (4, 8, 12, 12), (16, 8, 3, 3), (16,)),
    "conv3d": (F.conv3d, (2, 4, 6, 6, 6), (8, 4, 3, 3, 3)),
    "conv_transpose2d": (F.conv_transpose2d, (2, 8, 8, 8), (8, 8, 3, 3)),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (4, 16, 64), (4, 64, 16)),
}


def run(mode, func, values):
    """The result of `func` on half leaves with `values`, and the leaves' gradients, under `mode`."""
    leaves = [value.detach().clone().requires_grad_() for value in values]
    with cpu_half(mode), ENGINE.active():
        result = func(*leaves)
        result.backward(torch.linspace(-1, 1, result.numel()).reshape(result.shape).half().to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def share_equal(left, right):
    pairs = list(zip(left, right, strict=True))
    assert all(one.dtype is other.dtype is torch.float16 for one, other in pairs)
    equal = sum(int((one == other).sum()) for one, other in pairs)
    return equal / sum(one.numel() for one in left)


ALL = pytest.mark.parametrize(
    ("name", "func", "shapes"), [(name, func, shapes) for name, (func, *shapes) in CASES.items()]
)


@ALL
def test_nearly_every_bit_is_native(name, func, shapes):
    torch.manual_seed(0)
    values = [half(*shape) for shape in shapes]
    ours, native = run("fp32_accumulate", func, values), run("native", func, values)
    if name.startswith("conv"):
        # The CPU's own half convolutions round gradients per sample and per column before they add them up.
        for one, other in zip(ours, native, strict=True):
            torch.testing.assert_close(one, other, atol=0.05, rtol=0.01)
        ours, native = ours[:1], native[:1]
    if name != "conv_transpose2d":  # whose forward is such a gradient
        assert share_equal(ours, native) >= 0.99


@ALL
def test_results_and_gradients_are_the_float64_ones_rounded_to_half(name, func, shapes):
    torch.manual_seed(1)
    values = [half(*shape) for shape in shapes]
    rounded = run("fp32_accumulate", func, values)
    exact = run("native", func, [value.double() for value in values])
    for result, reference in zip(rounded, exact, strict=True):
        spacing = torch.finfo(torch.float16).eps * reference.abs().clamp(min=2.0**-3)
        assert ((result.double() - reference).abs() <= spacing).all()
    assert share_equal(rounded, [reference.half() for reference in exact]) >= 0.99


def test_accumulation_is_not_rounded_on_the_way():
    ones = torch.full((1, 4048), 1.0).half()
    with cpu_half("fp32_accumulate"), ENGINE.active():
        assert (ones @ ones.t()).item() == 4048  # a half sum of ones stops at 2048
        big = torch.full((1, 2), 300.0).half()
        assert torch.isinf(big @ big.t())
        assert (big @ torch.tensor([[300.0], [-300.0]]).half()).item() == 0


def test_gradients_overflow_at_the_half_border():
    x, weight = (
        torch.ones(1, 4, dtype=torch.float16, requires_grad=True),
        torch.full((4, 4), 8.0).half().requires_grad_(),
    )
    with cpu_half("fp32_accumulate"), ENGINE.active():
        F.linear(x, weight).backward(torch.full((1, 4), 32768.0).half())
    assert torch.isinf(x.grad).all()
    assert torch.isfinite(weight.grad).all()
    assert x.grad.dtype is weight.grad.dtype is torch.float16


def test_attention_trains_and_agrees():
    torch.manual_seed(0)
    values = [half(2, 2, 16, 32) for _ in range(3)]

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    accumulated, native = run("fp32_accumulate", attention, values), run("native", attention, values)
    for one, other in zip(accumulated, native, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("make", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_nets_in_half_train(make):
    torch.manual_seed(0)
    module = make(8, 16, num_layers=2, bidirectional=True, batch_first=True).half()
    x = half(4, 6, 8)
    outputs = {}
    for mode in ("fp32_accumulate", "native"):
        module.zero_grad()
        with cpu_half(mode), ENGINE.active():
            output, _ = module(x)
            output.float().sum().backward()
        outputs[mode] = [output, *(parameter.grad for parameter in module.parameters())]
        assert all(tensor.dtype is torch.float16 for tensor in outputs[mode])
    torch.testing.assert_close(*outputs.values(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("make", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
def test_recurrent_cells_in_half(make):
    with cpu_half("fp32_accumulate"), ENGINE.active():
        result = make(8, 16).half()(half(4, 8))
    assert (result[0] if isinstance(result, tuple) else result).dtype is torch.float16


def test_other_dtypes_and_mixtures_run_as_they_come():
    with cpu_half("fp32_accumulate"), ENGINE.active():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert (torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64)).dtype is torch.int64
        with pytest.raises(RuntimeError, match="same dtype"):
            half(2, 2) @ torch.ones(2, 2)
        out = torch.empty(2, 2, dtype=torch.float16)
        assert torch.mm(half(2, 2).detach(), half(2, 2).detach(), out=out) is out


def test_products_hold_what_the_table_calls_a_product():
    rows = {func: row for table in (APEX, TORCH_CPU, TORCH_CUDA) for func, row in table.by_function.items()}
    lower = {
        func
        for table in (APEX, TORCH_CPU, TORCH_CUDA)
        for func, row in table.by_function.items()
        if row.cast is CastPolicy.LOWER_PRECISION_FP
    }
    assert {rows[func].op for func in lower - PRODUCTS} == {"prelu", "addr"}
    assert {rows[func].op for func in PRODUCTS - lower} == {"bilinear", "dot", "vdot"}


def test_the_mode_is_scoped_and_survives_exceptions():
    def fail():
        assert cpu_half_mode() == "fp32_accumulate"
        raise KeyError

    outer = cpu_half_mode()
    with cpu_half("native"):
        with pytest.raises(KeyError), cpu_half("fp32_accumulate"):
            fail()
        assert cpu_half_mode() == "native"
    assert cpu_half_mode() == outer


def test_the_default_suits_the_cpu():
    has_fp16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert cpu_half_mode() == ("native" if has_fp16 else "fp32_accumulate")


def test_another_word_is_refused():
    message = r"cpu_half\('float32'\): expected 'fp32_accumulate' or 'native'; use 'fp32_accumulate' on a CPU without"
    with pytest.raises(ValueError, match=message), cpu_half("float32"):
        pass


WITHOUT = {
    "AvgPool3d": (torch.nn.AvgPool3d(2), (2, 3, 4, 4, 4)),
    "LocalResponseNorm": (torch.nn.LocalResponseNorm(2), (2, 4, 5, 5)),
    "RReLU": (lambda x: F.rrelu(x, training=bool(torch.manual_seed(0))), (3, 7)),
    "torch.rrelu": (lambda x: torch.rrelu(x, training=bool(torch.manual_seed(0))), (3, 7)),
    "multilabel_margin_loss": (lambda x: F.multilabel_margin_loss(x, torch.tensor([[3, 0, -1, 1]] * 2)), (2, 4)),
    "cdist": (lambda x: torch.cdist(x, x.detach().flip(0)), (5, 6)),
}


@pytest.mark.parametrize("name", [name for name in WITHOUT if "relu" not in name.lower()])
def test_what_has_no_bfloat16_kernel_is_the_float32_result_rounded_once(name):
    func, shape = WITHOUT[name]
    torch.manual_seed(0)
    values = torch.randn(shape).bfloat16().requires_grad_()
    wide = values.detach().float().requires_grad_()
    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
        func(values)
    expected = func(wide).bfloat16()
    expected.float().square().sum().backward()
    with ENGINE.active():
        result = func(values)
        result.float().square().sum().backward()
    assert result.dtype is torch.bfloat16
    assert torch.equal(result, expected)
    assert torch.equal(values.grad, wide.grad.bfloat16())


@pytest.mark.parametrize("mode", ["native", "fp32_accumulate"])
@pytest.mark.parametrize("name", WITHOUT)
def test_what_has_no_half_kernel_is_the_float32_result_rounded_once(name, mode):
    func, shape = WITHOUT[name]
    torch.manual_seed(0)
    values = torch.randn(shape).half()
    wide = values.float().requires_grad_()
    with pytest.raises(NotImplementedError, match="not implemented for 'Half'"):
        func(values)
    expected = func(wide).half()
    expected.backward(torch.linspace(-1, 1, expected.numel()).reshape(expected.shape).half())
    result, gradient = run(mode, func, [values])
    assert result.dtype is gradient.dtype is torch.float16
    assert torch.equal(result, expected)
    assert torch.equal(gradient, wide.grad.half())
