"""The user's op rules, which replace rows of the table.

There are three ways to name an op:

    "softmax"                          every spelling: the table row, and torch's function, method and functional
    "torch.nn.functional.softmax"      that spelling only
    torch.nn.functional.softmax        the same, as the function object

The value is a precision (float32 casts up, the others cast down) or the name of a cast policy.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import get_ignored_functions

from amplab.policies.policy.precisions import Precision, precision_name, precision_of
from amplab.policies.tables.apex_table import APEX
from amplab.policies.tables.op_table import CastPolicy, OpRule, OpTable, resolve, spelling_of

__all__ = ["OpOverride", "op_overrides", "rules_by_function", "rules_of_policy"]

_HOMES = ("torch", "torch.Tensor", "torch.nn.functional")
_IN_PLACE = (CastPolicy.MATCH_SELF, CastPolicy.BANNED, CastPolicy.FALL_THROUGH)
OPERATORS = dict.fromkeys(("__add__", "__radd__"), "add") | {
    "__sub__": "sub",
    **dict.fromkeys(("__mul__", "__rmul__"), "mul"),
    **dict.fromkeys(("__truediv__", "__div__"), "div"),
    "__mod__": "remainder",
    "__matmul__": "matmul",
    **{f"__{name}__": name for name in ("lt", "le", "gt", "ge", "ne")},
}
"""Operators that torch runs under the name of another op: a rule for the operator alone is never used."""

_CONVERSIONS = frozenset(("to", "type", "type_as", "float", "double", "half", "bfloat16"))
_WORDS = {cast.value: cast for cast in CastPolicy if cast is not CastPolicy.FP32_SET_OPT_DTYPE}


@dataclasses.dataclass(frozen=True)
class OpOverride:
    """One op rule of a user.

    Attributes:
        op: a bare name ("softmax") or one spelling ("torch.nn.functional.softmax").
        cast: the kind of cast.
        precision: the precision of a lower_precision_fp op; None for the policy's compute dtype or other casts.
    """

    op: str
    cast: CastPolicy
    precision: Precision | None = None

    @property
    def word(self) -> str:
        """The text after the equals sign in the string form, which `op_overrides` accepts as a value."""
        if self.precision is not None:
            return precision_name(self.precision)
        return "float32" if self.cast is CastPolicy.FP32 else self.cast.value


def op_overrides(rules: Mapping[Any, Any] | Iterable[OpOverride], table: OpTable | None) -> tuple[OpOverride, ...]:
    """Check the rules of a user and return them sorted by name.

    Args:
        rules: op (name, spelling or function) -> precision, cast policy or the name of one; or OpOverrides.
        table: the table of the policy, which defines the spellings of an op.

    Raises:
        ValueError: torch has no such op, the op cannot be cast that way, or two rules name the same op.
    """
    if isinstance(rules, Mapping):
        rules = [_override(op, value) for op, value in rules.items()]
    found: dict[str, OpOverride] = {}
    for rule in rules:
        if found.setdefault(rule.op, rule) != rule:
            raise ValueError(_contradiction(rule.op, found[rule.op], rule))
    ordered = tuple(found[op] for op in sorted(found))
    rules_by_function(ordered, table)
    return ordered


def rules_by_function(
    overrides: Iterable[OpOverride], table: OpTable | None
) -> dict[Callable[..., Any], tuple[OpRule, OpOverride]]:
    """Return function object -> (row, rule). A rule for a spelling overrides a rule for the name.

    Raises:
        ValueError: as `op_overrides`.
    """
    found: dict[Callable[..., Any], tuple[OpRule, OpOverride]] = {}
    for override in sorted(overrides, key=lambda override: "." in override.op):
        for func, spelling in _functions(override.op, table).items():
            _check_in_place(override, func)
            other = found.get(func)
            if other is not None and _contradict(other[1], override):
                raise ValueError(_contradiction(spelling, other[1], override))
            found[func] = _row(override, func, spelling, table), override
    return found


def rules_of_policy(overrides: Iterable[OpOverride], table: OpTable | None) -> list[tuple[OpRule, OpOverride | None]]:
    """Return the rows from the user's rules, then the rows of the table that they do not replace.

    Each row comes with the rule that made it, or None for a row of the table. A row of the table is omitted if every
    spelling of it has a user rule.
    """
    users: dict[tuple[str, OpOverride], OpRule] = {}
    ruled = rules_by_function(overrides, table)
    for row, override in ruled.values():
        known = users.setdefault((row.op, override), row)
        if row.spellings[0] not in known.spellings:
            joined = dataclasses.replace(known, spellings=known.spellings + row.spellings)
            users[row.op, override] = joined
    left = [row for row in (() if table is None else table.rows) if not _is_overridden(row, ruled)]
    return [*((row, override) for (_, override), row in users.items()), *((row, None) for row in left)]


def _is_overridden(row: OpRule, ruled: Mapping[Callable[..., Any], Any]) -> bool:
    functions = [func for func in map(resolve, row.spellings) if func is not None]
    return bool(functions) and all(func in ruled for func in functions)


def _override(op: Any, value: Any) -> OpOverride:
    name = _in_full(op) if isinstance(op, str) else _spelling_of(op)
    cast = _WORDS.get(value, value) if isinstance(value, str) else value
    if isinstance(cast, CastPolicy):
        if cast not in _WORDS.values():
            raise ValueError(f"op_rules[{name!r}]={cast.value!r}: expected {_allowed()}.")
        return OpOverride(name, cast)
    try:
        precision = precision_of(value, "dtype")
    except ValueError:
        raise ValueError(f"op_rules[{name!r}]={value!r}: expected {_allowed()}.") from None
    if precision is torch.float32:
        return OpOverride(name, CastPolicy.FP32)
    return OpOverride(name, CastPolicy.LOWER_PRECISION_FP, precision)


def _in_full(op: str) -> str:
    """Expand F. and Tensor. at the start of a spelling; return other names unchanged."""
    head, dot, rest = op.partition(".")
    return (
        {"F": "torch.nn.functional.", "Tensor": "torch.Tensor."}[head] + rest if dot and head in ("F", "Tensor") else op
    )


def _spelling_of(func: Any) -> str:
    spelling = spelling_of(func) if callable(func) else None
    if spelling is None and callable(func) and (row := APEX.rule(func)) is not None:
        spelling = next(each for each in row.spellings if resolve(each) == func)
    if spelling is None:
        raise ValueError(
            f"op_rules: {func!r} is not an op of torch; expected a function such as torch.softmax, a method such as "
            "torch.Tensor.add, or a name such as 'softmax'. For your own code, write a rule for its module in "
            "module_rules."
        )
    return spelling


def _functions(op: str, table: OpTable | None) -> dict[Callable[..., Any], str]:
    """Return the functions that `op` names, each with its spelling."""
    if "." in op:
        func = resolve(op) if op.startswith("torch.") else None
        found = {func: op} if callable(func) and (spelling_of(func) or APEX.rule(func)) else {}
    else:
        rows = [row for each in dict.fromkeys((table or APEX, APEX)) for row in each.rows if row.op == op]
        listed = [spelling for row in rows for spelling in row.spellings]
        spelt = [f"{home}.{op}" for home in _HOMES if (func := resolve(f"{home}.{op}")) and spelling_of(func)]
        found = {func: each for each in (*spelt, *listed) if callable(func := resolve(each))}
    if not found:
        raise ValueError(f"op_rules: {op!r} is not an op of torch; {_nearest(op, table)}")
    _check_effect(op, found)
    return found


def _check_effect(op: str, found: Iterable[Callable[..., Any]]) -> None:
    """Raise ValueError if a rule for these functions casts nothing."""
    name = op.rpartition(".")[2]
    if name in OPERATORS:
        raise ValueError(
            f"op_rules: a rule for {op!r} has no effect, since torch runs the operator as "
            f"{OPERATORS[name]!r}; write the rule for {OPERATORS[name]!r}."
        )
    if name in _CONVERSIONS or name.startswith("new_") or _creates(name, found):
        raise ValueError(
            f"op_rules: a rule for {op!r} has no effect, since the call itself sets the dtype of its "
            f"result; change the call, for example its dtype=."
        )


def _creates(name: str, functions: Iterable[Callable[..., Any]]) -> bool:
    """Return whether these functions make a tensor without getting one, as zeros does and zeros_like does not."""
    return not name.endswith("_like") and get_ignored_functions().issuperset(functions)


def _nearest(op: str, table: OpTable | None) -> str:
    names = {row.op for row in (table or APEX).rows} | set(dir(torch.nn.functional)) | set(dir(torch.Tensor))
    near = difflib.get_close_matches(op.rpartition(".")[2], sorted(names), n=3)
    meant = f"did you mean {', '.join(map(repr, near))}? " if near else ""
    return f"{meant}Expected a name such as 'softmax' or a spelling such as 'torch.nn.functional.softmax'."


def _check_in_place(override: OpOverride, func: Callable[..., Any]) -> None:
    if _works_in_place(func.__name__) and override.cast not in _IN_PLACE:
        raise ValueError(
            f"op_rules[{override.op!r}]={override.word!r}: {func.__name__} is in-place, so its result keeps the "
            f"dtype of the tensor; expected {', '.join(repr(cast.value) for cast in _IN_PLACE)}, or a rule for "
            f"{func.__name__.strip('_').removeprefix('i')!r}, which returns a new tensor."
        )


def _works_in_place(name: str) -> bool:
    if name.startswith("__"):  # __iadd__ has a counterpart __add__; __int__ and __index__ have none
        return name == "__setitem__" or (name.startswith("__i") and f"__{name[3:]}" in dir(torch.Tensor))
    return name.endswith("_")


def _row(override: OpOverride, func: Callable[..., Any], spelling: str, table: OpTable | None) -> OpRule:
    row = None if table is None else table.rule(func)
    op = row.op if row is not None else spelling.rpartition(".")[2]
    instead = f"; the {table.name} list has {row.cast.value}" if table is not None and row is not None else ""
    return OpRule(op, override.cast, f"{op}: your rule, {override.word}{instead}", (spelling,), by_user=True)


def _contradict(first: OpOverride, second: OpOverride) -> bool:
    """Return whether two rules for one function differ and are equally specific."""
    differ = (first.cast, first.precision) != (second.cast, second.precision)
    return differ and ("." in first.op) == ("." in second.op)


def _contradiction(op: str, first: OpOverride, second: OpOverride) -> str:
    return f"op_rules: {op} is {first.word} by {first.op!r} and {second.word} by {second.op!r}; remove one of them."


def _allowed() -> str:
    return f"a dtype such as torch.float32, or one of {', '.join(map(repr, _WORDS))}"
