"""The check of an exercise: it says what is wrong with an answer, or that it is right, and why.

A check is a function that returns None for a right answer, and else a sentence that says what is wrong and how to go
on. `exercise` makes it answer with a `Verdict`, the same way in every lesson.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, get_args, get_origin

from amplab.lessons.progress import record_right

__all__ = ["Exercise", "Verdict", "exercise"]

NOT_ANSWERED = "Not answered yet: write your answer in place of ... and run the cell again."
_NAME = re.compile(r"\d\d-\d")
_RIGHT = re.compile(r"^Right:\n((?:[ \t]+\S.*\n?)+)", re.MULTILINE)

P = ParamSpec("P")


@dataclass(frozen=True)
class Verdict:
    """What a check says about an answer.

    Attributes:
        text: the sentence, which is also its repr.
        right: whether the answer is right.
    """

    text: str
    right: bool

    def __repr__(self) -> str:
        return self.text


class Exercise(Generic[P]):
    """A check with its name; a call returns a verdict and notes a right answer in the progress.

    Attributes:
        name: lesson and number, such as "03-1".
        why: what a right answer is told: the docstring's section ``Right:``.
    """

    def __init__(self, name: str, check: Callable[P, str | None]) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"exercise({name!r}): expected lesson and number, such as '03-1'.")
        self.name = name
        self.why = _why(check)
        self._check = check
        functools.update_wrapper(self, check)

    def __call__(self, *answer: P.args, **further: P.kwargs) -> Verdict:
        """Return the verdict on an answer."""
        if any(map(_is_open, (*answer, *further.values()))):
            return Verdict(NOT_ANSWERED, right=False)
        try:
            wrong = self._check(*answer, **further)
        except Exception as error:  # noqa: BLE001 - the answer may be the reader's own function
            wrong = _other_form(self._check, *answer) or (
                f"with this answer the check raised {type(error).__name__}: {error}"
            )
        if wrong is not None:
            return Verdict(f"Not yet: {wrong}", right=False)
        record_right(self.name)
        return Verdict(f"Right. {self.why}".rstrip(), right=True)


def exercise(name: str) -> Callable[[Callable[P, str | None]], Exercise[P]]:
    """Return a decorator that makes a check answer with a `Verdict`.

    >>> @exercise("99-1")
    ... def check_sum(answer: int) -> str | None:
    ...     '''Ask for 1 + 1.
    ...
    ...     Right:
    ...         Two ones are two.
    ...     '''
    ...     return None if answer == 2 else f"{answer} is not 1 + 1; count again."
    >>> check_sum(3)
    Not yet: 3 is not 1 + 1; count again.
    >>> check_sum(2)
    Right. Two ones are two.
    >>> check_sum(...)
    Not answered yet: write your answer in place of ... and run the cell again.

    Args:
        name: number of the lesson and of the exercise, such as "03-1".

    Raises:
        ValueError: `name` has another form.
    """
    return functools.partial(Exercise, name)


def _is_open(answer: object) -> bool:
    """Return whether an answer, or a part of it, is still ``...``."""
    if isinstance(answer, dict):
        return any(map(_is_open, answer.values()))
    if isinstance(answer, list | tuple):
        return any(map(_is_open, answer))
    return answer is ...


def _other_form(check: Callable[..., str | None], answer: Any, *_: object) -> str | None:
    """Return that an answer has not the form that the check's annotation asks for, such as a number; else None."""
    annotation = next(iter(inspect.signature(check, eval_str=True).parameters.values())).annotation
    form = get_origin(annotation) or annotation
    if form in (float, int):
        fits, expected = isinstance(answer, float | int), "a number"
    elif form is Callable:
        fits, expected = callable(answer), "a function"
    elif form is tuple:
        size = len(get_args(annotation))
        fits, expected = isinstance(answer, tuple | list) and len(answer) == size, f"{size} values in parentheses"
    elif isinstance(form, type) and issubclass(form, Mapping):
        fits, expected = isinstance(answer, Mapping), "a dict"
    elif isinstance(form, type) and issubclass(form, Iterable) and form is not str:
        fits, expected = isinstance(answer, Iterable), "a list"
    else:
        return None
    return None if fits else f"{answer!r} is not {expected}, which is what the exercise asks for."


def _why(check: Callable[P, str | None]) -> str:
    """Return the section ``Right:`` of the docstring as one paragraph."""
    section = _RIGHT.search(inspect.getdoc(check) or "")
    return " ".join(section[1].split()) if section else ""
