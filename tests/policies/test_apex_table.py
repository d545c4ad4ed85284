"""The rows of the apex table against a transcription of apex's lists, the running torch, and the numbers they quote."""

import math
import types

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, get_overridable_functions

from amplab.policies import APEX, CastPolicy
from amplab.policies.casting.plan import COMPOSITES
from amplab.policies.tables.op_table import absent, resolve

# apex's own lists, name by name, as its last version has them.
FUNCTIONAL_FP16 = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear"
FUNCTIONAL_FP32 = """interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm
    local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy
    hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss multilabel_margin_loss
    multilabel_soft_margin_loss multi_margin_loss nll_loss binary_cross_entropy_with_logits smooth_l1_loss
    soft_margin_loss triplet_margin_loss ctc_loss"""
TORCH_FP16 = """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm addmv addr
    matmul mm mv addbmm baddbmm bmm"""
TORCH_FP32 = """acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm
    prod std sum var renorm"""
TORCH_PROMOTE = "addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne"
TORCH_SEQUENCE = "cat stack"
TENSOR_FP16 = "__matmul__"
TENSOR_FP32 = "__pow__ __rpow__ cpu"
TENSOR_PROMOTE = """__add__ __div__ __eq__ __ge__ __gt__ __le__ __lt__ __mul__ __ne__ __radd__ __rdiv__ __rmul__
    __rsub__ __rtruediv__ __sub__ __truediv__"""
# Augmented assignments: promoted by apex into a new tensor; here they stay in place.
TENSOR_AUGMENTED = "__iadd__ __idiv__ __imul__ __isub__ __itruediv__ __ipow__"
TORCH_REFUSED_IN_PLACE = "acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_"
TENSOR_REFUSED_IN_PLACE = TORCH_REFUSED_IN_PLACE + " erfinv_ pow_ cumprod_ cumsum_ renorm_"
TENSOR_MATCH_SELF = """addmm_ addmv_ addr_ addcdiv_ addcmul_ atan2_ add_ div_ mul_ eq_ ge_ gt_ le_ lt_ ne_"""
RECURRENT = "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"

TRANSCRIBED = {
    CastPolicy.LOWER_PRECISION_FP: {
        "nn.functional": FUNCTIONAL_FP16,
        "": f"{TORCH_FP16} {RECURRENT}",
        "Tensor": TENSOR_FP16,
    },
    CastPolicy.FP32: {"nn.functional": FUNCTIONAL_FP32, "": TORCH_FP32, "Tensor": TENSOR_FP32},
    CastPolicy.PROMOTE: {"": TORCH_PROMOTE, "Tensor": TENSOR_PROMOTE},
    CastPolicy.SEQUENCE_PROMOTE: {"": TORCH_SEQUENCE},
    CastPolicy.MATCH_SELF: {"Tensor": f"{TENSOR_MATCH_SELF} {TENSOR_AUGMENTED}"},
    CastPolicy.BANNED: {
        "nn.functional": "binary_cross_entropy",
        "": TORCH_REFUSED_IN_PLACE,
        "Tensor": TENSOR_REFUSED_IN_PLACE,
    },
}


def listed_by_apex(cast: CastPolicy) -> set:
    """The function objects that apex's lists give `cast`; torch names also where Tensor has them."""
    homes = {"nn.functional": F, "": torch, "Tensor": torch.Tensor}
    found = {getattr(homes[home], name) for home, names in TRANSCRIBED[cast].items() for name in names.split()}
    if cast in (CastPolicy.SEQUENCE_PROMOTE, CastPolicy.MATCH_SELF):
        return found
    return found | {
        getattr(torch.Tensor, name) for name in TRANSCRIBED[cast][""].split() if hasattr(torch.Tensor, name)
    }


@pytest.mark.parametrize("cast", TRANSCRIBED, ids=lambda cast: cast.value)
def test_rows_hold_apex_lists_and_mark_what_was_added(cast):
    rows = APEX.rows_of(cast)
    ours = {resolve(name) for row in rows for name in row.spellings if name not in row.added}
    assert ours - {None} == listed_by_apex(cast)


def test_there_are_as_many_names_as_apex_has():
    assert len(FUNCTIONAL_FP32.split()) == 29
    assert len(TORCH_FP32.split()) == 23
    assert len(TORCH_PROMOTE.split()) == 16
    assert len(TORCH_REFUSED_IN_PLACE.split()) == 12
    assert len(TENSOR_REFUSED_IN_PLACE.split()) == 17


def test_every_spelling_is_a_function_of_the_running_torch_or_marked():
    spellings = [name for row in APEX.rows for name in row.spellings]
    assert [name for name in spellings if callable(resolve(name)) == absent(name)] == []


