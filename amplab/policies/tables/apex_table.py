"""The lists of apex.amp as one op table, with the reason for every row.

Rows are written with the functions of `op_rows`. The spellings in `added` are newer than apex or missing from
its lists (scaled_dot_product_attention, einsum, rms_norm, torch.softmax, …). The bmm family is lower
precision on every build.

Facts about float16 used below: the largest value is 65504, and values from 65520 up round to infinity.
The smallest positive value is 2^-24, and values up to 2^-25 round to zero. It has 11 significant bits, so
the relative rounding error is at most 2^-11, and odd integers above 2048 are not representable.

Differences from apex's lists: augmented assignments (`x += y`, `x **= y`) keep the storage and the dtype of
x, while apex bound x to a new float32 tensor; torch.softmax runs in float32, as F.softmax does.
"""

from __future__ import annotations

from amplab.policies.tables.op_rows import (
    EXP,
    GEMM,
    LOG_SIGMOID,
    LOG_SUM,
    NORM,
    RECURRENT,
    SOFTMAX,
    SQUARE,
    SUM,
    WIDEST,
    c,
    f,
    m,
    rows,
    t,
)
from amplab.policies.tables.op_table import CastPolicy, OpTable

__all__ = ["APEX"]

_COMPARE = "0.1 rounds to 0.09998 in float16, so values are compared in the wider dtype"
_IN_PLACE = "writes to existing storage (2 bytes per element for float16), so the other arguments are cast to its dtype"
_NO_HALF = "float16 storage (largest value 65504) cannot hold the float32 result of this op"
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc")

_LOWER = rows(
    CastPolicy.LOWER_PRECISION_FP,
    *((name, GEMM, (f"torch.{name}", *f(name))) for name in _CONVOLUTIONS),
    *((name, GEMM, (), (f"torch.{name}",)) for name in ("convolution", "_convolution")),
    ("cudnn_convolution", GEMM, (), ("torch.cudnn_convolution", "torch.cudnn_convolution_transpose")),
    ("linear", GEMM, f("linear")),
    ("prelu", "one multiplication per element, with a rounding error of at most 2^-11", t("prelu"), f("prelu")),
    ("addr", "one multiplication and one addition per element, each with a rounding error of at most 2^-11", t("addr")),
    *((name, GEMM, t(name)) for name in ("addmm", "addmv", "mm", "mv", "addbmm", "baddbmm", "bmm")),
    ("matmul", GEMM, (*t("matmul"), *m("__matmul__")), (*m("__rmatmul__"), "torch.linalg.matmul")),
    ("inner", GEMM, (), t("inner")),
    ("vecdot", GEMM, (), ("torch.linalg.vecdot",)),
    ("einsum", GEMM, (), ("torch.einsum",)),
    ("tensordot", GEMM, (), ("torch.tensordot",)),
    ("chain_matmul", GEMM, (), ("torch.chain_matmul", "torch.linalg.multi_dot")),
    (
        "scaled_dot_product_attention",
        "its two products are exact in float32 (11 + 11 bits fit in 24), and its softmax runs in float32",
        (),
        (*f("scaled_dot_product_attention"), "torch._scaled_dot_product_flash_attention"),
    ),
    *(
        (name, RECURRENT, (f"torch.{name}",))
        for name in ("lstm", "gru", "rnn_tanh", "lstm_cell", "gru_cell", "rnn_tanh_cell")
    ),
    *((name, GEMM, (f"torch.{name}",)) for name in ("rnn_relu", "rnn_relu_cell")),
    aten={
        "cudnn_convolution": "cudnn_convolution cudnn_convolution_transpose",
        "vecdot": "linalg_vecdot",
        "chain_matmul": "chain_matmul linalg_multi_dot",
        "scaled_dot_product_attention": "scaled_dot_product_attention _scaled_dot_product_flash_attention",
        "lstm": "lstm _cudnn_rnn mkldnn_rnn_layer",
        "gru": "gru _cudnn_rnn",
        "rnn_tanh": "rnn_tanh _cudnn_rnn",
        "rnn_relu": "rnn_relu _cudnn_rnn",
        "lstm_cell": "lstm_cell _thnn_fused_lstm_cell",
        "gru_cell": "gru_cell _thnn_fused_gru_cell",
    },
)

