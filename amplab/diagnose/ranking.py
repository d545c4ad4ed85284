"""Which of the findings of all rules a report contains, in which order, and how certain each is.

The catalogue says for each finding which ones it supersedes and which ones it may explain; `ranked` applies that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from amplab.diagnose.catalogue import CATALOGUE, CatalogueEntry
from amplab.diagnose.finding import Finding, Findings

__all__ = ["ranked"]


def ranked(found: Iterable[Finding]) -> Findings:
    """Return the findings to report, the most severe first.

    Findings that another one supersedes are left out. Those that another one explains become "possible". Of the notes
    that need no action only the first is kept, and it comes last.

    A diverging run explains later overflows. `diverging` is left out if the loss of a step that ran again in float32
    has not grown. It is also left out if a cause is certain that large update steps do not explain, unless the loss
    had grown by a factor of 100 before.

    >>> left = ranked([Finding("diverging", "error", "a", "b", "c", "likely"),
    ...                Finding("overflow-in-half", "error", "d", "e", "f", "certain")])
    >>> [(each.name, each.certainty) for each in left]
    [('diverging', 'likely'), ('overflow-in-half', 'possible')]
    """
    found = _without_refuted(list(found))
    superseded = {name for each in found for name in _superseded_by(each)}
    kept = [each for each in found if each.name not in superseded]
    for cause in [each for each in kept if each.severity == "error" and _entry(each.name).explains]:
        explained = _entry(cause.name).explains
        kept = [replace(each, certainty="possible") if each.name in explained else each for each in kept]
    in_order = Findings.ranked(kept)
    settles = [each for each in in_order if each.severity == "note" and _entry(each.name).settles]
    return Findings((*(each for each in in_order if each not in settles), *settles[:1]))


def _superseded_by(found: Finding) -> tuple[str, ...]:
    """The ids that a finding leaves out, its own never."""
    entry = _entry(found.name)
    names = (*entry.supersedes, *(entry.supersedes_as_error if found.severity == "error" else ()))
    return tuple(name for name in names if name != found.name)


def _entry(name: str) -> CatalogueEntry:
    """The entry of an id; of an id that is not in the catalogue, one that acts as any other cause."""
    return CATALOGUE.get(name) or CatalogueEntry(name, name, ("error",), {})


def _without_refuted(found: list[Finding]) -> list[Finding]:
    """Leave out `diverging` if the cause of a step's first non-finite value contradicts it."""
    causes = [each for each in found if each.severity == "error" and "not_finite" in each.evidence]
    return [each for each in found if each.name != "diverging" or not any(_refutes(cause, each) for cause in causes)]


def _refutes(cause: Finding, diverging: Finding) -> bool:
    """Whether a step's cause shows that the update steps were not too large."""
    began, again = diverging.evidence.get("first_loss"), cause.evidence.get("loss_in_float32")
    now = diverging.evidence.get("loss_now")
    if not isinstance(began, int | float):
        return False
    if cause.name in _entry("diverging").explains:
        return isinstance(again, int | float) and again <= began
    return cause.certainty == "certain" and not (isinstance(now, int | float) and now > _EXPLODED * began)


_EXPLODED = 100.0
"""If the loss grew by more than this factor, a certain cause in one step does not explain it."""
