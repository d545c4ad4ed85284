"""The short words that the op tables are written in: homes of spellings, shared reasons, rows and their recasting.

A row is written as (op, reason, spellings, added): `t` marks a name that is both a torch function and a
Tensor method, `f` a torch.nn.functional one, `m` a Tensor method or operator only, `c` one of the
functions that torch.nn.functional calls. The ATen names of a row are its op's own unless `aten` says others.
A list that shares ops with another takes their rows over under its own cast policy (`recast`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from amplab.policies.tables.op_table import CastPolicy, OpRule

__all__ = ["EXP", "GEMM", "INSIDE", "RECURRENT", "SQUARE", "SUM", "WIDEST", "c", "f", "m", "recast", "rows", "t"]

GEMM = "products of two halves are exact in float32 (11 + 11 bits fit in 24), so only the sum is rounded, by 2^-11"
RECURRENT = "its gates are products of halves, exact in float32 (11 + 11 bits fit in 24), and its state stays within 1"
SQUARE = "squares its elements, and 256 squared is 65536, above half's largest value 65504"
SUM = "sums, and half reaches infinity at 65520 and cannot count by ones above 2048"
EXP = "exp overflows half above 11.09"
INSIDE = "the ops inside it follow their own rows"
WIDEST = "with half (11 significant bits) and float32 (24) the wider type holds both arguments exactly"


def t(*names: str) -> tuple[str, ...]:
    """A torch function that is a Tensor method too.

    >>> t("mm")
    ('torch.mm', 'torch.Tensor.mm')
    """
    return tuple(f"{home}.{name}" for name in names for home in ("torch", "torch.Tensor"))


def f(*names: str) -> tuple[str, ...]:
    """A function of torch.nn.functional."""
    return tuple(f"torch.nn.functional.{name}" for name in names)


def m(*names: str) -> tuple[str, ...]:
    """A Tensor method or operator only."""
    return tuple(f"torch.Tensor.{name}" for name in names)


def c(*names: str) -> tuple[str, ...]:
    """What torch.nn.functional calls, for those who call it directly and for functions that are opened."""
    return tuple(f"torch._C._nn.{name}" for name in names)


def rows(cast: CastPolicy, *written: tuple[Any, ...], aten: dict[str, str] | None = None) -> tuple[OpRule, ...]:
    """Rows of one cast policy.

    Args:
        cast: their cast policy.
        written: (op, reason, spellings, added); the last may be left out.
        aten: op -> ATen names with blanks between, where they are not the op's own name.
    """
    others = aten or {}
    return tuple(_row(cast, others.get(row[0], row[0]), *row) for row in written)


def recast(
    shared: Iterable[OpRule], cast: CastPolicy, ops: str, *, reason: str | None = None, listed: bool = True
) -> tuple[OpRule, ...]:
    """The rows of `ops` in `shared`, under another list's cast policy; spellings, ATen names and reason are kept.

    Args:
        shared: the rows of the other list.
        cast: the cast policy in the new list.
        ops: the op names with blanks between.
        reason: what to say instead of the other list's reason, without the op's name.
        listed: whether the new list names these ops itself; if not, every spelling counts as added.

    Raises:
        KeyError: `shared` has no such row.
    """
    by_op = {row.op: row for row in shared}
    return tuple(_recast(by_op[op], cast, reason, listed) for op in ops.split())


def _row(
    cast: CastPolicy, aten: str, op: str, reason: str, spellings: tuple[str, ...], added: tuple[str, ...] = ()
) -> OpRule:
    return OpRule(op, cast, f"{op}: {reason}", spellings + added, added, tuple(aten.split()))


def _recast(row: OpRule, cast: CastPolicy, reason: str | None, listed: bool) -> OpRule:
    said = row.reason if reason is None else f"{row.op}: {reason}"
    return dataclasses.replace(row, cast=cast, reason=said, added=() if listed else row.spellings)
