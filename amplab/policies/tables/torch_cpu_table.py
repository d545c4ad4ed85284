"""The lists of torch.autocast("cpu") as an op table, and what they add to the lists of a GPU.

They differ from the lists of CUDA: exp, softmax, layer_norm and sum are on no list and run in 16 bits. Most ops
on the float32 list are there because they had no 16-bit CPU kernel. `torch_cuda_table` explains how rows are
shared and marked.

Differences from torch.autocast("cpu"), in addition to the last two in `torch_cuda_table`:
  - F.pad keeps a 16-bit dtype in every mode; in torch, the modes reflect and replicate return float32.
  - The products inside gru, lstm_cell, gru_cell and bilinear are not lowered (the outputs are float32, as in torch;
    with a 16-bit input gru and the cells still return float32, and torch the 16-bit dtype).
  - einsum, inner and tensordot are lowered even where torch computes them without a matrix product.
"""

from __future__ import annotations

from amplab.policies.tables.apex_table import APEX
from amplab.policies.tables.op_rows import GEMM, INSIDE, WIDEST, c, f, recast, rows, t
from amplab.policies.tables.op_table import CastPolicy, OpTable

__all__ = ["ON_THE_CPU", "TORCH_CPU"]

_LAPACK = "LAPACK supports 32-bit and 64-bit floats only"
_FFT = "the FFT libraries for the CPU support 32-bit and 64-bit floats only"
_NO_KERNEL = "when torch defined the list, its CPU kernel supported 32-bit and 64-bit floats only"
_TRANSFORMS = (
    *("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "rfft", "rfft2", "rfftn", "irfft", "irfft2", "irfftn"),
    *("hfft", "ihfft"),
)


def _linalg(*names: str) -> tuple[str, ...]:
    return tuple(f"torch.linalg.{name}" for name in names)


_LOWER = recast(
    APEX.rows,
    CastPolicy.LOWER_PRECISION_FP,
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc _convolution linear prelu "
    "addmm mm addbmm baddbmm bmm matmul vecdot scaled_dot_product_attention",
)
_LOWER += recast(
    APEX.rows,
    CastPolicy.LOWER_PRECISION_FP,
    "einsum tensordot inner chain_matmul lstm rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell",
    listed=False,
)
_LOWER += rows(
    CastPolicy.LOWER_PRECISION_FP,
    ("_addmm_activation", GEMM, t("_addmm_activation")),
    ("_native_multi_head_attention", GEMM, ("torch._native_multi_head_attention",)),
    ("mkldnn_rnn_layer", GEMM, ("torch.mkldnn_rnn_layer",)),
)

_FP32_SHARED = recast(
    APEX.rows,
    CastPolicy.FP32,
    "prod cdist grid_sample "
    "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss "
    "hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss "
    "multilabel_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss",
)

_FP32_KERNELS = rows(
    CastPolicy.FP32,
    *((name, _NO_KERNEL, (*f(name), *c(name))) for name in ("avg_pool3d", "adaptive_avg_pool3d")),
    *(
        (name, _NO_KERNEL, (*f(name), *c(name)), f(f"{name}_with_indices"))
        for name in ("adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d")
    ),
    ("max_pool3d", _NO_KERNEL, (*f("max_pool3d"), "torch.max_pool3d")),
    (
        "max_unpool",
        _NO_KERNEL,
        (*f("max_unpool2d", "max_unpool3d"), *c("max_unpool2d", "max_unpool3d")),
        f("max_unpool1d"),
    ),
    (
        "grid_sampler",
        _NO_KERNEL,
        ("torch.grid_sampler_2d", "torch.grid_sampler_3d", "torch._grid_sampler_2d_cpu_fallback"),
    ),
    (
        "pad",
        _NO_KERNEL,
        c("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d"),
    ),
    ("fake_quantize_per_tensor_affine", _NO_KERNEL, ("torch.fake_quantize_per_tensor_affine",)),
    (
        "quantile",
        "interpolates between ranks, and float16 cannot represent odd ranks above 2048",
        t("quantile", "nanquantile"),
    ),
    ("trace", "sums the diagonal, and a float16 sum overflows at 65520", t("trace")),
    (
        "polar",
        "returns complex numbers, and its CPU kernel supports 32-bit and 64-bit floats only",
        ("torch.polar",),
    ),
    (
        "view_as_complex",
        "torch has no complex dtype with bfloat16 parts (8 significant bits)",
        ("torch.view_as_complex",),
    ),
    aten={
        "grid_sampler": "grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback",
        "max_unpool": "max_unpool2d max_unpool3d",
        "pad": "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d",
        "quantile": "quantile nanquantile",
    },
)

_FP32_FOURIER = rows(
    CastPolicy.FP32,
    *((f"fft_{name}", _FFT, (f"torch.fft.{name}",)) for name in _TRANSFORMS),
    ("stft", _FFT, (*t("stft"), "torch._VF.stft")),
)

_FP32_LAPACK = rows(
    CastPolicy.FP32,
    ("cholesky", _LAPACK, (*t("cholesky"), *_linalg("cholesky", "cholesky_ex"))),
    ("cholesky_inverse", _LAPACK, t("cholesky_inverse")),
    ("cholesky_solve", _LAPACK, t("cholesky_solve")),
    ("cond", _LAPACK, _linalg("cond")),
    ("eig", _LAPACK, _linalg("eig", "eigvals")),
    ("eigh", _LAPACK, _linalg("eigh", "eigvalsh")),
    ("householder_product", _LAPACK, (*t("orgqr"), *_linalg("householder_product"))),
    ("inverse", _LAPACK, (*t("inverse"), *_linalg("inv", "inv_ex", "tensorinv"))),
    ("lstsq", _LAPACK, _linalg("lstsq")),
    ("lu_solve", _LAPACK, t("lu_solve")),
    ("lu", _LAPACK, ("torch._lu_with_info",), t("lu")),
    ("matrix_rank", _LAPACK, _linalg("matrix_rank")),
    ("matrix_sqrth", _LAPACK, _linalg("matrix_sqrth>=2.14")),
    ("ormqr", _LAPACK, t("ormqr")),
    ("pinverse", _LAPACK, t("pinverse")),
    ("qr", _LAPACK, (*t("qr", "geqrf"), *_linalg("qr"))),
    ("solve", _LAPACK, (*t("triangular_solve"), *_linalg("solve", "tensorsolve"))),
    ("svd", _LAPACK, (*t("svd"), *_linalg("svd", "svdvals"))),
    aten={
        "cholesky": "cholesky<2.14 linalg_cholesky linalg_cholesky_ex",
        "cond": "linalg_cond",
        "eig": "linalg_eig linalg_eigvals",
        "eigh": "linalg_eigh linalg_eigvalsh",
        "householder_product": "orgqr linalg_householder_product",
        "inverse": "inverse linalg_inv linalg_inv_ex linalg_tensorinv",
        "lstsq": "linalg_lstsq",
        "lu": "_lu_with_info",
        "matrix_rank": "linalg_matrix_rank",
        "matrix_sqrth": "linalg_matrix_sqrth>=2.14",
        "qr": "qr<2.14 geqrf linalg_qr",
        "solve": "triangular_solve linalg_solve linalg_tensorsolve",
        "svd": "svd linalg_svd linalg_svdvals",
    },
)

_PROMOTE = recast(APEX.rows, CastPolicy.PROMOTE, "index_copy") + recast(
    APEX.rows, CastPolicy.SEQUENCE_PROMOTE, "cat stack"
)
_PROMOTE += rows(  # torch lowers the products inside; CompiledEngine, which sees them, does so, too
    CastPolicy.PROMOTE,
    ("recurrent", WIDEST, (), ("torch.gru", "torch.gru_cell", "torch.lstm_cell")),
    aten={"recurrent": ""},
)

_FALL_THROUGH = recast(
    APEX.rows,
    CastPolicy.FALL_THROUGH,
    "multi_head_attention_forward linear_cross_entropy gumbel_softmax lp_pool backward interpolate local_response_norm",
    reason=INSIDE,
    listed=False,
) + rows(
    CastPolicy.FALL_THROUGH,
    ("svd_lowrank", INSIDE, (), ("torch.svd_lowrank", "torch.pca_lowrank")),
    aten={"svd_lowrank": ""},
)

TORCH_CPU = OpTable(
    "torch_cpu", _LOWER + _FP32_SHARED + _FP32_KERNELS + _FP32_FOURIER + _FP32_LAPACK + _PROMOTE + _FALL_THROUGH
)
"""The lists of torch.autocast("cpu")."""

_SUPPORTED = {
    *("max_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "max_unpool", "pad"),
    *("fake_quantize_per_tensor_affine", "fractional_max_pool2d", "fractional_max_pool3d", "grid_sampler"),
}
"""Ops on the float32 list that have 16-bit CPU kernels by now."""

_BUILT_IN = {"cat", "stack", "recurrent"}

ON_THE_CPU = OpTable(
    "on_the_cpu",
    tuple(
        row
        for row in TORCH_CPU.rows
        if row.cast is not CastPolicy.FALL_THROUGH and row.op not in _SUPPORTED | _BUILT_IN
    )
    + recast(
        TORCH_CPU.rows,
        CastPolicy.PROMOTE,
        "fractional_max_pool2d fractional_max_pool3d grid_sampler",
        reason=WIDEST,
    ),
)
"""How ops that another table does not name run on CPU tensors, for example under the lists of a GPU.

Float32 for an op without a 16-bit CPU kernel, as in torch.autocast("cpu"). What has one runs as on a GPU.
"""
