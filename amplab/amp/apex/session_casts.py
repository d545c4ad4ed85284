"""What casts around functions for one session: its engine, and the functions that the user has registered.

    O1            the user's policy or apex's lists, registered rows first; the user's own functions cast too
    O2, O3        no casts; products of CPU halves are computed with float32 accumulation
    O0            nothing

Rules by op count at each of them (`level_policy`). The engine itself is in `amplab.policies`.
"""

import contextlib
from collections.abc import Callable

from amplab.amp.apex.cast_lines import TalkativeEngine
from amplab.amp.apex.level_policy import engine_policy
from amplab.amp.apex.opt_levels import OptProperties
from amplab.amp.apex.registered_functions import Registration, replace_attributes
from amplab.policies import CastingEngine, PrecisionPolicy

__all__ = ["SessionCasts"]


class SessionCasts:
    """The engine that a session's properties ask for; the same one for as long as they ask for the same."""

    def __init__(self) -> None:
        self.engine: CastingEngine | None = None
        self.in_force: tuple[Registration, ...] = ()
        self._around_functions = False
        self._let_go: list[Callable[[], None]] = []

    def take_up(
        self,
        properties: OptProperties,
        registrations: tuple[Registration, ...] = (),
        *,
        talkative: bool = False,
        policy: PrecisionPolicy | None = None,
    ) -> None:
        """Cast as ``properties`` say from here on, ``registrations`` included where they cast around functions.

        Args:
            properties: those in force.
            registrations: what the user has registered.
            talkative: print a line for each cast.
            policy: the user's; None for the default.
        """
        self._around_functions = bool(properties.patch_torch_functions)
        self.in_force = registrations if self._around_functions else ()
        replaced = replace_attributes(self.in_force)
        self.let_go()
        self._let_go = replaced
        self._set_engine(
            engine_policy(properties, policy, self.in_force), TalkativeEngine if talkative else CastingEngine
        )

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

    def _set_engine(self, policy: PrecisionPolicy | None, kind: type[CastingEngine]) -> None:
        if self.engine is not None and (self.engine.policy != policy or type(self.engine) is not kind):
            self.engine.uninstall()
            self.engine = None
        if self.engine is None and policy is not None:
            self.engine = kind(policy)
