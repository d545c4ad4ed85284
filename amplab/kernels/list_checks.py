"""The argument checks of multi-tensor operators, with the messages of the kernels (``tensor_lists.h``).

    input 3 is int64: expected float16, bfloat16, float32 or float64.
    input 2 and input 5 overlap in memory: list each tensor once, and no views that share elements.

No check reads values. Sync: none.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amplab.formats.stored_values import has_values

__all__ = [
    "Extent",
    "check_apart",
    "check_lists",
    "check_measures",
    "check_memory",
    "check_present",
    "extent_of",
    "is_refusal",
    "refusal_naming",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXAMPLES = {torch.float32: "torch.zeros(1)", torch.int64: "torch.tensor(-1)"}


class Extent(NamedTuple):
    """The bytes of a tensor; the order of the fields is the order in which the kernels sort them."""

    begin: int
    only_read: bool
    place: int
    end: int
    name: str


def check_lists(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None, found_inf: Tensor, inv_scale: Tensor
) -> None:
    """Check the lists of an operator: an in-place one passes ``outputs is inputs``, one that only reads passes None.

    Raises:
        RuntimeError: names the tensor, what it is and what to pass.
    """
    _check_scalar("found_inf", found_inf, torch.float32, found_inf)
    _check_scalar("inv_scale", inv_scale, torch.float32, found_inf)
    in_place = outputs is inputs
    if outputs is not None and len(inputs) != len(outputs):
        raise RuntimeError(f"{len(inputs)} inputs, {len(outputs)} outputs: expected lists of equal length.")
    for index, x in enumerate(inputs):
        _check_tensor("input", index, x, found_inf)
        if outputs is not None and not in_place:
            _check_output(index, outputs[index], x, found_inf)
        if outputs is not None and _repeats(outputs[index]):
            raise RuntimeError(
                f"{'input' if in_place else 'output'} {index} is expanded: "
                "several of its elements share one place in memory; pass a clone."
            )


def check_memory(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None, scalars: Mapping[str, Tensor | None]
) -> None:
    """Raise if an element is not in memory, or would be written twice, or read for one tensor and written for another.

    An output may be its own input.

    Args:
        inputs: of the operator.
        outputs: of the operator; None if it writes none, and the inputs may overlap.
        scalars: the tensors outside the lists, by name; all but ``inv_scale`` are written.

    Raises:
        RuntimeError: names the first two tensors, by address, that overlap.
    """
    check_present((f"input {index}", x) for index, x in enumerate(inputs))
    if outputs is not None and outputs is not inputs:
        check_present((f"output {index}", out) for index, out in enumerate(outputs))
    check_present((name, tensor) for name, tensor in scalars.items() if tensor is not None)
    others = [
        extent_of(tensor, name, place - len(scalars), only_read=name == "inv_scale")
        for place, (name, tensor) in enumerate(scalars.items())
        if tensor is not None and tensor.numel() > 0 and not tensor.is_meta
    ]
    check_apart([*others, *(() if outputs is None else _extents(inputs, outputs))])


def check_present(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if the elements of a tensor are not in memory, where torch's own ops would crash.

    A ZeroTensor gets here only below the dispatcher's key for it, such as in a dispatch mode.

    Args:
        tensors: each with its name; those on the meta device have nothing to read and are taken.

    Raises:
        RuntimeError: names the first one.
    """
    for name, tensor in tensors:
        if not tensor.is_meta and (not has_values(tensor) or tensor._is_zerotensor()):
            raise RuntimeError(f"{name} has no memory: its storage was freed, or it is a ZeroTensor; pass a clone.")


def check_apart(extents: Iterable[Extent]) -> None:
    """Raise if an element is written twice, or read for one tensor and written for another.

    Raises:
        RuntimeError: names the first two tensors, by address, that overlap.
    """
    reached = {False: (0, ""), True: (0, "")}  # by "only what is written": the highest byte so far, and its tensor
    for begin, only_read, _, end, name in sorted(extents):
        limit, other = reached[only_read]
        if begin < limit:
            raise RuntimeError(
                f"{other} and {name} overlap in memory: list each tensor once, and no views that share elements."
            )
        for only_written in (False,) if only_read else (False, True):
            reached[only_written] = max(reached[only_written], (end, name), key=lambda entry: entry[0])


