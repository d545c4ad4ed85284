"""`Finding`, the result of a rule, and `Findings`, a printable list of them.

A finding says what was observed, why, with which numbers, what to do about it and how certain that is. Severities:

    error     the run cannot learn, or learns the wrong thing: all steps skipped, NaN, weights that never change
    warning   the run is worse: lost steps, lost gradients, results that differ from those in float32
    note      useful to know; does no harm in this run

The rules are in `rules`; the sentences of each finding are in `catalogue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypedDict, get_args, overload

from amplab.diagnose.finding_html import finding_html
from amplab.display.html import markup, page
from amplab.display.numbers import count, number
from amplab.display.text import labelled, visible

__all__ = ["CERTAINTIES", "SEVERITIES", "Certainty", "Finding", "Findings", "Number", "Place", "Severity"]

Severity = Literal["error", "warning", "note"]
Certainty = Literal["certain", "likely", "possible"]
Number = float | int | str

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
CERTAINTIES: tuple[Certainty, ...] = get_args(Certainty)


class Place(TypedDict):
    """The op, module and line of a finding, as keyword arguments of `Finding`."""

    op: str
    module: str
    line: str


@dataclass(frozen=True, repr=False)
class Finding:
    """One result of a rule.

    Args:
        name: its id, lower-case words joined by hyphens: `scale-too-large`.
        severity: "error", "warning" or "note"; see the table at the top of this file.
        symptom: what was observed, one sentence.
        cause: why, one or two sentences.
        remedy: code to paste; try the first suggestion first.
        certainty: "certain" (nothing else explains the numbers), "likely" or "possible".
        op: the op, as a trace names it; empty if it is about no single op.
        module: path of the module; empty outside of modules.
        tensor: the tensor: `input 0`, `weight`, `gradient of fc.weight`.
        line: line of the user's code, `file.py:12`; empty if unknown.
        evidence: name -> number that supports the finding.

    Raises:
        ValueError: an unknown severity or certainty, or a name that is not lower-case words joined by hyphens.
    """

    name: str
    severity: Severity
    symptom: str
    cause: str
    remedy: str
    certainty: Certainty = "certain"
    op: str = ""
    module: str = ""
    tensor: str = ""
    line: str = ""
    evidence: Mapping[str, Number] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity={self.severity!r}: expected one of {', '.join(SEVERITIES)}.")
        if self.certainty not in CERTAINTIES:
            raise ValueError(f"certainty={self.certainty!r}: expected one of {', '.join(CERTAINTIES)}.")
        if not self.name or self.name != self.name.lower() or not self.name.replace("-", "").isalnum():
            raise ValueError(
                f"name={self.name!r}: expected lower-case words joined by hyphens, such as scale-too-large."
            )

    @property
    def where(self) -> str:
        """Op, module, tensor and line in one phrase; empty for a finding about the whole run."""
        parts = (self.op, f"in {self.module}" if self.module else "", self.tensor, self.line)
        return ", ".join(part for part in (" ".join(filter(None, parts[:2])), *parts[2:]) if part)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, ready for JSON."""
        return {**asdict(self), "evidence": dict(self.evidence)}

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} = {number(value)}" for name, value in self.evidence.items())
        lines = (
            f"[{self.severity}] {self.name}{f': {self.where}' if self.where else ''}",
            labelled("seen", self.symptom),
            labelled("because", f"{self.cause} ({self.certainty})"),
            labelled("numbers", numbers) if numbers else "",
            "  to do     " + self.remedy.replace("\n", "\n            "),  # code, so its lines are not wrapped
        )
        return visible("\n".join(filter(None, lines)))

    def __repr__(self) -> str:
        return visible(f"<Finding: {self.severity}: {self.name}{f': {self.where}' if self.where else ''}>")

    def _repr_html_(self) -> str:
        return page("", finding_html(self, is_open=True))


@dataclass(frozen=True, repr=False)
class Findings(Sequence[Finding]):
    """Findings, ordered by severity, then by certainty, then as given.

    Args:
        found: the findings.
        looked_at: what was examined, and what was not; printed if nothing was found.

    >>> a = Finding("window-short", "note", "skips", "the window is short", "scale_window=2000")
    >>> b = Finding("data-nonfinite", "error", "NaN", "the batch holds NaN", "clean the batch")
    >>> [each.name for each in Findings.ranked([a, b])]
    ['data-nonfinite', 'window-short']
    """

    found: tuple[Finding, ...] = ()
    looked_at: tuple[str, ...] = ()

    @classmethod
    def ranked(cls, found: Iterable[Finding]) -> Findings:
        """Return `found` in order, each finding once, with its highest severity."""
        unique: dict[tuple[str, ...], Finding] = {}
        for each in sorted(found, key=_rank):
            unique.setdefault((each.name, each.op, each.module, each.tensor), each)
        return cls(tuple(unique.values()))

    @property
    def harmful(self) -> Findings:
        """The findings that are not notes."""
        return Findings(tuple(each for each in self.found if each.severity != "note"))

    def named(self, name: str) -> Findings:
        """The findings with one id."""
        return Findings(tuple(each for each in self.found if each.name == name))

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return every finding as plain values, ready for JSON."""
        return [each.as_dict() for each in self.found]

    def __len__(self) -> int:
        return len(self.found)

    @overload
    def __getitem__(self, place: int) -> Finding: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, place: int | slice) -> Finding | tuple[Finding, ...]:
        return self.found[place]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def __str__(self) -> str:
        if self.found:
            return "\n\n".join(map(str, self.found))
        return "\n".join(["nothing found", *(f"  {each}" for each in self.looked_at)])

    def __repr__(self) -> str:
        return f"<Findings: {self.sentence}>"

    @property
    def sentence(self) -> str:
        """The number of findings of each severity, in one line."""
        times = Counter(each.severity for each in self.found)
        return ", ".join(count(times[each], each) for each in SEVERITIES if times[each]) or "nothing found"

    def _repr_html_(self) -> str:
        """Return the findings as HTML, with notes collapsed."""
        if not self.found:
            listed = "".join(f"<li>{markup(each)}</li>" for each in self.looked_at)
            return page(
                "",
                '<p><span class="good">✓</span> nothing found</p>',
                f'<ul class="faint">{listed}</ul>' if listed else "",
            )
        return page(self.sentence, *(finding_html(each, is_open=each.severity != "note") for each in self.found))


def _rank(finding: Finding) -> tuple[int, int]:
    return SEVERITIES.index(finding.severity), CERTAINTIES.index(finding.certainty)
