"""The user's module rules: which modules a pattern matches, and which rule applies where.

A pattern is an fnmatch pattern over the names of `model.named_modules()`; `*` also matches dots. A rule applies to
the modules that its pattern matches and to all their submodules. If two rules with different precisions apply to one
module, the more specific rule wins: the one whose modules are a subset of the other's. If neither is, it is an error.
A model that torch.compile wraps has `_orig_mod.` in its names; a pattern matches with it and without it.
`module_regions` carries out the rules while a model runs.
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
    """One module rule of a user.

    Attributes:
        pattern: an fnmatch pattern over module names, e.g. "blocks.*.attn".
        precision: the precision that the matching modules compute in.
    """

    pattern: str
    precision: Precision

    def __str__(self) -> str:
        """Return the rule as it appears in the string form of the policy."""
        return f"{self.pattern}={precision_name(self.precision)}"


@dataclasses.dataclass(frozen=True)
class RuledModule:
    """A module whose rule differs from that of the enclosing module.

    Attributes:
        name: its name in the model, empty for the model itself.
        module: the module.
        rule: the rule inside the module.
        around: the rule of the enclosing module; None if the policy itself applies there.
    """

    name: str
    module: nn.Module
    rule: ModuleRule
    around: ModuleRule | None


def checked_module_rules(rules: Mapping[Any, Any] | Iterable[ModuleRule]) -> tuple[ModuleRule, ...]:
    """Check the rules of a user and return them sorted by pattern.

    Args:
        rules: pattern -> dtype, simulated format or the name of one; or ModuleRules.

    Raises:
        ValueError: a pattern is not a string, a precision is not supported, or two rules have the same pattern.
    """
    if isinstance(rules, Mapping):
        rules = [_rule(pattern, value) for pattern, value in rules.items()]
    found: dict[str, ModuleRule] = {}
    for rule in rules:
        if not isinstance(rule, ModuleRule):
            raise ValueError(
                f"module_rules: {rule!r} is not a rule; pass a mapping such as {{'blocks.*.attn': 'float32'}}."
            )
        if found.setdefault(rule.pattern, rule) != rule:
            raise ValueError(
                f"module_rules: {found[rule.pattern]} and {rule} contradict each other; remove one of them."
            )
    return tuple(found[pattern] for pattern in sorted(found))


def names_in(model: nn.Module, rule: ModuleRule) -> list[str]:
    """Return the names of the modules of `model` that match the pattern of `rule`."""
    return [name for name, _ in model.named_modules(remove_duplicate=False) if _matches(rule, name)]


def ruled_modules(model: nn.Module, rules: Iterable[ModuleRule]) -> list[RuledModule]:
    """Return the modules of `model` where a rule begins, outermost first; each module once.

    ModuleList and ModuleDict have no forward; there, the rule begins in the modules that they contain.

    Raises:
        ValueError: a rule matches no module (the message suggests the closest names); two rules contradict each other;
            a rule begins in the `out_proj` of nn.MultiheadAttention, which is never called.
    """
    counting = precisions_by_module(model, rules)
    found: dict[nn.Module, RuledModule] = {}
    _walk("", model, None, counting, found)
    return list(found.values())


def precisions_by_module(model: nn.Module, rules: Iterable[ModuleRule]) -> dict[nn.Module, ModuleRule]:
    """Return module -> the rule that applies, for the modules that a rule matches and their submodules.

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
            f"module_rules: {pattern!r} is not a pattern; expected a string such as 'blocks.*.attn'. "
            "Pass rules for functions as op_rules."
        )
    return ModuleRule(pattern, precision_of(value, f"module_rules[{pattern!r}]"))


def _matches(rule: ModuleRule, name: str) -> bool:
    return any(fnmatch.fnmatchcase(each, rule.pattern) for each in (name, _without_wrapper(name)))


def _without_wrapper(name: str) -> str:
    """Return the name that the module has in the model before torch.compile.

    >>> _without_wrapper("_orig_mod.blocks.0")
    'blocks.0'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _reach(rule: ModuleRule, names: list[tuple[str, nn.Module]]) -> frozenset[nn.Module]:
    """Return the modules that match the pattern, and all their submodules."""
    named = [module for name, module in names if _matches(rule, name)]
    if not named:
        known = list(filter(None, dict.fromkeys(_without_wrapper(name) for name, _ in names)))
        near = difflib.get_close_matches(rule.pattern, known, n=3, cutoff=0.3) or known[:3]
        raise ValueError(
            f"module_rules: {rule.pattern!r} matches no module of this {type(names[0][1]).__name__}; "
            f"the closest names are {', '.join(map(repr, near)) or 'none (it has no submodules)'}. "
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
                f"module_rules: {rule} applies to {name!r}, which nn.MultiheadAttention never calls (it only reads its "
                f"weights); write a rule for {name.rpartition('.')[0]!r} instead."
            )
        found[module] = RuledModule(name, module, rule, around)
    inside = rule if has_forward else around
    for key, child in module.named_children():
        _walk(f"{name}.{key}" if name else key, child, inside, counting, found)
