"""The form of an answer: what the annotation of a check asks for, such as a number or a dict of dtypes.

`in_form` returns the answer in this form, so that a check compares values only, and says what else it got:

    float, int             a finite number: Python's or numpy's, or a tensor without dimensions; no bool
    torch.dtype            a dtype, or one of its names in `DTYPES`
    Callable               a function; what it raises is said to be raised by it
    tuple[X, Y]            a tuple or a list of that length
    Mapping[K, X]          a dict; which keys it needs says `keys_fault`
    Sequence[X]            a list or a tuple; Collection[X] and Iterable[X] also a set or a generator
    type[X], X | Y, X      a subclass, one of several forms, an instance

What a check returns about an answer of the right form is in the lessons.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import Parameter
from numbers import Real
from types import UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
import torch

__all__ = ["DTYPES", "AnswerRaisedError", "FormError", "in_form", "keys_fault", "shown", "yours"]

_LONGEST = 100  # characters of a repr

DTYPES = {
    **dict.fromkeys(("float16", "half", "fp16"), torch.float16),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float32", "float", "fp32", "single"), torch.float32),
    **dict.fromkeys(("float64", "double", "fp64"), torch.float64),
}
"""Name -> dtype. A name may begin with "torch."."""


class FormError(Exception):
    """A part of an answer has another form than the exercise asks for.

    Attributes:
        place: the part, such as "answer['O1'][0]"; "" for the whole answer.
        expected: the form, such as "a number".
    """

    def __init__(self, place: str, value: object, expected: str) -> None:
        super().__init__(f"{f'{place} = ' if place else ''}{shown(value)} is not {expected}")
        self.place, self.expected = place, expected


class AnswerRaisedError(Exception):
    """The function that a reader wrote raised; its error is the cause."""


def in_form(value: Any, form: Any, place: str = "") -> Any:
    """Return a value in the form of an annotation, with numbers and dtypes as Python's and torch's.

    >>> in_form({"O1": ("half", torch.float32)}, Mapping[str, tuple[torch.dtype, torch.dtype]])
    {'O1': (torch.float16, torch.float32)}

    Args:
        value: an answer, or a part of it.
        form: an annotation; `Any`, `object` and none at all take every value.
        place: of the part in the answer.

    Raises:
        FormError: the value has another form.

    Sync: one for a number in a tensor on a GPU; else none.
    """
    kind, parts = get_origin(form) or form, get_args(form)
    if kind in (Any, object, Parameter.empty):
        return value
    if kind in (Union, UnionType):
        return _one_of(value, parts, place)
    if kind in _READERS:
        return _READERS[kind](value, parts, place)
    fits = isinstance(value, type) and issubclass(value, parts[0]) if kind is type else isinstance(value, kind)
    if not fits:
        raise FormError(place, value, f"a subclass of {parts[0].__name__}" if kind is type else f"a {kind.__name__}")
    return value


def keys_fault(answer: Mapping[str, object], names: Collection[str], place: str = "the answer") -> str | None:
    """Return which of the keys `names` an answer lacks, or which key is none of them; None if it has exactly these."""
    listed = ", ".join(map(repr, names))
    if missing := [name for name in names if name not in answer]:
        return f"{place} lacks {missing[0]!r}: the keys are {listed}."
    if further := [name for name in answer if name not in names]:
        return f"{place} has the key {shown(further[0])}, which is none of {listed}."
    return None


def yours(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the reader's own function; what it raises is an `AnswerRaisedError`."""

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise AnswerRaisedError(f"your function raised {type(error).__name__}: {error}") from error

    return called


def shown(value: object) -> str:
    """Return the repr of an answer in one line of at most 100 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - the repr may be the reader's own, or that of an int with 5,000 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


# ---- each form ----------------------------------------------------------------------------------


def _one_of(value: Any, forms: tuple[Any, ...], place: str) -> Any:
    """Return a value in the first of several forms that fits."""
    expected = []
    for form in forms:
        try:
            return in_form(value, form, place)
        except FormError as error:
            if error.place != place:
                raise  # the whole fits, and a part of it does not
            expected.append(error.expected)
    raise FormError(place, value, " or ".join(expected))


def _number(value: Any, _parts: tuple[Any, ...], place: str, expected: str = "a number") -> float:
    """Return a finite number as Python's int or float."""
    has_one = isinstance(value, np.ndarray | np.generic | torch.Tensor) and value.ndim == 0
    number = value.item() if has_one and not getattr(value, "is_meta", False) else value
    if isinstance(number, bool) or not isinstance(number, Real):
        raise FormError(place, value, expected)
    try:
        finite = math.isfinite(number)
    except OverflowError:  # an int beyond float64
        finite = False
    if not finite:
        raise FormError(place, value, expected.replace("a ", "a finite ", 1))
    return number if isinstance(number, int) else float(number)


def _whole_number(value: Any, parts: tuple[Any, ...], place: str) -> int:
    """Return a finite number without fraction as an int."""
    number = _number(value, parts, place, "a whole number")
    if number != int(number):
        raise FormError(place, value, "a whole number")
    return int(number)


def _string(value: Any, _parts: tuple[Any, ...], place: str) -> str:
    if not isinstance(value, str):
        raise FormError(place, value, "a string")
    return value


def _dtype(value: Any, _parts: tuple[Any, ...], place: str) -> torch.dtype:
    found = DTYPES.get(value.strip().removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        raise FormError(place, value, "a dtype, such as 'float16' or torch.float16")
    return found


def _function(value: Any, _parts: tuple[Any, ...], place: str) -> Callable[..., Any]:
    if not callable(value):
        raise FormError(place, value, "a function")
    return yours(value)


def _tuple(value: Any, parts: tuple[Any, ...], place: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list) or len(value) != len(parts):
        raise FormError(place, value, f"{len(parts)} values in parentheses")
    return tuple(
        in_form(each, form, _part(place, at)) for at, (each, form) in enumerate(zip(value, parts, strict=True))
    )


def _dict(value: Any, parts: tuple[Any, ...], place: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise FormError(place, value, "a dict")
    return {key: in_form(each, parts[1], _part(place, key)) for key, each in value.items()}


def _list(value: Any, parts: tuple[Any, ...], place: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise FormError(place, value, "a list")
    return [in_form(each, parts[0], _part(place, at)) for at, each in enumerate(value)]


def _names(value: Any, parts: tuple[Any, ...], place: str) -> list[Any]:
    """Return the elements of a list, a set or a generator; a string and a tensor are none of these."""
    if isinstance(value, str | torch.Tensor | np.ndarray) or not isinstance(value, Iterable):
        raise FormError(place, value, "a list or a set")
    return _list(list(value), parts, place)


def _part(place: str, key: object) -> str:
    return f"{place or 'answer'}[{shown(key)}]"


_READERS: dict[Any, Callable[[Any, tuple[Any, ...], str], Any]] = {
    float: _number,
    int: _whole_number,
    str: _string,
    torch.dtype: _dtype,
    Callable: _function,
    tuple: _tuple,
    dict: _dict,
    Mapping: _dict,
    list: _list,
    Sequence: _list,
    Collection: _names,
    Iterable: _names,
}
