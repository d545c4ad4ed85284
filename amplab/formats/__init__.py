"""Number formats: the value of a bit pattern, rounding, and the values of a tensor that are out of range.

`float_format` defines the class, `known_formats` six formats in use. `out_of_range` and `exponents` measure which
share of a tensor underflows or overflows in a format, and `histogram_drawing` draws it.
"""

from amplab.formats.exponents import ExponentHistogram, exponent_histogram
from amplab.formats.float_format import BitFields, FloatFormat
from amplab.formats.histogram_drawing import histogram_text
from amplab.formats.known_formats import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FORMATS,
    LOW_PRECISION_DTYPES,
    TF32,
    format_of,
)
from amplab.formats.out_of_range import overflow_fraction, underflow_fraction

__all__ = [
    "BitFields",
    "FloatFormat",
    "FLOAT32",
    "TF32",
    "BFLOAT16",
    "FLOAT16",
    "FLOAT8_E5M2",
    "FLOAT8_E4M3",
    "FORMATS",
    "LOW_PRECISION_DTYPES",
    "format_of",
    "underflow_fraction",
    "overflow_fraction",
    "ExponentHistogram",
    "exponent_histogram",
    "histogram_text",
]