class Seen(TorchFunctionMode):
    """Collects the function objects that torch hands to a mode."""

    def __init__(self):
        super().__init__()
        self.funcs = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.funcs.append(func)
        return func(*args, **(kwargs or {}))


def test_operators_reach_the_engine_as_listed_functions():
    x, y = torch.ones(2, 2), torch.ones(2, 2)
    operations = [
        *(lambda: x + y, lambda: 1 + x, lambda: x - y, lambda: 1 - x, lambda: x * y, lambda: 2 * x, lambda: x / y),
        *(lambda: 1 / x, lambda: x == y, lambda: x != y, lambda: x < y, lambda: x <= y, lambda: x > y, lambda: x >= y),
        *(lambda: x**2, lambda: 2**x, lambda: x @ y, lambda: x.__iadd__(y), lambda: x.__ipow__(2)),
        lambda: x.__setitem__(0, y[0]),
    ]
    with Seen() as seen:
        for operation in operations:
            operation()
    unlisted = [func for func in seen.funcs if APEX.rule(func) is None]
    assert [func.__name__ for func in unlisted] == ["__getitem__"]
    assert len(seen.funcs) == len(operations) + 1


def test_python_functions_with_listed_ops_inside_are_listed_or_opened():
    listed = {row.op for cast in (CastPolicy.LOWER_PRECISION_FP, CastPolicy.FP32) for row in APEX.rows_of(cast)}
    functions = {func for family in get_overridable_functions().values() for func in family}
    bodies = {func: getattr(func, "__wrapped__", func) for func in functions}
    python = {func: body for func, body in bodies.items() if isinstance(body, types.FunctionType)}
    assert len(python) > 100
    unseen = {
        func.__name__
        for func, body in python.items()
        if listed & set(body.__code__.co_names) and APEX.rule(func) is None and func not in COMPOSITES
    }
    # An SVD has no half kernel, so what precedes it is no loss; sym_sum adds sizes, not tensors.
    assert unseen <= {"pca_lowrank", "sym_sum"}


def test_every_reason_names_its_op_and_every_row_but_fall_through_has_a_number():
    for row in APEX.rows:
        assert row.reason.startswith(f"{row.op}: ")
        assert row.cast is CastPolicy.FALL_THROUGH or any(
            letter.isdigit() for letter in row.reason.removeprefix(row.op)
        )


def half(value):
    return torch.tensor(value, dtype=torch.float16)


def says(op, *numbers):
    """Return whether the reason of `op` contains these numbers."""
    reason = next(row.reason for row in APEX.rows if row.op == op)
    return all(number in reason for number in numbers)


@pytest.mark.parametrize(
    ("op", "number", "func", "largest_finite"),
    [
        ("poisson_nll_loss", "11.09", math.exp, 11.09),
        ("soft_margin_loss", "11.09", math.exp, 11.09),
        ("exp", "11.09", math.exp, 11.09),
        ("expm1", "11.09", math.expm1, 11.09),
        ("cosh", "11.78", math.cosh, 11.78),
        ("sinh", "11.78", math.sinh, 11.78),
    ],
)
def test_overflow_thresholds(op, number, func, largest_finite):
    assert says(op, number)
    assert torch.isfinite(half(func(largest_finite)))
    assert torch.isinf(half(func(largest_finite + 0.01)))


def test_numbers_of_the_pointwise_rows():
    assert says("exp", "-17.33")
    assert half(math.exp(-17.34)) == 0 < half(math.exp(-17.32))
    assert says("reciprocal", "1.526e-05")
    assert torch.isinf(half(1 / 1.526e-5))
    assert torch.isfinite(half(1 / 1.527e-5))
    assert says("pow", "256")
    assert torch.isinf(half(256.0).float().square().half())
    assert torch.isfinite(half(255.875).float().square().half())
    assert says("acos", "2^-11", "0.031")
    assert says("asin", "2^-11", "0.031")
    before_one = 1 - 2.0**-11
    assert torch.nextafter(half(1.0), half(0.0)) == before_one
    assert round(math.acos(before_one), 3) == round(math.pi / 2 - math.asin(before_one), 3) == 0.031
    assert says("erfinv", "2.47")
    assert round(torch.erfinv(torch.tensor(before_one)).item(), 2) == 2.47
    assert says("tan", "2^-10", "2066.9", "-2029.5")
    below = half(math.pi / 2)
    above = torch.nextafter(below, half(2.0))
    assert above - below == 2.0**-10
    assert [round(math.tan(angle.item()), 1) for angle in (below, above)] == [2066.9, -2029.5]
    assert says("gelu", "-5.92e-09", "x = -6")
    assert f"{F.gelu(torch.tensor(-6.0, dtype=torch.float64)).item():.2e}" == "-5.92e-09"
    assert F.gelu(half(-6.0)) == 0


