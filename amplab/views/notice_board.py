"""What is said above the dashboard: failures with their traceback, sentences, and the offer of a running experiment.

A notice is a frozen value; the board keeps those that nobody has answered yet. No widget here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Notice", "NoticeBoard", "failure", "offer"]

KEPT = 4
"""Notices on the board at once; an older failure gives way to a newer one."""


@dataclass(frozen=True)
class Notice:
    """One message.

    Attributes:
        kind: "error" or "offer".
        title: A few words.
        text: A sentence.
        detail: Lines to be read as they are, such as a traceback.
        choices: (message type, label) of the buttons, the first one the accented.
        of_run: Whether it speaks of the present run and so goes when the run begins anew.
    """

    kind: str
    title: str
    text: str
    detail: str = ""
    choices: tuple[tuple[str, str], ...] = (("dismiss", "Dismiss"),)
    of_run: bool = False


def failure(text: str, *, fatal: bool = False, damaged: bool = False) -> Notice:
    """Return the notice of a failure whose first line is a sentence or a traceback's head.

    One that ends the run, or leaves NaN in the model, offers a reset and goes with it.

    >>> failure("Traceback (most recent call last):\\n  File …\\nValueError: no").text
    'ValueError: no'
    """
    first, _, rest = text.strip().partition("\n")
    if first.startswith("Traceback"):
        first, rest = text.strip().splitlines()[-1], text.strip()
    title = "Something failed; the lab goes on"
    if fatal or damaged:
        title = "Training has failed" if fatal else "The run goes on, damaged"
    choices = (("reset", "Reset the run"), ("dismiss", "Dismiss")) if fatal or damaged else (("dismiss", "Dismiss"),)
    return Notice("error", title, first, rest.strip(), choices, of_run=fatal or damaged)


def offer(running: str, steps: int, state: str, wanted: str | None) -> Notice:
    """Return the choice between the experiment that is there and a new one.

    Args:
        running: Its config.
        steps: How far it has come.
        state: State of its trainer.
        wanted: Config that was asked for, None for the same.
    """
    text = f"{running} is {state} at step {steps:,} and goes on untouched."
    if wanted is not None:
        text += f" Start new begins {wanted}."
    choices = (("dismiss", "Continue with it"), ("new", "Start new"))
    return Notice("offer", "This kernel has an experiment", text, choices=choices, of_run=True)


class NoticeBoard:
    """The notices that are up, each under a number of its own."""

    def __init__(self) -> None:
        self._notices: dict[int, Notice] = {}
        self._number = 0

    def put(self, notice: Notice) -> None:
        """Put one up, unless the same is there; an offer takes the place of an older one."""
        if notice in self._notices.values():
            return
        if notice.kind == "offer":
            self.withdraw("offer")
        self._number += 1
        self._notices[self._number] = notice
        while len(self._notices) > KEPT:
            del self._notices[min(self._notices)]

    def take_down(self, number: int) -> None:
        """Remove one; harmless when it is gone."""
        self._notices.pop(number, None)

    def withdraw(self, kind: str) -> None:
        """Remove all of one kind."""
        self._notices = {number: notice for number, notice in self._notices.items() if notice.kind != kind}

    def begin_anew(self) -> None:
        """Remove all that speak of the run that has been reset."""
        self._notices = {number: notice for number, notice in self._notices.items() if not notice.of_run}

    def payload(self) -> list[dict]:
        """Return what is up as JSON values, newest first."""
        return [{"id": number, **asdict(notice)} for number, notice in reversed(self._notices.items())]
