"""The private state that scripts reach for in apex: ``amp._amp_state``, its loss scalers, its handle; and ``amp.init``.

    amp._amp_state.loss_scalers[0].loss_scale()     the scale
    amp._amp_state.loss_scalers[0]._loss_scale = x  set it
    amp._amp_state.opt_properties.master_weights    the properties in force
    amp._amp_state.handle.is_active()               whether this thread casts

Everything is read from the calling thread's session; nothing is kept here. What cannot be read or set says so.
"""

import contextlib
import dataclasses
import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor

from amplab.amp.default_sessions import default_session
from amplab.amp.loss_scaler import LossScaler
from amplab.amp.opt_levels import OptProperties, scale_value
from amplab.amp.session import Session
from amplab.policies import casts_enabled, disable_casts

__all__ = ["AmpHandle", "AmpState", "ScalerView", "amp_state", "init"]


class ScalerView:
    """One of `AmpState.loss_scalers`: apex's names for a `LossScaler`.

    Attributes:
        dynamic: whether overflows skip the step and move the scale.
    """

    def __init__(self, session: Session, loss_id: int) -> None:
        self._session, self._loss_id = weakref.ref(session), loss_id
        self._scaler: LossScaler = session.scalers[loss_id]
        self.dynamic = self._scaler.dynamic
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    def loss_scale(self) -> float:
        """Return the scale that the next loss is multiplied by."""
        return self._scaler.scale

    @property
    def _loss_scale(self) -> float:
        return self._scaler.scale

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        scale = scale_value("_loss_scale", value)
        self._scaler.state = dataclasses.replace(self._scaler.state, scale=scale)

    @property
    def _unskipped(self) -> int:
        return self._scaler.state.clean_steps

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._scaler.state = dataclasses.replace(self._scaler.state, clean_steps=int(value))

    @property
    def _has_overflow(self) -> bool:
        return bool(self._overflow_buf.any())

    def clear_overflow_state(self) -> None:
        """Forget what ``_overflow_buf`` says. Sync: none."""
        self._overflow_buf = torch.zeros_like(self._overflow_buf)

    def update_scale(self) -> bool:
        """Move the scale by the verdict in ``_overflow_buf``, and by the one that ``delay_overflow_check`` left.

        Returns:
            Whether the step should be skipped, which is then left to the caller.

        Sync: one.
        """
        session = self._session()
        waiting: Tensor | None = None if session is None else session.take_unchecked(self._loss_id)
        found = self._has_overflow or (waiting is not None and bool(waiting.any()))
        self.clear_overflow_state()
        self._scaler.update(found and self.dynamic)
        return found and self.dynamic

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"amp._amp_state.loss_scalers[…].{name}: amplab has no such thing; a scaler has loss_scale(), _loss_scale, "
            "_unskipped, dynamic, _overflow_buf, update_scale() and clear_overflow_state(). Gradients are unscaled by "
            "amp.scale_loss."
        )


class AmpHandle:
    """What apex keeps in ``_amp_state.handle`` and returns from ``amp.init``: the casts of this thread."""

    has_cache = True
    verbose = False

    def is_active(self) -> bool:
        """Say whether ops in the calling thread are cast, by an `initialize` at O1 and no `disable_casts`."""
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
            f"amp._amp_state.handle.{name}: amplab replaces nothing in torch, so there is no such thing; it has "
            "is_active(), _disable_casts(), _clear_cache() and _deactivate(). To undo amp.initialize call amp.reset()."
        )


class AmpState:
    """``amp._amp_state``: the names that scripts read there.

    Attributes:
        hard_override: False; sentences that refuse an override cannot be switched off.
        allow_incoming_model_not_fp32: False; models come in float32.
    """

    def __init__(self) -> None:
        views: weakref.WeakKeyDictionary[LossScaler, ScalerView] = weakref.WeakKeyDictionary()
        vars(self).update(
            hard_override=False, allow_incoming_model_not_fp32=False, handle=AmpHandle(), _scaler_views=views
        )

    @property
    def verbosity(self) -> int:
        """As last passed to `initialize`."""
        return default_session().verbosity

    @property
    def opt_properties(self) -> OptProperties:
        """The properties in force.

        Raises:
            AttributeError: before `initialize`, so that ``hasattr`` tells.
        """
        session = default_session()
        if not session.initialized:
            raise AttributeError("opt_properties")  # told by __getattr__
        return session.properties

    @property
    def loss_scalers(self) -> list[ScalerView]:
        """One for each ``loss_id``.

        Raises:
            AttributeError: before `initialize`, or with ``enabled=False``.
        """
        session = default_session()
        if not session.scalers:
            raise AttributeError("loss_scalers")  # told by __getattr__
        views = vars(self)["_scaler_views"]
        for loss_id, scaler in enumerate(session.scalers):
            if scaler not in views:
                views[scaler] = ScalerView(session, loss_id)
        return [views[scaler] for scaler in session.scalers]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"amp._amp_state.{name} = {value!r}: amplab reads nothing from there. Pass the option to amp.initialize, "
            "which may be called again; a scale is set with amp._amp_state.loss_scalers[0]._loss_scale = 65536.0."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name in vars(AmpState):  # a property has found nothing
            raise AttributeError(
                f"amp._amp_state.{name}: nothing is initialized, or with enabled=False; call amp.initialize first."
            )
        raise AttributeError(
            f"amp._amp_state.{name}: amplab has no such state; it has loss_scalers, opt_properties, handle, verbosity, "
            "hard_override and allow_incoming_model_not_fp32."
        )


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",  # noqa: ARG001  it served a scale_loss that is gone
    enable_caching: bool = True,  # noqa: ARG001  casts of weights are always kept, and checked
    verbose: bool = False,  # noqa: ARG001  verbosity=2 of initialize
    allow_banned: bool = False,
) -> AmpHandle:
    """Prepare the old API of apex, of which one thing is left: ``allow_banned=True`` for a later `initialize`.

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
