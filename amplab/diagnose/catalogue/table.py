"""`CATALOGUE`, all entries in the order in which a person reads them, and `finding`, which fills one in."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

from amplab.diagnose.catalogue.entry import Catalogue
from amplab.diagnose.catalogue.gradients import GRADIENTS
from amplab.diagnose.catalogue.nonfinite import NONFINITE
from amplab.diagnose.catalogue.parameters import PARAMETERS
from amplab.diagnose.catalogue.raised import RAISED
from amplab.diagnose.catalogue.ranks import RANKS
from amplab.diagnose.catalogue.run import RUN
from amplab.diagnose.catalogue.speed import SPEED
from amplab.diagnose.catalogue.values import VALUES
from amplab.diagnose.finding import Certainty, Finding, Number, Severity
from amplab.diagnose.remedies.api_styles import Api
from amplab.display.numbers import percent

__all__ = ["CATALOGUE", "finding"]

CATALOGUE = Catalogue((*RUN, *RANKS, *GRADIENTS, *PARAMETERS, *NONFINITE, *VALUES, *SPEED, *RAISED))
"""Every finding of amplab by its id."""


def finding(
    name: str,
    case: str = "",
    /,
    *,
    api: Api | None = None,
    severity: Severity | None = None,
    certainty: Certainty = "certain",
    op: str = "",
    module: str = "",
    tensor: str = "",
    line: str = "",
    evidence: Mapping[str, Number] | None = None,
    **fields: Any,
) -> Finding:
    """Return a finding of the catalogue.

    Args:
        name: its id.
        case: the situation, a key of the entry's `cases`.
        api: what the training loop uses, for the remedy.
        severity: one of the entry's severities; None for the first.
        certainty, op, module, tensor, line, evidence: as in `Finding`.
        fields: what the sentences need in addition.

    Raises:
        KeyError: no entry has this id or case, or a field of its sentences is missing.
        ValueError: the entry does not have this severity.

    >>> finding("launch-bound", evidence={"ops": 12, "median_elements": 64.0}).severity
    'note'
    """
    entry = CATALOGUE[name]
    chosen = severity or entry.severities[0]
    if chosen not in entry.severities:
        raise ValueError(f"severity={chosen!r}: expected one of {', '.join(entry.severities)} for {name}.")
    known = {"op": op, "module": module, "tensor": tensor, "line": line, **(evidence or {}), **fields}
    symptom, cause, remedy = (
        _SENTENCES.vformat(said, (), known) if isinstance(said, str) else said.text(api or Api(), known)
        for said in entry.texts(case)
    )
    return Finding(
        name, chosen, symptom, cause, remedy, certainty,
        op=op, module=module, tensor=tensor, line=line, evidence=evidence or {},
    )  # fmt: skip


class _Sentences(Formatter):
    """Writes a field as `str.format` does, and a share as `{share:percent}`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return percent(value) if format_spec == "percent" else str(super().format_field(value, format_spec))


_SENTENCES = _Sentences()
