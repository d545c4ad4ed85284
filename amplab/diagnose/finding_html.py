"""A finding as HTML: the symptom, the cause, the code to paste, and the evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amplab.display.html import Markup, markup, name
from amplab.display.numbers import number

if TYPE_CHECKING:
    from amplab.diagnose.finding import Finding

__all__ = ["finding_html"]


def finding_html(finding: Finding, *, is_open: bool) -> Markup:
    """Return a finding as a part that folds below its severity and its symptom."""
    severity, opened = markup(finding.severity), " open" if is_open else ""
    return Markup(
        f'<details class="finding" data-severity="{severity}"{opened}><summary>'
        f'<span class="badge">{severity}</span> <strong>{markup(finding.symptom)}</strong></summary>'
        f'<p class="faint">{_where(finding)}</p>'
        f'<p>{markup(finding.cause)} <span class="faint">({markup(finding.certainty)})</span></p>'
        f'<pre tabindex="0" role="group" aria-label="remedy"><code>{markup(finding.remedy)}</code></pre>'
        f"{_evidence(finding)}</details>"
    )


def _where(finding: Finding) -> str:
    """The name of the finding, and its op, module, tensor and line."""
    module = f"in {name(finding.module)}" if finding.module else ""
    parts = (name(finding.op) if finding.op else "", module)
    places = [" ".join(filter(None, parts)), markup(finding.tensor), name(finding.line) if finding.line else ""]
    return " · ".join(filter(None, (name(finding.name), *places)))


def _evidence(finding: Finding) -> str:
    pairs = (
        f"<div><dt>{markup(each.replace('_', ' '))}</dt><dd>{markup(number(value))}</dd></div>"
        for each, value in finding.evidence.items()
    )
    return f'<dl class="evidence">{"".join(pairs)}</dl>' if finding.evidence else ""
