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
is read once per step. So of the scales of several backwards of one step only amplab's tells. A session unscales the
gradients of each backward before it adds them up: whatever the scales were, they do not mix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp import GradScaler, ScaleRecord, Session, default_session
from amplab.lab.watched_run import NO_LEVEL
from amplab.scalers import DynamicScale

__all__ = ["Outcome", "ScaleProbe", "probe_of"]


class Outcome(NamedTuple):
    """What the scaler says of one step; a tuple, since one is made between any two steps."""

    loss_scale: float = 1.0
    next_loss_scale: float = 1.0
    skipped: bool = False
    first_nonfinite: str | None = None
    loss: Tensor | None = None
    backward_scales: tuple[float, ...] = ()


Tell = Callable[[Outcome | ScaleRecord], None]  # a record has all that an outcome has


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

    def loss(self) -> Tensor | None:
        """The loss of this step, where it is told before the optimizer steps. Sync: none."""
        return None

    def found_inf(self) -> bool:
        """Whether this step's gradients are known not to be finite. Sync: none."""
        return False

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
        self._records: list[ScaleRecord] = []  # one for each backward since the last step

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

    def loss(self) -> Tensor | None:
        return self._records[-1].loss if self._records else None

    def found_inf(self) -> bool:
        return any(record.found_inf for record in self._records)

    def _hear(self, record: ScaleRecord) -> None:
        self._records.append(record)

    def _outcome(self, optimizer: Optimizer) -> Outcome:
        said, records = self._session.last_step(optimizer), self._records
        self._records = []
        if not records:  # a loss that was not scaled
            return Outcome(self.scale(), self.scale(), said.first_nonfinite is not None, said.first_nonfinite)
        bad = [each for each in records if each.found_inf and not said.stepped]  # without gradients none steps, either
        first = bad[0].first_nonfinite if bad else None
        return Outcome(records[-1].loss_scale, self.scale(), bool(bad), first, records[-1].loss)


class _AmplabProbe(ScaleProbe):
    kind = "amplab"

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = self.amp = scaler
        self.dynamic = scaler.is_enabled()
        self.growth_interval = scaler.get_growth_interval() if self.dynamic else None

    def follow(self, optimizer: Optimizer, tell: Tell) -> Callable[[], None]:
        stepped = False

        def step(*_: object) -> None:
            nonlocal stepped
            stepped = True

        def hear(record: ScaleRecord) -> None:
            nonlocal stepped
            if stepped or record.skipped:  # an update that sets the scale is no step
                tell(record)
            stepped = False

        ends = self._scaler.subscribe(hear), optimizer.register_step_post_hook(step).remove

        def end() -> None:
            for each in ends:
                each()

        return end

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


def probe_of(scaler: Session | torch.amp.GradScaler | object | None, optimizer: Optimizer) -> ScaleProbe:
    """Return what follows a scaler.

    Args:
        scaler: a `Session`, the module ``amp`` (its session), a GradScaler of amplab or torch, or None: the
            apex session of this thread where the optimizer is part of it, else nothing is scaled.
        optimizer: whose steps count.

    Raises:
        TypeError: something else. RuntimeError: a session that the optimizer is no part of.
    """
    if isinstance(scaler, torch.amp.GradScaler):
        probe = _AmplabProbe if isinstance(scaler, GradScaler) else _TorchProbe
        return probe(scaler) if scaler.is_enabled() else ScaleProbe()
    if scaler is None:
        session = default_session()
        return _ApexProbe(session) if _knows(session, optimizer) else ScaleProbe()
    if getattr(scaler, "__name__", "") in ("amplab.amp", "apex.amp"):
        scaler = default_session()
    if isinstance(scaler, Session):
        if not _knows(scaler, optimizer):
            raise RuntimeError(
                f"this {type(optimizer).__name__} is not part of the session: call amp.initialize with it before "
                "watch(..., scaler=amp), in this thread."
            )
        return _ApexProbe(scaler)
    raise TypeError(f"scaler={type(scaler).__name__}: expected a GradScaler, a Session, the module amp, or None.")


def _knows(session: Session, optimizer: Optimizer) -> bool:
    if not session.initialized or not session.scalers:
        return False
    try:
        session.last_step(optimizer)
    except RuntimeError:
        return False
    return True
