"""PrecisionPolicy: an op table together with the dtype that its lower-precision rows compute in.

A policy is a value: it decides and explains, and `CastingEngine` carries it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import resolve_name

from amplab.policies.apex_table import APEX
from amplab.policies.cast_policy import CastPolicy
from amplab.policies.op_names import TABLES, find_op, find_row, find_table, nearest
from amplab.policies.op_table import OpRule, OpTable
from amplab.policies.policy_rows import PolicyRows, policy_rows

__all__ = ["PrecisionPolicy"]

_COMPUTE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_TABLES = {**TABLES, "none": None}


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
    """Which op runs in which dtype.

    The string form is "table/dtype", and `parse` reads it back:

    >>> str(PrecisionPolicy())
    'apex/float16'
    >>> PrecisionPolicy.parse("none/bfloat16").table is None
    True

    Args:
        table: the op table, or the name of one in TABLES ("apex", "torch_cuda", "torch_cpu"); None casts nothing.
        compute_dtype: what lower-precision ops compute in: float16, bfloat16, or float32 (casts nothing down).

    Raises:
        ValueError: no table has this name, or compute_dtype is another dtype.
    """

    table: OpTable | str | None = APEX
    compute_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        """Look up a table given by name; refuse a compute dtype that no op could be cast to."""
        if isinstance(self.table, str):
            object.__setattr__(self, "table", find_table(self.table))  # this value is not out yet
        if self.compute_dtype not in _COMPUTE_DTYPES.values():
            raise ValueError(
                f"compute_dtype={self.compute_dtype!r}: expected torch.float16, torch.bfloat16 or torch.float32; "
                "pass one of these, or table=None to cast nothing."
            )

    def __str__(self) -> str:
        """The form that `parse` reads back."""
        table = "none" if self.table is None else self.table.name
        return f"{table}/{str(self.compute_dtype).removeprefix('torch.')}"

    @classmethod
    def parse(cls, text: str) -> PrecisionPolicy:
        """The policy whose string form is `text`, e.g. "apex/float16".

        Raises:
            ValueError: `text` is no such form.
        """
        table, _, dtype = text.partition("/")
        if table not in _TABLES or dtype not in _COMPUTE_DTYPES:
            raise ValueError(
                f"policy {text!r}: expected 'table/dtype' with a table of {sorted(_TABLES)} "
                f"and a dtype of {sorted(_COMPUTE_DTYPES)}, e.g. 'apex/float16'{nearest(table, _TABLES)}"
            )
        return cls(_TABLES[table], _COMPUTE_DTYPES[dtype])

    def explain(self, func: Callable[..., Any] | str) -> OpRule:
        """The row that decides about `func`, given itself or by name; a fall_through row for an op on no list.

        >>> print(PrecisionPolicy().explain(torch.nn.functional.softmax))
        softmax [fp32] softmax: exp overflows half above 11.09
        >>> print(PrecisionPolicy().explain(torch.relu))
        relu [fall_through] relu: on no list of apex/float16, runs in the dtype it gets

        Raises:
            ValueError: torch has no function of this name.
        """
        if isinstance(func, str):
            named = find_row(func, self.table)
            if named is not None:
                return named
            func = find_op(func)
        rule = None if self.table is None else self.table.rule(func)
        return rule or self.unlisted(func)

    def rows(self) -> PolicyRows:
        """Every row of the table with the dtype that it comes to under this policy; prints as text and as HTML.

        >>> PrecisionPolicy("torch_cuda").rows()[0]["runs in"]
        'float16'
        """
        rules = () if self.table is None else self.table.rows
        table, _, lower = str(self).partition("/")
        return policy_rows(rules, table=table, lower=lower, title=str(self))

    def unlisted(self, func: Callable[..., Any]) -> OpRule:
        """The fall_through row of an op that the table does not name."""
        op = (resolve_name(func) or getattr(func, "__name__", "op")).rpartition(".")[2]
        return OpRule(op, CastPolicy.FALL_THROUGH, f"{op}: on no list of {self}, runs in the dtype it gets")
