"""The lists of apex.amp as one op table, with the reason for every row.

Each row is written as (op, reason, spellings); `t` marks a name that is both a torch function
and a Tensor method, `f` a torch.nn.functional one. What stands in `added` came after apex or was
missed by its lists (scaled_dot_product_attention, einsum, rms_norm, torch.softmax, …).
The bmm family is lower precision on every build.

Numbers used below, half being float16: 65504 is its largest value and everything from 65520 on
rounds to infinity; 2^-24 is its smallest value and everything up to 2^-25 rounds to zero; it has
11 significant bits, so rounding costs at most 2^-11 of a value, and above 2048 odd integers are lost.

Differences from apex's lists: augmented assignments (`x += y`, `x **= y`) keep the storage and the
dtype of x, where apex bound x to a new float32 tensor; torch.softmax is float32, not only F.softmax.
"""

from __future__ import annotations

from amplab.policies.cast_policy import CastPolicy
from amplab.policies.op_table import OpRule, OpTable

__all__ = ["APEX"]

_GEMM = "products of two halves are exact in float32 (11 + 11 bits fit in 24), so only the sum is rounded, by 2^-11"
_RECURRENT = "its gates are products of halves, exact in float32 (11 + 11 bits fit in 24), and its state stays within 1"
_SQUARE = "squares its elements, and 256 squared is 65536, above half's largest value 65504"
_SUM = "sums, and half reaches infinity at 65520 and cannot count by ones above 2048"
_EXP = "exp overflows half above 11.09"
_WIDEST = "with half (11 significant bits) and float32 (24) the wider type holds both arguments exactly"
_COMPARE = "0.1 is 0.09998 in half, so values are compared in the wider type"
_IN_PLACE = "writes into existing storage, 2 bytes an element in half, so the other arguments take its dtype"
_NO_HALF = "half storage (largest value 65504) cannot hold what this op computes in float32"


def _t(*names: str) -> tuple[str, ...]:
    """A torch function that is a Tensor method too."""
    return tuple(f"{home}.{name}" for name in names for home in ("torch", "torch.Tensor"))


def _f(*names: str) -> tuple[str, ...]:
    return tuple(f"torch.nn.functional.{name}" for name in names)


def _m(*names: str) -> tuple[str, ...]:
    """A Tensor method or operator only."""
    return tuple(f"torch.Tensor.{name}" for name in names)


def _row(cast: CastPolicy, op: str, reason: str, spellings: tuple[str, ...], added: tuple[str, ...] = ()) -> OpRule:
    return OpRule(op, cast, f"{op}: {reason}", spellings + added, added)


def _rows(cast: CastPolicy, *rows: tuple) -> tuple[OpRule, ...]:
    return tuple(_row(cast, *row) for row in rows)


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc")

_LOWER = _rows(
    CastPolicy.LOWER_PRECISION_FP,
    *((name, _GEMM, (f"torch.{name}", *_f(name))) for name in _CONVOLUTIONS),
    ("convolution", _GEMM, (), ("torch.convolution", "torch._convolution")),
    ("linear", _GEMM, _f("linear")),
    ("prelu", "one multiplication an element, rounded by at most 2^-11", _t("prelu"), _f("prelu")),
    ("addr", "one multiplication and one addition an element, each rounded by at most 2^-11", _t("addr")),
    *((name, _GEMM, _t(name)) for name in ("addmm", "addmv", "mm", "mv", "addbmm", "baddbmm", "bmm")),
    ("matmul", _GEMM, (*_t("matmul"), *_m("__matmul__")), (*_m("__rmatmul__"), "torch.linalg.matmul")),
    ("inner", _GEMM, (), (*_t("inner"), "torch.linalg.vecdot")),
    ("einsum", _GEMM, (), ("torch.einsum",)),
    ("tensordot", _GEMM, (), ("torch.tensordot",)),
    ("chain_matmul", _GEMM, (), ("torch.chain_matmul", "torch.linalg.multi_dot")),
    (
        "scaled_dot_product_attention",
        "two products of halves, exact in float32 (11 + 11 bits fit in 24), and a softmax kept in float32 between",
        (),
        _f("scaled_dot_product_attention"),
    ),
    *(
        (name, _RECURRENT, (f"torch.{name}",))
        for name in ("lstm", "gru", "rnn_tanh", "lstm_cell", "gru_cell", "rnn_tanh_cell")
    ),
    *((name, _GEMM, (f"torch.{name}",)) for name in ("rnn_relu", "rnn_relu_cell")),
)

