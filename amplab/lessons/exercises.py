"""The check of an exercise: it says what is wrong with an answer, or that it is right, and why.

A check is a function that returns None for a right answer, and else a sentence that says what is wrong and how to go
on. `exercise` makes it answer with a `Verdict`, the same way in every lesson. An answer of another form than the
annotation of the check asks for does not reach the check; the forms are in :mod:`amplab.lessons.forms`.
"""

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, ParamSpec

from amplab.lessons.forms import AnswerRaisedError, FormError, in_form
from amplab.lessons.progress import record_right

__all__ = ["Exercise", "Verdict", "exercise"]

NOT_ANSWERED = "Not answered yet: write your answer in place of ... and run the cell again."
_NAME = re.compile(r"\d\d-\d")
_SECTION = r"^{}:\n((?:[ \t]+\S.*\n?)+)"

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
        form: how to write the answer, which one of another form is told: the docstring's section ``Form:``.
    """

    def __init__(self, name: str, check: Callable[P, str | None]) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"exercise({name!r}): expected lesson and number, such as '03-1'.")
        self.name = name
        self.why, self.form = _section(check, "Right"), _section(check, "Form").rstrip(".")
        self._check: Callable[..., str | None] = check
        functools.update_wrapper(self, check)

    def __call__(self, *answer: P.args, **further: P.kwargs) -> Verdict:
        """Return the verdict on an answer."""
        if any(map(_is_open, (*answer, *further.values()))):
            return Verdict(NOT_ANSWERED, right=False)
        if (wrong := self._fault(*answer, **further)) is not None:
            return Verdict(f"Not yet: {wrong}", right=False)
        record_right(self.name)
        return Verdict(f"Right. {self.why}".rstrip(), right=True)

    def _fault(self, *answer: object, **further: object) -> str | None:
        """Return what is wrong with an answer: its form, what it raises, or its value."""
        signature = inspect.signature(self._check, eval_str=True)
        try:
            given = signature.bind(*answer, **further)
        except TypeError:
            return f"it needs other arguments; call it as {self._check.__name__}({', '.join(signature.parameters)})."
        try:
            _put_in_form(given)
            return self._check(*given.args, **given.kwargs)
        except FormError as error:
            return f"{error}: {self.form}." if self.form else f"{error}."
        except AnswerRaisedError as error:
            return f"{str(error).rstrip('.')}."
        except Exception as error:  # noqa: BLE001 - the answer may be an object of the reader's own
            return f"with this answer the check raised {type(error).__name__}: {error}"


def exercise(name: str) -> Callable[[Callable[P, str | None]], Exercise[P]]:
    """Return a decorator that makes a check answer with a `Verdict`.

    >>> @exercise("99-1")
    ... def check_sum(answer: int) -> str | None:
    ...     '''Ask for 1 + 1.
    ...
    ...     Form:
    ...         write the sum, such as 3.
    ...
    ...     Right:
    ...         Two ones are two.
    ...     '''
    ...     return None if answer == 2 else f"{answer} is not 1 + 1; count again."
    >>> check_sum(3)
    Not yet: 3 is not 1 + 1; count again.
    >>> check_sum(2)
    Right. Two ones are two.
    >>> check_sum("2")
    Not yet: '2' is not a whole number: write the sum, such as 3.
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


def _put_in_form(given: inspect.BoundArguments) -> None:
    """Replace each argument of a check, the answer first, by its value in the form of its annotation."""
    for at, (name, value) in enumerate(given.arguments.items()):
        form = given.signature.parameters[name].annotation
        given.arguments[name] = in_form(value, form, name if at else "")


def _section(check: Callable[P, str | None], title: str) -> str:
    """Return a section of the docstring, such as ``Right:``, as one paragraph."""
    section = re.search(_SECTION.format(title), inspect.getdoc(check) or "", re.MULTILINE)
    return " ".join(section[1].split()) if section else ""
