"""Unscale many gradients at once, and report whether any of them was not finite and what their norms are.

Four operators under ``torch.ops.amplab``, one arithmetic:

    product = x * inv_scale              in float32 (float64 where a float64 takes part)
    multi_tensor_unscale_                x      <- round(product)
    multi_tensor_unscale_copy            output <- round(product)
    multi_tensor_unscale_add             output <- round(output + product)
    multi_tensor_norm                    no tensor of the list is written

Pass an output tensor to request each optional result; none of them needs a second pass:

    found_inf   <- 1.0 if anything is not finite, never cleared; required
    first_bad   <- min(first_bad, index of the first tensor that is not finite); -1: none so far
    norms[i]    <- sqrt(sum(v * v)), v what was written to tensor i (its product if nothing is written)
    norm        <- sqrt(sum(norms * norms))

Squares are summed in float64, in an order that does not depend on the number of threads. The schemas and the
PyTorch reference are here; ``unscale.cpp`` and ``unscale.cu`` hold the kernels that a build registers under the same
names, with the same bits. The argument checks are in ``list_checks.py``, the build is in ``builder``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from amplab.kernels import builder
from amplab.kernels.list_checks import check_lists, check_measures, check_memory
from amplab.kernels.operators import define_operator

__all__ = [
    "multi_tensor_norm_reference",
    "multi_tensor_unscale__reference",
    "multi_tensor_unscale_add_reference",
    "multi_tensor_unscale_copy_reference",
    "unscale_",
    "unscale_add",
    "unscale_copy",
    "unscaled_norm",
]

_FOUND = "Tensor(c!)? norm=None, Tensor(d!)? norms=None, Tensor(e!)? first_bad=None"
_IN_PLACE = f"(Tensor(a!)[] tensors, Tensor(b!) found_inf, Tensor inv_scale, *, {_FOUND}) -> ()"
_INTO_OUTPUTS = f"(Tensor[] inputs, Tensor(a!)[] outputs, Tensor(b!) found_inf, Tensor inv_scale, *, {_FOUND}) -> ()"
_READ_ONLY = f"(Tensor[] tensors, Tensor(b!) found_inf, Tensor inv_scale, *, {_FOUND}) -> ()"
_NO_INDEX = torch.iinfo(torch.int64).max


def unscale_(
    tensors: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    *,
    norm: Tensor | None = None,
    norms: Tensor | None = None,
    first_bad: Tensor | None = None,
) -> None:
    """Multiply every tensor by ``inv_scale`` in place; set ``found_inf`` to 1.0 if anything is not finite.

    ``x <- round(x * inv_scale)``, the product in float32 (float64 for float64 tensors), rounded once.
    ``found_inf`` is sticky: it is written only when an element or its product is inf or NaN, never cleared.

    Args:
        tensors: float16, bfloat16, float32 or float64, in any mixture, any shape and strides, on one device; each
            listed once.
        found_inf: ``(1,)`` or ``()``, float32, on the same device.
        inv_scale: ``(1,)`` or ``()``, float32, on the same device; 1 / loss scale.
        norm: ``(1,)`` or ``()``, float32; receives the 2-norm of everything that was written. inf or NaN if an
            element is.
        norms: ``(len(tensors),)``, float32; receives the 2-norm of each tensor.
        first_bad: ``(1,)`` or ``()``, int64; receives the index of the first tensor that made found_inf 1.0. Over
            several calls it is the smallest index. Initialize it with -1, which means none.

    Raises:
        RuntimeError: an integer, complex, expanded or sparse tensor, one on another device, one whose storage was
            freed, or two that overlap in memory; the message gives the index. Also if found_inf, norm, norms or
            first_bad share elements with each other, with inv_scale or with the list.

    Sync: none.

    Reference: ``torch._amp_foreach_non_finite_check_and_unscale_``, which checks only the input;
    ``amp_C.multi_tensor_l2norm`` of apex.

    >>> grads = [torch.tensor([6.0, 8.0]), torch.tensor([float("inf")], dtype=torch.float16)]
    >>> found_inf, norms, first_bad = torch.zeros(1), torch.zeros(2), torch.tensor(-1)
    >>> unscale_(grads, found_inf, torch.tensor([0.5]), norms=norms, first_bad=first_bad)
    >>> grads[0].tolist(), found_inf.item(), norms.tolist(), first_bad.item()
    ([3.0, 4.0], 1.0, [5.0, inf], 1)
    """
    builder.settle()
    _UNSCALE(tensors, found_inf, inv_scale, norm=norm, norms=norms, first_bad=first_bad)


def unscale_copy(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    *,
    norm: Tensor | None = None,
    norms: Tensor | None = None,
    first_bad: Tensor | None = None,
) -> None:
    """Write ``inputs * inv_scale`` to ``outputs`` of any floating dtype, such as float16 gradients to float32 masters.

    ``output <- round(input * inv_scale)``; ``found_inf`` becomes 1.0 if an input is not finite or the product
    exceeds the output's range.

    Args:
        inputs: as the tensors of `unscale_`; not modified.
        outputs: as many, of the same shapes, on the same device; overwritten. An output may be its own input.
        found_inf: ``(1,)`` or ``()``, float32.
        inv_scale: ``(1,)`` or ``()``, float32.
        norm: as `unscale_`, of the outputs.
        norms: as `unscale_`, of the outputs.
        first_bad: as `unscale_`.

    Raises:
        RuntimeError: lists of unequal length, shapes that differ, or a tensor `unscale_` would refuse.

    Sync: none.
    """
    builder.settle()
    _UNSCALE_COPY(inputs, outputs, found_inf, inv_scale, norm=norm, norms=norms, first_bad=first_bad)


def unscale_add(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    *,
    norm: Tensor | None = None,
    norms: Tensor | None = None,
    first_bad: Tensor | None = None,
) -> None:
    """Add ``inputs * inv_scale`` to ``outputs``: gradient accumulation over several backward passes.

    ``output <- round(output + input * inv_scale)``; product and sum are each rounded in float32 (float64).
    ``found_inf`` becomes 1.0 if this call adds a product that is inf or NaN, or makes a finite output overflow. An
    output that was already inf does not set it, but does show in the norms.

    Args and Raises: as `unscale_copy`; the norms are those of the sums.

    Sync: none.

    Reference: apex's ``amp_C.multi_tensor_axpby`` with its check on the incoming gradients.
    """
    builder.settle()
    _UNSCALE_ADD(inputs, outputs, found_inf, inv_scale, norm=norm, norms=norms, first_bad=first_bad)


def unscaled_norm(
    tensors: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    *,
    norm: Tensor | None = None,
    norms: Tensor | None = None,
    first_bad: Tensor | None = None,
) -> None:
    """Compute the results of `unscale_` without writing the tensors, for a step that applies the factor itself.

    All results are those of ``x * inv_scale`` in float32 (float64 for float64 tensors), not rounded to the tensor's
    dtype.

    Args:
        tensors: as `unscale_`; not modified, so they may overlap and be expanded.
        found_inf: ``(1,)`` or ``()``, float32; becomes 1.0 if an element or its product is not finite, never cleared.
        inv_scale: ``(1,)`` or ``()``, float32.
        norm: as `unscale_`, of the products.
        norms: as `unscale_`, of the products.
        first_bad: as `unscale_`.

    Raises:
        RuntimeError: an integer, complex or sparse tensor, or one on another device, named by index.

    Sync: none.

    >>> norm = torch.zeros(())
    >>> unscaled_norm([torch.tensor([6.0, 8.0])], torch.zeros(1), torch.tensor([0.5]), norm=norm)
    >>> norm.item()
    5.0
    """
    builder.settle()
    _NORM(tensors, found_inf, inv_scale, norm=norm, norms=norms, first_bad=first_bad)


def multi_tensor_unscale__reference(
    tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor, **receivers: Tensor | None
) -> None:
    """PyTorch reference of `unscale_`. Sync: none."""
    multi_tensor_unscale_copy_reference(tensors, tensors, found_inf, inv_scale, **receivers)


def multi_tensor_unscale_copy_reference(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    **receivers: Tensor | None,
) -> None:
    """PyTorch reference of `unscale_copy`. Sync: none."""
    found = _Found(inputs, outputs, found_inf, inv_scale, **receivers)
    for x, out in zip(inputs, outputs, strict=True):
        out.copy_(_product(x, out, inv_scale))
        found.add(_nonfinite(out), out)
    found.write()


def multi_tensor_unscale_add_reference(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    **receivers: Tensor | None,
) -> None:
    """PyTorch reference of `unscale_add`. Sync: none."""
    found = _Found(inputs, outputs, found_inf, inv_scale, **receivers)
    for x, out in zip(inputs, outputs, strict=True):
        product = _product(x, out, inv_scale)
        was_finite = out.isfinite()
        out.copy_(out.to(product.dtype) + product)
        found.add(_nonfinite(product) | _nonfinite(out.where(was_finite, 0)), out)
    found.write()


def multi_tensor_norm_reference(
    tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor, **receivers: Tensor | None
) -> None:
    """PyTorch reference of `unscaled_norm`. Sync: none."""
    found = _Found(tensors, None, found_inf, inv_scale, **receivers)
    for x in tensors:
        product = _product(x, x, inv_scale)
        found.add(_nonfinite(product), product)
    found.write()


class _Found:
    """The results of one pass over a list, collected tensor by tensor and written at the end. Checks the arguments."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None,
        found_inf: Tensor,
        inv_scale: Tensor,
        *,
        norm: Tensor | None = None,
        norms: Tensor | None = None,
        first_bad: Tensor | None = None,
    ) -> None:
        _check(inputs, outputs, found_inf, inv_scale, norm=norm, norms=norms, first_bad=first_bad)
        others = {"found_inf": found_inf, "inv_scale": inv_scale, "norm": norm, "norms": norms, "first_bad": first_bad}
        check_memory(inputs, outputs, others)
        self._found_inf, self._norm, self._norms, self._first_bad = found_inf, norm, norms, first_bad
        self._bad: list[Tensor] = []
        self._lengths: list[Tensor] = []

    def add(self, bad: Tensor, values: Tensor) -> None:
        """Add the next tensor: ``bad``, ``()`` bool, and the norm of its ``values``."""
        self._bad.append(bad)
        if self._norm is not None or self._norms is not None:
            self._lengths.append(torch.linalg.vector_norm(values, dtype=torch.float64))

    def write(self) -> None:
        """Write the output tensors."""
        if self._bad:
            bad = torch.stack(self._bad)  # (tensors,)
            self._found_inf.masked_fill_(bad.any(), 1.0)
            if self._first_bad is not None:
                _lower(self._first_bad, bad)
        if self._norm is not None or self._norms is not None:
            lengths = torch.stack(self._lengths) if self._lengths else self._found_inf.new_zeros(0)
            if self._norms is not None:
                self._norms.copy_(lengths)
            if self._norm is not None:
                self._norm.copy_(torch.linalg.vector_norm(lengths))