_FP32_POINTWISE = _rows(
    CastPolicy.FP32,
    ("acos", "its slope is infinite at 1, where one step of half (2^-11) is 0.031 of angle", _t("acos"), _t("arccos")),
    ("asin", "its slope is infinite at 1, where one step of half (2^-11) is 0.031 of angle", _t("asin"), _t("arcsin")),
    ("cosh", "overflows half above 11.78", _t("cosh")),
    ("sinh", "overflows half above 11.78", _t("sinh")),
    ("tan", "one step of half (2^-10) across pi/2 takes it from 2066.9 to -2029.5", _t("tan")),
    (
        "erfinv",
        "is infinite at 1, and one step of half (2^-11) before it only 2.47",
        _t("erfinv"),
        ("torch.special.erfinv",),
    ),
    ("exp", "overflows half above 11.09 and is zero below -17.33", _t("exp")),
    ("expm1", "overflows half above 11.09", _t("expm1"), ("torch.special.expm1",)),
    ("log", "reaches -16.64, where half steps by 2^-6", _t("log")),
    ("log10", "reaches -7.22, where half steps by 2^-8", _t("log10")),
    ("log2", "reaches -24, where half steps by 2^-6", _t("log2")),
    ("log1p", "1 + x loses x below 2^-11 in half", (), (*_t("log1p"), "torch.special.log1p")),
    ("reciprocal", "overflows half for |x| below 1.526e-05", _t("reciprocal")),
    ("rsqrt", "follows var + eps, and an eps of 1e-08 is zero in half", _t("rsqrt")),
    (
        "pow",
        "squares overflow half from 256 on",
        (*_t("pow"), *_m("__pow__", "__rpow__")),
        ("torch.float_power", *_m("float_power")),
    ),
    ("gelu", "1 + erf(x / sqrt 2) is 6.33e-05 at x = -4, under half's step of 2^-11 below 1", _f("gelu")),
    ("softplus", _EXP, _f("softplus")),
    ("cpu", "hands results to the host, where many ops lack half; float32 keeps all 11 of its bits", _m("cpu")),
)

_FP32_REDUCTIONS = _rows(
    CastPolicy.FP32,
    ("softmax", _EXP, _f("softmax"), (*_t("softmax"), "torch.special.softmax")),
    ("softmin", _EXP, _f("softmin")),
    ("log_softmax", _EXP, _f("log_softmax"), (*_t("log_softmax"), "torch.special.log_softmax")),
    ("logsumexp", _EXP, (), (*_t("logsumexp"), "torch.special.logsumexp")),
    ("logcumsumexp", _EXP, (), _t("logcumsumexp")),
    ("cumprod", "sixteen factors of 2 are 65536, above half's largest value 65504", _t("cumprod")),
    ("prod", "sixteen factors of 2 are 65536, above half's largest value 65504", _t("prod")),
    ("cumsum", _SUM, _t("cumsum")),
    ("sum", _SUM, _t("sum"), _t("nansum")),
    ("std", _SQUARE, _t("std"), ("torch.std_mean",)),
    ("var", _SQUARE, _t("var"), ("torch.var_mean",)),
    (
        "norm",
        _SQUARE,
        _t("norm"),
        (
            "torch.linalg.norm",
            "torch.linalg.vector_norm",
            "torch.linalg.matrix_norm",
            "torch.nuclear_norm",
            "torch.frobenius_norm",
        ),
    ),
    ("dist", _SQUARE, _t("dist")),
    ("cdist", _SQUARE, (), ("torch.cdist",)),
    ("pdist", _SQUARE, (), _f("pdist")),
    ("pairwise_distance", _SQUARE, (), _f("pairwise_distance")),
    ("renorm", _SQUARE, _t("renorm")),
    ("layer_norm", _SQUARE, _f("layer_norm"), ("torch.layer_norm",)),
    ("group_norm", _SQUARE, _f("group_norm"), ("torch.group_norm",)),
    ("rms_norm", _SQUARE, (), (*_f("rms_norm"), "torch.rms_norm")),
    ("local_response_norm", _SQUARE, _f("local_response_norm")),
    ("normalize", "divides by max(norm, eps), and its eps of 1e-12 is zero in half", _f("normalize")),
    ("cosine_similarity", "divides by max(norm, eps), and its eps of 1e-08 is zero in half", _f("cosine_similarity")),
    (
        "interpolate",
        "source coordinates lose their fraction in half above 1024",
        _f("interpolate"),
        _f("upsample", "upsample_nearest", "upsample_bilinear"),
    ),
    (
        "grid_sample",
        "half coordinates near 1 step by 2^-11, one pixel of a 4096 wide image",
        _f("grid_sample"),
        ("torch.grid_sampler",),
    ),
)

