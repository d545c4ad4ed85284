"""An X-ray as HTML: its numbers, the step as two bands of dtypes, and one folded table for each module.

The forward band runs from left to right and the backward band back below it, so that an op and its gradient lie about
under each other. Modules stand in the order in which they ran.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from amplab.display.html import Markup, dtype_chips, figures, html_table, key, markup, name, page, ribbon
from amplab.display.numbers import count, size
from amplab.display.text import filled, places
from amplab.trace.records import OpRecord
from amplab.trace.table import folded
from amplab.trace.xray_text import NUMBERS, cells, dtypes, heads, totals

if TYPE_CHECKING:
    from amplab.trace.xray_value import XRay

__all__ = ["html"]

_MODULE = 2  # the column that the tables of modules do not need
_Run = tuple[str, bool, int, str]


def html(xray: "XRay") -> str:
    """Return the X-ray as a piece of a page."""
    by_module: dict[str, list[list[OpRecord]]] = defaultdict(list)
    for group in folded(xray.trace):
        by_module[group[0].module].append(group)
    titles = ("module", "dtypes", "ops", "casts", "kept for backward")
    parts = "".join(_part(xray, module, groups) for module, groups in by_module.items())
    rest = "".join(f'<p class="faint">{markup(line)}</p>' for line in totals(xray)[1:])
    return page(
        f"X-ray of {xray.model}: one step, {xray.precision}",
        _figures(xray),
        _bands([record for record in xray.trace if not record.folds]),
        f'<div class="columns titles" aria-hidden="true">{_columns(titles)}</div><div class="folds">{parts}</div>',
        rest,
    )


def _figures(xray: "XRay") -> str:
    made = [cast for cast in xray.casts if not cast.cached]
    phases = [record.phase for record in xray.trace if not record.folds]
    forward = phases.count("forward")
    return figures(
        {
            "ops forward": f"{forward:,}",
            "ops backward": f"{len(phases) - forward:,}",
            "casts": f"{len(made):,}",
            "read and written by casts": size(sum(cast.nbytes for cast in made)),
            "from the weight cache": f"{len(xray.casts) - len(made):,}",
            "kept for backward": "not counted" if xray.kept is None else size(xray.kept.total),
        }
    )


def _bands(records: Sequence[OpRecord]) -> str:
    """The whole step, forward above backward, and what its colours mean."""
    bands = ""
    for phase in ("forward", "backward"):
        runs = _runs(record for record in records if record.phase == phase)
        bands += f"<div>{phase}</div>{ribbon(runs, f'{phase}: {_said(runs)}', turned=phase == 'backward')}"
    seen = dict.fromkeys(_dtype(record) for record in records)
    return f'<div class="step">{bands}</div>{key(seen, casts=any(record.is_cast for record in records))}'


def _part(xray: "XRay", module: str, groups: list[list[OpRecord]]) -> str:
    """One module: a line of its numbers that unfolds into the table of its ops."""
    records = [record for group in groups for record in group]
    moved = sum(record.cast_bytes for record in records)
    kept = xray.kept.of(module) if xray.kept else 0
    runs = _runs(records)
    numbers = (_figure(f"{len(records):,}", "ops"), _figure(size(moved), "of casts"), _figure(size(kept), "kept"))
    columns = _columns((name(module) if module else "outside of every module", ribbon(runs, _said(runs)), *numbers))
    titles, *lines = filled(
        [_without_module(each) for each in (heads(xray), *(_line(group, xray) for group in groups))]
    )
    table = html_table(
        titles,
        lines,
        right=places(titles, NUMBERS),
        caption=f"Ops of {module}" if module else "Ops outside of every module",
        groups=[group[0].phase for group in groups],
    )
    return f'<details><summary><span class="columns">{columns}</span></summary>{table}</details>'


def _figure(shown: str, what: str) -> str:
    """A number under a title, and what it is for those who cannot see the title."""
    return Markup(f'{shown}<span class="unseen"> {what}</span>') if shown != "0 B" else ""


def _line(group: list[OpRecord], xray: "XRay") -> tuple[str, ...]:
    record = group[0]
    line = list(cells(group, xray))
    line[1], line[3], line[4] = name(record.op, len(group)), _code_line(record), dtype_chips(dtypes(record))
    return tuple(line)


def _code_line(record: OpRecord) -> str:
    """The place of the line of code, the line itself where one points at it."""
    if record.line is None:
        return "–"
    return Markup(f'<span title="{markup(record.line.source)}">{name(str(record.line))}</span>')


def _columns(cells: Iterable[str]) -> str:
    kinds = ("", "", *[' class="right"'] * 3)
    return "".join(f"<span{kind}>{markup(cell)}</span>" for kind, cell in zip(kinds, cells, strict=True))


def _runs(records: Iterable[OpRecord]) -> list[_Run]:
    """Neighbours of one module that are alike, as one piece of a band."""
    grouped = groupby(records, key=lambda record: (record.module, _dtype(record), record.is_cast))
    return [_run(module, dtype, is_cast, list(run)) for (module, dtype, is_cast), run in grouped]


def _run(module: str, dtype: str, is_cast: bool, run: list[OpRecord]) -> _Run:
    ops = ", ".join(list(dict.fromkeys(record.op for record in run))[:6])
    what = f"{count(len(run), 'cast')} to {dtype}" if is_cast else f"{ops} in {dtype}"
    return dtype, is_cast, len(run), f"{module or 'outside of every module'}: {what}"


def _said(runs: Iterable[_Run]) -> str:
    """What a band shows, in words."""
    times: dict[str, int] = defaultdict(int)
    for dtype, is_cast, number, _ in runs:
        times[f"to {dtype}" if is_cast else dtype] += number
    return ", ".join(
        f"{count(number, 'cast')} {what}" if what.startswith("to ") else f"{count(number, 'op')} in {what}"
        for what, number in times.items()
    )


def _dtype(record: OpRecord) -> str:
    """What an op is coloured by: the first floating-point dtype it writes, else the first it writes or reads."""
    infos = (*record.outputs, *record.inputs)
    return next((info.dtype_name for info in infos if info.dtype.is_floating_point), infos[0].dtype_name)


def _without_module(line: tuple[str, ...]) -> tuple[str, ...]:
    return (*line[:_MODULE], *line[_MODULE + 1 :])
