"""What a rule has found: `Finding`, and `Findings`, the list of them that prints.

A finding says what was seen, why, on which evidence, what to do about it and how sure that is. Severity goes by harm:

    error     the run cannot learn, or learns something else: skipped for ever, NaN, weights that never move
    warning   the run is worse for it: steps lost, gradients lost, results that differ from float32's
    note      worth knowing; does no harm in this run

The rules themselves are in the files named ``…_rules``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Literal, get_args, overload

__all__ = ["CERTAINTIES", "SEVERITIES", "Certainty", "Finding", "Findings", "Number", "Severity"]

Severity = Literal["error", "warning", "note"]
Certainty = Literal["certain", "likely", "possible"]
Number = float | int | str

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
CERTAINTIES: tuple[Certainty, ...] = get_args(Certainty)


@dataclass(frozen=True)
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
        numbers = ", ".join(f"{name} = {_shown(value)}" for name, value in self.evidence.items())
        lines = (
            f"[{self.severity}] {self.name}{f': {self.where}' if self.where else ''}",
            f"  seen      {self.symptom}",
            f"  because   {self.cause} ({self.certainty})",
            f"  numbers   {numbers}" if numbers else "",
            "  to do     " + self.remedy.replace("\n", "\n            "),
        )
        return "\n".join(filter(None, lines))

    def _repr_html_(self) -> str:
        numbers = ", ".join(f"{escape(name)} = {escape(_shown(value))}" for name, value in self.evidence.items())
        return (
            f'<div style="border-left: 4px solid {_COLOURS[self.severity]}; padding: 2px 10px; margin: 8px 0">'
            f"<b>{escape(self.severity)}</b> <code>{escape(self.name)}</code> {escape(self.where)}"
            f"<div>{escape(self.symptom)}</div><div>{escape(self.cause)} <i>({escape(self.certainty)})</i></div>"
            f'<div style="opacity: 0.75">{numbers}</div><pre style="margin: 4px 0">{escape(self.remedy)}</pre></div>'
        )


# Told apart in a light and in a dark page; the word beside it says the same.
_COLOURS = {"error": "#d03b3b", "warning": "#c98500", "note": "#6b7f99"}


@dataclass(frozen=True)
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

    def _repr_html_(self) -> str:
        return "".join(each._repr_html_() for each in self.found) or "<div>nothing found</div>"


def _rank(finding: Finding) -> tuple[int, int]:
    return SEVERITIES.index(finding.severity), CERTAINTIES.index(finding.certainty)


def _shown(value: Number) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
