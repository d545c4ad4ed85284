"""The private state of apex that scripts read and set: ``amp._amp_state`` with its loss scalers and handle.

    amp._amp_state.loss_scalers[0].loss_scale()     the scale
    amp._amp_state.loss_scalers[0]._loss_scale = x  set it
    amp._amp_state.opt_properties.master_weights    the properties in force
    amp._amp_state.handle.is_active()               whether this thread casts
    amp._amp_state.hard_override = True             warn of senseless overrides instead of refusing them
    from amplab.amp._amp_state import maybe_print   the module of that name in apex, which is the same object

Everything is read from the session of the calling thread. Names that cannot be read or set raise with a reason.
"""

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from torch import Tensor

from amplab.amp.apex.banner import is_first_rank
from amplab.amp.apex.functions import default_session
from amplab.amp.apex.loss_scaling import LossScaler
from amplab.amp.apex.old_interface import AmpHandle
from amplab.amp.apex.opt_levels import OptProperties

__all__ = ["AmpState", "amp_state"]


class AmpState(ModuleType):
    """``amp._amp_state``: the names that scripts read from it, and those that they import from the module of that name.

    In apex a module of that name holds a state of that name; here one object is both, so that importing the module
    does not hide the state.

    """

    def __init__(self) -> None:
        name = "amplab.amp._amp_state"
        super().__init__(name, type(self).__doc__)
        vars(self).update(
            __spec__=ModuleSpec(name, None), AmpState=AmpState, _amp_state=self, handle=AmpHandle(),
        )  # fmt: skip

    def maybe_print(self, msg: object, rank0: bool = False) -> None:
        """Print ``msg`` unless verbosity is 0; with ``rank0`` on the first rank alone."""
        if self.verbosity > 0 and (not rank0 or is_first_rank()):
            print(msg)  # noqa: T201  its purpose

    def warn_or_err(self, msg: str) -> None:
        """Raise RuntimeError; with `hard_override` print a warning, unless verbosity is 0."""
        default_session().permissions.warn_or_err(msg, quiet=self.verbosity == 0)

    def master_params(self, optimizer: Any) -> Iterator[Tensor]:
        """Yield what ``optimizer`` steps, as ``amp.master_params`` does."""
        return default_session().master_params(optimizer)

    @property
    def hard_override(self) -> bool:
        """Whether `initialize` warns of overrides that make no sense, and of half models, instead of refusing them.

        Assignable. `reset` sets it to False.
        """
        return default_session().permissions.hard_override

    @hard_override.setter
    def hard_override(self, value: bool) -> None:
        default_session().permissions.hard_override = bool(value)

    @property
    def allow_incoming_model_not_fp32(self) -> bool:
        """Whether `initialize` accepts models that are already half. Assignable. `reset` sets it to False.

        At O0 their weights become float32; at O1 they stay half; at O2 masters have their values, and BatchNorm
        becomes float32.
        """
        return default_session().permissions.allow_incoming_model_not_fp32

    @allow_incoming_model_not_fp32.setter
    def allow_incoming_model_not_fp32(self, value: bool) -> None:
        default_session().permissions.allow_incoming_model_not_fp32 = bool(value)

    @property
    def verbosity(self) -> int:
        """As last passed to `initialize`."""
        return default_session().verbosity

    @property
    def opt_properties(self) -> OptProperties:
        """The properties in force.

        Raises:
            AttributeError: before `initialize`, so that ``hasattr`` is False.
        """
        session = default_session()
        if not session.initialized:
            raise AttributeError("opt_properties")  # __getattr__ raises the message
        return session.properties

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """One for each ``loss_id``.

        Raises:
            AttributeError: before `initialize`, or with ``enabled=False``.
        """
        scalers = default_session().scalers
        if not scalers:
            raise AttributeError("loss_scalers")  # __getattr__ raises the message
        return list(scalers)

    def __setattr__(self, name: str, value: Any) -> None:
        settable = name in ("hard_override", "allow_incoming_model_not_fp32")
        if settable or name.startswith("__"):  # the import system marks its modules
            return super().__setattr__(name, value)
        raise AttributeError(
            f"amp._amp_state.{name} = {value!r}: amplab does not read this attribute. Pass the option to "
            "amp.initialize, which may be called again. Here hard_override and "
            "allow_incoming_model_not_fp32 can be set, and a scale with "
            "amp._amp_state.loss_scalers[0]._loss_scale = 65536.0."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name in vars(AmpState):  # its property raised
            raise AttributeError(
                f"amp._amp_state.{name}: nothing is initialized, or with enabled=False; call amp.initialize first."
            )
        raise AttributeError(
            f"amp._amp_state.{name} does not exist in amplab: expected loss_scalers, opt_properties, handle, "
            "verbosity, hard_override or allow_incoming_model_not_fp32."
        )


amp_state = AmpState()
"""``amp._amp_state``."""
sys.modules[amp_state.__name__] = amp_state
