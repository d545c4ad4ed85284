"""The run logs of processes that train together: where they are, and the one run that they are.

    20261122-140512-Net-apex/rank-0.jsonl      each rank writes a log of its own, as one process does
    20261122-140512-Net-apex/rank-1.jsonl

=======================  ====================================================================================
in the joined run        from the ranks
=======================  ====================================================================================
loss                     the mean: each rank has the loss of its own share of the batch
skipped                  whether one of them skipped
first_nonfinite          "rank 1: fc.weight" if it is known on which rank the gradient was not finite
seconds                  of the slowest
explanations             those of the ranks that were not finite, with the rank
findings in a step       those of all ranks, with the rank if not every rank has them
changes                  also where ranks begin to differ that must be equal, so that charts mark it
everything else          of the first rank that has the step
=======================  ====================================================================================

`loss_scale`, `next_loss_scale`, `skipped` and `opt_level` must be equal on every rank; `rank_differences` says where
they are not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from amplab.diagnose import Finding
from amplab.display.numbers import count, number, power
from amplab.display.table import Column, Table
from amplab.lab.changes import RunChange
from amplab.lab.events import StepRecord, StepRow
from amplab.lab.history import History, row_of
from amplab.lab.skip_explanation import SkipExplanation

__all__ = [
    "EQUAL_COLUMNS",
    "RankDifference",
    "findings_of_ranks",
    "is_rank_log",
    "joined",
    "rank_differences",
    "rank_log",
    "rank_logs",
    "rank_table",
]

EQUAL_COLUMNS = ("loss_scale", "next_loss_scale", "skipped", "opt_level")
"""The columns that are equal on every rank in a run that goes well."""

_NAME = re.compile(r"rank-(0|[1-9][0-9]*)\.jsonl")  # as `rank_log` names it: rank-01.jsonl is none of the run
_ELSEWHERE = ("other-rank", "once")  # kinds of explanations of a rank that was finite


@dataclass(frozen=True)
class RankDifference:
    """Ranks that differ where they must be equal.

    Attributes:
        column: One of `EQUAL_COLUMNS`, or "steps" if some ranks have more steps than others.
        step: The first step in which they differ.
        steps: The number of such steps.
        values: Rank -> value in that step; for "steps" the number of steps.

    >>> print(RankDifference("loss_scale", 12, 3, {0: 1024.0, 1: 2048.0}))
    loss_scale differs in 3 steps, first in step 12: 2^10 on rank 0, 2^11 on rank 1
    """

    column: str
    step: int
    steps: int
    values: Mapping[int, Any]

    def __str__(self) -> str:
        each = ", ".join(f"{_text(value)} on rank {rank}" for rank, value in self.values.items())
        if self.column == "steps":
            return f"the numbers of steps differ: {each}"
        return f"{self.column} differs in {count(self.steps, 'step')}, first in step {self.step}: {each}"


def rank_log(folder: Path, rank: int) -> Path:
    """Return the log of one rank in the folder of a run."""
    return folder / f"rank-{rank}.jsonl"


def rank_logs(folder: Path) -> dict[int, Path]:
    """Return the logs in a folder by rank, in order."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def is_rank_log(path: Path) -> bool:
    """Return whether a log is that of one rank of several."""
    return _NAME.fullmatch(path.name) is not None


def findings_of_ranks(found: Mapping[int, Sequence[tuple[int, Finding]]]) -> list[tuple[int, Finding]]:
    """Return (step, finding) of all ranks, by step; a finding that some ranks do not have says on which rank it is.

    In a step those of a rank that says it was the one that was not finite are last: `with_explained` keeps the last.

    >>> nan = Finding("data-nonfinite", "error", "The batch holds NaN.", "why", "code")
    >>> [each.symptom for _, each in findings_of_ranks({0: [], 1: [(3, nan)]})]
    ['On rank 1: The batch holds NaN.']
    """
    owners: dict[tuple[str, ...], set[int]] = {}
    for rank, own in found.items():
        for _, each in own:
            owners.setdefault((each.name, each.module, each.op), set()).add(rank)

    def told(rank: int, each: Finding) -> Finding:
        is_shared = len(owners[each.name, each.module, each.op]) == len(found)
        return each if is_shared else replace(each, symptom=f"On rank {rank}: {each.symptom}")

    named = [(step, told(rank, each)) for rank, own in found.items() for step, each in own]
    return sorted(named, key=lambda each: (each[0], "rank" in each[1].evidence))


