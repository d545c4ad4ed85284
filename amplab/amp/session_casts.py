"""What casts around functions for one session: its engine, and the functions that the user has registered.

    O1            the policy of apex's lists, the user's rows first; the user's own functions cast too
    O2, O3        no casts; products of CPU halves are computed with float32 accumulation
    O0            nothing

The engine itself is in `amplab.policies`.
"""

import contextlib
from collections.abc import Callable

from amplab.amp.cast_lines import TalkativeEngine
from amplab.amp.model_weights import LOW_PRECISION
from amplab.amp.opt_levels import OptProperties
from amplab.amp.registered_functions import Registration, replace_attributes, table_with
from amplab.policies import APEX, CastingEngine, PrecisionPolicy

__all__ = ["SessionCasts"]


class SessionCasts:
    """The engine that a session's properties ask for; the same one for as long as they ask for the same."""

    def __init__(self) -> None:
        self.engine: CastingEngine | None = None
        self.in_force: tuple[Registration, ...] = ()
        self._around_functions = False
        self._let_go: list[Callable[[], None]] = []

    def take_up(
        self, properties: OptProperties, registrations: tuple[Registration, ...] = (), *, talkative: bool = False
    ) -> None:
        """Cast as ``properties`` say from here on, ``registrations`` included where they cast around functions.

        Args:
            properties: those in force.
            registrations: what the user has registered.
            talkative: print a line for each cast.
        """
        self._around_functions = bool(properties.patch_torch_functions)
        self.in_force = registrations if self._around_functions else ()
        replaced = replace_attributes(self.in_force)
        self.let_go()
        self._let_go = replaced
        self._set_engine(self._policy(properties), TalkativeEngine if talkative else CastingEngine)

    def let_go(self) -> None:
        """Give the user's modules back their functions."""
        for let_go in self._let_go:
            let_go()
        self._let_go = []

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Return the block in which the calling thread casts."""
        return contextlib.nullcontext() if self.engine is None else self.engine.active()

    def install(self) -> None:
        """Cast in the calling thread until other properties are taken up; nothing unless around functions."""
        if self.engine is not None and self._around_functions:
            self.engine.install()

    def drop_weight_casts(self) -> None:
        """Let go of the half copies of weights: their backward is over."""
        if self.engine is not None:
            self.engine.clear_cache()

    def _policy(self, properties: OptProperties) -> PrecisionPolicy | None:
        if self._around_functions:
            return PrecisionPolicy(table_with(APEX, self.in_force))
        if properties.cast_model_type in LOW_PRECISION:
            return PrecisionPolicy(None, properties.cast_model_type)
        return None

    def _set_engine(self, policy: PrecisionPolicy | None, kind: type[CastingEngine]) -> None:
        if self.engine is not None and (self.engine.policy != policy or type(self.engine) is not kind):
            self.engine.uninstall()
            self.engine = None
        if self.engine is None and policy is not None:
            self.engine = kind(policy)
