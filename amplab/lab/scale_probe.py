"""How a watch finds out the result of a step: one probe for each kind of scaler.

===============  ===========================================  ==============================================
scaler           a step is over when                          it was skipped when
===============  ===========================================  ==============================================
apex session     the optimizer's ``step`` has returned        the session reports it
amplab's         ``update`` has updated the scale             the scaler's row of this optimizer says so
torch's          after ``update`` a loss comes, the next      the scaler did not call the optimizer, or told it
                 batch begins, the model is called, or the    that it found inf
                 watch ends
none             the optimizer's ``step`` has returned        never
===============  ===========================================  ==============================================

torch's scaler has no hook, and it does not call an optimizer whose step it skips. The evidence is in its record of the
iteration, which ``update`` replaces and the probe keeps. If the optimizer steps several times and nothing
comes in between, they are one step with the record of the first; a later skip is counted if the optimizer was called at
least twice and the scale fell by a power of the backoff factor. After a single call such a fall may also be the loop's
own ``update(new_scale)``. A skipped step after an iteration that only unscales and updates is lost if nothing comes in
between, as where a loop calls a method of the model and gives one loss for both. The scale is read once per step, so
only a session and amplab's scaler report the scales of several backwards of one step. A session unscales the gradients
of each backward before it adds them, so that different scales do not mix.

After an interrupt, the probe of a session or of amplab's scaler reports the step when the next loss or batch comes, or
the watch ends, if the optimizer had stepped.

`StepCounter` tells which losses come before, and which after, a step of one of several optimizers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amplab.amp import GradScaler, ScaledLoss, ScaleRecord, Session, StepOutcome, default_session
from amplab.lab.scale_growth import ScaleGrowth, growth_of_rule, growth_of_saved, interval_of
from amplab.lab.watched_run import NO_LEVEL
from amplab.trace.optimizer_hooks import seeing_gradients
from amplab.trace.untouched import observing_steps, unless_undone

__all__ = ["NO_STEPS", "ScaleProbe", "ScaledStep", "StepCounter", "Steps", "probe_of"]


class ScaledStep(NamedTuple):
    """What the scaler reports of one step; a tuple, which is made faster than a dataclass, between any two steps."""

    loss_scale: float = 1.0
    next_loss_scale: float = 1.0
    skipped: bool = False
    first_nonfinite: str | None = None
    backward_scales: tuple[float, ...] = ()


Report = Callable[[ScaledStep | ScaleRecord], None]  # a record has all attributes of a scaled step


class Steps(NamedTuple):
    """Numbers that grow when an optimizer steps or skips: the first one of a loop, and any of them."""

    of_first: int
    of_all: int


NO_STEPS = Steps(0, 0)


class StepCounter:
    """Tells whether optimizers have stepped, or skipped, between two looks: for a loop with several.

    A scaler calls no hook of an optimizer that it skips; its record of the iteration has each that it steps or skips.

    Attributes:
        is_later_run: whether the closure of a step of the first optimizer, which needs one, has run in this step.
    """

    def __init__(self, optimizers: Sequence[Optimizer], scaler: Session | torch.amp.GradScaler | None) -> None:
        self._optimizers = optimizers
        self._scaler = scaler if isinstance(scaler, torch.amp.GradScaler) and len(optimizers) > 1 else None
        self._numbers = frozenset(map(id, optimizers))
        self._rows: Mapping[int, Any] = {}  # of the iteration of the last look; `update` replaces it
        self._seen: frozenset[int] = frozenset()  # the optimizers in it that had stepped by then
        self._steps = NO_STEPS
        self.is_later_run = False

    def follow(self) -> Callable[[], None]:
        """Start to follow the optimizers; return a function that ends it.

        Steps of the first one are counted with a scaler only: without one its hook reports them at once.
        """
        first = self._optimizers[0]
        counted = self._optimizers if self._scaler is not None else self._optimizers[1:]
        ends = [each.register_step_post_hook(observing_steps(self._see_step, each)).remove for each in counted]
        if _needs_closure(first):
            after_run = seeing_gradients(torch.compiler.disable(unless_undone(partial(self._see_run, True))))
            ends.append(first.register_step_pre_hook(observing_steps(after_run, first)).remove)
            ends.append(first.register_step_post_hook(observing_steps(partial(self._see_run, False), first)).remove)

        def end() -> None:
            for each in ends:
                each()

        return end

    def _see_run(self, is_first_over: bool, *_: object) -> None:
        self.is_later_run = is_first_over

    def _see_step(self, optimizer: Optimizer, *_: object) -> None:
        of_first, of_all = self._steps
        self._steps = Steps(of_first + (optimizer is self._optimizers[0]), of_all + 1)

    def steps(self) -> Steps:
        """Return the numbers. A skip in an iteration without a look is not in them. Sync: none."""
        if self._scaler is not None:
            self._look_at(self._rows, self._seen)
            rows = self._scaler._per_optimizer_states
            if rows is not self._rows:
                self._look_at(rows, frozenset())
        return self._steps

    def _look_at(self, rows: Mapping[int, Any], seen: frozenset[int]) -> None:
        stepped = frozenset(each for each in self._numbers if each in rows and rows[each]["stage"] is OptState.STEPPED)
        new, (of_first, of_all) = stepped - seen, self._steps
        steps = Steps(of_first + (id(self._optimizers[0]) in new), of_all + len(new))
        # One line without a call: CPython lets no interrupt in between.
        self._rows, self._seen, self._steps = rows, stepped, steps


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether a step cannot do without a closure, as that of LBFGS."""
    parameter = inspect.signature(optimizer.step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


class ScaleProbe:
    """The probe without a scaler: every step of the optimizer counts. The other probes are below.

    Attributes:
        kind: "none", "apex", "amplab" or "torch".
        dynamic: whether the scale changes.
        opt_level: of a session, else `NO_LEVEL`.
        amp: the session or the scaler itself, None without either.
        waits_for_forward: whether `at_forward` ends a step.
        see_loss: called with each loss that a session or amplab's scaler is about to scale.
    """

    kind = "none"
    dynamic = False
    opt_level = NO_LEVEL
    amp: Session | torch.amp.GradScaler | None = None
    waits_for_forward = False
    see_loss: Callable[[ScaledLoss], None] | None = None
    _report: Report | None = None
    _waiting: ScaledStep | ScaleRecord | None = None

    def follow(self, optimizer: Optimizer, report: Report) -> Callable[[], None]:
        """Call `report` after every step; return a function that ends this."""
        return optimizer.register_step_post_hook(observing_steps(lambda *_: report(ScaledStep()), optimizer)).remove

    def scale(self) -> float:
        """Return the scale in effect. Sync: one if it is on a device."""
        return 1.0

    @property
    def growth_interval(self) -> int | None:
        """Steps without overflow until the scale grows, as it is now; None if it does not, or if that is not known."""
        return None

    def scale_growth(self) -> ScaleGrowth | None:
        """Return when the scale grows next; None if that is not known. Sync: two if it is on a device."""
        return None

    def found_inf(self) -> bool:
        """Return whether this step is known to have gradients that are not finite. Sync: none."""
        return False

    def at_forward(self) -> None:
        """Note that the next iteration may start, before its loss is known."""
        self._hand_over()

    def _at_loss(self) -> Callable[[ScaledLoss], None] | None:
        """Return what is called with a loss: the step before, which an interrupt may have ended, is reported first."""
        if self.see_loss is None:
            return None
        see_loss = self.see_loss

        def see(loss: ScaledLoss) -> None:
            self.at_forward()
            see_loss(loss)

        return unless_undone(see)

    def _hand_over(self) -> None:
        """Report the step that is over, if an interrupt has not let that happen."""
        if self._waiting is not None and self._report is not None:
            self._report(self._waiting)
            self._waiting = None


class _ApexProbe(ScaleProbe):
    kind = "apex"

    def __init__(self, session: Session) -> None:
        self._session = self.amp = session
        self.dynamic = session.scalers[0].dynamic
        self._backwards = 1  # of the first loss in the last step: each moves its scale
        self.opt_level = session.opt_level or NO_LEVEL
        self._records: list[ScaleRecord] = []  # one for each backward of the optimizer since its last step
        self._scales: dict[int, float] = {}  # of the next loss, by the number of its scaler
        self._done: tuple[list[ScaleRecord], StepOutcome] | None = None  # the records and the outcome of a step
        self._optimizer: Optimizer | None = None
        self._last: StepOutcome | None = None  # the outcome of the last step

    def follow(self, optimizer: Optimizer, report: Report) -> Callable[[], None]:
        self._report, self._optimizer, self._last = report, optimizer, self._session.last_step(optimizer)
        ends = [
            self._session.subscribe(unless_undone(self._see_scale)),
            self._session.subscribe(unless_undone(self._see_record), optimizer, at_loss=self._at_loss()),
            optimizer.register_step_post_hook(observing_steps(self._see_step, optimizer)).remove,
        ]

        def end() -> None:
            self._recover()
            self._hand_over()
            for each in ends:
                each()

        return end

    @property
    def growth_interval(self) -> int | None:
        scalers = self._session.scalers  # none after a reset
        return interval_of(scalers[0].rule) if scalers else None

    def scale(self) -> float:
        return self._session.loss_scale()

    def scale_growth(self) -> ScaleGrowth | None:
        scalers = self._session.scalers
        return growth_of_rule(scalers[0].rule, scalers[0].state, backwards=self._backwards) if scalers else None

    def found_inf(self) -> bool:
        return any(record.found_inf for record in self._records)

    def _see_scale(self, record: ScaleRecord) -> None:
        self._scales[record.loss_id] = record.next_loss_scale

    def _see_record(self, record: ScaleRecord) -> None:
        self._records.append(record)

    def at_forward(self) -> None:
        self._recover()
        self._hand_over()

    def _see_step(self, optimizer: Optimizer, *_: object) -> None:
        self._hand_over()
        self._note(self._session.last_step(optimizer))
        self._hand_over()

    def _recover(self) -> None:
        """Note a step of which an interrupt has kept the record: its hook was not called, or did not get that far."""
        if self._records and self._optimizer is not None and _knows(self._session, self._optimizer):
            last = self._session.last_step(self._optimizer)
            if last is not self._last:
                self._note(last)

    def _note(self, last: StepOutcome) -> None:
        # One line without a call: CPython lets no interrupt in between.
        self._records, self._done, self._last = [], (self._records, last), last

    def _hand_over(self) -> None:
        if self._done is not None:
            self._waiting, self._done = self._scaled_step(*self._done), None
        super()._hand_over()

    def _scaled_step(self, records: list[ScaleRecord], last: StepOutcome) -> ScaledStep:
        records = _since_given_up(records, last.overflow)
        self._backwards = max(1, sum(each.loss_id == 0 for each in records))
        if not records:  # a loss that was not scaled
            return ScaledStep(self.scale(), self.scale(), last.first_nonfinite is not None, last.first_nonfinite)
        limiting = last.overflow or min(records, key=lambda each: each.loss_scale)
        following = self._scales.get(limiting.loss_id, limiting.next_loss_scale)
        scales = tuple(each.loss_scale for each in records)
        skipped, first = last.overflow is not None, last.first_nonfinite
        return ScaledStep(limiting.loss_scale, following, skipped, first, backward_scales=scales)


def _since_given_up(records: list[ScaleRecord], overflow: ScaleRecord | None) -> list[ScaleRecord]:
    """Leave out the backwards up to an overflow for which no step was skipped: its gradients were cleared."""
    first = next((place for place, each in enumerate(records) if each is overflow), len(records))
    given_up = [place for place in range(first) if records[place].skipped]
    return records[given_up[-1] + 1 :] if given_up else records


class _Calls:
    """The calls of an optimizer's step since the last report. A fused optimizer is called in a skipped step, too.

    Attributes:
        count: how many there were.
        in_first: whether one was in the iteration whose record the probe keeps; further iterations may have followed.
    """

    count = 0
    in_first = False
    _found_inf: Tensor | None = None

    def see(self, optimizer: Optimizer, *_: object) -> None:
        """Called after the optimizer's step, which has ``found_inf`` while it runs if it is fused."""
        self.count, self._found_inf = self.count + 1, getattr(optimizer, "found_inf", None)

    def found_inf(self) -> bool:
        """Whether the fused optimizer has skipped in its last call. Sync: one for a fused optimizer."""
        return self._found_inf is not None and self._found_inf.item() > 0


class _AmplabProbe(ScaleProbe):
    kind = "amplab"
    dynamic = True

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = self.amp = scaler
        self._calls, self._rows = _Calls(), scaler._per_optimizer_states  # of the iteration of these calls
        self._heard = scaler._updated  # the iteration that was reported last
        self._next_scale = 1.0  # after it
        self._optimizer_id = 0

    def _see_call(self, optimizer: Optimizer, *_: object) -> None:
        rows = self._scaler._per_optimizer_states
        if rows is not self._rows:  # `update` replaces it, and so does the beginning after an iteration given up
            self._calls, self._rows = _Calls(), rows
        self._calls.see(optimizer)

    def follow(self, optimizer: Optimizer, report: Report) -> Callable[[], None]:
        self._report, self._optimizer_id, self._next_scale = report, id(optimizer), self.scale()
        ends = (
            self._scaler.subscribe(unless_undone(self._hear), at_loss=self._at_loss()),
            optimizer.register_step_post_hook(observing_steps(self._see_call, optimizer)).remove,
        )

        def end() -> None:
            self._recover(has_ended=True)
            self._hand_over()
            for each in ends:
                each()

        return end

    def at_forward(self) -> None:
        self._recover()
        self._hand_over()

    def _hear(self, record: ScaleRecord) -> None:
        if self._waiting is not None:
            self._hand_over()
        if self._scaler._updated is not self._heard:  # else the record of another loss
            self._note(self._scaler._updated, record)
            self._hand_over()

    def _recover(self, *, has_ended: bool = False) -> None:
        """Note a step of which an interrupt has kept the record: in `update` after the scale has moved, or before."""
        if self._scaler._updated is not self._heard:
            self._note(self._scaler._updated, None)
        elif self._calls.count and self._rows is not self._heard and (has_ended or self._scaler._was_interrupted()):
            self._note(self._rows, None)

    def _note(self, rows: dict[int, Any], record: ScaleRecord | None) -> None:
        calls, row = self._calls if rows is self._rows else _Calls(), rows.get(self._optimizer_id, {})
        # The record is of the last step, which may be that of another optimizer, and of the first loss alone.
        may_be_inf = record is None or record.found_inf or len(self._scaler._scales) > 1
        skipped = may_be_inf and calls.found_inf() if calls.count else row.get("verdict", False)
        following = self.scale() if record is None else record.next_loss_scale
        step: ScaledStep | ScaleRecord = record or ScaledStep(self._next_scale, following, skipped)
        if isinstance(step, ScaleRecord) and skipped is not step.skipped:
            step = replace(step, skipped=skipped, first_nonfinite=None)
        done = step if calls.count or skipped else None  # an update that sets the scale is not a step
        none_yet = _Calls()
        # One line without a call: CPython lets no interrupt in between.
        self._waiting, self._heard, self._next_scale, self._calls, self._rows = done, rows, following, none_yet, rows

    @property
    def growth_interval(self) -> int | None:
        rule = self._scaler.rule
        return (self._scaler.get_growth_interval() or None) if rule is None else interval_of(rule)

    def scale(self) -> float:
        return self._scaler.get_scale()

    def scale_growth(self) -> ScaleGrowth | None:
        return growth_of_saved(self._scaler.rule, self._scaler.state_dict())


class _TorchProbe(ScaleProbe):
    kind = "torch"
    dynamic = True
    waits_for_forward = True

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = self.amp = scaler
        self._scale = scaler.get_scale()
        self._rows: Mapping[int, Any] = scaler._per_optimizer_states  # of this iteration; `update` replaces it
        self._calls = _Calls()
        self._optimizer_id = 0
        self._version = (0, -1)  # of the scale as it was read
        self._has_ended = False

    def follow(self, optimizer: Optimizer, report: Report) -> Callable[[], None]:
        self._report, self._optimizer_id = report, id(optimizer)
        self._scale, self._rows = self._scaler.get_scale(), self._scaler._per_optimizer_states
        remove = optimizer.register_step_post_hook(observing_steps(self._see_call, optimizer)).remove

        def end() -> None:
            self._has_ended = True
            self.at_forward()
            self._report = None
            remove()

        return end

    def _see_call(self, optimizer: Optimizer, *_: object) -> None:
        self._calls.see(optimizer)
        self._calls.in_first |= self._scaler._per_optimizer_states is self._rows

    @property
    def growth_interval(self) -> int | None:
        return self._scaler.get_growth_interval() or None

    def scale(self) -> float:
        return self._scaler.get_scale()

    def scale_growth(self) -> ScaleGrowth | None:
        return growth_of_saved(None, self._scaler.state_dict())

    def at_forward(self) -> None:
        self._hand_over()
        rows, version = self._scaler._per_optimizer_states, self._version_of_scale()
        row, calls, done = self._rows.get(self._optimizer_id), self._calls, None
        stepped = row is not None and row["stage"] is OptState.STEPPED
        is_over = stepped or calls.count == 0  # else the loop has called the optimizer without the scaler
        if rows is self._rows and not self._has_ended and is_over and (stepped or version == self._version):
            return  # no update since the last call
        scale, was = self._scaler.get_scale(), self._scale
        if self._report is not None and (stepped or calls.count):
            skipped = stepped and not calls.in_first
            skipped = skipped or calls.found_inf() or (calls.count > 1 and self._backed_off(was, scale))
            done, calls = ScaledStep(was, scale, skipped), _Calls()
        rows = {} if self._has_ended else rows  # nothing is reported twice
        # One line without a call: CPython lets no interrupt in between.
        self._scale, self._rows, self._calls, self._waiting, self._version = scale, rows, calls, done, version
        self._hand_over()

    def _version_of_scale(self) -> tuple[int, int]:
        """What changes when the scale is written to. Sync: none."""
        scale = self._scaler._scale
        return (0, 0) if scale is None else (id(scale), scale._version)

    def _backed_off(self, was: float, scale: float) -> bool:
        """Whether the scale fell as updates after skipped steps lower it: by a power of the backoff factor."""
        factor = self._scaler.get_backoff_factor()
        if not 0 < scale < was or not 0 < factor < 1:
            return False
        power = math.log(scale / was, factor)
        return round(power) > 0 and math.isclose(power, round(power), rel_tol=1e-5)


def probe_of(scaler: Session | torch.amp.GradScaler | object | None, optimizer: Optimizer) -> ScaleProbe:
    """Return the probe that follows a scaler.

    Args:
        scaler: a `Session`, the module ``amp`` (its session), a GradScaler of amplab or torch, or None: the
            apex session of this thread if the optimizer is part of it, else the loop without a scale.
        optimizer: the optimizer whose steps count.

    Raises:
        TypeError: something else. RuntimeError: a session that does not include the optimizer.
    """
    if isinstance(scaler, torch.amp.GradScaler):
        if not scaler.is_enabled():
            return ScaleProbe()
        return _AmplabProbe(scaler) if isinstance(scaler, GradScaler) else _TorchProbe(scaler)
    if scaler is None:
        session = default_session()
        return _ApexProbe(session) if _knows(session, optimizer) else ScaleProbe()
    if getattr(scaler, "__name__", "") in ("amplab.amp", "apex.amp"):
        scaler = default_session()
    if isinstance(scaler, Session):
        if scaler.initialized and not scaler.scalers:  # with enabled=False, as a GradScaler that is not enabled
            return ScaleProbe()
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
