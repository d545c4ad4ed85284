"""The precisions of a policy: a dtype that torch computes in, or a simulated format.

    torch.float16, torch.bfloat16, torch.float32     tensors of that dtype
    tf32, float8_e4m3, float8_e5m2                   simulated: float32 tensors that hold values of the format

torch has float8 dtypes but no arithmetic on them, and no tf32 dtype, so these precisions are `FloatFormat`s.
`simulated_rounding` rounds values to them.
"""

from __future__ import annotations

from typing import Any

import torch

from amplab.formats import FLOAT8_E4M3, FLOAT8_E5M2, FORMATS, TF32, FloatFormat

__all__ = ["Precision", "precision_name", "precision_of", "tensor_dtype"]

Precision = torch.dtype | FloatFormat
"""A torch dtype, or a format simulated with float32 tensors."""

_SIMULATED = (TF32, FLOAT8_E4M3, FLOAT8_E5M2)
_BY_NAME: dict[str, Precision] = {
    name: known if known in _SIMULATED or known.torch_dtype is None else known.torch_dtype
    for name, known in FORMATS.items()
}
_BY_DTYPE: dict[torch.dtype, Precision] = {
    known.torch_dtype: _BY_NAME[name] for name, known in FORMATS.items() if known.torch_dtype is not None
}


def precision_of(value: Any, what: str) -> Precision:
    """Return the precision that `value` names.

    Args:
        value: a torch dtype, a `FloatFormat` of amplab.formats, or the name of one.
        what: the name of the argument, for the error message.

    Raises:
        ValueError: `value` is not a supported precision.

    >>> precision_of("bfloat16", "compute_dtype"), precision_of(torch.float8_e5m2, "compute_dtype").name
    (torch.bfloat16, 'float8_e5m2')
    """
    name = value.name if isinstance(value, FloatFormat) and value in FORMATS.values() else value
    if isinstance(name, str) and name.removeprefix("torch.") in _BY_NAME:
        return _BY_NAME[name.removeprefix("torch.")]
    if isinstance(value, torch.dtype) and value in _BY_DTYPE:
        return _BY_DTYPE[value]
    raise ValueError(
        f"{what}={value!r}: expected torch.float16, torch.bfloat16 or torch.float32; "
        "pass one of these, or 'tf32', 'float8_e4m3' or 'float8_e5m2' to simulate that format in float32 tensors."
    )


def precision_name(precision: Precision) -> str:
    """Return the name that `precision_of` accepts, e.g. "float16" or "tf32"."""
    return precision.name if isinstance(precision, FloatFormat) else str(precision).removeprefix("torch.")


def tensor_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of the tensors that hold values of `precision`: float32 for a simulated format."""
    return torch.float32 if isinstance(precision, FloatFormat) else precision
