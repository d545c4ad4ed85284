"""What each cast policy does to a call, against manual casts and torch.autocast."""

import pytest
import torch
from torch.nn import functional as F

from amplab.policies import CastingEngine, CastPolicy, OpRule, OpTable, PrecisionPolicy, cpu_half, disable_casts

HALF, FLOAT, DOUBLE = torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def casting():
    """Every test here runs under apex's lists in float16 with native half, for bit-equal comparison."""
    torch.manual_seed(0)
    with cpu_half("native"), CastingEngine().active():
        yield


def same(left, right):
    if isinstance(left, tuple):
        return all(map(same, left, right))
    return left.dtype == right.dtype and torch.equal(left.nan_to_num(), right.nan_to_num())


AGREEING = {
    "linear": (F.linear, ((4, 8), (6, 8), (6,))),
    "conv1d": (F.conv1d, ((2, 3, 9), (4, 3, 3))),
    "conv2d": (F.conv2d, ((2, 3, 9, 9), (4, 3, 3, 3), (4,))),
    "conv_transpose2d": (F.conv_transpose2d, ((2, 3, 5, 5), (3, 4, 3, 3))),
    "matmul": (torch.matmul, ((2, 3, 4), (4, 5))),
    "bmm": (torch.bmm, ((2, 3, 4), (2, 4, 5))),
    "baddbmm": (torch.baddbmm, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
    "addmm": (torch.addmm, ((3, 5), (3, 4), (4, 5))),
    "attention": (F.scaled_dot_product_attention, ((2, 2, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8))),
    "mse_loss": (F.mse_loss, ((4, 8), (4, 8))),
}


@pytest.mark.parametrize(("func", "shapes"), AGREEING.values(), ids=AGREEING)
def test_bfloat16_is_what_torch_autocast_computes(func, shapes):
    values = [torch.randn(shape) for shape in shapes]

    def run():
        leaves = [value.clone().requires_grad_() for value in values]
        result = func(*leaves)
        result.float().sum().backward()
        return result, *(leaf.grad for leaf in leaves)

    with CastingEngine(PrecisionPolicy(compute_dtype=torch.bfloat16)).active():
        ours = run()
    with disable_casts(), torch.autocast("cpu", torch.bfloat16):
        theirs = run()
    assert same(ours, theirs)


def half(*shape):
    return torch.randn(*shape).half()


@pytest.mark.parametrize(
    "func", [lambda d, h: d @ d, lambda d, h: F.softmax(d, 0), lambda d, h: d.sum(), lambda d, h: F.mse_loss(h, d)]
)
def test_float64_is_not_narrowed(func):
    double, narrow = torch.randn(3, 3, dtype=DOUBLE), half(3, 3)
    assert func(double, narrow).dtype is DOUBLE


def test_float64_in_a_lowered_op_is_refused_as_in_the_float32_model():
    with pytest.raises(RuntimeError, match=r"(?i)dtype"):
        half(3, 3) @ torch.randn(3, 3, dtype=DOUBLE)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((HALF, FLOAT), FLOAT),
        ((HALF, DOUBLE), DOUBLE),
        ((HALF, torch.bfloat16), FLOAT),
        ((torch.bfloat16, DOUBLE), DOUBLE),
        ((HALF, HALF), HALF),
    ],
)
def test_promote_takes_the_widest(dtypes, expected):
    x, y = (torch.ones(3, dtype=dtype) for dtype in dtypes)
    assert (x + y).dtype is expected
    assert torch.dot(x, y).dtype is expected
    assert torch.addcmul(x, y, y).dtype is expected
    assert torch.cat([x, y]).dtype is torch.stack((x, y)).dtype is expected


def test_zero_dim_tensors_widen_up_to_float32():
    x = half(3)
    assert (x * torch.tensor(2.0)).dtype is FLOAT
    assert (x * torch.tensor(2.0, dtype=DOUBLE)).dtype is HALF
    assert (torch.tensor(2.0).half() * torch.tensor(2.0, dtype=DOUBLE)).dtype is DOUBLE
    assert (x * 2.0).dtype is HALF


def test_one_over_a_half_is_a_float32_reciprocal():
    tiny = torch.tensor([1e-5]).half()
    assert (1 / tiny).dtype is FLOAT
    assert torch.isfinite(1 / tiny).all()


IN_PLACE = {
    "+=": lambda x, y: x.__iadd__(y),
    "*=": lambda x, y: x.__imul__(y),
    "**=": lambda x, y: x.__ipow__(y),
    "addmm_": lambda x, y: x.addmm_(y, y),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "x[0] = y": lambda x, y: x.__setitem__(0, y[0]) or x,
    "x[mask] = y": lambda x, y: x.__setitem__(x > -9, y.flatten()) or x,
    "index_put_": lambda x, y: x.index_put_((torch.tensor([0]),), y[:1]),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([0]), y[:1]),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
}


