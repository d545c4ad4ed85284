"""The private state of apex that scripts read: ``amp._amp_state`` with its loss scalers and handle; and ``amp.init``.

    amp._amp_state.loss_scalers[0].loss_scale()     the scale
    amp._amp_state.loss_scalers[0]._loss_scale = x  set it
    amp._amp_state.opt_properties.master_weights    the properties in force
    amp._amp_state.handle.is_active()               whether this thread casts
    from amplab.amp._amp_state import maybe_print   the module of that name in apex, which is the same object

Everything is read from the session of the calling thread. Names that cannot be read or set raise with a reason.
"""

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from torch import Tensor

from amplab.amp.apex.banner import is_first_rank
from amplab.amp.apex.functions import default_session
from amplab.amp.apex.loss_scaling import LossScaler
from amplab.amp.apex.opt_levels import OptProperties
from amplab.policies import casts_enabled, disable_casts

__all__ = ["AmpHandle", "AmpState", "amp_state", "init"]


class AmpHandle:
    """``_amp_state.handle`` of apex, which ``amp.init`` returns: the casts of this thread."""

    has_cache = True
    verbose = False

    def is_active(self) -> bool:
        """Return whether ops in the calling thread are cast: after `initialize` at O1, outside `disable_casts`."""
        engine = default_session().engine
        return engine is not None and engine.policy.table is not None and engine.installed and casts_enabled()

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return disable_casts()

    def _clear_cache(self) -> None:
        engine = default_session().engine
        if engine is not None:
            engine.clear_cache()

    def _deactivate(self) -> None:
        engine = default_session().engine
        if engine is not None:
            engine.uninstall()

    def scale_loss(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse, as apex does.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "The old Amp API is no longer supported.  Please move to the new API: model, optimizer = "
            "amp.initialize(model, optimizer, opt_level=...), then `with amp.scale_loss(loss, optimizer)`."
        )

    wrap_optimizer = scale_loss

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"amp._amp_state.handle.{name} does not exist, since amplab replaces nothing in torch: expected "
            "is_active(), _disable_casts(), _clear_cache() or _deactivate(). To undo amp.initialize call amp.reset()."
        )


class AmpState(ModuleType):
    """``amp._amp_state``: the names that scripts read from it, and those that they import from the module of that name.

    In apex a module of that name holds a state of that name; here one object is both, so that importing the module
    does not hide the state.

    Attributes:
        hard_override: False; the errors about overrides cannot be disabled.
        allow_incoming_model_not_fp32: False; models must be float32.
    """

    def __init__(self) -> None:
        name = "amplab.amp._amp_state"
        super().__init__(name, type(self).__doc__)
        vars(self).update(
            __spec__=ModuleSpec(name, None), AmpState=AmpState, _amp_state=self, hard_override=False,
            allow_incoming_model_not_fp32=False, handle=AmpHandle(),
        )  # fmt: skip

    def maybe_print(self, msg: object, rank0: bool = False) -> None:
        """Print ``msg`` unless verbosity is 0; with ``rank0`` on the first rank alone."""
        if self.verbosity > 0 and (not rank0 or is_first_rank()):
            print(msg)  # noqa: T201  its purpose

    def warn_or_err(self, msg: str) -> NoReturn:
        """Raise RuntimeError. In apex ``hard_override`` makes it a warning; here it is always an error."""
        raise RuntimeError(msg)

    def master_params(self, optimizer: Any) -> Iterator[Tensor]:
        """Yield what ``optimizer`` steps, as ``amp.master_params`` does."""
        return default_session().master_params(optimizer)

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
        if name.startswith("__"):  # the import system marks its modules
            return super().__setattr__(name, value)
        raise AttributeError(
            f"amp._amp_state.{name} = {value!r}: amplab does not read this attribute. Pass the option to "
            "amp.initialize, which may be called again; to set a scale: "
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


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",  # noqa: ARG001  for a scale_loss that no longer exists
    enable_caching: bool = True,  # noqa: ARG001  casts of weights are always kept, and checked
    verbose: bool = False,  # noqa: ARG001  verbosity=2 of initialize
    allow_banned: bool = False,
) -> AmpHandle:
    """Accept the call of apex's old API. Only ``allow_banned=True`` has an effect, on a later `initialize`.

    Casts begin with `initialize` at O1.

    Returns:
        The handle, whose ``scale_loss`` is refused.

    Reference: ``apex.amp.init``.
    """
    if enabled and allow_banned:
        default_session().registered.allow_banned()
    return amp_state.handle


amp_state = AmpState()
"""``amp._amp_state``."""
sys.modules[amp_state.__name__] = amp_state