_FP32_POINTWISE = rows(
    CastPolicy.FP32,
    (
        "acos",
        "its slope is infinite at 1, where one float16 step (2^-11) changes the angle by 0.031",
        t("acos"),
        t("arccos"),
    ),
    (
        "asin",
        "its slope is infinite at 1, where one float16 step (2^-11) changes the angle by 0.031",
        t("asin"),
        t("arcsin"),
    ),
    ("cosh", "overflows float16 above 11.78", t("cosh")),
    ("sinh", "overflows float16 above 11.78", t("sinh")),
    ("tan", "one float16 step (2^-10) across pi/2 changes it from 2066.9 to -2029.5", t("tan")),
    (
        "erfinv",
        "is infinite at 1, but only 2.47 one float16 step (2^-11) below 1",
        t("erfinv"),
        ("torch.special.erfinv",),
    ),
    ("exp", "overflows float16 above 11.09 and underflows to zero below -17.33", t("exp")),
    ("expm1", "overflows float16 above 11.09", t("expm1"), ("torch.special.expm1",)),
    ("log", "reaches -16.64, where float16 has a spacing of 2^-6", t("log")),
    ("log10", "reaches -7.22, where float16 has a spacing of 2^-8", t("log10")),
    ("log2", "reaches -24, where float16 has a spacing of 2^-6", t("log2")),
    ("log1p", "reaches 11.09, where float16 has a spacing of 2^-7", (), (*t("log1p"), "torch.special.log1p")),
    ("reciprocal", "overflows float16 for |x| below 1.526e-05", t("reciprocal")),
    ("rsqrt", "its argument is usually var + eps, and an eps of 1e-08 is zero in float16", t("rsqrt")),
    (
        "pow",
        "squares overflow float16 from 256 up",
        (*t("pow"), *m("__pow__", "__rpow__")),
    ),
    ("float_power", "squares overflow float16 from 256 up", (), t("float_power")),
    ("gelu", "approaches zero from below: at x = -6 it is -5.92e-09, which is zero in float16", f("gelu")),
    ("softplus", "is about exp(x) for negative x, and zero in float16 below -17.33", f("softplus")),
    (
        "cpu",
        "copies to the CPU, where many ops have no float16 kernel; float32 keeps all 11 significant bits",
        m("cpu"),
    ),
    aten={
        "cpu": "to _to_copy",
    },
)

_UPSAMPLE = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)

_FP32_REDUCTIONS = rows(
    CastPolicy.FP32,
    ("softmax", SOFTMAX, f("softmax"), (*t("softmax"), "torch.special.softmax")),
    ("softmin", SOFTMAX, f("softmin")),
    ("log_softmax", LOG_SUM, f("log_softmax"), (*t("log_softmax"), "torch.special.log_softmax")),
    ("logsumexp", LOG_SUM, (), (*t("logsumexp"), "torch.special.logsumexp")),
    ("logcumsumexp", LOG_SUM, (), t("logcumsumexp")),
    ("cumprod", "the product of sixteen factors of 2 is 65536, above the float16 maximum of 65504", t("cumprod")),
    ("prod", "the product of sixteen factors of 2 is 65536, above the float16 maximum of 65504", t("prod")),
    ("cumsum", SUM, t("cumsum")),
    ("sum", SUM, t("sum")),
    ("nansum", SUM, (), t("nansum")),
    ("std", NORM, t("std"), ("torch.std_mean",)),
    ("var", SQUARE, t("var"), ("torch.var_mean",)),
    ("norm", NORM, t("norm"), ("torch.linalg.norm",)),
    ("vector_norm", NORM, (), ("torch.linalg.vector_norm",)),
    ("matrix_norm", NORM, (), ("torch.linalg.matrix_norm",)),
    ("nuclear_norm", NORM, (), ("torch.nuclear_norm",)),
    ("frobenius_norm", NORM, (), ("torch.frobenius_norm",)),
    ("dist", NORM, t("dist")),
    ("cdist", NORM, (), ("torch.cdist",)),
    ("pdist", NORM, (), f("pdist")),
    ("pairwise_distance", NORM, (), f("pairwise_distance")),
    ("renorm", NORM, t("renorm")),
    ("layer_norm", NORM, f("layer_norm"), ("torch.layer_norm", "torch.native_layer_norm")),
    ("group_norm", NORM, f("group_norm"), ("torch.group_norm",)),
    ("rms_norm", NORM, (), (*f("rms_norm"), "torch.rms_norm")),
    ("local_response_norm", SQUARE, f("local_response_norm")),
    ("normalize", "divides by max(norm, eps), and its eps of 1e-12 is zero in float16", f("normalize")),
    ("cosine_similarity", "divides by max(norm, eps), and its eps of 1e-08 is zero in float16", f("cosine_similarity")),
    (
        "interpolate",
        "source coordinates in float16 would have no fractional part above 1024",
        f("interpolate"),
        f("upsample", "upsample_nearest", "upsample_bilinear"),
    ),
    ("upsample", "source coordinates in float16 would have no fractional part above 1024", (), c(*_UPSAMPLE)),
    (
        "grid_sample",
        "float16 coordinates near 1 have a spacing of 2^-11, which is one pixel of a 4096-pixel-wide image",
        f("grid_sample"),
        ("torch.grid_sampler",),
    ),
    aten={
        "softmin": "neg softmax",
        "std": "std std_mean",
        "var": "var var_mean",
        "norm": "norm linalg_norm linalg_vector_norm linalg_matrix_norm",
        "vector_norm": "linalg_vector_norm",
        "matrix_norm": "linalg_matrix_norm",
        "layer_norm": "layer_norm native_layer_norm",
        "local_response_norm": "avg_pool2d avg_pool3d pow",
        "normalize": "linalg_vector_norm clamp_min div",
        "interpolate": " ".join(_UPSAMPLE),
        "upsample": " ".join(_UPSAMPLE),
        "grid_sample": "grid_sampler",
    },
)

