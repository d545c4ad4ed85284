"""The fp32-accumulate rule of `half_on_cpu` below autograd: one ATen overload, half in and half out.

A dispatch mode that watches a step calls this for every op it sees, so that a half product on a CPU
without fp16 arithmetic is one op, float16 -> float16, computed in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amplab.policies.nested_tensors import map_tensors, tensors_in

__all__ = ["accumulate_fp32"]

_aten = torch.ops.aten

_PRODUCTS = frozenset(
    getattr(_aten, name)
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "addbmm", "dot", "vdot", "_trilinear"),
        *("convolution", "convolution_backward", "conv_tbc", "conv_tbc_backward"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
        # Composites, which a dispatch mode meets whole in inference mode:
        *("linear", "matmul", "einsum", "tensordot", "inner", "chain_matmul", "linalg_multi_dot", "bilinear"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"),
        *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        # No products, but without a half kernel on the CPU:
        *("avg_pool3d", "avg_pool3d_backward", "_cdist_forward", "_cdist_backward", "_euclidean_dist", "cdist"),
        *("multilabel_margin_loss_forward", "multilabel_margin_loss_backward", "multilabel_margin_loss"),
    )
)
_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu


def accumulate_fp32(aten_overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a product of CPU halves in float32 and round its outputs to half once.

        outputs = round_half( op( float(args) ) )

    Args:
        aten_overload: e.g. torch.ops.aten.mm.default.
        args, kwargs: its arguments as a dispatch mode receives them.

    Returns:
        The op's outputs in the dtypes native half has (attention's logsumexp is float32), or NotImplemented
        where the op is no product, works in place, or its operands are not CPU halves. Sync: none.

    >>> a = torch.full((2, 2), 3.0, dtype=torch.float16)
    >>> accumulate_fp32(torch.ops.aten.mm.default, (a, a), {}).dtype
    torch.float16
    >>> accumulate_fp32(torch.ops.aten.relu.default, (a,), {})
    NotImplemented
    """
    if aten_overload.overloadpacket not in _PRODUCTS or kwargs.get("out") is not None:
        return NotImplemented
    halves = [tensor for tensor in tensors_in((*args, *kwargs.values())) if tensor.dtype is torch.float16]
    if not halves or not all(tensor.is_cpu for tensor in halves):
        return NotImplemented
    wide_args, wide_kwargs = map_tensors((args, kwargs), _widened)
    result = aten_overload(*wide_args, **wide_kwargs)
    if aten_overload.overloadpacket is _FLASH:
        return (_rounded(result[0]), *result[1:])
    return map_tensors(result, _rounded)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype is torch.float16 else tensor


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float16) if tensor.dtype is torch.float32 else tensor
