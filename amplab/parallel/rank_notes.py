"""The notes that ranks of ``combine_ddp`` send with their gradients: whether all ranks must compare what they have.

    a note                one number, 0.0 or 1.0; after the sum over ranks it is > 0 if a rank has sent 1.0
    the number of steps   two notes for each binary digit, one for 0 and one for 1: ranks that differ set both

Only whether a sum is above 0 counts, which holds in every dtype and for any number of ranks. Where the numbers are in a
bucket is in ``buckets.py``; when they are sent, and what ranks then compare, is in ``combined_reducer.py``.
"""

import operator
from collections.abc import Sequence
from typing import NamedTuple, Self

__all__ = ["NOTE_COUNT", "Notes"]

_DIGITS = 14  # of the number of steps

NOTE_COUNT = 3 + 2 * _DIGITS
"""Numbers of the notes of one rank; the padding of a part has room for 31."""


class Notes(NamedTuple):
    """What a rank tells the others in a bucket; after the exchange, what all ranks told.

    Attributes:
        of_params: its parameters are others than those that were agreed on.
        of_values: its settings are others, it has a gradient that cannot be averaged, or its backward raised.
        without_order: it has not recorded in which order the gradients of this backward arrived.
        zeros, ones: the last binary digits of the number of its steps, each in one of the two.
    """

    of_params: bool = False
    of_values: bool = False
    without_order: bool = False
    zeros: tuple[bool, ...] = (False,) * _DIGITS
    ones: tuple[bool, ...] = (False,) * _DIGITS

    def with_steps(self, steps: int) -> Self:
        """Return these notes with another number of steps."""
        ones = tuple(bool(steps >> place & 1) for place in range(_DIGITS))
        return self._replace(zeros=tuple(not digit for digit in ones), ones=ones)

    @property
    def ask_for_comparison(self) -> bool:
        """Whether a rank has news, or ranks have made other numbers of steps."""
        return self.of_params or self.of_values or any(map(operator.and_, self.zeros, self.ones))

    def numbers(self) -> list[float]:
        """Return them as `NOTE_COUNT` numbers, 0.0 or 1.0."""
        notes = (self.of_params, self.of_values, self.without_order, *self.zeros, *self.ones)
        return [float(note) for note in notes]

    @classmethod
    def heard(cls, numbers: Sequence[float]) -> Self:
        """Return the notes whose numbers were summed over ranks."""
        params, values, order, *digits = (number > 0 for number in numbers)
        return cls(params, values, order, tuple(digits[:_DIGITS]), tuple(digits[_DIGITS:]))
