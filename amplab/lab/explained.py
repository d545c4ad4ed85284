"""What replays have found out about skipped steps: in a run log, and among what the rules find in the whole run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from amplab.diagnose import Finding, Findings
from amplab.diagnose.catalogue import causes_first

__all__ = ["logged", "read_back", "with_explained"]


def with_explained(found: Iterable[Finding], explained: Iterable[Finding]) -> Findings:
    """Return what was found in a run and in its skipped steps, the last of a kind alone, the worst first."""
    last = {(each.name, each.module, each.op): each for each in explained}
    return Findings.ranked(causes_first((*found, *last.values())))


def logged(finding: Finding) -> dict[str, Any]:
    """Return a finding as a run log holds it: a number that JSON has no word for is a text there."""
    evidence = {name: _plain(value) for name, value in finding.evidence.items()}
    return {**finding.as_dict(), "evidence": evidence}


def read_back(fields: Mapping[str, Any]) -> Finding:
    """Return the finding that `logged` wrote.

    >>> read_back(logged(Finding("a", "note", "seen", "why", "code", evidence={"absmax": math.inf}))).evidence
    {'absmax': 'inf'}
    """
    return Finding(**fields)


def _plain(value: float | str) -> float | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
