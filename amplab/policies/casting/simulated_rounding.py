"""Simulate ops in a format without torch arithmetic: float32 tensors with values rounded to the format.

    y = Q( op( Q(a), Q(b) ) )        float8: the op reads and writes tensors of the format
    y =    op( Q(a), Q(b) )          tf32: a tensor core rounds its inputs; the result is float32

Q is `FloatFormat.round`, which rounds to nearest even. The backward of Q is the identity (straight-through), with
rounding wherever the gradient would be stored in the format: float8 rounds the gradients of the operands and of the
result. tf32 rounds the gradient of the result, which the products of backward read; gradients of operands are float32.
Values are not scaled: an out-of-range value saturates or becomes infinite, as in `FloatFormat.round`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amplab.formats import FORMATS, FloatFormat
from amplab.kernels.operators import define_operator

__all__ = ["round_operand", "round_result", "rounded_operands", "rounded_results"]

_ROUNDED = frozenset([torch.float16, torch.bfloat16, torch.float32])


def _round_to_format(tensor: Tensor, format_name: str) -> Tensor:
    return FORMATS[format_name].round(tensor)


def _round_batch(_info: Any, in_dims: tuple[int, None], tensor: Tensor, format_name: str) -> tuple[Tensor, int]:
    return torch.ops.amplab.round_to_format(tensor, format_name), in_dims[0]


# A custom op, so that a trace shows one op instead of the arithmetic of the rounding.
define_operator("round_to_format", "(Tensor tensor, str format_name) -> Tensor", _round_to_format, vmap=_round_batch)


class _Rounding(torch.autograd.Function):
    """Apply Q in forward, in backward, or both."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, name: str, rounds_value: bool, _rounds_gradient: bool) -> Tensor:
        return torch.ops.amplab.round_to_format(tensor, name) if rounds_value else tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str, bool, bool], output: Tensor) -> None:  # noqa: ARG004
        _, ctx.format_name, ctx.rounds_value, ctx.rounds_gradient = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.rounds_gradient:
            gradient = _rounding(gradient, ctx.format_name, True, ctx.rounds_value)
        return gradient, None, None, None


_rounding: Callable[[Tensor, str, bool, bool], Tensor] = _Rounding.apply


def round_operand(tensor: Tensor, format: FloatFormat) -> Tensor:
    """Round `tensor` as an op in `format` does when it reads it; returns float32 of the same shape.

    Differentiable (straight-through estimator), also twice: the gradient is rounded if torch has a dtype for the
    format (float8), and not rounded otherwise (tf32). Sync: none.

    Args:
        tensor: float16, bfloat16 or float32, any shape, on a device with float64.
        format: one of amplab.formats.
    """
    wide = tensor if tensor.dtype is torch.float32 else tensor.to(torch.float32)
    return _rounding(wide, format.name, True, format.torch_dtype is not None)


def round_result(tensor: Tensor, format: FloatFormat) -> Tensor:
    """Round `tensor` if torch has a dtype for the format (float8); return it unrounded otherwise (tf32).

    Differentiable (straight-through estimator): the gradient is rounded to the format. Sync: none.
    """
    return _rounding(tensor, format.name, format.torch_dtype is not None, True)


def rounded_operands(values: Iterable[Any], format: FloatFormat) -> list[Any] | None:
    """Return `values` with `round_operand` applied to float32 and 16-bit tensors.

    Returns None if a value is a tensor subclass or a float64 tensor; the op then runs as in the float32 model.
    """
    result: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.dtype is torch.float64:
                return None
            result.append(round_operand(value, format) if value.dtype in _ROUNDED else value)
        elif kind is tuple or kind is list:
            inner = rounded_operands(value, format)
            if inner is None:
                return None
            result.append(kind(inner))
        elif isinstance(value, Tensor):
            return None
        else:
            result.append(value)
    return result


def rounded_results(result: Any, format: FloatFormat) -> Any:
    """Apply `round_result` to the float32 tensors in the result of an op, a tensor or a tuple of tensors."""
    if type(result) is Tensor:
        return round_result(result, format) if result.dtype is torch.float32 else result
    if isinstance(result, tuple):  # includes torch.return_types
        return type(result)([rounded_results(item, format) for item in result])
    return result
