"""What a rule has found: `Finding`, and `Findings`, the list of them that prints.

A finding says what was seen, why, on which evidence, what to do about it and how sure that is. Severity goes by harm:

    error     the run cannot learn, or learns something else: skipped for ever, NaN, weights that never move
    warning   the run is worse for it: steps lost, gradients lost, results that differ from float32's
    note      worth knowing; does no harm in this run

The rules themselves are in the files named ``…_rules``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args, overload

from amplab.diagnose.finding_html import finding_html
from amplab.display.html import page
from amplab.display.numbers import count, number
from amplab.display.text import labelled

__all__ = ["CERTAINTIES", "SEVERITIES", "Certainty", "Finding", "Findings", "Number", "Severity"]

Severity = Literal["error", "warning", "note"]
Certainty = Literal["certain", "likely", "possible"]
Number = float | int | str

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
CERTAINTIES: tuple[Certainty, ...] = get_args(Certainty)


@dataclass(frozen=True, repr=False)
class Finding:
    """One thing that a rule has found.

    Args:
        name: the rule's word for it, in lower case with hyphens: `scale-too-large`.
        severity: "error", "warning" or "note"; see the head of this file.
        symptom: what can be seen, one sentence.
        cause: why it is so, one or two sentences.
        remedy: code to paste; the first one is the one to try first.
        certainty: "certain" (nothing else explains the numbers), "likely" or "possible".
        op: the op it happened in, as a trace names it; empty where it is none's.
        module: path of the module, empty outside of modules.
        tensor: what it happened to: `input 0`, `weight`, `gradient of fc.weight`.
        line: line of the user's code, `file.py:12`; empty where it is not known.
        evidence: the numbers that it rests on, by name.

    Raises:
        ValueError: another word for severity or certainty, or a name that is none.
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
            raise ValueError(
                f"severity={self.severity!r}: expected one of {', '.join(SEVERITIES)}; go by the harm done."
            )
        if self.certainty not in CERTAINTIES:
            raise ValueError(f"certainty={self.certainty!r}: expected one of {', '.join(CERTAINTIES)}.")
        if not self.name or self.name != self.name.lower() or not self.name.replace("-", "").isalnum():
            raise ValueError(f"name={self.name!r}: expected words in lower case joined by hyphens, as scale-too-large.")

    @property
    def where(self) -> str:
        """Op, module, tensor and line in one phrase; empty where it is about the run as a whole."""
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
            "  to do     " + self.remedy.replace("\n", "\n            "),  # code, which no line may break
        )
        return "\n".join(filter(None, lines))

    def __repr__(self) -> str:
        return f"<Finding: {self.severity}: {self.name}{f': {self.where}' if self.where else ''}>"

    def _repr_html_(self) -> str:
        return page("", finding_html(self, is_open=True))


@dataclass(frozen=True, repr=False)
class Findings(Sequence[Finding]):
    """Findings, the ones to look at first in front: by severity, then by certainty, then in the order given.

    >>> a = Finding("window-short", "note", "skips", "the window is short", "scale_window=2000")
    >>> b = Finding("data-nonfinite", "error", "NaN", "the batch holds NaN", "clean the batch")
    >>> [each.name for each in Findings.ranked([a, b])]
    ['data-nonfinite', 'window-short']
    """

    found: tuple[Finding, ...] = ()

    @classmethod
    def ranked(cls, found: Iterable[Finding]) -> Findings:
        """Put `found` in order, each finding once, as severe as it was found."""
        unique: dict[tuple[str, ...], Finding] = {}
        for each in sorted(found, key=_rank):
            unique.setdefault((each.name, each.op, each.module, each.tensor), each)
        return cls(tuple(unique.values()))

    @property
    def harmful(self) -> Findings:
        """Those above "note"."""
        return Findings(tuple(each for each in self.found if each.severity != "note"))

    def named(self, name: str) -> Findings:
        """Those of one rule."""
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
        return "\n\n".join(map(str, self.found)) if self.found else "nothing found"

    def __repr__(self) -> str:
        return f"<Findings: {self.sentence}>"

    @property
    def sentence(self) -> str:
        """How many there are of each severity, in one line."""
        times = Counter(each.severity for each in self.found)
        return ", ".join(count(times[each], each) for each in SEVERITIES if times[each]) or "nothing found"

    def _repr_html_(self) -> str:
        """Notes are folded: they do no harm."""
        if not self.found:
            return page("", '<p><span class="good">✓</span> nothing found</p>')
        return page(self.sentence, *(finding_html(each, is_open=each.severity != "note") for each in self.found))


def _rank(finding: Finding) -> tuple[int, int]:
    return SEVERITIES.index(finding.severity), CERTAINTIES.index(finding.certainty)
