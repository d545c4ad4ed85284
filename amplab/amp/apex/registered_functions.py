"""Functions that the user has registered or decorated to cast their arguments.

A function of torch becomes a row of the policy, before the built-in ones. The engine cannot intercept a function of the
user's own module, so the module's attribute is replaced from `initialize` to `reset`.
"""

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import get_testing_overrides

from amplab.kernels.fork_renewal import renew_lock_in_forks
from amplab.policies import CastingEngine, CastPolicy, OpRule, OpTable, casts_enabled, thread_engines
from amplab.policies.casting.function_modes import without_function_modes
from amplab.policies.casting.steps import StepParts, make_step
from amplab.policies.tables.op_table import resolve

__all__ = [
    "ALLOW_BANNED",
    "RegisteredFunctions",
    "Registration",
    "Replacements",
    "casting_function",
    "float_function",
    "half_function",
    "promote_function",
    "replace_attributes",
    "table_with",
    "warn_of_idle",
]

# The places of one op under one name: torch.sigmoid, Tensor.sigmoid, F.sigmoid.
_HOMES = ("torch", "torch.Tensor", "torch.nn.functional")


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
"""The effect of ``allow_banned=True``: the refused loss runs in float32."""


class RegisteredFunctions:
    """The registrations, in order; a later one about the same function replaces the earlier one."""

    def __init__(self) -> None:
        self._registered: list[Registration] = []

    def add(self, cast: CastPolicy, owner: Any, name: str) -> Registration:
        """Register ``owner.name``.

        Raises:
            ValueError: there is no such function, or it is one of torch's that function modes cannot intercept.
            TypeError: not a function.
        """
        registration = _registration(cast, owner, name)
        self._registered = [each for each in self._registered if not (each.owner is owner and each.name == name)]
        self._registered.append(registration)
        return registration

    def allow_banned(self) -> None:
        """Run the refused loss in float32, unless it is registered otherwise."""
        if ALLOW_BANNED not in self._registered:
            self._registered.insert(0, ALLOW_BANNED)

    def forget(self) -> None:
        """Clear the list."""
        self._registered = []

    def all(self) -> tuple[Registration, ...]:
        """Return the registrations."""
        return tuple(self._registered)


def replace_attributes(holder: object, registrations: Iterable[Registration]) -> None:
    """Replace the user's own functions among ``registrations`` by casting ones, in place of those of an earlier call.

    Args:
        holder: whose functions they are; without registrations it has none any more.
        registrations: all that it wants.
    """
    _REPLACEMENTS.hold(holder, [each for each in registrations if not each.spellings])


def warn_of_idle(registrations: Iterable[Registration], opt_level: str) -> None:
    """Warn of each registration that would widen a function, at a level where the model is half and nothing is cast.

    Half functions need no warning there: their arguments are half already.

    Args:
        registrations: those of the session.
        opt_level: "O2" or "O3".
    """
    for each in registrations:
        if each.cast is not CastPolicy.LOWER_PRECISION_FP:
            title = f"{getattr(each.owner, '__name__', each.owner)}.{each.name}"
            rule = f"policy=amplab.policies.PrecisionPolicy(op_rules={{{each.name!r}: 'float32'}})"
            instead = f"pass {rule} to initialize" if each.spellings else "call .float() on its arguments"
            warnings.warn(
                f"{title} is registered as a {KINDS[each.cast]} function, which has no effect at {opt_level}: "
                f"registered functions cast at O1 only. To compute it in float32 here, {instead}.",
                stacklevel=4,
            )


def table_with(base: OpTable, registrations: Iterable[Registration]) -> OpTable:
    """Return ``base`` with the rows of ``registrations`` first, and without these functions in its other rows."""
    of_torch = [each for each in registrations if each.spellings]
    if not of_torch:
        return base
    rows = {spelling: each.row for each in of_torch for spelling in each.spellings}
    for each in of_torch:  # a registered spelling overrides those that follow from another registered name
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
        kind = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
        raise TypeError(f"{title}.{name} is {kind}: expected a function, such as one that a module's forward calls.")
    spellings = _spellings(function, name)
    if not spellings and _is_torchs_own(owner):
        raise ValueError(
            f"{title}.{name} is a function of torch that function modes cannot intercept, so its arguments cannot be "
            "cast. Register the ops that it calls, or wrap it in your own function and register that."
        )
    return Registration(owner, name, cast, spellings)


