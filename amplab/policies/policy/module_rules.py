"""A user's own rules by module name: which modules of a model a pattern names, and which rule counts where.

A pattern is an fnmatch pattern over the names of `model.named_modules()`; `*` matches dots too. It rules over the
modules it names and all that is inside them. Where two patterns with different precisions meet in a module, the more
specific one counts: the one whose modules are all among the other's. Where neither is, that is an error.
What a rule does while a model runs is in `module_regions`.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from amplab.policies.policy.precisions import Precision, precision_name, precision_of

__all__ = ["ModuleRule", "RuledModule", "checked_module_rules", "names_in", "precisions_by_module", "ruled_modules"]


@dataclasses.dataclass(frozen=True)
class ModuleRule:
    """One rule of a user about modules.

    Attributes:
        pattern: an fnmatch pattern over module names, e.g. "blocks.*.attn".
        precision: what the modules it names compute in.
    """

    pattern: str
    precision: Precision

    def __str__(self) -> str:
        """The rule as the policy's string form has it."""
        return f"{self.pattern}={precision_name(self.precision)}"


@dataclasses.dataclass(frozen=True)
class RuledModule:
    """A module where another rule begins than the one around it.

    Attributes:
        name: its name in the model, empty for the model itself.
        module: the module.
        rule: what counts inside.
        around: what counts around it; None for the policy itself.
    """

    name: str
    module: nn.Module
    rule: ModuleRule
    around: ModuleRule | None


def checked_module_rules(rules: Mapping[Any, Any] | Iterable[ModuleRule]) -> tuple[ModuleRule, ...]:
    """The rules that a user wrote, checked, in the order of their patterns.

    Args:
        rules: pattern -> dtype, simulated format or the name of one; or finished rules.

    Raises:
        ValueError: a pattern that is no string, a dtype that cannot be computed in, two rules for one pattern.
    """
    if isinstance(rules, Mapping):
        rules = [_rule(pattern, value) for pattern, value in rules.items()]
    found: dict[str, ModuleRule] = {}
    for rule in rules:
        if found.setdefault(rule.pattern, rule) != rule:
            raise ValueError(f"module_rules: {found[rule.pattern]} and {rule} contradict each other; keep one of them.")
    return tuple(found[pattern] for pattern in sorted(found))


def names_in(model: nn.Module, rule: ModuleRule) -> list[str]:
    """The names of the modules of `model` that the pattern of `rule` matches."""
    return [name for name, _ in model.named_modules(remove_duplicate=False) if fnmatch.fnmatchcase(name, rule.pattern)]


def ruled_modules(model: nn.Module, rules: Iterable[ModuleRule]) -> list[RuledModule]:
    """The modules of `model` where a rule begins, outermost first; each module once.

    A list or dict of modules has no forward of its own; the rule begins in what it holds.

    Raises:
        ValueError: a rule that names no module, with the nearest names; rules that contradict each other somewhere;
            a rule that begins in the `out_proj` of nn.MultiheadAttention, which is never called.
    """
    counting = precisions_by_module(model, rules)
    found: dict[nn.Module, RuledModule] = {}
    _walk("", model, None, counting, found)
    return list(found.values())


def precisions_by_module(model: nn.Module, rules: Iterable[ModuleRule]) -> dict[nn.Module, ModuleRule]:
    """Module -> the rule that counts in it, for the modules that a rule names or that lie inside of one.

    Raises:
        ValueError: as `ruled_modules`.
    """
    names = list(model.named_modules(remove_duplicate=False))
    reach = {rule: _reach(rule, names) for rule in rules}
    counting: dict[nn.Module, ModuleRule] = {}
    for name, module in names:
        reaching = [rule for rule in reach if module in reach[rule]]
        most_specific = [rule for rule in reaching if not any(reach[other] < reach[rule] for other in reaching)]
        for rule in most_specific:
            if counting.setdefault(module, rule).precision != rule.precision:
                raise ValueError(
                    f"module_rules: {counting[module]} and {rule} contradict each other in {name or 'the model'!r}, "
                    f"and neither is more specific; add a rule for {name!r} itself."
                )
    return counting


def _rule(pattern: Any, value: Any) -> ModuleRule:
    if not isinstance(pattern, str):
        raise ValueError(
            f"module_rules: {pattern!r} is no pattern; expected a string such as 'blocks.*.attn'; "
            "rules by function go into op_rules."
        )
    return ModuleRule(pattern, precision_of(value, f"module_rules[{pattern!r}]"))


def _reach(rule: ModuleRule, names: list[tuple[str, nn.Module]]) -> frozenset[nn.Module]:
    """The modules that a pattern names, and all that is inside them."""
    named = [module for name, module in names if fnmatch.fnmatchcase(name, rule.pattern)]
    if not named:
        known = [name for name, _ in names if name]
        near = difflib.get_close_matches(rule.pattern, known, n=3, cutoff=0.3) or known[:3]
        raise ValueError(
            f"module_rules: {rule.pattern!r} names no module of this {type(names[0][1]).__name__}; "
            f"the nearest names are {', '.join(map(repr, near)) or 'none, for it has no submodules'}. "
            "Patterns match the names of model.named_modules()."
        )
    return frozenset(inner for module in named for inner in module.modules())


def _walk(
    name: str,
    module: nn.Module,
    around: ModuleRule | None,
    counting: Mapping[nn.Module, ModuleRule],
    found: dict[nn.Module, RuledModule],
) -> None:
    rule = counting.get(module, around)
    has_forward = getattr(type(module), "forward", None) is not nn.Module.forward  # a ScriptModule hides its own
    begins = rule is not None and (around is None or rule.precision != around.precision)
    if rule is not None and begins and has_forward and module not in found:
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            raise ValueError(
                f"module_rules: {rule} rules over {name!r}, whose weights nn.MultiheadAttention uses without calling "
                f"the module; rule over {name.rpartition('.')[0]!r} instead."
            )
        found[module] = RuledModule(name, module, rule, around)
    inside = rule if has_forward else around
    for key, child in module.named_children():
        _walk(f"{name}.{key}" if name else key, child, inside, counting, found)
