"""One call of every op on the lists, for the tests that go over whole tables.

A call is a function and the shapes of its floating arguments, which are drawn between 0.1 and 0.9 so that
every op is defined there; everything else stands in the function.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["CALLS", "CONDITIONED", "draw", "split_calls"]

LABELS = torch.tensor([1, 0, 2])
ROW = torch.tensor([0, 0])

CALLS: dict[str, tuple] = {}
"""Op -> (function, shape of its first argument, of its second, …)."""


def split_calls(names: str, *shapes: tuple[int, ...], home: object = torch, **kwargs: object) -> None:
    """Add calls of the functions `names` of `home`, all with the same shapes and keyword arguments."""
    for name in names.split():
        CALLS[name] = (partial(getattr(home, name), **kwargs) if kwargs else getattr(home, name), *shapes)


def draw(op: str, *, seed: int = 0) -> tuple[Callable, list[Tensor]]:
    """The function of `op` and its float32 arguments."""
    func, *shapes = CALLS[op]
    generator = torch.Generator().manual_seed(seed)
    return func, [torch.rand(shape, generator=generator) * 0.8 + 0.1 for shape in shapes]


SQUARE, PAIR = (3, 3), ((3, 3), (3, 3))
IMAGE, VOLUME, BATCH = (2, 3, 6, 6), (2, 3, 4, 4, 4), (4, 3, 3)

# Products.
split_calls("conv1d", (2, 3, 8), (4, 3, 3), (4,))
split_calls("conv2d", IMAGE, (4, 3, 3, 3), (4,))
split_calls("conv3d", VOLUME, (4, 3, 2, 2, 2), (4,))
split_calls("conv_transpose1d", (2, 3, 8), (3, 4, 3))
split_calls("conv_transpose2d", IMAGE, (3, 4, 3, 3))
split_calls("conv_transpose3d", VOLUME, (3, 4, 2, 2, 2))
split_calls("conv_tbc", (8, 2, 3), (3, 3, 4), (4,))
CALLS["convolution"] = (
    lambda x, w: torch.convolution(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    *(IMAGE, (4, 3, 3, 3)),
)
split_calls("linear", (4, 8), (5, 8), (5,), home=F)
split_calls("prelu", (4, 5), (5,), home=F)
split_calls("addr", SQUARE, (3,), (3,))
split_calls("addmm _addmm_activation", (4, 5), (4, 6), (6, 5))
split_calls("addmv", (4,), (4, 6), (6,))
split_calls("mm matmul", (4, 6), (6, 5))
split_calls("mv", (4, 6), (6,))
split_calls("addbmm", (3, 3), BATCH, BATCH)
split_calls("baddbmm", BATCH, BATCH, BATCH)
split_calls("bmm", BATCH, BATCH)
split_calls("inner", (4, 6), (5, 6))
split_calls("vecdot", (4, 6), (4, 6), home=torch.linalg)
CALLS["einsum"] = (lambda a, b: torch.einsum("ij,jk->ik", a, b), (4, 6), (6, 5))
CALLS["tensordot"] = (lambda a, b: torch.tensordot(a, b, dims=1), (4, 6), (6, 5))
CALLS["chain_matmul"] = (lambda a, b: torch.linalg.multi_dot([a, b]), (4, 6), (6, 5))
split_calls("scaled_dot_product_attention", *[(2, 2, 5, 8)] * 3, home=F)
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
for _name, _gates in _GATES.items():
    _shapes = ((5, 2, 4), (1, 2, 3), (3 * _gates, 4), (3 * _gates, 3), (3 * _gates,), (3 * _gates,))

    def _recurrent(x: Tensor, h: Tensor, *weights: Tensor, name: str = _name) -> tuple:
        """One layer, one direction, biases, in evaluation."""
        state = (h, h) if name == "lstm" else h
        return getattr(torch, name)(x, state, weights, True, 1, 0.0, False, False, False)

    def _cell(x: Tensor, h: Tensor, *weights: Tensor, name: str = _name) -> tuple | Tensor:
        """One step."""
        return getattr(torch, f"{name}_cell")(x, (h, h) if name == "lstm" else h, *weights)

    CALLS[_name] = (_recurrent, *_shapes)
    CALLS[f"{_name}_cell"] = (_cell, (2, 4), (2, 3), *_shapes[2:])
CALLS["cudnn_convolution"] = CALLS["conv2d"]  # its own kernels need a GPU
CALLS["_convolution"] = (
    lambda x, w: torch._convolution(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True),
    *(IMAGE, (4, 3, 3, 3)),
)

# Elementwise.
split_calls("acos asin cosh sinh tan erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt square", (4, 5))
split_calls("gelu softplus", (4, 5), home=F)
CALLS["cpu"] = (Tensor.cpu, (4, 5))
CALLS["pow"] = (lambda x: x**2.5, (4, 5))
CALLS["float_power"] = (lambda x: torch.float_power(x, 2.5), (4, 5))
CALLS["__rdiv__"] = (lambda x: 1 / x, (4, 5))
split_calls("mvlgamma", (4, 5), p=1)
CALLS["polar"] = (torch.polar, (4, 5), (4, 5))
CALLS["view_as_complex"] = (torch.view_as_complex, (4, 2))
CALLS["fake_quantize_per_tensor_affine"] = (
    lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255),
    *((4, 5),),
)

# Reductions and norms.
split_calls("softmin softmax log_softmax", (4, 5), home=F, dim=1)
split_calls("logsumexp logcumsumexp cumprod cumsum prod sum nansum std var", (4, 5), dim=1)
split_calls("norm nuclear_norm trace", (4, 5))
split_calls("frobenius_norm", (4, 5), dim=(0, 1))
split_calls("vector_norm matrix_norm cond", SQUARE, home=torch.linalg)
split_calls("dist cdist", (4, 5), (4, 5))
split_calls("pdist", (4, 5), home=F)
split_calls("pairwise_distance cosine_similarity", (4, 5), (4, 5), home=F)
CALLS["renorm"] = (lambda x: torch.renorm(x, 2, 0, 1.0), (4, 5))
CALLS["layer_norm"] = (lambda x, w, b: F.layer_norm(x, (5,), w, b), (4, 5), (5,), (5,))
CALLS["rms_norm"] = (lambda x, w: F.rms_norm(x, (5,), w), (4, 5), (5,))
CALLS["group_norm"] = (lambda x: F.group_norm(x, 3), IMAGE)
CALLS["local_response_norm"] = (lambda x: F.local_response_norm(x, 2), IMAGE)
split_calls("normalize", (4, 5), home=F)
split_calls("trapezoid", (4, 5))
CALLS["sum_to_size"] = (lambda x: x.sum_to_size(1, 5), (4, 5))
CALLS["quantile"] = (lambda x: torch.quantile(x, 0.5), (4, 5))

# Images and volumes.
CALLS["interpolate"] = (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGE)
CALLS["upsample"] = (lambda x: torch._C._nn.upsample_nearest2d(x, (9, 9)), IMAGE)
CALLS["grid_sample"] = (lambda x, grid: F.grid_sample(x, grid, align_corners=False), IMAGE, (2, 4, 4, 2))
CALLS["grid_sampler"] = (lambda x, grid: torch.grid_sampler_2d(x, grid, 0, 0, False), IMAGE, (2, 4, 4, 2))
split_calls("avg_pool3d max_pool3d", VOLUME, home=F, kernel_size=2)
split_calls("adaptive_avg_pool3d adaptive_max_pool3d", VOLUME, home=F, output_size=2)
_SAMPLES = torch.full((2, 3, 3), 0.5)
CALLS["fractional_max_pool2d"] = (
    lambda x, samples: F.fractional_max_pool2d(x, 2, output_size=3, _random_samples=samples.detach()),
    *(IMAGE, (2, 3, 2)),
)
CALLS["fractional_max_pool3d"] = (
    lambda x, samples: F.fractional_max_pool3d(x, 2, output_size=2, _random_samples=samples.detach()),
    *(VOLUME, (2, 3, 3)),
)
CALLS["max_unpool"] = (lambda x: F.max_unpool2d(x, torch.arange(4).reshape(1, 1, 2, 2) * 2, 2), (1, 1, 2, 2))
CALLS["pad"] = (lambda x: torch._C._nn.reflection_pad1d(x, (1, 1)), (2, 3, 4))
CALLS["lp_pool"] = (lambda x: F.lp_pool1d(x, 2, 2), (2, 3, 8))

# Losses.
split_calls("poisson_nll_loss l1_loss mse_loss huber_loss smooth_l1_loss", (4, 5), (4, 5), home=F)
split_calls("kl_div", (4, 5), (4, 5), home=F, reduction="batchmean")
split_calls("binary_cross_entropy binary_cross_entropy_with_logits", (4, 5), (4, 5), home=F)
split_calls("gaussian_nll_loss", *[(4, 5)] * 3, home=F)
split_calls("triplet_margin_loss triplet_margin_with_distance_loss", *[(4, 5)] * 3, home=F)
for _name in ("cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss"):
    _target = LABELS if _name != "multilabel_margin_loss" else torch.tensor([[1, 0, -1, 0, 0]] * 3)
    CALLS[_name] = (partial(getattr(F, _name), target=_target), (3, 5))
CALLS["hinge_embedding_loss"] = (lambda x: F.hinge_embedding_loss(x, LABELS), (3,))
CALLS["soft_margin_loss"] = (lambda x, y: F.soft_margin_loss(x, y.detach()), (3,), (3,))
CALLS["multilabel_soft_margin_loss"] = (F.multilabel_soft_margin_loss, (4, 5), (4, 5))
CALLS["cosine_embedding_loss"] = (lambda a, b: F.cosine_embedding_loss(a, b, torch.ones(4)), (4, 5), (4, 5))
CALLS["margin_ranking_loss"] = (lambda a, b: F.margin_ranking_loss(a, b, torch.ones(4)), (4,), (4,))
CALLS["ctc_loss"] = (lambda x: F.ctc_loss(x, torch.tensor([[1, 2]]), (6,), (2,)), (6, 1, 4))

# Promotion.
split_calls("addcdiv addcmul", *[(3, 3)] * 3)
split_calls("atan2 add sub mul div eq ne ge gt le lt equal", *PAIR)
split_calls("dot vdot", (6,), (6,))
split_calls("cross", *PAIR, dim=1)
CALLS["linalg_cross"] = (torch.linalg.cross, *PAIR)
split_calls("bilinear", (4, 5), (4, 6), (3, 5, 6))
CALLS["lerp"] = (lambda a, b: torch.lerp(a, b, 0.5), *PAIR)
CALLS["scatter_add"] = (lambda a, b: torch.scatter_add(a, 0, torch.zeros(3, 3, dtype=torch.int64), b), *PAIR)
CALLS["index_add"] = (lambda a, b: torch.index_add(a, 0, ROW, b), SQUARE, (2, 3))
CALLS["index_copy"] = (lambda a, b: torch.index_copy(a, 0, torch.tensor([0, 2]), b), SQUARE, (2, 3))
CALLS["index_put"] = (lambda a, b: torch.index_put(a, (torch.tensor([0, 2]),), b), SQUARE, (2, 3))
CALLS["masked_scatter"] = (lambda a, b: torch.masked_scatter(a, torch.eye(3, dtype=torch.bool), b), *PAIR)
CALLS["where"] = (lambda a, b: torch.where(torch.eye(3, dtype=torch.bool), a, b), *PAIR)
CALLS["cat"] = (lambda a, b: torch.cat([a, b]), *PAIR)
CALLS["stack"] = (lambda a, b: torch.stack([a, b]), *PAIR)

# What LAPACK and FFT libraries compute.
_DOMINANT = torch.eye(3) * 4


def _lapack(func: Callable) -> tuple:
    """A call of `func` on a symmetric, diagonally dominant matrix in the dtype of the drawn one."""
    return (lambda x: func(_symmetric(x)), SQUARE)


def _symmetric(x: Tensor) -> Tensor:
    half = x.dtype in (torch.float16, torch.bfloat16)
    with torch._C.DisableTorchFunction(), torch.autocast("cpu", enabled=False):
        wide = x.float() if half else x
        return (wide + wide.t() + _DOMINANT.to(wide.dtype)).to(x.dtype)


for _name in ("cholesky", "cholesky_inverse", "inverse", "pinverse", "qr", "lu"):
    CALLS[_name] = _lapack(getattr(torch.linalg, _name, None) or getattr(torch, _name))
CALLS["lu"] = _lapack(Tensor.lu)
CALLS["eigh"] = _lapack(torch.linalg.eigvalsh)
CALLS["eig"] = _lapack(lambda x: torch.linalg.eigvals(x).real)
CALLS["matrix_rank"] = _lapack(torch.linalg.matrix_rank)
CALLS["svd"] = _lapack(torch.linalg.svdvals)
if hasattr(torch.linalg, "matrix_sqrth"):  # new in torch 2.14
    CALLS["matrix_sqrth"] = _lapack(torch.linalg.matrix_sqrth)
CALLS["cholesky_solve"] = (torch.cholesky_solve, *PAIR)
CALLS["solve"] = (lambda a, b: torch.linalg.solve(_symmetric(a), b), *PAIR)
CALLS["lstsq"] = (lambda a, b: torch.linalg.lstsq(_symmetric(a), b).solution, *PAIR)
CALLS["householder_product"] = (torch.linalg.householder_product, SQUARE, (3,))
CALLS["ormqr"] = (torch.ormqr, SQUARE, (3,), SQUARE)
CALLS["lu_solve"] = (lambda b, lu: torch.lu_solve(b, lu, torch.tensor([1, 2, 3], dtype=torch.int32)), *PAIR)


def _svd_lowrank(x: Tensor) -> Tensor:
    """Singular values, with the random start fixed."""
    torch.manual_seed(0)
    return torch.svd_lowrank(x, q=2)[1]


CALLS["svd_lowrank"] = (_svd_lowrank, (4, 5))
CONDITIONED = frozenset(
    {"cholesky", "cholesky_inverse", "inverse", "pinverse", "qr", "lu", "eigh", "eig", "matrix_rank", "svd"}
    | {"matrix_sqrth", "solve", "lstsq"}
)
"""Ops whose call makes its matrix well conditioned in the dtype it is given, before the op is called."""


def _spectrum(transform: str) -> Callable:
    """Call a transform with a complex result."""
    func = getattr(torch.fft, transform)
    return lambda x: torch.view_as_real(func(x).resolve_conj())


for _name in ("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "rfft", "rfft2", "rfftn", "ihfft"):
    CALLS[f"fft_{_name}"] = (_spectrum(_name), (4, 6))
for _name in ("irfft", "irfft2", "irfftn", "hfft"):
    CALLS[f"fft_{_name}"] = (getattr(torch.fft, _name), (4, 6))
CALLS["stft"] = (
    lambda x, window: torch.view_as_real(torch.stft(x, 8, window=window, return_complex=True)),
    *((32,), (8,)),
)
