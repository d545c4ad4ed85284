"""Look up ops and op tables by name: "softmax", "F.softmax", "torch_cuda".

The error for an unknown name suggests the closest known names.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from amplab.policies.tables.apex_table import APEX
from amplab.policies.tables.op_table import OpRule, OpTable, resolve
from amplab.policies.tables.torch_cpu_table import TORCH_CPU
from amplab.policies.tables.torch_cuda_table import TORCH_CUDA

__all__ = ["TABLES", "find_op", "find_row", "find_table", "nearest"]

TABLES: dict[str, OpTable] = {table.name: table for table in (APEX, TORCH_CUDA, TORCH_CPU)}
"""The op tables by name."""

_HOMES = ("torch", "torch.nn.functional", "torch.Tensor", "torch.linalg", "torch.fft", "torch.special")


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return the names in `allowed` closest to `name` as the end of a message, or "" if none is close.

    >>> nearest("torch_cud", ["apex", "torch_cuda", "torch_cpu"])
    '; did you mean torch_cuda or torch_cpu?'
    """
    close = difflib.get_close_matches(name, sorted(set(allowed)), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def find_table(name: str) -> OpTable:
    """Return the op table called `name`.

    >>> find_table("torch_cpu").name
    'torch_cpu'

    Raises:
        ValueError: no table has this name.
    """
    if name not in TABLES:
        raise ValueError(
            f"op table {name!r}: expected one of {', '.join(TABLES)}{nearest(name, TABLES) or '.'} "
            "Pass one of these names, an OpTable, or None to cast nothing."
        )
    return TABLES[name]


def find_row(name: str, table: OpTable | None) -> OpRule | None:
    """Return the row of `table` whose op is `name`, e.g. "softmax" or "add_", or None."""
    return next((row for row in (() if table is None else table.rows) if row.op == name), None)


def find_op(name: str) -> Callable[..., Any]:
    """Return the function called `name`: a bare name, or a dotted path from torch, Tensor or F.

    >>> find_op("F.relu").__module__
    'torch.nn.functional'

    Raises:
        ValueError: torch has no function of this name.
    """
    head, _, rest = name.partition(".")
    home = {"F": "torch.nn.functional", "Tensor": "torch.Tensor", "torch": "torch"}.get(head)
    paths = [f"{home}.{rest}"] if home and rest else [f"{home}.{name}" for home in _HOMES]
    found = next((func for func in map(resolve, paths) if callable(func)), None)
    if found is None:
        bare = name.rpartition(".")[2]
        known = [op for home in _HOMES for op in dir(resolve(home)) if not op.startswith("_")]
        raise ValueError(
            f"op {name!r}: torch has no function of this name{nearest(bare, known) or '.'} "
            "Expected a name such as 'softmax', a path such as 'F.softmax' or 'Tensor.add_', or the function itself."
        )
    return found