@pytest.mark.parametrize("op", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize(("own", "other"), [(HALF, FLOAT), (FLOAT, HALF)])
def test_in_place_ops_keep_storage_and_dtype(op, own, other):
    x, y = torch.rand(3, 3).to(own), torch.rand(3, 3).to(other)
    expected = op(x.clone(), y.to(own))
    pointer = x.data_ptr()
    result = op(x, y)
    assert (result.data_ptr(), result.dtype) == (pointer, own)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("name", ["exp_", "log_", "pow_", "cumsum_", "rsqrt_"])
def test_in_place_forms_of_the_fp32_list_refuse_half(name):
    args = {"pow_": (2,), "cumsum_": (0,)}.get(name, ())
    message = (
        rf"Cannot call in-place method {name} on fp16 Tensors: self is float16, expected float32. "
        rf"Use {name[:-1]}, which returns float32, or call .float\(\) first."
    )
    with pytest.raises(NotImplementedError, match=message):
        getattr(half(3), name)(*args)
    assert getattr(torch.ones(3), name)(*args).dtype is FLOAT
    with disable_casts():
        assert getattr(torch.ones(3).half(), name)(*args).dtype is HALF


def test_float32_pow_takes_a_half_exponent_in_place():
    x = torch.full((2,), 3.0)
    assert torch.equal(x.pow_(torch.full((2,), 2.0).half()), torch.full((2,), 9.0))


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_binary_cross_entropy_is_banned_for_16_bit_arguments(dtype):
    probability, target = torch.rand(3).to(dtype), torch.ones(3)
    with pytest.raises(NotImplementedError) as error:
        torch.nn.BCELoss()(probability, target)
    name = str(dtype).removeprefix("torch.")
    assert str(error.value) == (
        "amp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss`: "
        f"an argument is {name}, expected float32 (binary_cross_entropy: a float16 sigmoid is exactly 1 from 8.32 up, "
        "and log(1 - 1) is -inf). "
        "Use torch.nn.BCEWithLogitsLoss on the logits, or call .float() before the sigmoid."
    )
    assert F.binary_cross_entropy(probability.float(), target).dtype is FLOAT
    with disable_casts():
        F.binary_cross_entropy(probability, target.to(dtype))


def test_out_variants_run_as_called():
    out = torch.empty(3, 3)
    assert torch.mm(torch.ones(3, 3), torch.ones(3, 3), out=out) is out
    assert torch.equal(out, torch.full((3, 3), 3.0))
    wide = torch.empty(3, dtype=HALF)
    assert torch.exp(torch.zeros(3).half(), out=wide).dtype is HALF


def test_an_explicit_dtype_is_the_callers_choice():
    assert half(3).sum(dtype=HALF).dtype is HALF
    assert F.softmax(half(3), 0, dtype=DOUBLE).dtype is DOUBLE


def test_keyword_and_nested_arguments_are_cast():
    x = torch.ones(2, 3)
    assert F.linear(input=x, weight=torch.ones(4, 3)).dtype is HALF
    assert torch.einsum("ij,kj->ik", [x, x]).dtype is HALF
    assert torch.linalg.multi_dot([x, x.t()]).dtype is HALF
    assert F.mse_loss(input=half(3), target=half(3)).dtype is FLOAT


def test_integers_and_complex_pass():
    assert (torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64)).dtype is torch.int64
    assert (torch.ones(2, 2, dtype=torch.complex64) @ torch.ones(2, 2, dtype=torch.complex64)).dtype is torch.complex64


class Plain(torch.Tensor):
    """A tensor subclass with torch's own __torch_function__."""


def test_tensor_subclasses_are_left_alone():
    x = torch.ones(2, 2).as_subclass(Plain)
    weight = torch.nn.Parameter(torch.ones(2, 2))
    assert F.linear(x, weight).dtype is FLOAT
    assert (x.half() + torch.ones(2, 2)).dtype is FLOAT
    assert F.softmax(x.half(), 0).dtype is HALF
    assert torch.cat([x.half(), x.half()]).dtype is HALF
    assert x.half().exp_().dtype is HALF


def test_gradients_arrive_in_the_leafs_dtype_and_equal_manual_casts():
    x, weight = torch.randn(4, 3, requires_grad=True), torch.nn.Parameter(torch.randn(5, 3))
    F.linear(x, weight).float().square().sum().backward()
    ours = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    with disable_casts():
        F.linear(x.half(), weight.half()).float().square().sum().backward()
    assert same(ours, (x.grad, weight.grad))


def test_set_opt_dtype_passes_a_dtype_and_leaves_the_arguments():
    rows = (OpRule("softmax", CastPolicy.FP32_SET_OPT_DTYPE, "softmax: by dtype=", ("torch.softmax", "torch.sum")),)
    with CastingEngine(PrecisionPolicy(OpTable("by_dtype", rows))).active():
        assert torch.softmax(half(3), 0).dtype is FLOAT
        assert torch.softmax(half(3), 0, HALF).dtype is HALF
        assert torch.sum(half(3), dtype=DOUBLE).dtype is DOUBLE
        assert torch.sum(torch.ones(3, dtype=torch.int64)).dtype is torch.int64
        assert torch.softmax(input=half(3), dim=0).dtype is FLOAT
        assert torch.sum(half(3), 0, out=torch.empty((), dtype=HALF)).dtype is HALF


MODULES = {
    "conv bn relu": (
        lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()),
        (2, 3, 8, 8),
    ),
    "norms": (
        lambda: torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 8)
        ),
        (4, 8),
    ),
    "instance and group norm": (
        lambda: torch.nn.Sequential(
            torch.nn.Conv1d(4, 4, 1), torch.nn.InstanceNorm1d(4, affine=True), torch.nn.GroupNorm(2, 4)
        ),
        (2, 4, 8),
    ),
    "attention": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    "activations": (
        lambda: torch.nn.Sequential(
            torch.nn.Linear(8, 8),
            torch.nn.PReLU(),
            torch.nn.GELU(),
            torch.nn.SiLU(),
            torch.nn.Linear(8, 8),
            torch.nn.GLU(),
        ),
        (4, 8),
    ),
    "upsampling": (
        lambda: torch.nn.Sequential(torch.nn.ConvTranspose2d(3, 3, 2), torch.nn.Upsample(scale_factor=2)),
        (1, 3, 4, 4),
    ),
}


@pytest.mark.parametrize(("make", "shape"), MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_modules_train_with_float32_weights(make, shape, dtype):
    module = make()
    module(torch.randn(shape).to(dtype)).float().square().mean().backward()
    assert all(parameter.grad.dtype is FLOAT for parameter in module.parameters())
