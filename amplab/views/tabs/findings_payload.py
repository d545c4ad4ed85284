"""The cards of findings as plain values. No widget here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amplab.diagnose import CATALOGUE, Finding, Findings
from amplab.display.numbers import count, number
from amplab.lab import ConfigRemedy

__all__ = ["card_key", "findings_payload"]

STEPS = ("first_step", "first_skip")
"""Evidence that names the step to show."""


def findings_payload(
    found: Findings, remedies: Mapping[str, ConfigRemedy], *, steps: int, refusal: str = ""
) -> dict[str, Any]:
    """Return the cards, the sentence above them, and the number of findings that do harm.

    Args:
        found: The findings, the most harmful first.
        remedies: The changes of the config that help, by `card_key`.
        steps: Number of steps of the run.
        refusal: Why the latest remedy was refused, or "".
    """
    harmful = len(found.harmful)
    return {
        "cards": [_card(each, remedies.get(card_key(each))) for each in found],
        "summary": refusal or _summary(found, steps),
        "count": f"{harmful}" if harmful else "",
    }


def card_key(finding: Finding) -> str:
    """Return what tells a card from the others."""
    return f"{finding.name} {finding.op} {finding.module} {finding.tensor}"


def _card(finding: Finding, remedy: ConfigRemedy | None) -> dict[str, Any]:
    entry = CATALOGUE.get(finding.name)
    step = next((finding.evidence[name] for name in STEPS if name in finding.evidence), None)
    return {
        "key": card_key(finding),
        "name": finding.name,
        "severity": finding.severity,
        "title": finding.name if entry is None else entry.title,
        "symptom": finding.symptom,
        "cause": finding.cause,
        "certainty": finding.certainty,
        "evidence": [[_words(name), number(value)] for name, value in finding.evidence.items() if name not in STEPS],
        "where": finding.where,
        "step": int(step) if isinstance(step, int | float) else None,
        "remedy": finding.remedy,
        "apply": None if remedy is None else remedy.label,
    }


def _words(name: str) -> str:
    """Return a name of evidence as words.

    >>> _words("finite_at_loss_scale")
    'finite at loss scale'
    """
    return name.replace("_", " ")


def _summary(found: Findings, steps: int) -> str:
    if not steps:
        return (
            "Findings appear while the run goes: rules examine the losses, the loss scale, skipped steps and one step."
        )
    looked = " · ".join((f"examined: {count(steps, 'step')}", *found.looked_at[1:]))
    return f"{found.sentence[:1].upper()}{found.sentence[1:]} · {looked}"
