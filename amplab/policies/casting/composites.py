"""Python composites of torch, opened: the same code, run so that a function mode sees the ops inside.

A function mode gets a Python-level function such as F.multi_head_attention_forward as one call, and
while it handles that call it is off: the linear and softmax inside would run unseen. `opened`
returns the function's own code with torch's dispatch check answered "no overrides", so that it can
run with the mode on. Tensor.backward is one of them: what checkpointing or a user's
autograd.Function computes inside it is then cast as it was in the forward.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from amplab.policies.tables.apex_table import APEX
from amplab.policies.tables.op_table import CastPolicy, OpTable, resolve

__all__ = ["COMPOSITES", "composites_of", "opened"]


def _fall_through(table: OpTable) -> frozenset[Callable[..., Any]]:
    found = (resolve(spelling) for row in table.rows_of(CastPolicy.FALL_THROUGH) for spelling in row.spellings)
    return frozenset(func for func in found if func is not None)


COMPOSITES = _fall_through(APEX)
"""The Python-level functions whose inner ops have rows of their own, whatever the table."""


def composites_of(table: OpTable | None) -> frozenset[Callable[..., Any]]:
    """COMPOSITES with those that fall through in `table`: its lists may name what is inside, not the function."""
    return COMPOSITES if table is None else COMPOSITES | _fall_through(table)


def _no_override(*_args: Any) -> bool:
    return False


@functools.cache
def opened(func: types.FunctionType) -> types.FunctionType:
    """`func` without its check for `__torch_function__`; built-in functions come back as they are.

    >>> from torch.nn import functional as F
    >>> opened(F.multi_head_attention_forward).__code__ is F.multi_head_attention_forward.__code__
    True
    """
    inner = getattr(func, "__wrapped__", func)
    if not isinstance(inner, types.FunctionType):
        return func
    scope = {name: value for name, value in inner.__globals__.items() if name != "__name__"}
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope.update(dict.fromkeys(checks, _no_override))
    copy = types.FunctionType(inner.__code__, scope, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy
