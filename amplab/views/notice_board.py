"""The messages above the dashboard: failures with their traceback, notes, and the offer to continue an experiment.

A notice is a frozen value; the board keeps notices until the user dismisses them. No widget here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["Notice", "NoticeBoard", "failure", "offer", "refused_message", "saved_offer"]

KEPT = 4
"""Notices on the board at once; the oldest is removed for a new one."""

DISMISS = ("dismiss", "Dismiss")


@dataclass(frozen=True)
class Notice:
    """One message.

    Attributes:
        kind: "error", "note" or "offer".
        title: A few words.
        text: A sentence.
        detail: Lines shown unchanged, such as a traceback.
        choices: (message type, label) of the buttons; the first is the default button.
        of_run: Whether it is about the current run, so that a reset removes it.
    """

    kind: str
    title: str
    text: str
    detail: str = ""
    choices: tuple[tuple[str, str], ...] = (DISMISS,)
    of_run: bool = False


CELL_WAITS = Notice(
    "note",
    "A cell waits for this run",
    "What is pressed here may take effect only when the cell ends. To end it now, interrupt the kernel (■).",
    choices=(),
)
"""While a cell runs, JupyterLab may hand no message of a page to the kernel."""


def failure(text: str, *, fatal: bool = False, damaged: bool = False, attempted: bool = False) -> Notice:
    """Return the notice of a failure, given as a sentence or as a traceback.

    A failure that ends the run (`fatal`), or leaves NaN in the model (`damaged`), offers a reset. What failed without a
    change of the run (`attempted`) is over with the run, too.

    >>> failure("Traceback (most recent call last):\\n  File …\\nValueError: no").text
    'ValueError: no'
    """
    first, _, rest = text.strip().partition("\n")
    if first.startswith("Traceback"):
        first, rest = text.strip().splitlines()[-1], text.strip()
    title = "An error occurred; the lab continues"
    if fatal or damaged:
        title = "Training has failed" if fatal else "The run continues with a damaged model"
    choices = (("reset", "Reset the run"), DISMISS) if fatal or damaged else (DISMISS,)
    return Notice("error", title, first, rest.strip(), choices, of_run=fatal or damaged or attempted)


def refused_message(why: str) -> Notice:
    """Return the notice of a message of the page that was not carried out."""
    text = f"{why} Nothing was changed. If a click causes this, reload the page: it is of another version of amplab."
    return Notice("note", "A message of this page was refused", text)


def offer(running: str, steps: int, state: str, wanted: str | None) -> Notice:
    """Return the choice between the current experiment and a new one.

    Args:
        running: Config of the current experiment.
        steps: Its number of steps.
        state: State of its trainer.
        wanted: Config of the new one, None for the same config.
    """
    text = f"{running} is {state} at step {steps:,} and has not been changed."
    if wanted is not None:
        text += f" Start new starts {wanted}."
    choices = (("dismiss", "Continue with it"), ("new", "Start new"))
    return Notice("offer", "This kernel already has an experiment", text, choices=choices, of_run=True)


def saved_offer(name: str, config: str, step: int, others: Sequence[str] = ()) -> Notice:
    """Return the choice to continue a run of a kernel that has ended.

    Args:
        name: What the run is called.
        config: Its config.
        step: Its steps.
        others: The parts of code of one's own that are not those of the run.

    >>> saved_offer("run of 14:05", "amplab/1 task=digits", 12_300).title
    'Continue the run of 14:05 at step 12,300?'
    """
    text = f"Its kernel has ended: {config}. Continue it, then press Start to train on."
    if parts := ", ".join(f"{each}=" for each in others if each != "optimizer"):
        text += f" It was trained with another {parts}: its next steps use what this cell has."
    if "optimizer" in others:
        text += " Its optimizer= was another: the optimizer of this cell goes on with the settings that were saved."
    choices = (("continue", "Continue it"), ("dismiss", "Dismiss"))
    return Notice("offer", f"Continue the {name} at step {step:,}?", text, choices=choices)


class NoticeBoard:
    """The notices on display, each with a unique number."""

    def __init__(self) -> None:
        self._notices: dict[int, Notice] = {}
        self._number = 0

    def put(self, notice: Notice) -> None:
        """Add a notice, unless an equal one is shown; an offer replaces an older offer."""
        if notice in self._notices.values():
            return
        if notice.kind == "offer":
            self.remove_kind("offer")
        self._number += 1
        self._notices[self._number] = notice
        while len(self._notices) > KEPT:
            del self._notices[min(self._notices)]

    def remove(self, number: int) -> None:
        """Remove a notice, if it is still shown."""
        self._notices.pop(number, None)

    def withdraw(self, notice: Notice) -> None:
        """Remove a notice, if it is still shown."""
        self._notices = {number: each for number, each in self._notices.items() if each != notice}

    def has_kind(self, kind: str) -> bool:
        """Return whether a notice of this kind is up."""
        return any(notice.kind == kind for notice in self._notices.values())

    def remove_kind(self, kind: str) -> None:
        """Remove all notices of one kind."""
        self._notices = {number: notice for number, notice in self._notices.items() if notice.kind != kind}

    def remove_of_run(self) -> None:
        """Remove all notices about a run that has been reset."""
        self._notices = {number: notice for number, notice in self._notices.items() if not notice.of_run}

    def payload(self) -> list[dict[str, object]]:
        """Return the notices as JSON values, newest first."""
        return [{"id": number, **asdict(notice)} for number, notice in reversed(self._notices.items())]
