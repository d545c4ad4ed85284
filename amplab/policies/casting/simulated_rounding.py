"""Ops in a format that torch has no arithmetic for: float32 tensors whose values are rounded to the format.

    y = Q( op( Q(a), Q(b) ) )        float8: an op that reads and writes tensors of the format
    y =    op( Q(a), Q(b) )          tf32: a tensor core rounds what it reads, and results stay float32

Q is `FloatFormat.round`, one rounding to nearest even. In backward a gradient passes straight through Q and is rounded
where a tensor of the format would hold it: float8 rounds the gradient of every operand and of the result; tf32 rounds
the gradient of the result, which the products of backward read, and leaves those of the operands float32.
Values are not scaled: a value beyond the format saturates or becomes infinite, as in `FloatFormat.round`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amplab.formats import FORMATS, FloatFormat

__all__ = ["round_operand", "round_result", "rounded_operands", "rounded_results"]

_ROUNDED = frozenset([torch.float16, torch.bfloat16, torch.float32])


def _round_to_format(tensor: Tensor, format_name: str) -> Tensor:
    return FORMATS[format_name].round(tensor)


def _round_batch(_info: Any, in_dims: tuple[int, None], tensor: Tensor, format_name: str) -> tuple[Tensor, int]:
    return torch.ops.amplab.round_to_format(tensor, format_name), in_dims[0]


# A separate operator, so that a trace shows one op and not the arithmetic of a rounding.
torch.library.define("amplab::round_to_format", "(Tensor tensor, str format_name) -> Tensor")
torch.library.impl("amplab::round_to_format", "default", _round_to_format)
torch.library.register_vmap("amplab::round_to_format", _round_batch)


class _Rounding(torch.autograd.Function):
    """Q on the way forward, Q on the way back, or both."""

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
    """`tensor` as an op in `format` reads it: float32 of the same shape, each value rounded to the format.

    Differentiable, straight through: its gradient is rounded where the format can be stored (float8), and passes
    unrounded where it cannot (tf32). Differentiable twice. Sync: none.

    Args:
        tensor: float16, bfloat16 or float32, any shape, on a device with float64.
        format: one of amplab.formats.
    """
    wide = tensor if tensor.dtype is torch.float32 else tensor.to(torch.float32)
    return _rounding(wide, format.name, True, format.torch_dtype is not None)


def round_result(tensor: Tensor, format: FloatFormat) -> Tensor:
    """`tensor` as an op in `format` returns it: rounded where the format can be stored (float8), else as it is (tf32).

    Differentiable, straight through: its gradient is rounded to the format. Sync: none.
    """
    return _rounding(tensor, format.name, format.torch_dtype is not None, True)


def rounded_operands(values: Iterable[Any], format: FloatFormat) -> list[Any] | None:
    """`values` with float32 and 16-bit tensors as `round_operand` gives them.

    None where there is a tensor subclass or a float64 tensor: the op runs as in the float32 model.
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
    """What an op returned, a tensor or a tuple of them, with float32 tensors as `round_result` gives them."""
    if type(result) is Tensor:
        return round_result(result, format) if result.dtype is torch.float32 else result
    if isinstance(result, tuple):  # torch.return_types too
        return type(result)([rounded_results(item, format) for item in result])
    return result