def _spellings(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Return every path of torch's ``function``, the registered one first; empty for functions that are not torch's."""
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


KINDS = {
    CastPolicy.LOWER_PRECISION_FP: "half",
    CastPolicy.FP32: "float",
    CastPolicy.PROMOTE: "promote",
}


def half_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with its floating arguments cast to half at O1: tensors, and tensors in lists and tuples.

    May be applied before or after `initialize`, to functions, methods and ``Function.apply``. A float64 argument keeps
    all of them as they are. Other containers pass as they are.

    Raises:
        TypeError: ``fn`` is not a function.

    Reference: ``apex.amp.half_function``.

    >>> import torch
    >>> half_function(torch.sin)(torch.zeros(2)).dtype  # nothing casts here
    torch.float32
    """
    return casting_function(fn, CastPolicy.LOWER_PRECISION_FP)


def float_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with its half arguments cast to float32 at O1; the rest as `half_function`.

    Reference: ``apex.amp.float_function``.
    """
    return casting_function(fn, CastPolicy.FP32)


def promote_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with its arguments cast to the widest dtype among them at O1; the rest as `half_function`.

    Reference: ``apex.amp.promote_function``.
    """
    return casting_function(fn, CastPolicy.PROMOTE)


def casting_function(fn: Callable[..., Any], cast: CastPolicy) -> Callable[..., Any]:
    """Return ``fn`` with its arguments cast according to ``cast`` while the calling thread casts.

    Raises:
        TypeError: ``fn`` is a class or not callable.
    """
    if isinstance(fn, (type, staticmethod, classmethod)) or not callable(fn):
        raise TypeError(
            f"{KINDS[cast]}_function got {fn!r}: expected a function or a method; decorate a class's forward, and put "
            "the decorator under @staticmethod."
        )
    rule = OpRule(getattr(fn, "__name__", "function"), cast, f"registered as a {KINDS[cast]} function")

    @functools.wraps(fn)
    def cast_first(*args: Any, **kwargs: Any) -> Any:
        engine = _engine_at_work()
        if engine is not None:
            with without_function_modes():
                step = make_step(StepParts(rule, engine.policy.compute_dtype, engine.cache, _arguments))
                args, kwargs = step(None, fn, args, kwargs)  # type: ignore[arg-type]  # no mode: `_arguments` needs none
        return fn(*args, **kwargs)

    return cast_first


class Replacements:
    """Attributes of the user's modules that are replaced by a casting function.

    apex's ``register_half_function(module, name)`` promises this replacement. The original is restored when the last
    holder lets go.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may call `amp.reset` in it
        self._held: dict[tuple[int, str], _Replacement] = {}
        renew_lock_in_forks(self, "_lock")

    def hold(self, holder: object, registrations: Iterable[Registration]) -> None:
        """Let these functions cast their arguments for ``holder``, and no others.

        A second call finishes what an interrupt has left.
        """
        wanted = {(id(each.owner), each.name): each for each in registrations}
        with self._lock:
            for key, each in wanted.items():
                if key not in self._held:
                    self._held[key] = _Replacement(each)
                self._held[key].holders.add(holder)
                self._held[key].replace()
            for key in [key for key in self._held if key not in wanted]:
                self._let_go(key, holder)

    def _let_go(self, key: tuple[int, str], holder: object) -> None:
        self._held[key].holders.discard(holder)
        if not self._held[key].holders:
            self._held[key].restore()
            del self._held[key]


class _Replacement:
    """One attribute, its original, and the casting function in its place from `replace` to `restore`.

    Attributes:
        holders: who needs it.
    """

    def __init__(self, registration: Registration) -> None:
        self._owner, self._name = registration.owner, registration.name
        self.holders: set[object] = set()
        self._own = self._name in vars(self._owner)
        self._original = self._present()
        casting = casting_function(getattr(self._owner, self._name), registration.cast)
        self._replaced = staticmethod(casting) if isinstance(self._original, staticmethod) else casting

    def _present(self) -> Any:
        return vars(self._owner).get(self._name)

    def replace(self) -> None:
        if self._present() is self._original:
            setattr(self._owner, self._name, self._replaced)

    def restore(self) -> None:
        if self._present() is not self._replaced:
            return  # replaced by someone else since
        if self._own:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)


_REPLACEMENTS = Replacements()


def _engine_at_work() -> CastingEngine | None:
    engines = thread_engines()
    if engines and casts_enabled() and engines[-1].policy.table is not None:
        return engines[-1]
    return None


def _arguments(_mode: Any, _fn: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs
