"""The functions that a user has put on a list: `register_half_function` and its kin.

A function of torch becomes a row of the policy, before the built-in ones. A function of the user's own module cannot
be seen by the engine, so that the module's attribute is replaced from `initialize` to `reset`.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import get_testing_overrides

from amplab.amp.apex.function_casts import KINDS, Replacements
from amplab.policies import CastPolicy, OpRule, OpTable
from amplab.policies.op_table import resolve

__all__ = ["ALLOW_BANNED", "RegisteredFunctions", "Registration", "replace_attributes", "table_with"]

# Where an op may stand under one name: torch.sigmoid, Tensor.sigmoid, F.sigmoid.
_HOMES = ("torch", "torch.Tensor", "torch.nn.functional")

_REPLACEMENTS = Replacements()


@dataclasses.dataclass(frozen=True, eq=False)
class Registration:
    """One registered function.

    Attributes:
        owner: the module, or class, that holds it.
        name: its name there.
        cast: what happens to its arguments.
        spellings: the torch functions that it names; empty for a function of the user's own.
    """

    owner: Any
    name: str
    cast: CastPolicy
    spellings: tuple[str, ...] = ()

    @property
    def row(self) -> OpRule:
        """The row of the policy."""
        return OpRule(
            self.name,
            self.cast,
            f"{self.name}: registered by the user as a {KINDS[self.cast]} function",
            self.spellings,
        )

    def same_as(self, other: "Registration") -> bool:
        """Whether both say the same of the same function."""
        return self.owner is other.owner and (self.name, self.cast) == (other.name, other.cast)


ALLOW_BANNED = Registration(
    torch.nn.functional, "binary_cross_entropy", CastPolicy.FP32, ("torch.nn.functional.binary_cross_entropy",)
)
"""What ``allow_banned=True`` comes to: the refused loss runs in float32."""


class RegisteredFunctions:
    """What is registered, in the order of registration; of two about one function the later counts."""

    def __init__(self) -> None:
        self._registered: list[Registration] = []

    def add(self, cast: CastPolicy, owner: Any, name: str) -> Registration:
        """Register ``owner.name``.

        Raises:
            ValueError: there is no such function, or it is one of torch's that no function mode sees.
            TypeError: it is no function.
        """
        registration = _registration(cast, owner, name)
        self._registered = [each for each in self._registered if not (each.owner is owner and each.name == name)]
        self._registered.append(registration)
        return registration

    def allow_banned(self) -> None:
        """Let the refused loss run in float32, unless it is registered otherwise."""
        self._registered.insert(0, ALLOW_BANNED)

    def forget(self) -> None:
        """Register nothing any more."""
        self._registered = []

    def all(self) -> tuple[Registration, ...]:
        """Return what is registered now."""
        return tuple(self._registered)


def replace_attributes(registrations: Iterable[Registration]) -> list[Callable[[], None]]:
    """Let the user's own functions among ``registrations`` cast; return what undoes it."""
    own = [each for each in registrations if not each.spellings]
    return [_REPLACEMENTS.hold(each.owner, each.name, each.cast) for each in own]


def table_with(base: OpTable, registrations: Iterable[Registration]) -> OpTable:
    """Return ``base`` with the rows of ``registrations`` before its own, which lose the functions named there."""
    of_torch = [each for each in registrations if each.spellings]
    if not of_torch:
        return base
    rows = {spelling: each.row for each in of_torch for spelling in each.spellings}
    for each in of_torch:  # what was named itself counts more than what follows from a name
        rows[each.spellings[0]] = each.row
    claimed = {resolve(spelling) for spelling in rows}
    users = [
        dataclasses.replace(row, spellings=tuple(spelling for spelling, own in rows.items() if own == row))
        for row in dict.fromkeys(rows.values())
    ]
    rest = [
        dataclasses.replace(row, spellings=tuple(each for each in row.spellings if resolve(each) not in claimed))
        for row in base.rows
    ]
    return OpTable(base.name, (*users, *rest))


def _registration(cast: CastPolicy, owner: Any, name: str) -> Registration:
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: expected the name of a function, such as register_half_function(torch, 'mm').")
    function = getattr(owner, name, None)
    title = getattr(owner, "__name__", repr(owner))
    if function is None:
        raise ValueError(f"No function named {name} in module {owner}. Name one that is in {title}.")
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"{title}.{name} is no function: expected one; register what its forward calls.")
    spellings = _spellings(function, name)
    if not spellings and _is_torchs_own(owner):
        raise ValueError(
            f"{title}.{name} is a function of torch that takes no part in its function modes, so no cast can be put "
            "before it. Register the ops that it calls, or wrap it in a function of your own."
        )
    return Registration(owner, name, cast, spellings)


def _spellings(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Return every path by which torch's ``function`` is called, the one that was named first; empty for others."""
    overridable = get_testing_overrides()
    if not _is_overridable(function, overridable):
        return ()
    paths = [f"{home}.{name}" for home in (*_HOMES, "torch.linalg", "torch.special", "torch.fft")]
    named = [path for path in paths if resolve(path) is function]
    follow = [f"{home}.{name}" for home in _HOMES]
    follow = [path for path in follow if path not in named and _is_overridable(resolve(path), overridable)]
    return (*named, *follow) if named else ()


def _is_overridable(function: Any, overridable: dict[Callable[..., Any], Any]) -> bool:
    try:
        return function in overridable
    except TypeError:  # not hashable, so none of torch's
        return False


def _is_torchs_own(owner: Any) -> bool:
    home = owner.__module__ if isinstance(owner, type) else getattr(owner, "__name__", "")
    return home.split(".")[0] == "torch" and not home.startswith("torch.ops.")
