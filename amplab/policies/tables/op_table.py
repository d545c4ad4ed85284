"""The op table: one row per op with its cast policy, its spellings and the reason.

A spelling is a dotted path from `torch`, e.g. "torch.nn.functional.softmax". Two marks say that
a spelling is not in every torch: "torch.foo>=2.9" came with 2.9, "torch.foo<2.9" left with it.
A spelling that the running torch lacks is passed over, so that a newer torch does not break the table.
Rows are found by function object, not by name: `torch.mm` and `torch.spmm` share a name.
The rows themselves are in `apex_table`, `torch_cuda_table` and `torch_cpu_table`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import resolve_name

__all__ = ["CastPolicy", "OpRule", "OpTable", "absent", "resolve", "spelling_of"]


class CastPolicy(enum.Enum):
    """How the floating tensors among an op's arguments are cast before the op runs.

    float64 is never narrowed by any of them: an op that gets a float64 tensor runs as it would
    in the float32 model (its 16-bit arguments become float32, the rest is torch's own rule).
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Every float32 and 16-bit argument is cast to the policy's compute dtype."""

    FP32 = "fp32"
    """Every 16-bit argument is cast to float32."""

    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """The arguments stay; the op gets `dtype=torch.float32` unless the caller passed a dtype."""

    PROMOTE = "promote"
    """Where floating dtypes differ, every argument is cast to the widest of them."""

    SEQUENCE_PROMOTE = "sequence_promote"
    """As PROMOTE, over the elements of a list or tuple argument."""

    MATCH_SELF = "match_self"
    """An in-place op: the other arguments are cast to the dtype of the tensor written to."""

    BANNED = "banned"
    """The op refuses 16-bit arguments with an error that says what to do instead."""

    FALL_THROUGH = "fall_through"
    """The op runs in the dtype it gets; ops inside it follow their own rows."""


@dataclasses.dataclass(frozen=True)
class OpRule:
    """One row: what happens to the arguments of `op`, and why.

    Attributes:
        op: the op's bare name, e.g. "softmax"; in-place ops end in an underscore.
        cast: the kind of cast.
        reason: one sentence with its number, e.g. "exp overflows half above 11.09".
        spellings: every public path the op is called by.
        added: those of `spellings` that the list this row comes from does not name.
        aten: the ATen ops it becomes, without overloads, e.g. ("nll_loss", "nll_loss2d").
        by_user: whether a user's own rule made this row, and no list.
    """

    op: str
    cast: CastPolicy
    reason: str
    spellings: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()
    by_user: bool = False

    def __str__(self) -> str:
        """One line: op, cast policy, reason."""
        return f"{self.op} [{self.cast.value}] {self.reason}"


@dataclasses.dataclass(frozen=True)
class OpTable:
    """A named list of rows, searched by function object.

    Attributes:
        name: the word for the list, e.g. "apex".
        rows: the rows; no function may be claimed by two of them.
    """

    name: str
    rows: tuple[OpRule, ...]

    def __reduce__(self) -> tuple[type[OpTable], tuple[str, tuple[OpRule, ...]]]:
        """Pickle the rows; function objects are found again where it is loaded."""
        return OpTable, (self.name, self.rows)

    def rule(self, func: Callable[..., Any]) -> OpRule | None:
        """The row of `func`, or None where no row names it.

        >>> from amplab.policies import APEX
        >>> APEX.rule(torch.nn.functional.softmax).cast.value
        'fp32'
        >>> APEX.rule(torch.relu) is None
        True
        """
        return self.by_function.get(func)

    def rows_of(self, cast: CastPolicy) -> tuple[OpRule, ...]:
        """The rows with the cast policy `cast`, in table order."""
        return tuple(row for row in self.rows if row.cast is cast)

    @functools.cached_property
    def by_function(self) -> dict[Callable[..., Any], OpRule]:
        """Function object -> row, for the spellings that the running torch has.

        Raises:
            ValueError: a function is claimed by two rows.
        """
        found: dict[Callable[..., Any], OpRule] = {}
        for row in self.rows:
            for spelling in row.spellings:
                func = resolve(spelling)
                if func is None:
                    continue
                if found.setdefault(func, row) is not row:
                    raise ValueError(
                        f"op table {self.name!r}: {spelling} is claimed by the rows {found[func].op!r} and "
                        f"{row.op!r}; a function has one row, so take it out of one of them."
                    )
        return found


def resolve(spelling: str) -> Callable[..., Any] | None:
    """The function that `spelling` names; None where the running torch does not have it.

    >>> resolve("torch.mm") == torch.mm
    True
    >>> resolve("torch.conv4d") is None
    True
    """
    value: Any = torch
    for name in _split_mark(spelling)[0].split(".")[1:]:
        value = getattr(value, name, None)
    return value  # type: ignore[no-any-return]  # getattr: a function, or None


def spelling_of(func: Callable[..., Any]) -> str | None:
    """The public path of an op of torch; None for anything else. torch.mm is torch.spmm too, and goes by its own name.

    >>> spelling_of(torch.mm), spelling_of(torch.Tensor.add), spelling_of(len)
    ('torch.mm', 'torch.Tensor.add', None)
    """
    spelling = resolve_name(func)
    own = getattr(func, "__name__", "")
    return f"torch.{own}" if spelling is not None and getattr(torch, own, None) is func else spelling


def absent(spelling: str) -> bool:
    """Whether the mark of `spelling` says that the running torch does not have it."""
    _, bound, version = _split_mark(spelling)
    major, minor = torch.__version__.split(".")[:2]
    return bool(bound) and ((int(major), int(minor)) >= version) != (bound == ">=")


def _split_mark(spelling: str) -> tuple[str, str, tuple[int, int]]:
    for bound in (">=", "<"):
        path, found, version = spelling.partition(bound)
        if found:
            major, minor = version.split(".")
            return path, bound, (int(major), int(minor))
    return spelling, "", (0, 0)
