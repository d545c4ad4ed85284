"""The tab of op dtypes as plain values, from traces of one training step.

A row is an op, or several in succession that differ only in shape. The picture and the table show the same rows; the
modules are nested as in the model. No widget here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch

from amplab.display.numbers import count, percent, power, size
from amplab.policies import PrecisionPolicy
from amplab.trace import OpRecord, TensorInfo, Trace
from amplab.trace.input_statistics import MeasuredInput
from amplab.trace.records import folded

__all__ = ["TracedLevel", "dtypes_payload", "measured_inputs"]

OUTSIDE = "outside"

_LISTED = re.compile(r"\b(\w+) list\b(?!s)")
_KINDS = (
    ("your rule", "your rule"),
    ("the weights of", "weights"),
    ("a hook", "hook"),
    ("requested", "code"),
)
"""Words of a reason, and what they say has decided."""


@dataclass(frozen=True)
class TracedLevel:
    """A trace and the opt_level that it was taken at."""

    level: str
    trace: Trace


def dtypes_payload(
    now: TracedLevel,
    *,
    before: TracedLevel | None = None,
    other: TracedLevel | None = None,
    policy: PrecisionPolicy | None = None,
    modules: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the rows, the modules that they belong to, and the sentence above them.

    Args:
        now: The step at the present opt_level.
        before: The trace before the last change; rows that differ from it are marked.
        other: The step at another opt_level, which each row is compared with.
        policy: The op lists in force, None if there are none.
        modules: Names of the modules that an override can name.
    """
    named = frozenset(modules)
    changed = now.trace.changed_since(before.trace) if before is not None else frozenset()
    keys = {record.index: key for key, record in now.trace.keyed()}
    elsewhere = None if other is None else dict(other.trace.keyed())
    rows = []
    for group in folded(now.trace):
        row = _row(group, policy, named)
        row["changed"] = any(record.index in changed for record in group)
        if elsewhere is not None:
            row["other"] = _elsewhere(group[0], elsewhere.get(keys[group[0].index]))
        rows.append(row)
    return {
        "level": now.level,
        "rows": rows,
        "modules": _tree(now.trace, rows),
        "summary": _sentence(rows, now, before),
        "compared": "" if other is None else other.level,
        "comparison": "" if other is None else _comparison(rows, now, other),
    }


def measured_inputs(inputs: Iterable[MeasuredInput]) -> list[dict[str, str]]:
    """Return the table of what an op reads: the largest magnitude, and the shares that float16 cannot hold."""
    return [
        {
            "tensor": str(each.info),
            "absmax": _magnitude(each.stats.absmax),
            "flushed": percent(each.stats.half_flushed / max(each.stats.numel, 1)),
            "overflowed": percent((each.stats.half_overflows + each.stats.infs) / max(each.stats.numel, 1)),
            "nans": percent(each.stats.nans / max(each.stats.numel, 1)),
        }
        for each in inputs
    ]


def _magnitude(value: float) -> str:
    return power(value, raised=True) if value >= 2**20 else f"{value:.4g}"


# Rows


def _row(group: Sequence[OpRecord], policy: PrecisionPolicy | None, modules: frozenset[str]) -> dict[str, Any]:
    record = group[0]
    return {
        "index": str(record.index),
        "op": record.op,
        "times": len(group),
        "aten": record.aten,
        "shapes": _shapes(record),
        "phase": record.phase,
        "module": record.module,
        "inputs": _counted(record.inputs),
        "outputs": _counted(record.outputs),
        "dtype": _color(record),
        "list": _list(record),
        "reason": f"{record.reason} ({record.note})" if record.note else record.reason,
        "policy": "" if record.is_cast else _policy_row(policy, record.op),
        "cast": record.is_cast,
        "moved": size(sum(member.cast_bytes for member in group)) if record.is_cast else "",
        "line": str(record.line or ""),
        "code": record.line.source if record.line else "",
        "canOp": not record.is_cast and _is_op(record.op),
        "canModule": record.module in modules,
    }


def _shapes(record: OpRecord) -> str:
    """Return each tensor in words.

    >>> info = TensorInfo(torch.float16, (64, 128))
    >>> _shapes(OpRecord(0, "relu", "aten.relu.default", "forward", "", (info,), (info,), ""))
    'float16[64, 128] → float16[64, 128]'
    """
    return " → ".join(", ".join(map(str, side)) for side in (record.inputs, record.outputs)).strip()