def test_ops_that_torch_guards_against_overflow_are_not_said_to_overflow():
    """Compared with torch's own ops in half: what the reason says happens, and no exp overflows."""
    large = half([20.0, 60000.0, 0.0])
    for op in (torch.softmax, F.softmin, torch.log_softmax, torch.logsumexp, torch.logcumsumexp):
        assert not op(large, 0).isnan().any()
        assert not says(op.__name__, "overflows")
    assert says("softmax", "2^-25")
    assert says("softmin", "2^-25")
    assert torch.softmax(half([0.0, -17.3]), 0)[1] > 0 == torch.softmax(half([0.0, -17.4]), 0)[1]
    assert all(says(op, "from 8 up", "2^-7") for op in ("log_softmax", "logsumexp", "logcumsumexp", "cross_entropy"))
    assert torch.nextafter(half(8.0), half(9.0)) - half(8.0) == 2.0**-7
    assert F.cross_entropy(half([[20.0, 0.0, 60000.0]]), torch.tensor([1])) == 60000
    assert says("softplus", "-17.33")
    assert F.softplus(half(60000.0)) == 60000
    assert F.softplus(half(-17.3)) > 0 == F.softplus(half(-17.4))
    assert says("binary_cross_entropy_with_logits", "17.33")
    assert says("multilabel_soft_margin_loss", "17.33")
    assert F.binary_cross_entropy_with_logits(half([-60000.0, -17.4]), half([0.0, 0.0])) == 0
    assert F.logsigmoid(half(17.4)) == 0 == F.logsigmoid(half(60000.0))
    assert F.smooth_l1_loss(half([300.0]), half([0.0])) == F.huber_loss(half([300.0]), half([0.0])) == 299.5
    assert torch.isfinite(torch.std(half([300.0, -300.0])))
    assert torch.linalg.vector_norm(half([300.0, 400.0])) == 500
    assert all(says(op, "would overflow") for op in ("norm", "layer_norm", "std", "dist"))
    assert torch.isinf(F.mse_loss(half([300.0]), half([0.0])))
    assert torch.isinf(torch.var(half([300.0, -300.0])))
    assert torch.isinf(F.soft_margin_loss(half([20.0]), half([-1.0])))


@pytest.mark.parametrize(
    ("op", "value", "step"), [("log", -16.64, "2^-6"), ("log10", -7.22, "2^-8"), ("log2", -24, "2^-6")]
)
def test_numbers_of_the_logarithms(op, value, step):
    assert says(op, str(value), step)
    exact = getattr(math, op)(2.0**-24)
    assert round(exact, 2) == value
    largest = half(abs(exact))
    assert torch.nextafter(largest, half(60000.0)) - largest == 2.0 ** -int(step[3:])


def test_numbers_of_sums_squares_and_products():
    assert says("sum", "65520", "2048")
    assert says("norm", "256", "65536", "65504")
    assert says("prod", "65536", "65504")
    assert half(65504.0) == 65504
    assert torch.isinf(half(65520.0))
    assert torch.isfinite(half(65519.0))
    assert half(2048.0) + half(1.0) == 2048
    assert 256**2 == 2**16 == 65536
    assert says("linear", "11 + 11 bits", "24", "2^-11")
    assert (torch.finfo(torch.float16).eps, torch.finfo(torch.float32).eps) == (2.0**-10, 2.0**-23)
    assert says("interpolate", "1024")
    assert half(1024.0) + half(0.5) == 1024
    assert half(1023.0) + half(0.5) == 1023.5
    assert says("grid_sample", "4096")
    assert 2 / 4096 == 2.0**-11


def test_numbers_of_the_epsilons_and_the_rest():
    assert says("normalize", "1e-12")
    assert half(1e-12) == 0
    assert says("cosine_similarity", "1e-08")
    assert says("rsqrt", "1e-08")
    assert half(1e-8) == 0
    assert says("eq", "0.09998")
    assert round(half(0.1).item(), 5) == 0.09998
    assert says("log1p", "11.09", "2^-7")
    assert round(math.log1p(65504), 2) == 11.09
    assert torch.nextafter(half(11.09), half(12.0)) - half(11.09) == 2.0**-7
    assert says("binary_cross_entropy", "8.32")
    sigmoid = [torch.sigmoid(torch.tensor(logit)).half() for logit in (8.31, 8.32)]
    assert sigmoid[0] < 1 == sigmoid[1]
    assert torch.isinf(torch.log(1 - sigmoid[1]))
