"""Functions of the user that cast their arguments first: the three decorators, and attributes replaced for a while.

    half_function       floating arguments in the policy's half dtype, weights through its cache
    float_function      half arguments in float32
    promote_function    all in the widest dtype among them

They cast where casts around functions are on in the calling thread (O1) and `disable_casts` is not; elsewhere, and at
every other level, they are the functions themselves. Ops inside follow their own rows. Which functions are registered
is in `registered_functions`.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from amplab.amp.backward.gradients import bookkeeping
from amplab.policies import CastingEngine, CastPolicy, OpRule, casts_enabled, thread_engines
from amplab.policies.casting_steps import StepParts, make_step

__all__ = ["Replacements", "casting_function", "float_function", "half_function", "promote_function"]

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
        TypeError: ``fn`` is no function.

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
    """Return ``fn`` with its arguments cast as ``cast`` says, wherever the calling thread casts.

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
            with bookkeeping():
                step = make_step(StepParts(rule, engine.policy.compute_dtype, engine.cache, _arguments))
                args, kwargs = step(None, fn, args, kwargs)
        return fn(*args, **kwargs)

    return cast_first


class Replacements:
    """Attributes of the user's modules that hold a casting function while somebody wants it.

    This replaces a name in a module that is not ours, as apex's ``register_half_function(module, name)`` promises.
    It is counted: the original is back when the last one who wanted it lets go.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[int, str], _Replacement] = {}

    def hold(self, owner: Any, name: str, cast: CastPolicy) -> Callable[[], None]:
        """Let ``owner.name`` cast its arguments.

        Returns:
            A function that lets go; once for each call of this one.
        """
        key = (id(owner), name)
        with self._lock:
            if key not in self._held:
                self._held[key] = _Replacement(owner, name, cast)
            replacement = self._held[key]
            replacement.holders += 1

        def let_go() -> None:
            with self._lock:
                replacement.holders -= 1
                if replacement.holders == 0:
                    del self._held[key]
                    replacement.restore()

        return let_go


class _Replacement:
    """One attribute, what it was, and what stands there now."""

    def __init__(self, owner: Any, name: str, cast: CastPolicy) -> None:
        self.owner, self.name, self.holders = owner, name, 0
        self._own = name in vars(owner)
        self._original = vars(owner).get(name)
        casting = casting_function(getattr(owner, name), cast)
        self._replaced = staticmethod(casting) if isinstance(self._original, staticmethod) else casting
        setattr(owner, name, self._replaced)

    def restore(self) -> None:
        if vars(self.owner).get(self.name) is not self._replaced:
            return  # somebody has put something else there since
        if self._own:
            setattr(self.owner, self.name, self._original)
        else:
            delattr(self.owner, self.name)


def _engine_at_work() -> CastingEngine | None:
    engines = thread_engines()
    if engines and casts_enabled() and engines[-1].policy.table is not None:
        return engines[-1]
    return None


def _arguments(_mode: Any, _fn: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs
