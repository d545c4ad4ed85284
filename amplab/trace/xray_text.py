"""An X-ray as text: a table of its ops, and what it comes to below.

Ops that follow each other and differ in nothing but shape share a line, as in `Trace.rows`.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from amplab.trace.kept_tensors import KeptBytes
from amplab.trace.plain_words import aligned, count, power
from amplab.trace.records import OpRecord, TensorInfo
from amplab.trace.statistics import OpStatistics
from amplab.trace.table import folded

if TYPE_CHECKING:
    from amplab.trace.xray_value import XRay

__all__ = ["cells", "dtypes", "heads", "kept_words", "summary", "text", "totals"]

_HEADS = ("#", "op", "module", "line", "in → out", "cast bytes", "reason")
_MEASURED = ("absmax", "smallest", "0 / sub / inf / nan")
_WIDEST = 90


def text(xray: "XRay", *, every: bool = False) -> str:
    """Return the table and what it comes to."""
    groups = [[record] for record in xray.trace] if every else list(folded(xray.trace))
    body = [_shortened(cells(group, xray)) for group in groups]
    titles, *lines = aligned([heads(xray), *body], right={0, 5})
    phases = [group[0].phase for group in groups]
    shown = [titles]
    for phase, members in groupby(range(len(groups)), key=phases.__getitem__):
        shown += [f"-- {phase} ".ljust(60, "-"), *(lines[place] for place in members)]
    return "\n".join([*shown, "", *totals(xray)])


def summary(xray: "XRay") -> str:
    """Return the X-ray in one line, with its numbers."""
    phases = [record.phase for record in xray.trace if not record.folds]
    forward = phases.count("forward")
    made = [cast for cast in xray.casts if not cast.cached]
    return (
        f"{xray.model} {xray.precision}: {count(forward, 'op')} forward, {len(phases) - forward:,} backward; "
        f"{count(len(made), 'cast')} of {count(sum(cast.nbytes for cast in made), 'byte')}, "
        f"{len(xray.casts) - len(made):,} from the weight cache; {_kept(xray)}"
    )


def _kept(xray: "XRay") -> str:
    if xray.kept is None:
        return "bytes kept for backward not counted, since torch.func takes no saved tensor hooks"
    return f"{count(xray.kept.total, 'byte')} kept for backward"


def totals(xray: "XRay") -> list[str]:
    """Return what the X-ray comes to, line by line."""
    saved = sum(cast.saved for cast in xray.casts if cast.cached)
    lines = [f"{summary(xray)}.", f"Backward starts from {xray.loss}, times {power(xray.loss_scale)}."]
    if saved:
        lines.append(f"The weight cache spared {count(saved, 'byte')} of casts.")
    return lines + kept_words(xray)


def kept_words(xray: "XRay") -> list[str]:
    """Return what is kept for backward, by module, the most first."""
    kept = xray.kept or KeptBytes()
    parts = (("Activations", kept.activations), ("Casts of weights", kept.weight_casts))
    return [
        f"{name} kept for backward: {count(sum(sizes.values()), 'byte')}: "
        + ", ".join(f"{module or 'outside'} {size:,}" for module, size in _largest_first(sizes))
        for name, sizes in parts
        if sizes
    ]


def heads(xray: "XRay") -> tuple[str, ...]:
    """Return the titles of the columns of `cells`."""
    return _HEADS if xray.statistics is None else (*_HEADS[:-1], *_MEASURED, _HEADS[-1])


def cells(group: Sequence[OpRecord], xray: "XRay") -> tuple[str, ...]:
    """Return the cells of the line that `group` shares."""
    record = group[0]
    name = record.op if len(group) == 1 else f"{record.op} ×{len(group)}"
    moved = f"{sum(member.cast_bytes for member in group):,}" if record.is_cast else ""
    first = (str(record.index), name, record.module or "-", str(record.line or "-"), dtypes(record), moved)
    measured = () if xray.statistics is None else _measured(group, xray.statistics)
    return (*first, *measured, _why(group, xray))


def dtypes(record: OpRecord) -> str:
    """Return the dtypes in and out of an op, equal neighbours counted."""
    return f"{_counted(record.inputs)} → {_counted(record.outputs)}"


def _why(group: Sequence[OpRecord], xray: "XRay") -> str:
    record = group[0]
    parameters = [member.parameter for member in group if member.parameter and member.is_cast]
    served = [xray.trace.records[index].parameter for member in group for index in member.served]
    parts = (
        record.reason,
        f"of {', '.join(parameters)}" if parameters else "",
        f"{', '.join(served)} from the weight cache" if served else "",
        record.note,
    )
    return "; ".join(filter(None, parts))


def _measured(group: Sequence[OpRecord], statistics: Mapping[int, OpStatistics]) -> tuple[str, ...]:
    found = [stats for member in group for stats in statistics.get(member.index, OpStatistics(())).outputs]
    if not found:
        return "", "", ""
    counts = (sum(getattr(stats, name) for stats in found) for name in ("zeros", "half_subnormals", "infs", "nans"))
    largest = max(stats.absmax for stats in found)
    smallest = min(stats.smallest_nonzero for stats in found)
    return f"{largest:.3g}", f"{smallest:.3g}" if largest else "-", " / ".join(f"{each:,}" for each in counts)


def _counted(infos: Iterable[TensorInfo]) -> str:
    runs = [(name, len(list(run))) for name, run in groupby(info.dtype_name for info in infos)]
    return ", ".join(name if times == 1 else f"{name} ×{times}" for name, times in runs) or "-"


def _largest_first(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=lambda item: -item[1])


def _shortened(line: tuple[str, ...]) -> tuple[str, ...]:
    *cells, reason = line
    return (*cells, reason if len(reason) <= _WIDEST else reason[: _WIDEST - 1].rstrip(" ,:;") + "…")
