"""A loss scale as text."""

from __future__ import annotations

import math

from amplab.views.number_text import binary_power

__all__ = ["scale_text"]


def scale_text(scale: float, *, raised: bool = False) -> str:
    """Return a scale as a power of two where it is one, its exponent raised for a page or plain for a terminal.

    >>> scale_text(65536.0), scale_text(1000.0), scale_text(2.0**-14)
    ('2^16', '1000', '2^-14')
    >>> scale_text(65536.0, raised=True)
    '2¹⁶'
    """
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        return f"{scale:g}"
    return binary_power(exponent - 1) if raised else f"2^{exponent - 1}"
