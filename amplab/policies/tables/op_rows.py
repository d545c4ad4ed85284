"""The functions and shared reasons that the op tables are written with.

A row is written as (op, reason, spellings, added). `t` expands a name to the torch function and the Tensor
method, `f` to the function of torch.nn.functional, `m` to the Tensor method or operator, and `c` to the
function of torch._C._nn that torch.nn.functional calls. The ATen name of a row is its op's name unless `aten`
gives others. `recast` copies rows of another list under a different cast policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from amplab.policies.tables.op_table import CastPolicy, OpRule, unmarked

__all__ = [
    "EXP",
    "GEMM",
    "INSIDE",
    "LOG_SIGMOID",
    "LOG_SUM",
    "NORM",
    "RECURRENT",
    "SOFTMAX",
    "SQUARE",
    "SUM",
    "WIDEST",
    "c",
    "f",
    "m",
    "recast",
    "rows",
    "t",
]

GEMM = "products of two float16 values are exact in float32 (11 + 11 bits fit in 24); only the sum is rounded, by 2^-11"
RECURRENT = "its gates are products that are exact in float32 (11 + 11 bits fit in 24), and its output is in [-1, 1]"
SQUARE = "squares its elements, and 256 squared is 65536, above the float16 maximum of 65504"
SUM = "sums its elements, and a float16 sum overflows at 65520 and cannot grow by 1 above 2048"
NORM = "adds squares, which in float16 would overflow from 256 up: 256 squared is 65536, above 65504"
# torch.softmax and its kin subtract the largest element, so exp does not overflow in them.
EXP = "exp overflows float16 above 11.09"
SOFTMAX = "probabilities below 2^-25 are zero in float16"
LOG_SUM = "the log of a sum of exp; from 8 up float16 has a spacing of 2^-7"
LOG_SIGMOID = "log(1 + exp(-|x|)) is zero in float16 for |x| above 17.33"
INSIDE = "the ops inside it follow their own rows"
WIDEST = "the wider dtype (float32: 24 significant bits) represents a float16 argument (11 bits) exactly"


def t(*names: str) -> tuple[str, ...]:
    """Return the spellings of a torch function that is also a Tensor method.

    >>> t("mm")
    ('torch.mm', 'torch.Tensor.mm')
    """
    return tuple(f"{home}.{name}" for name in names for home in ("torch", "torch.Tensor"))


def f(*names: str) -> tuple[str, ...]:
    """Return the spelling of a function of torch.nn.functional."""
    return tuple(f"torch.nn.functional.{name}" for name in names)


def m(*names: str) -> tuple[str, ...]:
    """Return the spelling of a Tensor method or operator."""
    return tuple(f"torch.Tensor.{name}" for name in names)


def c(*names: str) -> tuple[str, ...]:
    """Return the spelling in torch._C._nn, which torch.nn.functional calls and users sometimes call directly."""
    return tuple(f"torch._C._nn.{name}" for name in names)


def rows(cast: CastPolicy, *written: tuple[Any, ...], aten: dict[str, str] | None = None) -> tuple[OpRule, ...]:
    """Return rows of one cast policy.

    Args:
        cast: the cast policy of the rows.
        written: (op, reason, spellings, added); `added` is optional.
        aten: op -> ATen names separated by spaces, where they differ from the name of the op. They take the version
            suffixes of spellings: "qr<2.14" was removed in 2.14.
    """
    others = aten or {}
    return tuple(_row(cast, others.get(row[0], row[0]), *row) for row in written)


def recast(
    shared: Iterable[OpRule], cast: CastPolicy, ops: str, *, reason: str | None = None, listed: bool = True
) -> tuple[OpRule, ...]:
    """Return copies of the rows of `ops` in `shared` with the cast policy `cast`.

    Spellings, ATen names and reason stay the same.

    Args:
        shared: the rows of the other list.
        cast: the cast policy in the new list.
        ops: the op names, separated by spaces.
        reason: replaces the reason of the other list, without the name of the op; None keeps it.
        listed: whether the new list names these ops; if not, every spelling counts as added.

    Raises:
        KeyError: `shared` has no row of that name.
    """
    by_op = {row.op: row for row in shared}
    return tuple(_recast(by_op[op], cast, reason, listed) for op in ops.split())


def _row(
    cast: CastPolicy, aten: str, op: str, reason: str, spellings: tuple[str, ...], added: tuple[str, ...] = ()
) -> OpRule:
    return OpRule(op, cast, f"{op}: {reason}", spellings + added, added, unmarked(aten.split()))


def _recast(row: OpRule, cast: CastPolicy, reason: str | None, listed: bool) -> OpRule:
    said = row.reason if reason is None else f"{row.op}: {reason}"
    return dataclasses.replace(row, cast=cast, reason=said, added=() if listed else row.spellings)
