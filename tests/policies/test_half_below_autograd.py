"""fp32 accumulation below autograd: a step under a dispatch mode has the ops and dtypes of native half."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from amplab.policies import accumulate_fp32

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Runs each op natively or through accumulate_fp32, and notes its dtypes."""

    def __init__(self, accumulate):
        super().__init__()
        self.accumulate, self.records, self.accumulated = accumulate, [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = accumulate_fp32(func, args, kwargs or {}) if self.accumulate else NotImplemented
        if result is NotImplemented:
            result = func(*args, **(kwargs or {}))
        else:
            self.accumulated.add(func.overloadpacket._qualified_op_name.removeprefix("aten::"))
        outputs = result if isinstance(result, (tuple, list)) else [result]
        self.records.append((str(func), *(getattr(output, "dtype", None) for output in outputs)))
        return result


def half(*shape):
    return torch.randn(shape).half().requires_grad_()


def step(func, shapes, accumulate):
    torch.manual_seed(0)
    leaves = [half(*shape) for shape in shapes]
    with Recorder(accumulate) as recorder:
        result = func(*leaves)
        result.sum().backward()
    return recorder, [result.detach(), *(leaf.grad for leaf in leaves)]


STEPS = {
    "linear": (F.linear, [(32, 48), (16, 48), (16,)], {"addmm", "mm"}),
    "bmm": (torch.bmm, [(4, 16, 32), (4, 32, 16)], {"bmm"}),
    "baddbmm": (torch.baddbmm, [(4, 16, 16), (4, 16, 32), (4, 32, 16)], {"baddbmm", "bmm"}),
    "mv": (torch.mv, [(64, 32), (32,)], {"mv"}),
    "conv2d": (F.conv2d, [(2, 4, 8, 8), (8, 4, 3, 3), (8,)], {"convolution", "convolution_backward"}),
    "attention": (
        F.scaled_dot_product_attention,
        [(1, 2, 8, 16)] * 3,
        {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"},
    ),
    "lstm": (
        lambda x, *weights: torch.lstm(x, STATE, weights, True, 1, 0.0, True, False, False)[0],
        [(3, 2, 4), (16, 4), (16, 4), (16,), (16,)],
        {"addmm", "mm"},
    ),
    "bilinear": (F.bilinear, [(3, 4), (3, 5), (2, 4, 5)], {"_trilinear"}),
}
STATE = (torch.zeros(1, 2, 4).half(), torch.zeros(1, 2, 4).half())


@pytest.mark.parametrize(("func", "shapes", "products"), STEPS.values(), ids=STEPS)
def test_a_step_has_the_ops_dtypes_and_nearly_the_bits_of_native_half(func, shapes, products):
    accumulated, ours = step(func, shapes, accumulate=True)
    native, theirs = step(func, shapes, accumulate=False)
    assert accumulated.records == native.records
    assert products <= accumulated.accumulated
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(
    "func", [lambda a: F.linear(a, a), lambda a: torch.einsum("ij,kj->ik", a, a), lambda a: a @ a.t()]
)
def test_composites_met_whole_in_inference_mode(func):
    with torch.inference_mode(), Recorder(True) as recorder:
        assert func(torch.randn(8, 8).half()).dtype is torch.float16
    assert recorder.accumulated & {"linear", "einsum", "matmul"}


def test_sums_are_rounded_once():
    ones = torch.ones(1, 4048).half()
    assert accumulate_fp32(aten.mm.default, (ones, ones.t()), {}).item() == 4048


@pytest.mark.parametrize(
    ("overload", "args"),
    [
        (aten.relu.default, (torch.ones(2, 2).half(),)),
        (aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2))),
        (aten.mm.default, (torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16())),
        (aten.addmm_.default, (torch.ones(2, 2).half(), torch.ones(2, 2).half(), torch.ones(2, 2).half())),
        (aten.mm.default, (torch.ones(2, 2, device="meta").half(), torch.ones(2, 2, device="meta").half())),
    ],
)
def test_the_rest_is_not_implemented(overload, args):
    assert accumulate_fp32(overload, args, {}) is NotImplemented


@pytest.mark.parametrize(
    ("func", "shape", "ops"),
    [
        (lambda x: F.avg_pool3d(x, 2), (1, 2, 4, 4, 4), {"avg_pool3d", "avg_pool3d_backward"}),
        (lambda x: torch.cdist(x, x.detach().flip(0)), (5, 6), {"_cdist_forward", "_cdist_backward"}),
    ],
    ids=["avg_pool3d", "cdist"],
)
def test_an_op_without_a_half_kernel_is_the_float32_one_rounded(func, shape, ops):
    with pytest.raises(NotImplementedError, match="not implemented for 'Half'"):
        step(func, [shape], accumulate=False)
    recorder, (result, gradient) = step(func, [shape], accumulate=True)
    assert ops <= recorder.accumulated
    torch.manual_seed(0)
    wide = half(*shape).detach().float().requires_grad_()
    expected = func(wide)
    expected.sum().backward()
    assert torch.equal(result, expected.detach().half())
    torch.testing.assert_close(gradient, wide.grad.half(), rtol=2e-3, atol=1e-3)  # from saved halves
