"""The formats used in mixed precision.

| name        | sign, exponent, mantissa | largest | smallest normal | smallest | epsilon |
|-------------|--------------------------|---------|-----------------|----------|---------|
| float32     | 1, 8, 23                 | 2^128   | 2^-126          | 2^-149   | 2^-23   |
| tf32        | 1, 8, 10                 | 2^128   | 2^-126          | 2^-136   | 2^-10   |
| bfloat16    | 1, 8, 7                  | 2^128   | 2^-126          | 2^-133   | 2^-7    |
| float16     | 1, 5, 10                 | 65504   | 2^-14           | 2^-24    | 2^-10   |
| float8_e5m2 | 1, 5, 2                  | 57344   | 2^-14           | 2^-16    | 2^-2    |
| float8_e4m3 | 1, 4, 3                  | 448     | 2^-6            | 2^-9     | 2^-3    |

float8_e4m3 is the variant that torch calls ``float8_e4m3fn`` (finite, one NaN): it has no infinity, and values that
are too large become 448.
tf32 is the part of a float32 that a tensor core uses. torch has no dtype for it. The conversion in hardware may
truncate; `FloatFormat.round` always rounds to nearest even.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from amplab.formats.float_format import FloatFormat

__all__ = [
    "FLOAT32",
    "TF32",
    "BFLOAT16",
    "FLOAT16",
    "FLOAT8_E5M2",
    "FLOAT8_E4M3",
    "FORMATS",
    "LOW_PRECISION_DTYPES",
    "format_of",
]

FLOAT32 = FloatFormat("float32", 8, 23, torch_dtype=torch.float32)
TF32 = FloatFormat("tf32", 8, 10)
BFLOAT16 = FloatFormat("bfloat16", 8, 7, torch_dtype=torch.bfloat16)
FLOAT16 = FloatFormat("float16", 5, 10, torch_dtype=torch.float16)
FLOAT8_E5M2 = FloatFormat("float8_e5m2", 5, 2, torch_dtype=torch.float8_e5m2)
FLOAT8_E4M3 = FloatFormat("float8_e4m3", 4, 3, has_infinity=False, torch_dtype=torch.float8_e4m3fn)

FORMATS: Mapping[str, FloatFormat] = MappingProxyType(
    {known.name: known for known in (FLOAT32, TF32, BFLOAT16, FLOAT16, FLOAT8_E5M2, FLOAT8_E4M3)}
)

# The two 16-bit floating dtypes, "low precision" for weights, gradients and ops. A set, for fast lookup in every op.
LOW_PRECISION_DTYPES = frozenset([torch.float16, torch.bfloat16])


def format_of(dtype: torch.dtype) -> FloatFormat:
    """Return the format of a torch dtype.

    >>> format_of(torch.bfloat16).name
    'bfloat16'

    Raises:
        ValueError: if no known format has that dtype (including float64 and integers).
    """
    for known in FORMATS.values():
        if known.torch_dtype is not None and known.torch_dtype is dtype:
            return known
    allowed = ", ".join(str(f.torch_dtype) for f in FORMATS.values() if f.torch_dtype)
    raise ValueError(
        f"format_of({dtype}): expected one of {allowed}; "
        "describe another format with FloatFormat(name, exponent_bits, mantissa_bits)."
    )
