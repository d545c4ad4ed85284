"""An X-ray as text: what it comes to, and a table of its ops below, no wider than a page.

Ops that follow each other and differ in nothing but shape share a line, as in `Trace.rows`. A reason that is too long
for its column is cut short there and stands in full under the table, once.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from amplab.display.numbers import count, power, size
from amplab.display.text import WIDTH, filled, fitted, places, wrapped
from amplab.trace.kept_tensors import KeptBytes
from amplab.trace.records import OpRecord, TensorInfo
from amplab.trace.statistics import OpStatistics
from amplab.trace.table import folded

if TYPE_CHECKING:
    from amplab.trace.xray_value import XRay

__all__ = ["NUMBERS", "cells", "dtypes", "heads", "summary", "text", "totals"]

NUMBERS = ("#", "cast")
"""The columns of numbers."""

_HEADS = ("#", "op", "module", "line", "in → out", "cast", "reason")
_MEASURED = ("values", "of them")
_COUNTED = {"zeros": "zero", "half_subnormals": "subnormal", "infs": "inf", "nans": "nan"}
_MOST_MODULES = 8
_MIRROR = re.compile(r"^autograd's mirror of \S+ (#\d+)")


def text(xray: "XRay", *, every: bool = False) -> str:
    """Return what it comes to and the table."""
    groups = [[record] for record in xray.trace] if every else list(folded(xray.trace))
    titles, *body = filled([heads(xray), *(_brief(cells(group, xray)) for group in groups)])
    head, *lines = fitted([titles, *body], right=places(titles, NUMBERS), cut={len(titles) - 1})
    phases = [group[0].phase for group in groups]
    shown = [*map(wrapped, totals(xray)), "", *head]
    for phase, members in groupby(range(len(groups)), key=phases.__getitem__):
        shown += [f"-- {phase} ".ljust(WIDTH, "-"), *(line for place in members for line in lines[place])]
    return "\n".join([*shown, *_reasons(groups, lines)])


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
        return "bytes kept for backward not counted, since torch.func takes no saved tensor hooks"
    return f"{size(xray.kept.total)} kept for backward"


def totals(xray: "XRay") -> list[str]:
    """Return what the X-ray comes to, line by line."""
    saved = sum(cast.saved for cast in xray.casts if cast.cached)
    lines = [f"{summary(xray)}.", f"Backward starts from {xray.loss}, times {power(xray.loss_scale)}."]
    if saved:
        lines.append(f"The weight cache spared {size(saved)} of casts.")
    if xray.measured is not None and xray.measured.by_reference:
        lines.append(
            "Measured by the pure-torch reference: the same counts in several times the time of the kernel, which "
            "amplab.kernels.ensure(wait=True) builds where a compiler is."
        )
    return lines + _kept_words(xray)


def _kept_words(xray: "XRay") -> list[str]:
    """What is kept for backward, by module, the most first."""
    kept = xray.kept or KeptBytes()
    parts = (("Activations", kept.activations), ("Casts of weights", kept.weight_casts))
    return [f"{name} kept for backward: {_by_module(sizes)}." for name, sizes in parts if sizes]


def _by_module(sizes: Mapping[str, int]) -> str:
    first = sorted(sizes.items(), key=lambda item: -item[1])
    named = [f"{module or 'outside'} {size(nbytes)}" for module, nbytes in first[:_MOST_MODULES]]
    rest = [f"{count(len(first) - _MOST_MODULES, 'other')}"] if len(first) > _MOST_MODULES else []
    return f"{size(sum(sizes.values()))}: " + ", ".join([*named, *rest])


def heads(xray: "XRay") -> tuple[str, ...]:
    """Return the titles of the columns of `cells`."""
    return _HEADS if xray.statistics is None else (*_HEADS[:-1], *_MEASURED, _HEADS[-1])


def cells(group: Sequence[OpRecord], xray: "XRay") -> tuple[str, ...]:
    """Return the cells of the line that `group` shares."""
    record = group[0]
    name = record.op if len(group) == 1 else f"{record.op} ×{len(group)}"
    moved = size(sum(member.cast_bytes for member in group)) if record.is_cast else ""
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
        ", ".join(parameters),
        f"cached: {', '.join(served)}" if served else "",
        record.reason,
        record.note,
    )
    return "; ".join(filter(None, parts))


def _reasons(groups: Sequence[Sequence[OpRecord]], lines: Sequence[Sequence[str]]) -> list[str]:
    """The reasons that the table has cut short, each once; those of backward mirror these."""
    pairs = zip(groups, lines, strict=True)
    cut = [group[0] for group, shown in pairs if any(line.endswith("…") for line in shown)]
    whole = dict.fromkeys(record.reason for record in cut if record.phase == "forward")
    return ["", "In full:", *map(wrapped, whole)] if whole else []


def _brief(line: tuple[str, ...]) -> tuple[str, ...]:
    """A line of cells in few words: the file without its folder, and what backward mirrors by its number alone."""
    number, op, module, place, *others, reason = line
    return number, op, module, place.rpartition("/")[2], *others, _MIRROR.sub(r"mirror of \1", reason)


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