def _counted(infos: Iterable[TensorInfo]) -> list[list[object]]:
    """Return dtypes in order, with the number of equal ones in succession.

    >>> _counted([TensorInfo(torch.float32, ()), TensorInfo(torch.float32, (2,)), TensorInfo(torch.float16, ())])
    [['float32', 2], ['float16', 1]]
    """
    return [[name, len(list(group))] for name, group in groupby(info.dtype_name for info in infos)]


def _color(record: OpRecord) -> str:
    """Return the dtype that an op computes: the first floating-point one that it writes, else reads."""
    infos = [info for info in (*record.outputs, *record.inputs) if info.dtype.is_floating_point]
    return infos[0].dtype_name if infos else ""


def _list(record: OpRecord) -> str:
    """Return what decided the dtypes, for the filter: a list of the table, a rule, a hook, …, or none."""
    if record.phase == "backward" and "gradient" in record.reason:
        return "autograd"
    for words, kind in _KINDS:
        if words in record.reason:
            return kind
    found = _LISTED.search(record.reason)
    return found[1] if found and found[1] not in ("no", "op") else "none"


@lru_cache(maxsize=512)
def _is_op(name: str) -> bool:
    """Return whether an op rule can name this op."""
    try:
        PrecisionPolicy(op_rules={name: torch.float32})
    except ValueError:
        return False
    return True


@lru_cache(maxsize=512)
def _policy_row(policy: PrecisionPolicy | None, op: str) -> str:
    if policy is None:
        return ""
    try:
        return str(policy.explain(op))
    except ValueError:
        return ""


def _elsewhere(record: OpRecord, other: OpRecord | None) -> dict[str, Any] | None:
    """Return the dtypes of an op at the other level if they differ; an op that is not there has none."""
    if other is None:
        return {"inputs": [], "outputs": [], "dtype": "", "reason": ""}
    if other.dtypes == record.dtypes:
        return None
    return {
        "inputs": _counted(other.inputs),
        "outputs": _counted(other.outputs),
        "dtype": _color(other),
        "reason": other.reason,
    }


# Modules


def _tree(trace: Trace, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the modules in the order in which they first run, each after the one that it is in.

    A module without ops of its own is listed if it contains one that has. Each has its path, the path of the module
    around it, its depth and its label.
    """
    children: dict[str, dict[str, None]] = {"": {}}
    for path in dict.fromkeys(row["module"] for row in rows):
        parts = path.split(".") if path not in ("", trace.model) else []
        for depth in range(len(parts)):
            child = ".".join(parts[: depth + 1])
            children.setdefault(".".join(parts[:depth]), {})[child] = None
            children.setdefault(child, {})
    lines: list[dict[str, Any]] = []

    def visit(path: str, depth: int) -> None:
        for child in children[path]:
            inside = path or trace.model
            lines.append({"path": child, "parent": inside, "depth": depth, "label": child.rpartition(".")[2]})
            visit(child, depth + 1)

    if trace.model:
        lines.append({"path": trace.model, "parent": "", "depth": 0, "label": trace.model})
    visit("", 1 if trace.model else 0)
    if any(not row["module"] for row in rows):
        lines.append({"path": "", "parent": "", "depth": 0, "label": OUTSIDE})
    return lines


# Sentences


def _sentence(rows: Sequence[dict[str, Any]], now: TracedLevel, before: TracedLevel | None) -> str:
    casts = len(now.trace.casts)
    moved = f"{count(casts, 'cast')}, {size(now.trace.cast_bytes)}" if casts else "no casts"
    parts = [f"{now.level}: {count(sum(row['times'] for row in rows), 'op')}", moved]
    if before is not None:
        since = before.level if before.level != now.level else "the change"
        changed = count(sum(row["changed"] for row in rows), "row")
        parts.append(f"since {since}: {changed} changed, casts {len(before.trace.casts)} → {casts}")
    return " · ".join(parts)


def _comparison(rows: Sequence[dict[str, Any]], now: TracedLevel, other: TracedLevel) -> str:
    ops = [row for row in rows if not row["cast"]]
    differ = sum(row["times"] for row in ops if row["other"])
    return (
        f"At {other.level}: {differ} of {count(sum(row['times'] for row in ops), 'op')} would run in other dtypes, "
        f"casts {len(now.trace.casts)} → {len(other.trace.casts)}, {size(now.trace.cast_bytes)} → "
        f"{size(other.trace.cast_bytes)}. The run is not changed."
    )
