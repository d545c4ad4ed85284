"""An X-ray as text and as HTML.

The text is a summary and a table of ops at most 100 columns wide. Consecutive ops that differ only in shape share a
line, as in `Trace.rows`. A reason that is too long for its column is cut there and printed in full below the table.

The HTML shows the numbers, the step as two bands of dtypes, and one folded table for each module, in the order in which
they ran. The forward band runs from left to right and the backward band below it from right to left, so that an op and
its gradient are roughly above each other.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from amplab.display.html import Markup, dtype_chips, figures, key, markup, name, page, ribbon, styled
from amplab.display.numbers import count, power, size
from amplab.display.table import Cell, Column, Table
from amplab.display.text import wrapped
from amplab.trace.kept_tensors import KeptBytes
from amplab.trace.records import OpRecord, TensorInfo, folded
from amplab.trace.statistics import OpStatistics

if TYPE_CHECKING:
    from amplab.trace.xray_value import XRay

__all__ = ["dtypes", "html", "summary", "text"]

_COLUMNS = (
    Column("#", right=True),
    Column("op"),
    Column("module", as_html=name),
    Column("line"),
    Column("in → out", as_html=dtype_chips),
    Column("cast", right=True),
    Column("values"),
    Column("of them"),
    Column("reason", cut=True),
)
_MODULE = 2
_COUNTED = {"zeros": "zero", "half_subnormals": "subnormal", "infs": "inf", "nans": "nan"}
_MOST_MODULES = 8
_GRADIENT_OF = re.compile(r"^gradient of \S+ (#\d+)")
_Run = tuple[str, bool, int, str]
_Item = TypeVar("_Item")


def text(xray: "XRay", *, every: bool = False) -> str:
    """Return the totals and a table of all ops, or of those that do not fold."""
    groups = [[record] for record in xray.trace] if every else list(folded(xray.trace))
    table = Table(_COLUMNS, [_cells(group, xray) for group in groups], groups=[group[0].phase for group in groups])
    _, *rows = table.text_rows()
    return "\n".join([*map(wrapped, _totals(xray)), "", str(table), *_reasons(groups, rows)])


def summary(xray: "XRay") -> str:
    """Return the X-ray in one line, with its numbers."""
    phases = [record.phase for record in xray.trace if not record.folds]
    forward = phases.count("forward")
    made = [cast for cast in xray.casts if not cast.cached]
    return (
        f"{xray.model} {xray.precision}: {count(forward, 'op')} forward, {len(phases) - forward:,} backward; "
        f"{count(len(made), 'cast')} of {size(sum(cast.nbytes for cast in made))}, "
        f"{len(xray.casts) - len(made):,} from the weight cache; {_kept(xray)}"
    )


def _kept(xray: "XRay") -> str:
    if xray.kept is None:
        return "bytes kept for backward not counted, since torch.func does not support saved tensor hooks"
    return f"{size(xray.kept.total)} kept for backward"


def _totals(xray: "XRay") -> list[str]:
    """Return what the X-ray comes to, line by line."""
    saved = sum(cast.saved for cast in xray.casts if cast.cached)
    lines = [f"{summary(xray)}.", f"Backward starts from {xray.loss}, multiplied by {power(xray.loss_scale)}."]
    if saved:
        lines.append(f"The weight cache avoided {size(saved)} of casts.")
    if xray.measured is not None and xray.measured.by_reference:
        lines.append(
            "Measured by the PyTorch reference, which is several times slower than the kernel; call "
            "amplab.kernels.ensure(wait=True) to build the kernel."
        )
    return lines + _kept_words(xray)


def _kept_words(xray: "XRay") -> list[str]:
    """What is kept for backward, by module, the largest first."""
    kept = xray.kept or KeptBytes()
    parts = (("Activations", kept.activations), ("Casts of weights", kept.weight_casts))
    return [f"{name} kept for backward: {_by_module(sizes)}." for name, sizes in parts if sizes]


def _by_module(sizes: Mapping[str, int]) -> str:
    first = sorted(sizes.items(), key=lambda item: -item[1])
    named = [f"{module or 'outside'} {size(nbytes)}" for module, nbytes in first[:_MOST_MODULES]]
    rest = [f"{count(len(first) - _MOST_MODULES, 'other')}"] if len(first) > _MOST_MODULES else []
    return f"{size(sum(sizes.values()))}: " + ", ".join([*named, *rest])


def _cells(group: Sequence[OpRecord], xray: "XRay") -> tuple[str, ...]:
    """The cells of the line that `group` shares. In text, files have no folder and a forward op only its number."""
    record = group[0]
    op = record.op if len(group) == 1 else f"{record.op} ×{len(group)}"
    place = str(record.line or "-").rpartition("/")[2]
    moved = size(sum(member.cast_bytes for member in group)) if record.is_cast else ""
    values, counts = _measured(group, xray.statistics or {})
    reason = _why(group, xray)
    return (
        str(record.index),
        Cell(op, name(record.op, len(group))),
        record.module or "-",
        Cell(place, _code_line(record)),
        dtypes(record),
        moved,
        values,
        counts,
        Cell(_GRADIENT_OF.sub(r"grad of \1", reason), markup(reason)),
    )


def dtypes(record: OpRecord) -> str:
    """Return the input and output dtypes of an op; consecutive equal ones are counted."""
    return f"{_counted(record.inputs)} → {_counted(record.outputs)}"


def _why(group: Sequence[OpRecord], xray: "XRay") -> str:
    record = group[0]
    parameters = [member.parameter for member in group if member.parameter and member.is_cast]
    cached = [xray.trace.records[index].parameter for member in group for index in member.from_cache]
    parts = (
        ", ".join(parameters),
        f"cached: {', '.join(cached)}" if cached else "",
        record.reason,
        record.note,
    )
    return "; ".join(filter(None, parts))


def _reasons(groups: Sequence[Sequence[OpRecord]], lines: Sequence[Sequence[str]]) -> list[str]:
    """The reasons in forward that the table cuts, each once."""
    pairs = zip(groups, lines, strict=True)
    cut = [group[0] for group, shown in pairs if any(line.endswith("…") for line in shown)]
    whole = dict.fromkeys(record.reason for record in cut if record.phase == "forward")
    return ["", "In full:", *map(wrapped, whole)] if whole else []


def _measured(group: Sequence[OpRecord], statistics: Mapping[int, OpStatistics]) -> tuple[str, str]:
    found = [stats for member in group for stats in statistics.get(member.index, OpStatistics(())).outputs]
    counts = {word: sum(getattr(stats, name) for stats in found) for name, word in _COUNTED.items()}
    largest = max((stats.absmax for stats in found), default=0.0)
    smallest = min((stats.smallest_nonzero for stats in found), default=0.0)
    span = f"{smallest:.3g} to {largest:.3g}" if largest else ""
    return span, ", ".join(f"{times:,} {word}" for word, times in counts.items() if times)


def _counted(infos: Iterable[TensorInfo]) -> str:
    runs = [(name, len(list(run))) for name, run in groupby(info.dtype_name for info in infos)]
    return ", ".join(name if times == 1 else f"{name} ×{times}" for name, times in runs) or "-"


def html(xray: "XRay") -> str:
    """Return the X-ray as a piece of a page."""
    by_module: dict[str, list[list[OpRecord]]] = defaultdict(list)
    for group in folded(xray.trace):
        by_module[group[0].module].append(group)
    titles = ("module", "dtypes", "ops", "casts", "kept for backward")
    parts = "".join(_part(xray, module, groups) for module, groups in by_module.items())
    rest = "".join(f'<p class="faint">{markup(line)}</p>' for line in _totals(xray)[1:])
    return page(
        f"X-ray of {xray.model}: one step, {xray.precision}",
        _figures(xray),
        styled(
            _bands([record for record in xray.trace if not record.folds]),
            f'<div class="columns titles" aria-hidden="true">{_columns(titles)}</div>',
        ),
        f'<div class="folds">{parts}</div>',
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
    """The whole step, forward above backward, and a legend of its colors."""
    bands = ""
    for phase in ("forward", "backward"):
        runs = _runs(record for record in records if record.phase == phase)
        bands += f"<div>{phase}</div>{ribbon(runs, f'{phase}: {_said(runs)}', turned=phase == 'backward')}"
    seen = dict.fromkeys(_dtype(record) for record in records)
    return f'<div class="step">{bands}</div>{key(seen, casts=any(record.is_cast for record in records))}'


def _part(xray: "XRay", module: str, groups: list[list[OpRecord]]) -> str:
    """One module: a line with its numbers that unfolds into a table of its ops."""
    records = [record for group in groups for record in group]
    moved = sum(record.cast_bytes for record in records)
    kept = xray.kept.of(module) if xray.kept else 0
    runs = _runs(records)
    numbers = (_figure(f"{len(records):,}", "ops"), _figure(size(moved), "of casts"), _figure(size(kept), "kept"))
    columns = _columns((name(module) if module else "outside any module", ribbon(runs, _said(runs)), *numbers))
    table = Table(
        _without_module(_COLUMNS),
        [_without_module(_cells(group, xray)) for group in groups],
        caption=f"Ops of {module}" if module else "Ops outside any module",
        groups=[group[0].phase for group in groups],
    )
    return f'<details><summary><span class="columns">{columns}</span></summary>{table.html()}</details>'


def _figure(shown: str, what: str) -> str:
    """A number with its title for screen readers."""
    return Markup(f'{shown}<span class="unseen"> {what}</span>') if shown != "0 B" else ""


def _code_line(record: OpRecord) -> Markup:
    """File and number of the line of code; a tooltip shows the line itself."""
    if record.line is None:
        return Markup("–")
    return Markup(f'<span title="{markup(record.line.source)}">{name(str(record.line))}</span>')


def _columns(cells: Iterable[str]) -> str:
    kinds = ("", "", *[' class="right"'] * 3)
    return " ".join(f"<span{kind}>{markup(cell)}</span>" for kind, cell in zip(kinds, cells, strict=True))


def _runs(records: Iterable[OpRecord]) -> list[_Run]:
    """Consecutive ops of one module and dtype as one piece of a band."""
    grouped = groupby(records, key=lambda record: (record.module, _dtype(record), record.is_cast))
    return [_run(module, dtype, is_cast, list(run)) for (module, dtype, is_cast), run in grouped]


def _run(module: str, dtype: str, is_cast: bool, run: list[OpRecord]) -> _Run:
    ops = ", ".join(list(dict.fromkeys(record.op for record in run))[:6])
    what = f"{count(len(run), 'cast')} to {dtype}" if is_cast else f"{ops} in {dtype}"
    return dtype, is_cast, len(run), f"{module or 'outside any module'}: {what}"


def _said(runs: Iterable[_Run]) -> str:
    """A description of a band."""
    times: dict[str, int] = defaultdict(int)
    for dtype, is_cast, number, _ in runs:
        times[f"to {dtype}" if is_cast else dtype] += number
    return ", ".join(
        f"{count(number, 'cast')} {what}" if what.startswith("to ") else f"{count(number, 'op')} in {what}"
        for what, number in times.items()
    )


def _dtype(record: OpRecord) -> str:
    """The dtype that colors an op: the first floating-point one that it writes, else the first one of all."""
    infos = (*record.outputs, *record.inputs)
    return next((info.dtype_name for info in infos if info.dtype.is_floating_point), infos[0].dtype_name)


def _without_module(line: tuple[_Item, ...]) -> tuple[_Item, ...]:
    return (*line[:_MODULE], *line[_MODULE + 1 :])