def _lower(first_bad: Tensor, bad: Tensor) -> None:
    """Set ``first_bad <- min(first_bad, first index of bad)``; -1 counts as more than any index and means none."""
    places = torch.arange(len(bad), device=bad.device)
    index = places.where(bad, _NO_INDEX).min()
    before = first_bad.where(first_bad >= 0, _NO_INDEX)
    lowest = torch.minimum(before, index)
    first_bad.copy_(lowest.where(lowest < _NO_INDEX, -1))


def _product(x: Tensor, out: Tensor, inv_scale: Tensor) -> Tensor:
    """Return ``x * inv_scale`` in float32, or in float64 if ``x`` or ``out`` is float64."""
    arithmetic = torch.promote_types(torch.promote_types(x.dtype, out.dtype), torch.float32)
    return x.to(arithmetic) * inv_scale.to(arithmetic).reshape(())


def _nonfinite(x: Tensor) -> Tensor:
    """Return a bool ``()``: x * 0 sums to 0, or to NaN if an element is inf or NaN. Much faster than isfinite."""
    arithmetic = torch.promote_types(x.dtype, torch.float32)
    return x.to(arithmetic).mul(0).sum() != 0


def _check(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor] | None,
    found_inf: Tensor,
    inv_scale: Tensor,
    *,
    norm: Tensor | None = None,
    norms: Tensor | None = None,
    first_bad: Tensor | None = None,
) -> None:
    """Raise for what the kernels refuse. A fake tensor needs nothing else, since nothing is returned."""
    check_lists(inputs, outputs, found_inf, inv_scale)
    check_measures(len(inputs), found_inf, norm, norms, first_bad)


_UNSCALE = define_operator(
    "multi_tensor_unscale_",
    _IN_PLACE,
    multi_tensor_unscale__reference,
    lambda tensors, *scalars, **receivers: _check(tensors, tensors, *scalars, **receivers),
)
_UNSCALE_COPY = define_operator("multi_tensor_unscale_copy", _INTO_OUTPUTS, multi_tensor_unscale_copy_reference, _check)
_UNSCALE_ADD = define_operator("multi_tensor_unscale_add", _INTO_OUTPUTS, multi_tensor_unscale_add_reference, _check)
_NORM = define_operator(
    "multi_tensor_norm",
    _READ_ONLY,
    multi_tensor_norm_reference,
    lambda tensors, *scalars, **receivers: _check(tensors, None, *scalars, **receivers),
)
