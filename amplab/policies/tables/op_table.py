"""The op table: one row per op with its cast policy, its spellings and the reason.

A spelling is a dotted path from `torch`, e.g. "torch.nn.functional.softmax". A suffix restricts it to some
torch versions: "torch.foo>=2.9" was added in 2.9, "torch.foo<2.9" was removed in it. A spelling that the
installed torch does not have is ignored, so that a newer torch does not break the table. A row whose spellings
are all of other versions stays in the table, without effect: see `OpRule.exists`.
Rows are found by function object, not by name: `torch.mm` and `torch.spmm` share a name.
The rows themselves are in `apex_table`, `torch_cuda_table` and `torch_cpu_table`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import _get_overridable_functions

from amplab.formats.kept_property import kept_property
from amplab.policies.tables.called_op import original_of

__all__ = ["CastPolicy", "OpRule", "OpTable", "absent", "resolve", "spelling_of", "unmarked"]


class CastPolicy(enum.Enum):
    """How the floating tensors among an op's arguments are cast before the op runs.

    No cast policy narrows float64: an op that gets a float64 tensor runs as it does in the float32 model
    (its 16-bit arguments are cast to float32, then torch's type promotion applies).
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Every float32 and 16-bit argument is cast to the policy's compute dtype."""

    FP32 = "fp32"
    """Every 16-bit argument is cast to float32."""

    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """The arguments are unchanged; the op gets `dtype=torch.float32` unless the caller passes a dtype."""

    PROMOTE = "promote"
    """If the floating dtypes differ, every argument is cast to the widest of them."""

    SEQUENCE_PROMOTE = "sequence_promote"
    """The same as PROMOTE, for the elements of a list or tuple argument."""

    MATCH_SELF = "match_self"
    """An in-place op: the other arguments are cast to the dtype of the tensor written to."""

    BANNED = "banned"
    """16-bit arguments raise an error that says what to do instead."""

    FALL_THROUGH = "fall_through"
    """The op runs in the dtype of its arguments; the ops inside it follow their own rows."""


@dataclasses.dataclass(frozen=True)
class OpRule:
    """One row: how the arguments of `op` are cast, and why.

    Attributes:
        op: the op's bare name, e.g. "softmax"; in-place ops end in an underscore.
        cast: the kind of cast.
        reason: the op, then one clause with a number, e.g. "exp: overflows float16 above 11.09".
        spellings: every public path of the op.
        added: those of `spellings` that the original list does not name.
        aten: the ATen ops that it calls, without overloads, e.g. ("nll_loss", "nll_loss2d").
        by_user: whether the row comes from a user's rule instead of a list.
    """

    op: str
    cast: CastPolicy
    reason: str
    spellings: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()
    by_user: bool = False

    @property
    def exists(self) -> bool:
        """Whether the version suffixes leave a spelling to the installed torch; True for a row without spellings."""
        return not self.spellings or not all(map(absent, self.spellings))

    def __str__(self) -> str:
        """One line: op, cast policy, reason."""
        return f"{self.op} [{self.cast.value}] {self.reason}"


@dataclasses.dataclass(frozen=True)
class OpTable:
    """A named list of rows, with lookup by function object.

    Attributes:
        name: the name of the list, e.g. "apex".
        rows: the rows; two rows must not name the same function.
    """

    name: str
    rows: tuple[OpRule, ...]

    def __reduce__(self) -> tuple[type[OpTable], tuple[str, tuple[OpRule, ...]]]:
        """Pickle the rows; function objects are looked up again on load."""
        return OpTable, (self.name, self.rows)

    def rule(self, func: Callable[..., Any]) -> OpRule | None:
        """Return the row of `func`, or None if no row names it.

        >>> from amplab.policies import APEX
        >>> APEX.rule(torch.nn.functional.softmax).cast.value
        'fp32'
        >>> APEX.rule(torch.relu) is None
        True
        """
        return self.by_function.get(func)

    def rows_of(self, cast: CastPolicy) -> tuple[OpRule, ...]:
        """Return the rows with the cast policy `cast`, in table order."""
        return tuple(row for row in self.rows if row.cast is cast)

    @kept_property
    def by_function(self) -> dict[Callable[..., Any], OpRule]:
        """Function object -> row, for the spellings that the installed torch has.

        Raises:
            ValueError: two rows name the same function.
        """
        found: dict[Callable[..., Any], OpRule] = {}
        for row in self.rows:
            for spelling in row.spellings:
                func = resolve(spelling)
                if func is None:
                    continue
                if found.setdefault(func, row) is not row:
                    raise ValueError(
                        f"op table {self.name!r}: the rows {found[func].op!r} and {row.op!r} both name {spelling}; "
                        "a function can have one row only. Remove it from one of them."
                    )
        return found


def resolve(spelling: str) -> Callable[..., Any] | None:
    """Return the function that `spelling` names, or None if the installed torch does not have it.

    Where a program has put a function of its own, it is the op of torch behind that; see `called_op`.

    >>> resolve("torch.mm") == torch.mm
    True
    >>> resolve("torch.conv4d") is None
    True
    """
    value: Any = torch
    path = _split_mark(spelling)[0].split(".")
    for name in path[1:]:
        value = getattr(value, name, None)
    return original_of(value, path[-1])  # type: ignore[no-any-return]  # getattr: a function, or None


def spelling_of(func: Callable[..., Any]) -> str | None:
    """Return the public path of an op of torch, or None for anything else. For torch.mm, which is also torch.spmm,
    the path is that of its `__name__`.

    >>> spelling_of(torch.mm), spelling_of(torch.Tensor.add), spelling_of(len)
    ('torch.mm', 'torch.Tensor.add', None)
    """
    # Not torch.overrides.resolve_name: it replaces the filters of warnings, and an interrupt leaves them replaced.
    spelling = (
        str(func) if isinstance(func, OpOverload | OpOverloadPacket) else _get_overridable_functions()[1].get(func)
    )
    own = getattr(func, "__name__", "")
    return f"torch.{own}" if spelling is not None and getattr(torch, own, None) is func else spelling


def unmarked(names: Iterable[str]) -> tuple[str, ...]:
    """Return names without their version suffixes; those whose suffix excludes the installed torch are left out.

    >>> unmarked(["mm", "bmm>=2.0", "spmm<2.0"])
    ('mm', 'bmm')
    """
    return tuple(_split_mark(name)[0] for name in names if not absent(name))


def absent(spelling: str) -> bool:
    """Return whether the version suffix of `spelling` excludes the installed torch."""
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