_FP32_LOSSES = rows(
    CastPolicy.FP32,
    ("poisson_nll_loss", EXP, f("poisson_nll_loss"), ("torch.poisson_nll_loss",)),
    ("cosine_embedding_loss", SQUARE, f("cosine_embedding_loss"), ("torch.cosine_embedding_loss",)),
    ("cross_entropy", f"computes a log_softmax, {LOG_SUM}", f("cross_entropy"), c("cross_entropy_loss")),
    ("hinge_embedding_loss", SUM, f("hinge_embedding_loss"), ("torch.hinge_embedding_loss",)),
    ("kl_div", "log targets reach -16.64, where float16 has a spacing of 2^-6", f("kl_div"), ("torch.kl_div",)),
    ("l1_loss", SUM, f("l1_loss"), c("l1_loss")),
    ("mse_loss", SQUARE, f("mse_loss"), c("mse_loss")),
    ("huber_loss", SUM, (), (*f("huber_loss"), *c("huber_loss"))),
    ("smooth_l1_loss", SUM, f("smooth_l1_loss"), c("smooth_l1_loss")),
    ("gaussian_nll_loss", SQUARE, (), f("gaussian_nll_loss")),
    ("margin_ranking_loss", SUM, f("margin_ranking_loss"), ("torch.margin_ranking_loss",)),
    ("multilabel_margin_loss", SUM, f("multilabel_margin_loss"), c("multilabel_margin_loss")),
    ("multilabel_soft_margin_loss", LOG_SIGMOID, f("multilabel_soft_margin_loss")),
    ("multi_margin_loss", SUM, f("multi_margin_loss"), c("multi_margin_loss")),
    ("nll_loss", SUM, f("nll_loss"), c("nll_loss", "nll_loss2d", "nll_loss_nd")),
    (
        "binary_cross_entropy_with_logits",
        LOG_SIGMOID,
        f("binary_cross_entropy_with_logits"),
        ("torch.binary_cross_entropy_with_logits",),
    ),
    ("soft_margin_loss", EXP, f("soft_margin_loss"), c("soft_margin_loss")),
    (
        "triplet_margin_loss",
        NORM,
        f("triplet_margin_loss"),
        ("torch.triplet_margin_loss",),
    ),
    ("triplet_margin_with_distance_loss", NORM, (), f("triplet_margin_with_distance_loss")),
    ("ctc_loss", f"adds probabilities in log space, {LOG_SUM}", f("ctc_loss"), ("torch.ctc_loss",)),
    aten={
        "cross_entropy": "cross_entropy_loss log_softmax nll_loss nll_loss2d",
        "gaussian_nll_loss": "log pow mean",
        "multilabel_soft_margin_loss": "log_sigmoid mul mean",
        "multilabel_margin_loss": "multilabel_margin_loss multilabel_margin_loss_forward",
        "nll_loss": "nll_loss nll_loss2d",
        "triplet_margin_with_distance_loss": "pairwise_distance clamp_min mean",
    },
)

