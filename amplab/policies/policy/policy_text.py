"""Write and parse the string form of a policy.

    apex/float16
    apex/bfloat16; op softmax=bfloat16; op torch.nn.functional.linear=promote; module blocks.*.attn=float32
    apex/float16; module head=float32; cast_outputs_back

The form is table/dtype, then the user's rules for ops and for module-name patterns, then the option of the rules if it
is set. A name with other characters than these is written in double quotes, as in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["PolicyText", "read_policy", "write_policy"]

_PLAIN = re.compile(r"[\w.*?\[\]!-]+")
_RULE = re.compile(r'\s*;\s*(?P<kind>op|module)\s+(?P<name>"(?:[^"\\]|\\.)*"|[\w.*?\[\]!-]+)\s*=\s*(?P<word>\w+)\s*')
_CAST_BACK = re.compile(r"\s*;\s*cast_outputs_back\s*$")
_BASE = re.compile(r"\s*(?P<table>\w+)/(?P<dtype>\w+)\s*")


class PolicyText(NamedTuple):
    """The parts of a string form, as text.

    Attributes:
        table: the name of the table.
        dtype: the name of the compute dtype.
        op_rules: op -> word.
        module_rules: pattern -> dtype name.
        cast_outputs_back: whether the option is set.
    """

    table: str
    dtype: str
    op_rules: dict[str, str]
    module_rules: dict[str, str]
    cast_outputs_back: bool


def write_policy(
    table: str,
    dtype: str,
    op_rules: Iterable[tuple[str, str]] = (),
    module_rules: Iterable[tuple[str, str]] = (),
    *,
    cast_outputs_back: bool = False,
) -> str:
    """Return the string form, which `read_policy` parses.

    >>> write_policy("apex", "float16", [("softmax", "float32")], [("head", "bfloat16")])
    'apex/float16; op softmax=float32; module head=bfloat16'
    """
    ops = (f"op {_quoted(name)}={word}" for name, word in op_rules)
    modules = (f"module {_quoted(name)}={word}" for name, word in module_rules)
    return "; ".join((f"{table}/{dtype}", *ops, *modules, *(("cast_outputs_back",) if cast_outputs_back else ())))


def read_policy(text: str) -> PolicyText:
    """Parse a string form.

    Raises:
        ValueError: the text does not have this form, or has two rules for one name.
    """
    base = _BASE.match(text)
    place = base.end() if base else 0
    rules: dict[str, dict[str, str]] = {"op": {}, "module": {}}
    option = _CAST_BACK.search(text)
    end = option.start() if option else len(text)
    while base and place < end:
        rule = _RULE.match(text, place, end)
        if rule is None:
            raise _refusal(text, f"could not parse {text[place:end]!r}.")
        name = json.loads(rule["name"]) if rule["name"].startswith('"') else rule["name"]
        if rules[rule["kind"]].setdefault(name, rule["word"]) != rule["word"]:
            raise _refusal(text, f"{rule['kind']} {name} has two rules; remove one of them.")
        place = rule.end()
    if base is None:
        raise _refusal(text, "it does not begin with 'table/dtype'.")
    return PolicyText(base["table"], base["dtype"], rules["op"], rules["module"], option is not None)


def _quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name)


def _refusal(text: str, why: str) -> ValueError:
    return ValueError(
        f"policy {text!r}: expected 'table/dtype', then rules such as '; op softmax=float32' or "
        f"'; module blocks.*.attn=float32', then perhaps '; cast_outputs_back', e.g. 'apex/float16'; {why}"
    )