def extent_of(tensor: Tensor, name: str, place: int, *, only_read: bool) -> Extent:
    """Return the bytes of a tensor; of one with gaps, only those of its first element.

    The columns of a matrix interleave, but do not overlap.
    """
    begin = tensor.data_ptr()
    numel = tensor.numel() if _is_gapless(tensor) else 1
    return Extent(begin, only_read, place, begin + numel * tensor.element_size(), name)


def check_measures(
    count: int, found_inf: Tensor, norm: Tensor | None, norms: Tensor | None, first_bad: Tensor | None
) -> None:
    """Check the tensors that receive the results of a pass over ``count`` tensors.

    Raises:
        RuntimeError: names the tensor and what to pass.
    """
    if norm is not None:
        _check_scalar("norm", norm, torch.float32, found_inf)
    if norms is not None:
        if norms.shape != (count,) or norms.dtype != torch.float32 or not norms.is_contiguous():
            raise RuntimeError(f"norms: expected a float32 element for each tensor, such as torch.zeros({count}).")
        _check_device("norms", norms, found_inf)
    if first_bad is not None:
        _check_scalar("first_bad", first_bad, torch.int64, found_inf)


def is_refusal(error: RuntimeError) -> bool:
    """Return whether an operator has refused its arguments and written nothing.

    Other errors are subclasses of RuntimeError, such as ``torch.OutOfMemoryError``: they must reach the caller with
    their type, and nothing may be tried again, since the operator may have written.

    >>> is_refusal(RuntimeError("input 1 is int64.")), is_refusal(torch.OutOfMemoryError("CUDA out of memory."))
    (True, False)
    """
    return type(error) in (RuntimeError, NotImplementedError)  # the second for layouts that have no kernel


def refusal_naming(error: RuntimeError, inputs: Sequence[str]) -> RuntimeError:
    """Return the error of an operator with the caller's names of the inputs in its message.

    Args:
        error: of one of the operators.
        inputs: the name of each input.

    >>> refusal_naming(RuntimeError("input 1 is int64: expected float16."), ["a", "the gradient of conv.bias"])
    RuntimeError('the gradient of conv.bias is int64: expected float16.')
    """
    return RuntimeError(re.sub(r"\binput (\d+)\b", lambda found: inputs[int(found[1])], str(error)))


def _check_scalar(name: str, scalar: Tensor, dtype: torch.dtype, found_inf: Tensor) -> None:
    if scalar.numel() != 1 or scalar.dtype != dtype:
        raise RuntimeError(f"{name}: expected one {_named(dtype)} element, such as {_EXAMPLES[dtype]}.")
    _check_device(name, scalar, found_inf)


def _check_tensor(side: str, index: int, tensor: Tensor, found_inf: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise RuntimeError(f"{side} {index} is not strided: pass the values of a coalesced sparse gradient.")
    if tensor.dtype not in _DTYPES:
        raise RuntimeError(f"{side} {index} is {_named(tensor.dtype)}: expected float16, bfloat16, float32 or float64.")
    _check_device(f"{side} {index}", tensor, found_inf)


def _check_output(index: int, out: Tensor, x: Tensor, found_inf: Tensor) -> None:
    _check_tensor("output", index, out, found_inf)
    if x.shape != out.shape:
        raise RuntimeError(f"output {index} has shape {[*out.shape]}: expected its input's, {[*x.shape]}.")


def _check_device(name: str, tensor: Tensor, found_inf: Tensor) -> None:
    if tensor.device != found_inf.device:
        raise RuntimeError(f"{name} is on another device than found_inf; call once per device.")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _repeats(tensor: Tensor) -> bool:
    """Return whether the tensor is expanded, so that writing one element changes others."""
    if tensor.is_contiguous():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _extents(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Iterator[Extent]:
    """Yield the extents of all tensors with elements; an output that is its own input once."""
    side = "input" if outputs is inputs else "output"
    for index, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
        if out.numel() == 0 or out.is_meta:
            continue
        written = extent_of(out, f"{side} {index}", index, only_read=False)
        read = extent_of(x, f"input {index}", index, only_read=True)
        yield written
        if (read.begin, read.end) != (written.begin, written.end):
            yield read


def _is_gapless(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory in any order: contiguous, channels_last, transposed…"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