_FP32_LOSSES = _rows(
    CastPolicy.FP32,
    ("poisson_nll_loss", _EXP, _f("poisson_nll_loss"), ("torch.poisson_nll_loss",)),
    ("cosine_embedding_loss", _SQUARE, _f("cosine_embedding_loss"), ("torch.cosine_embedding_loss",)),
    ("cross_entropy", f"takes a softmax, and {_EXP}", _f("cross_entropy")),
    ("hinge_embedding_loss", _SUM, _f("hinge_embedding_loss"), ("torch.hinge_embedding_loss",)),
    ("kl_div", "log targets reach -16.64, where half steps by 2^-6", _f("kl_div"), ("torch.kl_div",)),
    ("l1_loss", _SUM, _f("l1_loss")),
    ("mse_loss", _SQUARE, _f("mse_loss")),
    ("huber_loss", _SQUARE, (), _f("huber_loss")),
    ("smooth_l1_loss", _SQUARE, _f("smooth_l1_loss")),
    ("gaussian_nll_loss", _SQUARE, (), _f("gaussian_nll_loss")),
    ("margin_ranking_loss", _SUM, _f("margin_ranking_loss"), ("torch.margin_ranking_loss",)),
    ("multilabel_margin_loss", _SUM, _f("multilabel_margin_loss")),
    ("multilabel_soft_margin_loss", _EXP, _f("multilabel_soft_margin_loss")),
    ("multi_margin_loss", _SUM, _f("multi_margin_loss")),
    ("nll_loss", _SUM, _f("nll_loss")),
    (
        "binary_cross_entropy_with_logits",
        _EXP,
        _f("binary_cross_entropy_with_logits"),
        ("torch.binary_cross_entropy_with_logits",),
    ),
    ("soft_margin_loss", _EXP, _f("soft_margin_loss")),
    (
        "triplet_margin_loss",
        _SQUARE,
        _f("triplet_margin_loss"),
        (*_f("triplet_margin_with_distance_loss"), "torch.triplet_margin_loss"),
    ),
    ("ctc_loss", f"adds probabilities as exp of logs, and {_EXP}", _f("ctc_loss"), ("torch.ctc_loss",)),
)

_PROMOTE = _rows(
    CastPolicy.PROMOTE,
    *((name, _WIDEST, _t(name)) for name in ("addcdiv", "addcmul", "atan2", "dot")),
    ("cross", _WIDEST, _t("cross"), ("torch.linalg.cross",)),
    ("bilinear", _WIDEST, ("torch.bilinear", *_f("bilinear"))),
    ("add", _WIDEST, (*_t("add"), *_m("__add__", "__radd__"))),
    ("sub", _WIDEST, _m("__sub__", "__rsub__"), (*_t("sub"), *_t("subtract"), "torch.rsub")),
    ("mul", _WIDEST, (*_t("mul"), *_m("__mul__", "__rmul__")), _t("multiply")),
    (
        "div",
        _WIDEST,
        (*_t("div"), *_m("__div__", "__rdiv__", "__truediv__", "__rtruediv__")),
        (*_t("divide"), *_t("true_divide")),
    ),
    *((name, _COMPARE, (*_t(name), *_m(f"__{name}__"))) for name in ("eq", "ne", "ge", "gt", "le", "lt")),
    ("equal", _COMPARE, _t("equal")),
    *(
        (name, _WIDEST, (), _t(name))
        for name in ("vdot", "lerp", "scatter_add", "index_add", "index_copy", "index_put", "masked_scatter", "where")
    ),
)

