"""Unscale many gradients at once and say whether any of them was not finite.

Three operators under ``torch.ops.amplab``, one arithmetic:

    product = x * inv_scale              in float32 (float64 where a float64 takes part)
    multi_tensor_unscale_                x      <- round(product)
    multi_tensor_unscale_copy            output <- round(product)
    multi_tensor_unscale_add             output <- round(output + product)

The schemas and the pure-torch reference are here; ``unscale.cpp`` and ``unscale.cu`` hold the kernels that a
build registers under the same names, with the same bits. Building is in ``build.py``.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from amplab.kernels import build

__all__ = [
    "multi_tensor_unscale__reference",
    "multi_tensor_unscale_add_reference",
    "multi_tensor_unscale_copy_reference",
    "unscale_",
    "unscale_add",
    "unscale_copy",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_IN_PLACE = "(Tensor(a!)[] tensors, Tensor(b!) found_inf, Tensor inv_scale) -> ()"
_INTO_OUTPUTS = "(Tensor[] inputs, Tensor(a!)[] outputs, Tensor(b!) found_inf, Tensor inv_scale) -> ()"


def unscale_(tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply every tensor by ``inv_scale`` in place; set ``found_inf`` to 1.0 where anything is not finite.

    ``x <- round(x * inv_scale)``, the product in float32 (float64 for float64 tensors), rounded once.
    ``found_inf`` is sticky: it is written only when an element or its product is inf or NaN, never cleared.

    Args:
        tensors: float16, bfloat16, float32 or float64, mixed as they come, any shape and strides, on one device;
            each listed once.
        found_inf: ``(1,)`` or ``()``, float32, on the same device.
        inv_scale: ``(1,)`` or ``()``, float32, on the same device; 1 / loss scale.

    Raises:
        RuntimeError: an integer, complex or sparse tensor, or one on another device (named by its index).

    Sync: none.

    Reference: ``torch._amp_foreach_non_finite_check_and_unscale_``, which looks at the input alone.

    >>> grads = [torch.tensor([2.0, 4.0]), torch.tensor([float("inf")], dtype=torch.float16)]
    >>> found_inf = torch.zeros(1)
    >>> unscale_(grads, found_inf, torch.tensor([0.5]))
    >>> grads[0].tolist(), found_inf.item()
    ([1.0, 2.0], 1.0)
    """
    build.settle()
    with torch.no_grad():
        _UNSCALE(tensors, found_inf, inv_scale)


def unscale_copy(inputs: Sequence[Tensor], outputs: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Write ``inputs * inv_scale`` into ``outputs`` of any floating dtype: half gradients to float32 masters.

    ``output <- round(input * inv_scale)``; ``found_inf`` becomes 1.0 where an input is not finite or the product
    leaves the output's range.

    Args:
        inputs: as `unscale_`; not changed.
        outputs: as many, of the same shapes, on the same device; overwritten whatever they held.
        found_inf: ``(1,)`` or ``()``, float32.
        inv_scale: ``(1,)`` or ``()``, float32.

    Raises:
        RuntimeError: lists of unequal length, shapes that differ, or a tensor `unscale_` would refuse.

    Sync: none.
    """
    build.settle()
    with torch.no_grad():
        _UNSCALE_COPY(inputs, outputs, found_inf, inv_scale)


def unscale_add(inputs: Sequence[Tensor], outputs: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Add ``inputs * inv_scale`` to ``outputs``: gradient accumulation over several backward passes.

    ``output <- round(output + input * inv_scale)``; product and sum are each rounded in float32 (float64).
    ``found_inf`` becomes 1.0 where this call brings in what is not finite: a product that is inf or NaN, or a
    finite output that overflows. An output that was already inf is the business of the call that made it so.

    Args and Raises: as `unscale_copy`.

    Sync: none.

    Reference: apex's ``amp_C.multi_tensor_axpby`` with its check on the incoming gradients.
    """
    build.settle()
    with torch.no_grad():
        _UNSCALE_ADD(inputs, outputs, found_inf, inv_scale)


def multi_tensor_unscale__reference(tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Pure torch `unscale_`. Sync: none."""
    multi_tensor_unscale_copy_reference(tensors, tensors, found_inf, inv_scale)


def multi_tensor_unscale_copy_reference(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor
) -> None:
    """Pure torch `unscale_copy`. Sync: none."""
    _check_arguments(inputs, outputs, found_inf, inv_scale)
    flags = []
    for x, out in zip(inputs, outputs, strict=True):
        out.copy_(_product(x, out, inv_scale))
        flags.append(_nonfinite(out))
    _raise_flag(found_inf, flags)


def multi_tensor_unscale_add_reference(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor
) -> None:
    """Pure torch `unscale_add`. Sync: none."""
    _check_arguments(inputs, outputs, found_inf, inv_scale)
    flags = []
    for x, out in zip(inputs, outputs, strict=True):
        product = _product(x, out, inv_scale)
        was_finite = out.isfinite()
        out.copy_(out.to(product.dtype) + product)
        flags.append(_nonfinite(product) | _nonfinite(out.where(was_finite, 0)))
    _raise_flag(found_inf, flags)


def _product(x: Tensor, out: Tensor, inv_scale: Tensor) -> Tensor:
    """``x * inv_scale`` in float32, or in float64 where ``x`` or ``out`` is float64."""
    arithmetic = torch.promote_types(torch.promote_types(x.dtype, out.dtype), torch.float32)
    return x.to(arithmetic) * inv_scale.to(arithmetic).reshape(())


def _nonfinite(x: Tensor) -> Tensor:
    """A bool of shape ``()``: x * 0 sums to 0, or to NaN where an element is inf or NaN; far cheaper than isfinite."""
    arithmetic = torch.promote_types(x.dtype, torch.float32)
    return x.to(arithmetic).mul(0).sum() != 0


def _raise_flag(found_inf: Tensor, flags: list[Tensor]) -> None:
    if flags:
        found_inf.masked_fill_(torch.stack(flags).any(), 1.0)


def _check_arguments(inputs: Sequence[Tensor], outputs: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Refuse what the kernels refuse, in the same words."""
    for name, scalar in (("found_inf", found_inf), ("inv_scale", inv_scale)):
        if scalar.numel() != 1 or scalar.dtype != torch.float32:
            raise RuntimeError(f"{name}: expected one float32 element, such as torch.zeros(1).")
        if scalar.device != found_inf.device:
            raise RuntimeError(f"{name} is on another device than found_inf; call once per device.")
    if len(inputs) != len(outputs):
        raise RuntimeError(f"{len(inputs)} inputs, {len(outputs)} outputs: expected lists of equal length.")
    for index, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
        _check_tensor("input", index, x, found_inf)
        if outputs is not inputs:
            _check_tensor("output", index, out, found_inf)
            if x.shape != out.shape:
                raise RuntimeError(f"output {index}: expected the shape of the input.")
        if _repeats(out):
            raise RuntimeError(
                f"{'input' if outputs is inputs else 'output'} {index} is expanded: "
                "several of its elements share one place in memory; pass a clone."
            )


def _check_tensor(side: str, index: int, tensor: Tensor, found_inf: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise RuntimeError(f"{side} {index} is not strided: pass the values of a coalesced sparse gradient.")
    if tensor.dtype not in _DTYPES:
        raise RuntimeError(f"{side} {index}: expected float16, bfloat16, float32 or float64.")
    if tensor.device != found_inf.device:
        raise RuntimeError(f"{side} {index} is on another device than found_inf; call once per device.")


def _repeats(tensor: Tensor) -> bool:
    """Whether the tensor was expanded, so that a write to one element changes others."""
    if tensor.is_contiguous():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _register(name: str, schema: str, reference: Callable[..., None], fake: Callable[..., None]) -> OpOverload:
    """Define an operator with the reference as the implementation that every device falls back to."""
    torch.library.define(f"amplab::{name}", schema)
    torch.library.impl(f"amplab::{name}", "default", reference)
    torch.library.register_fake(f"amplab::{name}", fake)
    return getattr(torch.ops.amplab, name).default


# Nothing is returned, so a fake tensor needs no more than the checks.
_UNSCALE = _register(
    "multi_tensor_unscale_",
    _IN_PLACE,
    multi_tensor_unscale__reference,
    lambda tensors, found_inf, inv_scale: _check_arguments(tensors, tensors, found_inf, inv_scale),
)
_UNSCALE_COPY = _register(
    "multi_tensor_unscale_copy", _INTO_OUTPUTS, multi_tensor_unscale_copy_reference, _check_arguments
)
_UNSCALE_ADD = _register(
    "multi_tensor_unscale_add", _INTO_OUTPUTS, multi_tensor_unscale_add_reference, _check_arguments
)
