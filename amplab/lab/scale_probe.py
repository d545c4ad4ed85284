"""How a watch learns what became of a step, whoever scales the loss: one probe for each kind of scaler.

===============  ===========================================  ==============================================
scaler           a step is over when                          it was skipped when
===============  ===========================================  ==============================================
apex session     the optimizer's ``step`` has returned        the session says so
amplab's         ``update`` has moved the scale               the scaler says so
torch's          the next forward begins, or the watch ends   the optimizer did not step and the scale fell
none             the optimizer's ``step`` has returned        never
===============  ===========================================  ==============================================

torch's scaler has no hook, and an optimizer that it skips is not called: what happened shows in its scale alone, which
is read once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp import GradScaler, ScaleRecord, Session, default_session
from amplab.lab.watched_run import NO_LEVEL
from amplab.scalers import DynamicScale

__all__ = ["Outcome", "ScaleProbe", "probe_of"]


@dataclass(frozen=True)
class Outcome:
    """What the scaler says of one step."""

    loss_scale: float = 1.0
    next_loss_scale: float = 1.0
    skipped: bool = False
    first_nonfinite: str | None = None
    loss: Tensor | None = None


Tell = Callable[[Outcome], None]


class ScaleProbe:
    """Follows no scaler: every step of the optimizer counts. The others are below.

    Attributes:
        kind: "none", "apex", "amplab" or "torch".
        dynamic: whether the scale moves.
        growth_interval: clean steps until it grows, None where it does not.
        opt_level: of a session, else `NO_LEVEL`.
        amp: the session or the scaler itself, None for neither.
        waits_for_forward: whether `at_forward` does anything.
    """

    kind = "none"
    dynamic = False
    growth_interval: int | None = None
    opt_level = NO_LEVEL
    amp: Session | torch.amp.GradScaler | None = None
    waits_for_forward = False

    def follow(self, optimizer: Optimizer, tell: Tell) -> Callable[[], None]:
        """Call `tell` after every step; return what ends this."""
        unscaled = Outcome()
        return optimizer.register_step_post_hook(lambda *_: tell(unscaled)).remove

    def scale(self) -> float:
        """The scale in effect. Sync: one where it lies on a device."""
        return 1.0

    def at_forward(self) -> None:
        """Take note that the next iteration begins."""


class _ApexProbe(ScaleProbe):
    kind = "apex"

    def __init__(self, session: Session) -> None:
        self._session = self.amp = session
        rule = session.scalers[0].rule
        self.dynamic = rule.skips_on_overflow
        self.growth_interval = rule.growth_interval if isinstance(rule, DynamicScale) else None
        self.opt_level = session.opt_level or NO_LEVEL
        self._record: ScaleRecord | None = None

    def follow(self, optimizer: Optimizer, tell: Tell) -> Callable[[], None]:
        ends = [
            self._session.subscribe(self._hear),
            optimizer.register_step_post_hook(lambda *_: tell(self._outcome(optimizer))).remove,
        ]

        def end() -> None:
            for each in ends:
                each()

        return end

    def scale(self) -> float:
        return self._session.loss_scale()

    def _hear(self, record: ScaleRecord) -> None:
        self._record = record

    def _outcome(self, optimizer: Optimizer) -> Outcome:
        said, record = self._session.last_step(optimizer), self._record
        if record is None:  # a loss that was not scaled
            return Outcome(self.scale(), self.scale(), not said.stepped, said.first_nonfinite)
        first = record.first_nonfinite if not said.stepped else None
        return Outcome(record.loss_scale, self.scale(), not said.stepped, first, record.loss)


class _AmplabProbe(ScaleProbe):
    kind = "amplab"

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = self.amp = scaler
        self.dynamic = scaler.is_enabled()
        self.growth_interval = scaler.get_growth_interval() if self.dynamic else None

    def follow(self, optimizer: Optimizer, tell: Tell) -> Callable[[], None]:  # noqa: ARG002
        def hear(record: ScaleRecord) -> None:
            first = record.first_nonfinite
            tell(Outcome(record.loss_scale, record.next_loss_scale, record.skipped, first, record.loss))

        return self._scaler.subscribe(hear)

    def scale(self) -> float:
        return self._scaler.get_scale()


class _TorchProbe(ScaleProbe):
    kind = "torch"
    waits_for_forward = True

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = self.amp = scaler
        self.dynamic = True
        self.growth_interval = scaler.get_growth_interval()
        self._scale = scaler.get_scale()
        self._stepped = False
        self._tell: Tell | None = None

    def follow(self, optimizer: Optimizer, tell: Tell) -> Callable[[], None]:
        self._tell = tell
        remove = optimizer.register_step_post_hook(self._take_step).remove

        def end() -> None:
            self.at_forward()
            self._tell = None
            remove()

        return end

    def scale(self) -> float:
        return self._scaler.get_scale()

    def at_forward(self) -> None:
        scale = self._scaler.get_scale()
        stepped, was = self._stepped, self._scale
        self._stepped, self._scale = False, scale
        if self._tell is not None and (stepped or scale < was):
            # A fused optimizer is called in a skipped step too, and does nothing there.
            self._tell(Outcome(was, scale, scale < was))

    def _take_step(self, *_: object) -> None:
        self._stepped = True


def probe_of(scaler_or_amp: Session | torch.amp.GradScaler | object | None) -> ScaleProbe:
    """Return what follows a scaler.

    Args:
        scaler_or_amp: a `Session`, the module ``amp`` (its session), a GradScaler of amplab or torch, or None: the
            apex session of this thread where there is one, else nothing is scaled.

    Raises:
        TypeError: something else.
    """
    if scaler_or_amp is None or getattr(scaler_or_amp, "__name__", "") in ("amplab.amp", "apex.amp"):
        session = default_session()
        if session.initialized and session.scalers:
            return _ApexProbe(session)
        if scaler_or_amp is not None:
            raise RuntimeError("amp has no session in this thread: call amp.initialize before watch(..., amp).")
        return ScaleProbe()
    if isinstance(scaler_or_amp, Session):
        return _ApexProbe(scaler_or_amp)
    if isinstance(scaler_or_amp, GradScaler):
        return _AmplabProbe(scaler_or_amp)
    if isinstance(scaler_or_amp, torch.amp.GradScaler):
        return _TorchProbe(scaler_or_amp) if scaler_or_amp.is_enabled() else ScaleProbe()
    raise TypeError(
        f"scaler_or_amp={type(scaler_or_amp).__name__}: expected a GradScaler, a Session, the module amp, or None."
    )