_SEQUENCE = _rows(
    CastPolicy.SEQUENCE_PROMOTE,
    ("cat", _WIDEST, ("torch.cat",), ("torch.concat", "torch.concatenate")),
    (
        "stack",
        _WIDEST,
        ("torch.stack",),
        ("torch.hstack", "torch.vstack", "torch.dstack", "torch.column_stack", "torch.row_stack"),
    ),
)

_MATCH_SELF = _rows(
    CastPolicy.MATCH_SELF,
    *(
        (f"{name}_", _IN_PLACE, _m(f"{name}_"))
        for name in ("addmm", "addmv", "addr", "addcdiv", "addcmul", "atan2", "eq", "ge", "gt", "le", "lt", "ne")
    ),
    *(
        (f"{name}_", _IN_PLACE, (), _m(f"{name}_"))
        for name in (
            "addbmm",
            "baddbmm",
            "lerp",
            "scatter",
            "scatter_add",
            "index_add",
            "index_copy",
            "index_put",
            "masked_scatter",
        )
    ),
    ("add_", _IN_PLACE, _m("add_", "__iadd__")),
    ("sub_", _IN_PLACE, _m("__isub__"), _m("sub_", "subtract_")),
    ("mul_", _IN_PLACE, _m("mul_", "__imul__"), _m("multiply_")),
    ("div_", _IN_PLACE, _m("div_", "__idiv__", "__itruediv__"), _m("divide_", "true_divide_")),
    ("__ipow__", _IN_PLACE, _m("__ipow__")),
    ("__setitem__", _IN_PLACE, (), _m("__setitem__")),
)

_BANNED = _rows(
    CastPolicy.BANNED,
    (
        "binary_cross_entropy",
        "a half sigmoid is exactly 1 from 8.32 on, and log(1 - 1) is -inf",
        _f("binary_cross_entropy"),
    ),
    *(
        (f"{name}_", _NO_HALF, _t(f"{name}_"))
        for name in (
            "acos",
            "asin",
            "cosh",
            "exp",
            "expm1",
            "log",
            "log10",
            "log2",
            "reciprocal",
            "rsqrt",
            "sinh",
            "tan",
        )
    ),
    *((f"{name}_", _NO_HALF, _m(f"{name}_")) for name in ("erfinv", "pow", "cumprod", "cumsum", "renorm")),
)

_FALL_THROUGH = _rows(
    CastPolicy.FALL_THROUGH,
    (
        "multi_head_attention_forward",
        "its projections, products and softmax follow their own rows",
        (),
        _f("multi_head_attention_forward"),
    ),
    (
        "linear_cross_entropy",
        "its linear and cross_entropy follow their own rows",
        (),
        _f("linear_cross_entropy>=2.13"),
    ),
    ("gumbel_softmax", "its log, division and softmax follow their own rows", (), _f("gumbel_softmax")),
    ("lp_pool", "its power and pooling follow their own rows", (), _f("lp_pool1d", "lp_pool2d", "lp_pool3d")),
    (
        "backward",
        "ops recomputed inside it follow their own rows",
        (),
        (*_m("backward"), "torch.autograd.backward", "torch.autograd.grad"),
    ),
)

APEX = OpTable(
    "apex",
    _LOWER
    + _FP32_POINTWISE
    + _FP32_REDUCTIONS
    + _FP32_LOSSES
    + _PROMOTE
    + _SEQUENCE
    + _MATCH_SELF
    + _BANNED
    + _FALL_THROUGH,
)
"""apex.amp's lists with what torch has gained since; the default of every policy."""
