"""A loss scale as text."""

from __future__ import annotations

import math

__all__ = ["scale_text"]


def scale_text(scale: float) -> str:
    """Return a scale as a power of two where it is one.

    >>> scale_text(65536.0), scale_text(1000.0), scale_text(2.0**-14)
    ('2^16', '1000', '2^-14')
    """
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"
