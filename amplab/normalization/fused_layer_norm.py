"""apex's fused normalizations: float32 arithmetic, and a rule for the dtype of the result.

    FusedLayerNorm, FusedRMSNorm              the dtype of the input
    MixedFusedLayerNorm, MixedFusedRMSNorm    the dtype of the weight

    layer norm   (x - mean) / sqrt(var + eps) * weight + bias
    rms norm     x / sqrt(mean(x^2) + eps) * weight

over the last ``len(normalized_shape)`` dimensions. torch fuses them itself, so ``memory_efficient`` has no effect.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amplab.formats import LOW_PRECISION_DTYPES

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

Shape = int | Sequence[int] | torch.Size


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the layer norm of ``input`` in its dtype. Sync: none."""
    del memory_efficient
    return _layer_norm(input, weight, bias, normalized_shape, eps).to(input.dtype)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the layer norm of ``input``, without weight and bias, in its dtype. Sync: none."""
    del memory_efficient
    return _layer_norm(input, None, None, normalized_shape, eps).to(input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the layer norm of ``input`` in the dtype of ``weight``. Sync: none."""
    del memory_efficient
    return _layer_norm(input, weight, bias, normalized_shape, eps).to(weight.dtype)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the root-mean-square norm of ``input`` in its dtype. Sync: none."""
    del memory_efficient
    return _rms_norm(input, weight, normalized_shape, eps).to(input.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Return the root-mean-square norm of ``input``, without weight, in its dtype. Sync: none."""
    del memory_efficient
    return _rms_norm(input, None, normalized_shape, eps).to(input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the root-mean-square norm of ``input`` in the dtype of ``weight``. Sync: none."""
    del memory_efficient
    return _rms_norm(input, weight, normalized_shape, eps).to(weight.dtype)


class FusedLayerNormAffineFunction:
    """`fused_layer_norm_affine` under the name of apex's autograd function: ``.apply(x, weight, bias, shape, eps)``."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormFunction:
    """`fused_layer_norm` under the name of apex's autograd function."""

    apply = staticmethod(fused_layer_norm)


class FusedRMSNormAffineFunction:
    """`fused_rms_norm_affine` under the name of apex's autograd function."""

    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormFunction:
    """`fused_rms_norm` under the name of apex's autograd function."""

    apply = staticmethod(fused_rms_norm)


class FusedLayerNorm(nn.LayerNorm):
    """Layer normalization whose result has the dtype of its input.

    Args:
        normalized_shape: sizes of the last dimensions.
        eps: added to the variance.
        elementwise_affine: use a weight and a bias.
        memory_efficient: ignored; torch decides what it saves.

    Reference: apex ``FusedLayerNorm``.

    >>> FusedLayerNorm(4)(torch.ones(2, 4, dtype=torch.float16)).dtype
    torch.float16
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input`` of shape ``(..., *normalized_shape)``."""
        return _layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps).to(input.dtype)


class MixedFusedLayerNorm(FusedLayerNorm):
    """`FusedLayerNorm` whose result has the dtype of its weight, which it always has.

    Reference: apex ``MixedFusedLayerNorm``.
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        _require_affine(type(self).__name__, kwargs)
        super().__init__(normalized_shape, eps=eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input`` of shape ``(..., *normalized_shape)``."""
        return _layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps).to(self.weight.dtype)


class FusedRMSNorm(nn.RMSNorm):
    """Root-mean-square normalization whose result has the dtype of its input.

    Args:
        normalized_shape: sizes of the last dimensions.
        eps: added to the mean square.
        elementwise_affine: use a weight.
        memory_efficient: ignored; torch decides what it saves.

    Reference: apex ``FusedRMSNorm``.
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input`` of shape ``(..., *normalized_shape)``."""
        return _rms_norm(input, self.weight, self.normalized_shape, self.eps).to(input.dtype)


class MixedFusedRMSNorm(FusedRMSNorm):
    """`FusedRMSNorm` whose result has the dtype of its weight, which it always has.

    Reference: apex ``MixedFusedRMSNorm``.
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        _require_affine(type(self).__name__, kwargs)
        super().__init__(normalized_shape, eps=eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input`` of shape ``(..., *normalized_shape)``."""
        return _rms_norm(input, self.weight, self.normalized_shape, self.eps).to(self.weight.dtype)


def _require_affine(name: str, kwargs: dict[str, Any]) -> None:
    if not kwargs.pop("elementwise_affine", True):
        raise RuntimeError(
            f"{name} does not support elementwise_affine=False: its result has the dtype of its weight; "
            f"use {name.removeprefix('Mixed')}."
        )
    if kwargs:
        raise TypeError(f"{name} got an unknown argument {sorted(kwargs)[0]!r}: expected normalized_shape and eps.")


def _layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Shape, eps: float) -> Tensor:
    weight, bias = (None if each is None else _wide(each) for each in (weight, bias))
    return F.layer_norm(_wide(input), _sizes(shape), weight, bias, eps)


def _rms_norm(input: Tensor, weight: Tensor | None, shape: Shape, eps: float | None) -> Tensor:
    return F.rms_norm(_wide(input), _sizes(shape), None if weight is None else _wide(weight), eps)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION_DTYPES else tensor


def _sizes(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)
