"""float16 products on the CPU: native, or with float32 accumulation as on a tensor core.

    native:          C = half(A) · half(B) with the float16 kernel of the CPU
    fp32_accumulate: C = round_half( float(A) · float(B) ),  A, B half

"half" is float16. Products of two halves are exact in float32 and the sum is rounded once, so the two modes agree
in nearly every bit. (Convolution gradients differ more: the native kernel rounds them per sample and per column.)
On a CPU without fp16 arithmetic the native kernels are many times slower than float32.

The functions here work on public torch functions and are differentiable: gradients are rounded to half at the same
places as in native half. `accumulate_fp32` applies the same rule below autograd. In recurrent nets the inputs,
weights and outputs are rounded, and the recurrence runs in float32. In-place ops (`addmm_`, …) run natively.

A few other functions have a 16-bit kernel on CUDA but none on the CPU. They run with float32 in both modes, in bfloat16
too. (Where lists cast, `ON_THE_CPU` says more.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from amplab.policies.nested_tensors import map_tensors, tensors_in
from amplab.policies.tables.op_table import resolve

__all__ = [
    "DEFAULT_HALF_MODE",
    "HalfMode",
    "PRODUCTS",
    "WITHOUT_KERNEL",
    "accumulate_fp32",
    "accumulated",
    "is_product",
]

HalfMode = Literal["fp32_accumulate", "native"]

_SPELLINGS = (
    *(f"torch.nn.functional.{name}" for name in ("linear", "bilinear", "scaled_dot_product_attention")),
    *(f"torch.{name}" for name in ("conv1d", "conv2d", "conv3d", "conv_tbc", "convolution", "_convolution")),
    *(f"torch.{name}" for name in ("cudnn_convolution", "cudnn_convolution_transpose", "mkldnn_rnn_layer")),
    *(f"torch.{name}" for name in ("_scaled_dot_product_flash_attention", "_native_multi_head_attention")),
    *(f"{home}._addmm_activation" for home in ("torch", "torch.Tensor")),
    *(f"torch.{name}" for name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")),
    *(
        f"{home}.{name}"
        for home in ("torch", "torch.Tensor")
        for name in ("matmul", "mm", "mv", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "dot", "vdot", "inner")
    ),
    *(f"torch.Tensor.{name}" for name in ("__matmul__", "__rmatmul__")),
    *(f"torch.linalg.{name}" for name in ("matmul", "multi_dot", "vecdot")),
    *(f"torch.{name}" for name in ("chain_matmul", "einsum", "tensordot", "bilinear")),
    *(f"torch.{name}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    *(f"torch.{name}" for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")),
)
PRODUCTS: frozenset[Callable[..., Any]] = frozenset(func for func in map(resolve, _SPELLINGS) if func is not None)
"""Functions that multiply and accumulate, and are therefore slow in half on a CPU without fp16 arithmetic."""

WITHOUT_KERNEL: frozenset[Callable[..., Any]] = frozenset(
    (
        *(torch.nn.functional.avg_pool3d, torch.nn.functional.local_response_norm, torch.nn.functional.rrelu),
        *(torch.nn.functional.multilabel_margin_loss, torch.rrelu, torch.cdist),
    )
)
"""Functions that support 16-bit dtypes on CUDA but not on the CPU."""


def _mode_for_this_cpu() -> HalfMode:
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return "native"
    return "fp32_accumulate"


DEFAULT_HALF_MODE: HalfMode = _mode_for_this_cpu()
""" "native" if oneDNN detects fp16 arithmetic in this CPU, else "fp32_accumulate"."""


def accumulated(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype = torch.float16
) -> Any:
    """Call `func(*args, **kwargs)` in float32 and round once, if all its floating tensors are `dtype` on the CPU.

    Args:
        func: one of PRODUCTS or WITHOUT_KERNEL.
        args, kwargs: its arguments; tensors may be in lists and tuples.
        dtype: float16, or, for WITHOUT_KERNEL, bfloat16.

    Returns:
        The result of `func`, with tensors of `dtype` if the arguments had it. Sync: none.
    """
    if kwargs.get("out") is not None:
        return func(*args, **kwargs)
    wide_args = _widened(args, dtype)
    wide_kwargs = _widened(kwargs.values(), dtype) if kwargs else ()
    if wide_args is None or wide_kwargs is None or _in_place(func, args, kwargs):
        return func(*args, **kwargs)
    result = func(*wide_args, **dict(zip(kwargs, wide_kwargs, strict=True)))
    return map_tensors(result, lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor)


def _in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return func is torch.nn.functional.rrelu and bool(kwargs.get("inplace") or args[4:5] == (True,))


def _widened(values: Any, dtype: torch.dtype) -> list[Any] | None:
    """Return `values` with tensors of `dtype` as float32; None if not all floating ones are plain CPU tensors of it."""
    wide: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.dtype is dtype and value.is_cpu:
                wide.append(value.to(torch.float32))
            elif value.is_floating_point():
                return None
            else:
                wide.append(value)
        elif kind is tuple or kind is list:
            inner = _widened(value, dtype)
            if inner is None:
                return None
            wide.append(kind(inner))
        elif isinstance(value, Tensor):
            return None
        else:
            wide.append(value)
    return wide


_aten = torch.ops.aten

_PRODUCTS = frozenset(
    getattr(_aten, name)
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "addbmm", "dot", "vdot", "_trilinear"),
        *("convolution", "convolution_backward", "conv_tbc", "conv_tbc_backward"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
        # Composites, which a dispatch mode sees undecomposed in inference mode:
        *("linear", "matmul", "einsum", "tensordot", "inner", "chain_matmul", "linalg_multi_dot", "bilinear"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"),
        *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        # Not products, but without a half kernel on the CPU:
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
        The outputs of the op in the dtypes that native half returns (the logsumexp of attention is float32), or
        NotImplemented if the op is not a product, is in-place, or its operands are not float16 on the CPU. Sync: none.

    >>> a = torch.full((2, 2), 3.0, dtype=torch.float16)
    >>> accumulate_fp32(torch.ops.aten.mm.default, (a, a), {}).dtype
    torch.float16
    >>> accumulate_fp32(torch.ops.aten.relu.default, (a,), {})
    NotImplemented
    """
    if not is_product(aten_overload) or kwargs.get("out") is not None:
        return NotImplemented
    halves = [tensor for tensor in tensors_in((*args, *kwargs.values())) if tensor.dtype is torch.float16]
    if not halves or not all(tensor.is_cpu for tensor in halves):
        return NotImplemented
    wide_args, wide_kwargs = map_tensors((args, kwargs), _widened_half)
    result = aten_overload(*wide_args, **wide_kwargs)
    if aten_overload.overloadpacket is _FLASH:
        return (_rounded_to_half(result[0]), *result[1:])
    return map_tensors(result, _rounded_to_half)


def is_product(aten_overload: torch._ops.OpOverload) -> bool:
    """Whether `accumulate_fp32` computes this op in float32."""
    return aten_overload.overloadpacket in _PRODUCTS


def _widened_half(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype is torch.float16 else tensor


def _rounded_to_half(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float16) if tensor.dtype is torch.float32 else tensor
