"""The lists of torch.autocast("cuda") as an op table; it works on every device.

Rows of ops that are on apex's lists too are copied from there, with their spellings and reasons, under torch's
cast policy. torch casts ATen ops, so its lists also apply to the ops inside a function written in C++ or Python.
A CastingEngine sees functions only. The table therefore has two kinds of rows that torch's lists do not name:
C++ functions whose inner op is listed (square calls pow), with all their spellings in `added`, and Python
functions that the engine opens to see the ops inside (fall_through). In-place ops and `out=` are on no list.

Differences from torch.autocast("cuda"):
  - A promote op with float64 or with both 16-bit dtypes runs in the widest dtype; torch refuses some of them.
  - binary_cross_entropy raises an error for 16-bit arguments only; in torch, every call raises one.
  - The ops that a C++ function runs before its listed op also run in the dtype of the listed op: the difference in
    pairwise_distance, lgamma in mvlgamma, the products in trapezoid, and the log_softmax in cross_entropy,
    whose result torch rounds to the 16-bit dtype of the logits before it computes nll_loss in float32.
  - F.interpolate runs in float32 in mode "area" too; torch runs the pooling inside it in the dtype of the input.
  - On CPU tensors, ops that no list here names and that have no 16-bit CPU kernel (avg_pool3d, ctc_loss, FFTs, LAPACK)
    run in float32: see `ON_THE_CPU` in `torch_cpu_table`. On other devices they run in the dtype of their arguments.
  - A product that a C++ function computes after other arithmetic (cov, corrcoef, pinv, matrix_power) is not lowered.
"""

from __future__ import annotations

from amplab.policies.tables.apex_table import APEX
from amplab.policies.tables.op_rows import INSIDE, SQUARE, SUM, WIDEST, m, recast, rows, t
from amplab.policies.tables.op_table import CastPolicy, OpTable

__all__ = ["TORCH_CUDA"]

_LOWER = (
    *recast(
        APEX.rows,
        CastPolicy.LOWER_PRECISION_FP,
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution _convolution "
        "cudnn_convolution linear prelu addmm addmv addr mm mv addbmm baddbmm bmm matmul einsum vecdot chain_matmul "
        "scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    ),
)

_FP32 = (
    *recast(
        APEX.rows,
        CastPolicy.FP32,
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus "
        "layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity logsumexp "
        "dist pdist cdist renorm upsample "
        "poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
        "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
        "multi_margin_loss binary_cross_entropy_with_logits",
    ),
    *recast(APEX.rows, CastPolicy.FP32, "cross_entropy pairwise_distance interpolate", listed=False),
    *rows(
        CastPolicy.FP32,
        ("square", SQUARE, (), t("square")),
        ("mvlgamma", SUM, (), (*t("mvlgamma"), "torch.special.multigammaln")),
        ("sum_to_size", SUM, (), m("sum_to_size")),
        (
            "matrix_sqrth",
            "its eigenvalues come from cuSOLVER, which supports 32-bit and 64-bit floats only",
            ("torch.linalg.matrix_sqrth>=2.14",),
        ),
        ("trapezoid", SUM, (), ("torch.trapezoid", "torch.trapz", "torch.cumulative_trapezoid")),
        aten={
            "square": "square pow",
            "mvlgamma": "mvlgamma special_multigammaln sum",
            "sum_to_size": "sum",
            "matrix_sqrth": "linalg_matrix_sqrth>=2.14",
            "trapezoid": "trapezoid trapz cumulative_trapezoid sum cumsum",
        },
    ),
)

_SET_OPT_DTYPE = recast(
    APEX.rows,
    CastPolicy.FP32_SET_OPT_DTYPE,
    "softmax log_softmax prod cumprod cumsum sum norm vector_norm matrix_norm",
) + recast(APEX.rows, CastPolicy.FP32_SET_OPT_DTYPE, "softmin", listed=False)

_PROMOTE = recast(
    APEX.rows,
    CastPolicy.PROMOTE,
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sample index_put tensordot scatter_add",
    reason=WIDEST,
) + recast(APEX.rows, CastPolicy.PROMOTE, "inner", reason=WIDEST, listed=False)

_BANNED = recast(APEX.rows, CastPolicy.BANNED, "binary_cross_entropy")

_FALL_THROUGH = (
    *recast(
        APEX.rows,
        CastPolicy.FALL_THROUGH,
        "multi_head_attention_forward linear_cross_entropy gumbel_softmax lp_pool backward gaussian_nll_loss "
        "local_response_norm multilabel_soft_margin_loss normalize triplet_margin_with_distance_loss",
        reason=INSIDE,
        listed=False,
    ),
    *rows(
        CastPolicy.FALL_THROUGH,
        ("__rdiv__", INSIDE, (), m("__rdiv__", "__rtruediv__")),
        ("svd_lowrank", INSIDE, (), ("torch.svd_lowrank", "torch.pca_lowrank")),
        aten={"__rdiv__": "reciprocal mul", "svd_lowrank": ""},
    ),
)

TORCH_CUDA = OpTable("torch_cuda", _LOWER + _FP32 + _SET_OPT_DTYPE + _PROMOTE + _BANNED + _FALL_THROUGH)
"""The lists of torch.autocast("cuda")."""