_PROMOTE = rows(
    CastPolicy.PROMOTE,
    *((name, WIDEST, t(name)) for name in ("addcdiv", "addcmul", "atan2", "dot")),
    ("cross", WIDEST, t("cross")),
    ("linalg_cross", WIDEST, (), ("torch.linalg.cross",)),
    ("bilinear", WIDEST, ("torch.bilinear", *f("bilinear"))),
    ("add", WIDEST, (*t("add"), *m("__add__", "__radd__"))),
    ("sub", WIDEST, m("__sub__", "__rsub__"), (*t("sub"), *t("subtract"), "torch.rsub")),
    ("mul", WIDEST, (*t("mul"), *m("__mul__", "__rmul__")), t("multiply")),
    (
        "div",
        WIDEST,
        (*t("div"), *m("__div__", "__rdiv__", "__truediv__", "__rtruediv__")),
        (*t("divide"), *t("true_divide")),
    ),
    *((name, _COMPARE, (*t(name), *m(f"__{name}__"))) for name in ("eq", "ne", "ge", "gt", "le", "lt")),
    ("equal", _COMPARE, t("equal")),
    *(
        (name, WIDEST, (), t(name))
        for name in ("vdot", "lerp", "scatter_add", "index_add", "index_copy", "index_put", "masked_scatter", "where")
    ),
)

_SEQUENCE = rows(
    CastPolicy.SEQUENCE_PROMOTE,
    ("cat", WIDEST, ("torch.cat",), ("torch.concat", "torch.concatenate")),
    (
        "stack",
        WIDEST,
        ("torch.stack",),
        ("torch.hstack", "torch.vstack", "torch.dstack", "torch.column_stack", "torch.row_stack"),
    ),
    aten={
        "stack": "stack hstack vstack dstack column_stack row_stack",
    },
)

_MATCH_SELF = rows(
    CastPolicy.MATCH_SELF,
    *(
        (f"{name}_", _IN_PLACE, m(f"{name}_"))
        for name in ("addmm", "addmv", "addr", "addcdiv", "addcmul", "atan2", "eq", "ge", "gt", "le", "lt", "ne")
    ),
    *(
        (f"{name}_", _IN_PLACE, (), m(f"{name}_"))
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
    ("add_", _IN_PLACE, m("add_", "__iadd__")),
    ("sub_", _IN_PLACE, m("__isub__"), m("sub_", "subtract_")),
    ("mul_", _IN_PLACE, m("mul_", "__imul__"), m("multiply_")),
    ("div_", _IN_PLACE, m("div_", "__idiv__", "__itruediv__"), m("divide_", "true_divide_")),
    ("__ipow__", _IN_PLACE, m("__ipow__")),
    ("__setitem__", _IN_PLACE, (), m("__setitem__")),
    aten={
        "__ipow__": "pow_",
        "__setitem__": "copy_ index_put_",
    },
)

_BANNED = rows(
    CastPolicy.BANNED,
    (
        "binary_cross_entropy",
        "a float16 sigmoid is exactly 1 from 8.32 up, and log(1 - 1) is -inf",
        f("binary_cross_entropy"),
        c("binary_cross_entropy"),
    ),
    *(
        (f"{name}_", _NO_HALF, t(f"{name}_"))
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
    *((f"{name}_", _NO_HALF, m(f"{name}_")) for name in ("erfinv", "pow", "cumprod", "cumsum", "renorm")),
)

_FALL_THROUGH = rows(
    CastPolicy.FALL_THROUGH,
    (
        "multi_head_attention_forward",
        "its projections, products and softmax follow their own rows",
        (),
        f("multi_head_attention_forward"),
    ),
    (
        "linear_cross_entropy",
        "its linear and cross_entropy follow their own rows",
        (),
        f("linear_cross_entropy>=2.13"),
    ),
    ("gumbel_softmax", "its log, division and softmax follow their own rows", (), f("gumbel_softmax")),
    ("lp_pool", "its power and pooling follow their own rows", (), f("lp_pool1d", "lp_pool2d", "lp_pool3d")),
    (
        "backward",
        "the ops recomputed inside it follow their own rows",
        (),
        (*m("backward"), "torch.autograd.backward", "torch.autograd.grad"),
    ),
    aten={
        "multi_head_attention_forward": "",
        "linear_cross_entropy": "",
        "gumbel_softmax": "",
        "lp_pool": "",
        "backward": "",
    },
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
"""The lists of apex.amp, extended with newer torch ops; the default table of a policy."""
