"""Prepare the history of a run for the rules of `amplab.diagnose`, and write their findings to a run log."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from amplab.diagnose import Finding, Findings, Observation, StepObservation
from amplab.diagnose.catalogue import finding
from amplab.diagnose.ranking import ranked
from amplab.diagnose.remedies.api_styles import Api
from amplab.display.numbers import count
from amplab.formats import FLOAT16
from amplab.lab.config import ExperimentConfig
from amplab.lab.events import StepRecord
from amplab.lab.history import History
from amplab.lab.skip_explanation import SkipExplanation
from amplab.lab.watched_run import NO_LEVEL, WatchedRun

__all__ = [
    "LOOK_BACK",
    "diverged",
    "finding_from_log",
    "finding_to_log",
    "observed_run",
    "with_explained",
    "with_injected",
    "with_lab_remedies",
]

LOOK_BACK = 2000
"""Number of steps at the end of a run that the rules read."""


def observed_run(
    history: History,
    config: ExperimentConfig | WatchedRun | None = None,
    *,
    growth_interval: int | None = None,
    dynamic: bool | None = None,
    norms: Mapping[int, float] | None = None,
    rates: Mapping[int, float] | None = None,
) -> Observation:
    """Return the last steps of a run as the rules read them.

    Args:
        history: the run. Its gradient samples give the share of gradients that underflow in float16.
        config: what was run, which says who scaled the losses; None if unknown.
        growth_interval: steps without overflow until the scale grows, None if unknown.
        dynamic: whether the scale changes; None takes it from the config.
        norms, rates: gradient norm and learning rate by step, as far as they are known.

    Skipped steps into which NaN or an overflow was injected are left out: they say nothing about the run.
    """
    start = max(0, len(history) - LOOK_BACK)
    records = [record for record in history.records(start) if not (record.skipped and record.is_disturbed)]
    since = records[0].step if records else 0
    lost = {
        taken.step: taken.histogram.lost_share(taken.loss_scale, FLOAT16)
        for taken in history.gradient_samples
        if taken.step >= since
    }
    scaling, level = _scaling(config)
    # A session unscales the gradients of each loss before it adds them, so different scales do no harm there.
    mixed = {} if scaling == "apex" else {each.step: each.scales for each in history.mixed_scales}
    missing = history.missing_losses(start)
    norms, rates = norms or {}, rates or {}

    def observed(record: StepRecord) -> StepObservation:
        return StepObservation(
            record.step,
            None if record.step in missing else record.loss,
            record.loss_scale,
            record.skipped,
            record.next_loss_scale,
            record.first_nonfinite,
            gradient_norm=norms.get(record.step),
            underflow=lost.get(record.step),
            learning_rate=rates.get(record.step),
            backward_scales=mixed.get(record.step, ()),
        )

    changes = _is_dynamic(config) if dynamic is None else dynamic
    return Observation(tuple(map(observed, records)), growth_interval, changes, scaling, level)


def lost_at_another_rate(history: History, step: int) -> bool:
    """Return whether steps were skipped when the learning rate changed, before `step`: the weights were lost before."""
    skips = set(history.skipped_steps())
    rates = [each.step for each in history.changes if each.field in ("lr", "optimizer")]
    return any(each <= step and each - 1 in skips for each in rates)


def diverged(history: History, why: SkipExplanation, config: ExperimentConfig) -> Iterator[Finding]:
    """Yield the finding of a skipped step whose loss has exploded in float32; the rules of runs see finite losses."""
    first, rate = history.record(0).loss, config.learning_rate
    taken = len(history) - history.skip_count
    if why.kind != "divergence" or why.loss is None or not math.isfinite(first):
        return
    if lost_at_another_rate(history, why.step):
        return
    yield finding(
        "diverging",
        api=Api.of_opt_level(config.opt_level),
        certainty="likely",
        evidence={
            "first_loss": first,
            "loss_now": why.loss,
            "steps_taken": taken,
            "learning_rate": config.learning_rate,
        },
        rate=f"{min(rate / 10, config.usual_learning_rate):.2g}",
        until="computed in float32, since the step was skipped",
    )


def with_explained(
    found: Iterable[Finding], explained: Iterable[tuple[int, Finding]], skips: Sequence[int] = ()
) -> Findings:
    """Return the findings in a run and those of its explained steps, the worst first; of equal ones only the last.

    A finding of an explained step that names no op and no module is left out if the run has one of the same id.

    Args:
        found: in the run.
        explained: step and finding, in any order. Each says in which step it was first found, and how many skips it
            explains: those from its step to the next explained one of the same row of skips, and those before the
            first explained one of a row.
        skips: the skipped steps, in order.
    """
    found, explained = list(found), list(explained)
    blocked = [each for _, each in explained if each.name == "step-not-explained" and "rank" in each.evidence]
    if blocked:  # no rank can run the step alone, as these remedies would
        found = [replace(each, remedy=blocked[0].remedy) if each.name in _RUN_AGAIN else each for each in found]
    names = {each.name for each in found}
    in_order = sorted(explained, key=lambda each: each[0])  # a step left over is explained after later ones
    explained = [(step, each) for step, each in in_order if each.op or each.module or each.name not in names]
    explains: dict[tuple[str, ...], list[int]] = {}
    for skip, each in _explanations(explained, skips):
        explains.setdefault(_key(each), []).append(skip)
    first: dict[tuple[str, ...], int] = {}
    last: dict[tuple[str, ...], Finding] = {}
    for step, each in explained:
        first.setdefault(_key(each), step)
        last[_key(each)] = each
    dated = (_dated(each, first[key], explains.get(key, ()), len(skips)) for key, each in last.items())
    return ranked((*found, *dated))


_RUN_AGAIN = ("nonfinite-loss", "scale-collapse")


def with_injected(found: Findings, history: History) -> Findings:
    """Return the findings; those of inf and NaN after a fault that was injected, and not skipped, say so."""
    last = history.last
    if last is None or not any(each.name in _OF_DAMAGE for each in found):
        return found
    taken = [each.step for each in history.records(max(0, len(history) - LOOK_BACK)) if _is_taken_fault(each)]

    def told(each: Finding) -> Finding:
        first = each.evidence.get("first_step")
        causes = [step for step in taken if isinstance(first, int) and step <= first]
        if each.name not in _OF_DAMAGE or not causes:
            return each
        said = f"{each.symptom} A fault was injected in step {causes[-1]:,}, and the step was not skipped."
        return replace(each, symptom=said, evidence={**each.evidence, "injected_in_step": causes[-1]})

    return replace(found, found=tuple(told(each) for each in found))


_OF_DAMAGE = ("nonfinite-loss", "nonfinite-parameter")


def with_lab_remedies(found: Findings) -> Findings:
    """Return the findings in a run of the lab; what is done to a trainer takes the place of a watch around a loop."""
    return replace(found, found=tuple(map(_remedied_in_lab, found.found)))


def _remedied_in_lab(found: Finding) -> Finding:
    if not found.remedy.startswith("amplab.watch("):
        return found
    return replace(found, remedy=_RESET if "injected_in_step" in found.evidence else _IN_LAB[found.name])


_RESET = "trainer.reset()  # or Reset on the page: the fault that was injected has damaged the weights"
_IN_LAB = {
    "nonfinite-loss": 'trainer.reset(trainer.config.changed(opt_level="O1", loss_scale="dynamic"))  # explains skips',
    "still-skipping": "trainer.run(20)  # until the loss scale fits; the lab says why it skips",
}
"""Remedies of a run of the lab, which has no loop of the user around which a watch could be."""


def _is_taken_fault(record: StepRecord) -> bool:
    return record.is_disturbed and not record.skipped


def _key(found: Finding) -> tuple[str, ...]:
    return found.name, found.module, found.op


def _explanations(explained: Sequence[tuple[int, Finding]], skips: Sequence[int]) -> Iterator[tuple[int, Finding]]:
    """Yield each skip with the finding that explains it, if there is one in its row of skips."""
    for row in _rows(skips):
        inside = [(step, each) for step, each in explained if row[0] <= step <= row[-1]]
        for skip in row if inside else ():
            before = [each for step, each in inside if step <= skip]
            yield skip, before[-1] if before else inside[0][1]


def _rows(skips: Sequence[int]) -> list[list[int]]:
    """Group steps that follow one another."""
    rows: list[list[int]] = []
    for step in skips:
        if rows and step == rows[-1][-1] + 1:
            rows[-1].append(step)
        else:
            rows.append([step])
    return rows


def _dated(found: Finding, found_in: int, explains: Sequence[int], skips: int) -> Finding:
    """Return a finding that says in which step it began and how many skips it explains."""
    first = min(found_in, *explains[:1]) if explains else found_in
    evidence = {**found.evidence, "first_step": first} | ({"skips_explained": len(explains)} if explains else {})
    said = f"First found in step {first}."
    if explains:
        said = f"It began in step {first} and explains {len(explains):,} of {count(skips, 'skipped step')}."
    return replace(found, symptom=f"{found.symptom} {said}", evidence=evidence)


def finding_to_log(found: Finding) -> dict[str, Any]:
    """Return a finding as JSON for a run log; inf and NaN, which JSON does not have, become text."""
    evidence = {name: _plain(value) for name, value in found.evidence.items()}
    return {**found.as_dict(), "evidence": evidence}


def finding_from_log(fields: Mapping[str, Any]) -> Finding:
    """Return the finding that `finding_to_log` wrote; fields of later versions are ignored.

    Raises:
        TypeError: a field is missing. ValueError: a field has a value that `Finding` refuses.

    >>> finding = Finding("a", "note", "seen", "why", "code", evidence={"absmax": math.inf})
    >>> finding_from_log(finding_to_log(finding)).evidence
    {'absmax': 'inf'}
    """
    known = {each.name for each in dataclasses.fields(Finding)}
    return Finding(**{name: value for name, value in fields.items() if name in known})


def _scaling(config: ExperimentConfig | WatchedRun | None) -> tuple[str, str]:
    """Return the API style that scaled the losses, and the opt_level; empty if unknown."""
    if isinstance(config, WatchedRun):
        return config.scaling, config.opt_level.replace(NO_LEVEL, "")
    return ("", "") if config is None else ("apex", config.level.opt_level)


def _is_dynamic(config: ExperimentConfig | WatchedRun | None) -> bool:
    """Whether the scale changes: in a watched run unless nothing scales, since its header does not say more."""
    if isinstance(config, ExperimentConfig):
        return config.is_dynamic
    return config is None or config.scaling != "none"


def _plain(value: float | str) -> float | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