def joined(histories: Mapping[int, History]) -> History:
    """Return the histories of several ranks, by rank, as that of one run."""
    records = {rank: history.records() for rank, history in histories.items()}
    missing = {rank: history.missing_losses() for rank, history in histories.items()}
    blamed = dict(_blamed(histories))
    first = next(iter(histories.values()))
    run = History()
    marks = [RunChange(each.step, "ranks", "ranks differ", str(each)) for each in rank_differences(histories)]
    run.keep_changes(*sorted([*first.changes, *marks], key=attrgetter("step")))
    for step in range(max(map(len, records.values()))):
        here = {rank: own[step] for rank, own in records.items() if step < len(own)}
        losses = {rank: record.loss for rank, record in here.items() if step not in missing[rank]}
        ranks = (blamed[step].ranks if step in blamed else []) or _ranks_of(losses)
        run.append_row(_joined_row(here, [*losses.values()], ranks))
    for each in blamed.values():
        run.explain(each.explanation)
    for sample in first.gradient_samples:
        run.keep(sample)
    for mixed in first.mixed_scales:
        run.keep_scales(mixed)
    for step, memory in first.memory:
        run.keep_memory(step, memory)
    return run


@dataclass(frozen=True)
class _Blamed:
    """Which ranks were not finite in a step, and what the first of them says."""

    ranks: list[int]
    explanation: SkipExplanation


def _blamed(histories: Mapping[int, History]) -> Iterator[tuple[int, _Blamed]]:
    """Yield each explained step with the explanation of the first rank that was not finite itself."""
    explained = [history.explanations for history in histories.values()]
    for step in sorted(set().union(*explained)):
        bad_first = sorted(histories.values(), key=lambda each: _is_finite_in(each, step))
        said = [each.explanations[step] for each in bad_first if step in each.explanations]
        guilty = [each for each in said if each.kind not in _ELSEWHERE]
        first = (guilty or said)[0]
        ranks = [each.rank for each in guilty if each.rank is not None]
        sentence = f"{_words(ranks)}: {first.sentence}" if ranks else first.sentence
        yield step, _Blamed(ranks, replace(first, sentence=sentence))


def _is_finite_in(history: History, step: int) -> bool:
    return step >= len(history) or math.isfinite(history.record(step).loss)


def _ranks_of(losses: Mapping[int, float]) -> list[int]:
    """The ranks whose own loss is not finite, if those of others are."""
    bad = [rank for rank, loss in losses.items() if not math.isfinite(loss)]
    return bad if len(bad) < len(losses) else []


def _words(ranks: list[int]) -> str:
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else ""
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _joined_row(by_rank: Mapping[int, StepRecord], losses: list[float], ranks: list[int]) -> StepRow:
    records = [*by_rank.values()]
    first = records[0]
    blamed = [by_rank[rank] for rank in ranks if rank in by_rank]  # first: shards that overflow may differ by rank
    name = next((each.first_nonfinite for each in (*blamed, *records) if each.first_nonfinite), None)
    injected = [each.injected for each in records if each.injected]
    row = replace(
        first,
        skipped=any(each.skipped for each in records),
        first_nonfinite=f"{_words(ranks)}: {name}" if name and ranks else name,
        score=next((each.score for each in records if each.score is not None), None),
        seconds=max(each.seconds for each in records),
        injected=injected[0] if injected else None,
    )
    known = row_of(row)
    return (known[0], sum(losses) / len(losses) if losses else None, *known[2:])


def rank_differences(histories: Mapping[int, History]) -> tuple[RankDifference, ...]:
    """Return where ranks differ that must be equal, one difference for each column; empty if they agree."""
    lengths = {rank: len(history) for rank, history in histories.items()}
    both = min(lengths.values())
    found = []
    for column in EQUAL_COLUMNS:
        values = {rank: history.column(column)[:both].tolist() for rank, history in histories.items()}
        steps = [step for step, each in enumerate(zip(*values.values(), strict=True)) if len({*each}) > 1]
        if steps:
            at = {rank: own[steps[0]] for rank, own in values.items()}
            found.append(RankDifference(column, steps[0], len(steps), at))
    if (longest := max(lengths.values())) > both:
        found.append(RankDifference("steps", both, longest - both, lengths))
    return tuple(found)


def rank_table(histories: Mapping[int, History]) -> Table:
    """Return one line for each rank; ≠ marks a value that must be equal on all ranks and is not."""
    differing = {each.column for each in rank_differences(histories)}

    def line(rank: int, history: History) -> list[str]:
        last = history.last
        own = [each for each in history.explanations.values() if each.kind not in _ELSEWHERE]
        return [
            str(rank),
            f"{len(history):,}{_mark('steps' in differing)}",
            f"{history.skip_count:,}{_mark('skipped' in differing)}",
            "" if (loss := history.loss(-1)) is None else number(loss),
            "" if last is None else f"{power(last.next_loss_scale)}{_mark('next_loss_scale' in differing)}",
            "" if not own else f"step {own[0].step:,}: {own[0].sentence}",
        ]

    heads = (
        Column("rank", right=True), Column("steps", right=True), Column("skipped", right=True),
        Column("last loss", right=True), Column("loss scale", right=True), "first overflow of its own",
    )  # fmt: skip
    lines = [line(rank, history) for rank, history in histories.items()]
    return Table(heads, lines, caption="Ranks")


def _mark(differs: bool) -> str:
    return " ≠" if differs else ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "skipped" if value else "taken"
    if isinstance(value, float):
        return power(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
