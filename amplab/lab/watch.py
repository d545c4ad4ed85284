"""`watch`: record of your own training loop what the lab records of its experiments, at a small cost.

    with amplab.watch(model, optimizer, scaler=scaler) as w:
        for batch in w.batches(loader):
            loss = w.loss(criterion(model(batch.x), batch.y))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    print(w.findings())

The loop does not change. The watch uses optimizer hooks, a forward hook and the scaler's callbacks. `scale_probe`
learns the outcome of a step, `watched_losses` knows its losses, `gradient_measure` measures gradients,
`left_scales` knows by what they are still multiplied, `idle_optimizers` finds optimizers that never step,
`watched_skips` explains a skipped step.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from textwrap import shorten
from threading import get_ident
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amplab.amp import ScaledLoss, ScaleRecord, Session, master_params
from amplab.amp.run_state.paths import given_path
from amplab.diagnose import Findings, Observation, run_findings
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.rules.parameters import adam_on_half, nonfinite_buffers
from amplab.display.html import page
from amplab.display.numbers import count
from amplab.formats import ExponentHistogram
from amplab.lab.events import GradientRecord, GradientSample, MixedScales, StepRecord, StepRow
from amplab.lab.findings import LOOK_BACK, observed_run, with_explained
from amplab.lab.gradient_measure import GradientMeasure
from amplab.lab.history import History, recorded
from amplab.lab.idle_optimizers import ENOUGH_STEPS, IdleOptimizers
from amplab.lab.left_scales import LeftScales
from amplab.lab.rank_watch import RankWatch
from amplab.lab.run_log import check_writable
from amplab.lab.run_store import RunStore
from amplab.lab.scale_growth import ScaleGrowth
from amplab.lab.scale_probe import ScaledStep, StepCounter, probe_of
from amplab.lab.step_look import StepLook
from amplab.lab.step_losses import LossSource, value_of
from amplab.lab.step_rerun import StepRerun
from amplab.lab.tensorboard_scalars import TensorBoardScalars
from amplab.lab.watched_batches import WatchedBatches
from amplab.lab.watched_losses import WatchedLosses
from amplab.lab.watched_run import NO_LEVEL, WatchedRun
from amplab.lab.watched_skips import WatchedSkips, names_of_nonfinite_gradients
from amplab.optimizers.group_settings import learning_rate
from amplab.policies.casting.thread_scopes import THREAD
from amplab.policies.nested_tensors import samples_in
from amplab.policies.signals import DeferredSignals, is_interrupt
from amplab.trace import Trace
from amplab.trace.argument_checks import check_values
from amplab.trace.as_found import end_blocks_of, remove_hook
from amplab.trace.handed_step import (
    Loss,
    Scaler,
    bound_to_batch,
    check_loss_function,
    optimizers_of,
    shows_calls,
)
from amplab.trace.modules import UncopiedHook
from amplab.trace.optimizer_hooks import seeing_gradients
from amplab.trace.untouched import before_untouched, observing_steps, unless_undone

__all__ = ["Watch", "check_options", "watch"]

T = TypeVar("T")
_LARGEST_EVERY = 16  # steps; near enough for a replay to know the steps between, and under 1 % of a small step


class _Exit(partial[None]):
    """`Watch._leave`, as a `with` statement holds it until its end.

    An interrupt may come where that call begins, and nothing of it runs. Then the statement drops this object.
    """

    def __del__(self) -> None:
        """End what is open."""
        watch: Watch = self.func.__self__  # type: ignore[attr-defined]  # of a bound method
        if watch._is_open:
            watch._leave()


class _ExitOfBlock:
    """``__exit__`` of a class that has `_leave`."""

    def __get__(self, watch: Watch | None, owner: type[Watch]) -> Callable[..., None]:
        """Return a new one for a `with` statement, which asks before the block begins; else the plain function."""
        if watch is None:  # `contextlib.ExitStack` asks the class
            return owner._leave
        return watch._leave if watch._is_open else _Exit(watch._leave)


class Watch:
    """Follows a training loop; made by `watch`, for a ``with`` block.

    Attributes:
        config: what is watched, a `WatchedRun`.
        thread: the number of the thread that has begun the watch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        scaler: Any,
        loss: Loss | None,
        step: Loss | None,
        log: str | PathLike[str] | None,
        every: int,
        scalars: TensorBoardScalars | None,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._probe = probe_of(scaler, optimizers[0])
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        names = type(inner).__name__, type(optimizers[0]).__name__
        self.config = WatchedRun(*names, self._probe.kind, self._probe.opt_level)
        advice = "For a log, pass the next watch log= with a writable folder."
        self._store = RunStore(self.config, log=log, on_failure=self._fail_log, advice=advice)
        self._every = every
        self._left_scales = LeftScales(optimizers, self._probe.amp)
        self._measure = GradientMeasure(optimizers, self._left_scales.of, self._names_of_stepped)
        self._rerun = StepRerun(model, loss, step, self._probe.amp)
        self._scalars = scalars
        self._rates: deque[tuple[int, float]] = deque(maxlen=LOOK_BACK)
        self._norms: dict[int, float] = {}
        self._idle = IdleOptimizers(optimizers)
        self._look = StepLook(model, optimizers, self._probe, self._store.find, self._fail)
        self._skips = WatchedSkips(model, self._rerun, self._store, self._look.pause, self._fail)
        self._failures: list[str] = []
        api, around = Api(ApiStyle(self._probe.kind)), lambda: self._rerun.wrappers
        self._ranks = RankWatch(model, optimizers, self._store, api=api, wrappers=around, fail=self._fail)
        self._batch_size: int | None = None
        self._has_batches = False  # in the body of `batches`, which tells when a step begins
        self.thread = get_ident()  # of the loop
        self._subscribers: list[Callable[[StepRecord], object]] = []
        self._ends: list[Callable[[], None]] = []
        first, see_forward, see_output, see_gradients = (
            optimizers[0],
            UncopiedHook(unless_undone(self._see_forward)),
            UncopiedHook(unless_undone(self._see_output)),
            observing_steps(
                seeing_gradients(torch.compiler.disable(unless_undone(self._see_gradients))), optimizers[0]
            ),
        )
        self._hooks = _Hooks(
            forward=_Hook(model.register_forward_pre_hook, see_forward, model._forward_pre_hooks),
            output=_Hook(model.register_forward_hook, see_output, model._forward_hooks),
            gradients=_Hook(first.register_step_pre_hook, see_gradients, first._optimizer_step_pre_hooks),
        )
        self._counter = StepCounter(optimizers, self._probe.amp)
        self._losses, self._loss_in_output = WatchedLosses(model, optimizers, self._counter), False
        self._add_loss = unless_undone(self._losses.add)
        self._probe.see_loss = unless_undone(self._see_scaled_loss)
        self._given = 0  # losses, by the loop
        self._measured = -1  # the step that was measured last
        self._unrecorded: tuple[_Outcome, ...] = ()  # several only after interrupts
        self._taken: ScaledStep | ScaleRecord | None = None  # the last outcome that was added to them
        self._bad_in_a_row = 0
        self._began = 0  # ns
        self._is_open = self._has_ended = False
        self._handled: BaseException | None = None

    # -- in the loop -------------------------------------------------------------------------------

    def begin_without_block(self) -> None:
        """Start to follow a loop whose end nobody may tell, as of a trainer that raises: no mode is put on the thread.

        A model that is not referenced any more is freed.
        """
        self._look.rest()
        self.__enter__()

    def __enter__(self) -> Watch:
        """Start to follow the loop."""
        if self._ends or self._has_ended:  # its log is closed then
            state = "has ended" if self._has_ended else "is in use"
            raise RuntimeError(
                f"this watch {state}: expected a new amplab.watch(...) for each `with` block, or one block around all "
                "epochs."
            )
        THREAD.own.drop_ended()  # what another thread has ended
        self._began, self._is_open, self._handled = time.perf_counter_ns(), True, sys.exception()
        self.thread = get_ident()
        try:
            with DeferredSignals():  # what is registered must be known to `_stop_following`
                self._ends.append(self._hooks.end)
                self._rerun.begin()
                self._hooks.need("forward", self._probe.waits_for_forward)
                self._hooks.need("output")
                self._hooks.need("gradients")
                self._look.begin()
                if not self._look.rests:
                    self._ends.append(before_untouched(self._look.pause))  # a tool, whose steps are none of the loop
                self._ends.append(self._idle.follow())
                self._ends.append(self._left_scales.follow())
                self._ends.append(self._probe.follow(self._optimizers[0], self._take))
                self._ends.insert(-1, self._counter.follow())  # the probe ends first: it may report a last step
            return self
        except BaseException:  # an interrupt: the block does not begin, so `__exit__` is not called
            self._stop_following()
            self._rerun.end()
            self._is_open = False
            raise

    def _stop_following(self) -> None:
        """Remove all hooks; a second call removes those that the first has left."""
        while self._ends:
            self._ends[-1]()
            self._ends.pop()
        self._look.end()

    def _leave(self, _kind: object = None, error: BaseException | None = None, _trace: object = None) -> None:
        """Remove the hooks and close the log."""
        try:
            self._end(error)
        except BaseException:  # of a signal that came before it let them wait
            self._end(error)
            raise

    __exit__ = _ExitOfBlock()

    def _end(self, error: BaseException | None) -> None:
        """End all, while signals wait, unless it waits for other ranks; a second call ends what the first has left."""
        signals = DeferredSignals()
        try:
            if self._has_ended:  # of a trainer whose process group may be gone
                return
            self._is_open = False
            raised = "" if error is None else shorten(f"{type(error).__name__}: {error}", 120, placeholder="…")
            self._look.batch_ends()
            if error is not None and is_interrupt(error):
                end_blocks_of(error, self._handled)  # torch's, which put a mode of a look back when the error is freed
                self._look.interrupted()
            self._stop_following()
            self._rerun.end()
            signals.admit()
            self._ranks.end(raised)
            signals.waits = True
            if self._unrecorded:
                self._record_rest()
            has_steps = len(self.history) > 0 or self._measured >= 0 or self._idle.saw_a_step
            if self._given > ENOUGH_STEPS and not has_steps and error is None:
                self._fail(self._no_step())
            self._store.close(raised)
            self._skips.end()
            if self._scalars is not None:
                self._try_scalars(self._scalars.close)
            self._has_ended = True
        finally:
            signals.end()

    def _no_step(self) -> str:
        optimizer = self._optimizers[0]
        inner = next((name for name, each in vars(optimizer).items() if isinstance(each, Optimizer)), "")
        other = f", such as optimizer.{inner}" if inner else ""
        return (
            f"no step was recorded: w.loss was called {count(self._given, 'time')}, and "
            f"{type(optimizer).__name__}.step never. Pass the optimizer whose step the loop calls{other}."
        )

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Return an iterator over the batches of a loader, which keeps those of a step until it is over.

        They are there to run a step again that is skipped. Errors of the loader are raised as by the loader itself.

        Read it in the thread that has begun the watch. Another thread, such as one that reads ahead, gets the batches
        and nothing more: steps are recorded, and not explained. Read outside of the block of the watch, it only
        returns the batches.

        Sync: none.
        """
        if not isinstance(loader, Iterable):
            raise TypeError(f"batches({type(loader).__name__}): expected an iterable of batches, such as a loader.")
        return WatchedBatches(loader, begins=self._batch_begins, ends=self._batch_ends, end=self._batches_end)

    def _batch_begins(self, batch: Any) -> None:
        """A step begins, unless the batches are read in another thread than the loop's: it knows nothing of steps."""
        in_loop = get_ident() == self.thread
        self._has_batches = in_loop and self._is_open  # else nothing would end a look
        self._choose_forward_hook()
        if self._has_batches:
            self._at_forward()  # the step before is over
            self._counter.is_later_run = False  # of a step that has failed
            if self._rerun.has_begun:
                self._drop_batches()
            self._rerun.remember(batch)
            if self._steps == 0:
                self._batch_size = samples_in(batch)
            self._look.batch_begins(batch)
        elif in_loop:
            self._fail_once(
                "w.batches(loader) is read outside of the block of the watch, so that its steps are not recorded. Put "
                "the loop into the block: with amplab.watch(...) as w."
            )
        else:
            self._fail_once(
                "w.batches(loader) is read in another thread than the one that began the watch, so that skipped steps "
                "are not explained and the values of ops are not looked at. Read it in the loop, and let the other "
                "thread read the loader: for batch in w.batches(read_ahead(loader))."
            )

    def _drop_batches(self) -> None:
        """Forget the batches of this step that the loop has dropped: no backward has reached their loss."""
        dropped = self._losses.dropped_batches()
        if dropped is None:
            self._rerun.drop()
        else:
            self._rerun.drop(dropped)

    def _batch_ends(self) -> None:
        if get_ident() == self.thread:
            self._look.batch_ends()

    def _batches_end(self) -> None:
        self._has_batches = False
        self._choose_forward_hook()

    def loss(self, value: Tensor) -> Tensor:
        """Record the loss of this step, before it is scaled, and return it. Sync: none.

        Needed with torch's scaler and without a scaler, unless the model's output has a "loss". amplab's session and
        scaler report the loss themselves. What is passed here takes precedence. With torch's scaler, pass each loss
        of a batch with several updates if the loop calls methods of the model: else calls of the model tell them apart.

        Several losses of a step, as of micro-batches whose gradients are accumulated, are added up. Those of a step of
        another optimizer than the first one are not recorded, nor are losses without a graph that are computed where
        gradients are disabled. Of the runs of a closure in one step, as of LBFGS, the first one counts. A loss that no
        backward reaches does not count beside one that it reaches: the loop has dropped its batch. Nor do the losses of
        an iteration that was given up: when the next backward begins, the first optimizer has no gradients, or zeros.
        Zeros on a device or in bfloat16 are not read, so that those losses are added to the next ones.
        """
        if not isinstance(value, Tensor):
            raise TypeError(f"loss({value!r}): expected the tensor that backward starts from, before .item().")
        if self._rerun.at_work:
            return value
        self._probe.at_forward()  # a loop may not call the model itself, but a method of it; or step again with a batch
        self._look.see_loss(value)
        self._given += 1
        self._add_loss(LossSource.LOOP, value)
        return value

    def _see_scaled_loss(self, scaled: ScaledLoss) -> None:
        if not self._rerun.at_work:
            self._losses.add_scaled(scaled)

    # -- what is known -----------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """Every step so far; ``history.replay()`` applies other scaling rules to it."""
        return self._store.history

    @property
    def log_path(self) -> PathLike[str] | None:
        """The file of the run log; None before the first step, and without a log that has every step."""
        return self._store.log_path

    @property
    def failures(self) -> tuple[str, ...]:
        """What failed in the watch itself, one sentence each; the first is a warning, and those of log and scalars."""
        return tuple(self._failures)

    @property
    def observation(self) -> Observation:
        """The last steps, for the rules about runs."""
        return observed_run(
            self.history,
            self.config,
            growth_interval=self._probe.growth_interval,
            dynamic=self._probe.dynamic,
            norms=dict(self._norms),
            rates=dict(self._rates),
        )

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale changes."""
        return self._probe.dynamic

    @property
    def growth_interval(self) -> int | None:
        """Steps without overflow until the loss scale grows; None if it does not, or if that is not known."""
        return self._probe.growth_interval

    @property
    def scale_growth(self) -> ScaleGrowth | None:
        """When the loss scale grows next; None if it does not, or if that is not known.

        Sync: two if the scale is on a device.
        """
        return self._probe.scale_growth()

    def findings(self) -> Findings:
        """Return the findings about the explained steps and the run, the most harmful first."""
        steps = len(self.history)
        found = (*run_findings(self.observation), *self._idle.findings(self._model, self._probe.kind, steps))
        of_weights = (*nonfinite_buffers(self._model), *adam_on_half(self._model, self._optimizers))
        skips = [record.step for record in self.history.skips()]
        of_ranks, explained, compared = self._ranks.findings(self.observation)
        ranked = with_explained((*found, *of_ranks, *of_weights), explained, skips)
        return replace(ranked, looked_at=(*self._looked_at(), *compared))

    def _looked_at(self) -> Iterator[str]:
        """What was examined, and what to pass for the rest."""
        yield f"looked at the losses, loss scales and skips of {count(len(self.history), 'step')}"
        yield from self._look.looked_at()
        if len(self.history.missing_losses()) == len(self.history):
            yield "not looked at: the losses; call w.loss(loss) before backward"
        if not self._rerun.is_possible:
            yield "not looked at: why steps skip; pass loss= or step=, and use w.batches(loader)"

    @property
    def can_explain(self) -> bool:
        """Whether a skipped step can run again, for its reason: ``loss=`` or ``step=`` is there, and ``w.batches``."""
        return self._rerun.is_possible

    @property
    def traced(self) -> tuple[int, Trace] | None:
        """The last step whose ops were seen, and these: the first step, and one in a thousand, in ``w.batches``."""
        return self._look.traced

    def subscribe(self, callback: Callable[[StepRecord], object]) -> Callable[[], None]:
        """Call `callback` with every `StepRecord`, in the loop's thread; return a function that unsubscribes it."""
        if not callable(callback):
            raise TypeError(f"subscribe({callback!r}): expected a function that takes a StepRecord, such as print.")
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback) if callback in self._subscribers else None

    def __repr__(self) -> str:
        """Return one line: what is watched, and the number of steps."""
        return f"<Watch: {self.config}: {self.history}>"

    def __str__(self) -> str:
        """Return the line, and the findings."""
        return f"{self!r}\n{self.findings()}"

    def _repr_html_(self) -> str:
        steps = f"{count(len(self.history), 'step')}, {self.history.skip_count:,} skipped"
        return page(f"{self.config.model} with {self.config.optimizer}: {steps}") + self.findings()._repr_html_()

    # -- what the hooks see ------------------------------------------------------------------------

    def _see_forward(self, module: nn.Module, _args: object) -> None:
        # torch.export traces without values, which the step before may need.
        if not torch.is_grad_enabled() or self._rerun.at_work or torch.compiler.is_exporting():
            return
        if module.training:
            self._at_forward()
        elif not self._rerun.is_possible:  # else a step would run again in evaluation mode
            self._probe.at_forward()

    def _at_forward(self) -> None:
        """The next step begins; with torch's scaler this ends the step before."""
        self._probe.at_forward()
        if self._ranks.is_due:
            self._ranks.at_forward()
            self._choose_forward_hook()

    def _choose_forward_hook(self) -> None:
        # torch's scaler needs it beside batches and losses, too: a batch may have several updates, and one loss.
        waits = self._probe.waits_for_forward or (self._ranks.is_due and not self._has_batches)
        self._hooks.need("forward", waits and bool(self._ends))

    def _see_output(self, module: nn.Module, _args: object, output: object) -> None:
        """Take the loss that models of transformers return."""
        if not module.training or isinstance(output, Tensor) or self._rerun.at_work:
            return
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._loss_in_output = True
            self._probe.at_forward()
            self._add_loss(LossSource.OUTPUT, loss)

    def _see_gradients(self, *_: object) -> None:
        """Called in the optimizer's step before it uses the gradients."""
        if self._unrecorded:
            self._record_rest()
        self._measured = self._steps
        self._look.step_begins()
        if self._measures:
            self._take_measure()
        if self._checks_before_step and (self._measure.is_finite is False or not self._is_finite_so_far()):
            self._bad_in_a_row += 1
            if self._bad_in_a_row == 1:  # after this step the weights contain NaN
                self._skips.explain(self._steps, self._probe.scale(), self._losses.total, seconds=self._seconds())
        else:
            self._bad_in_a_row = 0

    @property
    def _measures(self) -> bool:
        return self._steps % self._every == 0 or self._steps % _LARGEST_EVERY == 0

    def _take_measure(self) -> None:
        """Measure the gradients. An interrupt waits: where `torch.no_grad` ends, it would leave grad mode off."""
        with DeferredSignals():
            if self._steps % self._every == 0:
                self._measure.take()
            else:
                self._measure.take_largest()

    @property
    def _steps(self) -> int:
        return self._store.step_count

    def _seconds(self) -> float:
        """Since the loop began, in whole microseconds."""
        return (time.perf_counter_ns() - self._began) // 1000 / 1e6

    @property
    def _checks_before_step(self) -> bool:
        """Whether a bad step runs again before the optimizer steps: if nothing skips it, its weights are lost."""
        return self._rerun.is_possible and not self._probe.dynamic

    def _is_finite_so_far(self) -> bool:
        """Whether the loss of this step is finite, and the gradients as far as the scaler knows. Sync: one."""
        return self._losses.is_finite() and not self._probe.found_inf()

    def _take(self, outcome: ScaledStep | ScaleRecord) -> None:
        if outcome is not self._taken:  # else a probe reports it again, because an interrupt has stopped this method
            loss, left = self._losses.recorded()
            done = _Outcome(outcome, loss)
            # One line without a call: CPython lets no interrupt in between.
            self._unrecorded, self._taken, self._losses.waiting = (*self._unrecorded, done), outcome, left
        if not self._unrecorded:
            return
        row = self._record_rest()
        step = row[0]
        if (rate := learning_rate(self._optimizers[0].param_groups[0])) is not None:
            self._rates.append((step, rate))
        histogram = self._measure.histogram
        # A scaler does not call an optimizer that it skips: what was measured is then of a step that was given up.
        if histogram is not None and not (outcome.skipped and self._measure.is_finite):
            self._keep_measure(step, histogram, outcome)
        self._measure.forget()
        if len(outcome.backward_scales) > 1 and len(set(outcome.backward_scales)) > 1:
            self._store.keep_scales(MixedScales(step, outcome.backward_scales))
        self._choose_hooks(has_loss=row[1] is not None)
        self._look.step_ends(step, skipped=outcome.skipped)
        if outcome.skipped or self._skips.awaits_next:
            self._skips.after(recorded(row), row[1], self._seconds())
        self._rerun.forget()
        level = self.config.opt_level
        self._ranks.after_step(row[0], batch_size=self._batch_size, level=None if level == NO_LEVEL else level)
        if self._ranks.is_due:
            self._choose_forward_hook()
        if self._subscribers or self._scalars is not None:
            self._publish(row)

    def _record_rest(self) -> StepRow:
        """Record the step that is over, and those before whose record was interrupted; return the last one."""
        while True:
            row = self._record(self._unrecorded[0])
            self._unrecorded = self._unrecorded[1:]
            if not self._unrecorded:
                return row

    def _record(self, done: _Outcome) -> StepRow:
        if done.step is None:
            done.step = self._steps
        if self._measured != done.step:  # an interrupt has left what was measured
            self._measure.forget()
        row = self._row(done.step, done.outcome, done.loss)
        if self._steps == done.step:  # else it was interrupted after this
            self._store.append_row(row)
        return row

    def _row(self, step: int, outcome: ScaledStep | ScaleRecord, loss: float | Tensor | None) -> StepRow:
        """Return the values of a `StepRecord`; making one would take longer than all the rest."""
        return (
            step,
            value_of(loss),
            outcome.loss_scale,
            outcome.next_loss_scale,
            outcome.skipped,
            self._first_nonfinite(outcome),
            self.config.opt_level,
            None,  # no score
            self._seconds(),
            None,  # nothing injected
            math.inf if outcome.skipped else self._measure.largest_exponent,
        )

    def _choose_hooks(self, has_loss: bool) -> None:
        """Keep the hooks that the next step needs; the output's is not needed if loop or scaler report the loss."""
        self._hooks.need("gradients", self._measures or self._checks_before_step)
        if self._steps == 1 and has_loss and not self._loss_in_output:
            self._hooks.need("output", needed=False)

    def _keep_measure(self, step: int, histogram: ExponentHistogram, outcome: ScaledStep | ScaleRecord) -> None:
        layers = GradientRecord(step, outcome.loss_scale, self._measure.layers).shares
        self._store.keep(GradientSample(step, outcome.loss_scale, histogram, layers))
        if self._measure.norm is not None:
            self._norms[step] = self._measure.norm

    def _publish(self, row: StepRow) -> None:
        record = recorded(row)
        for callback in list(self._subscribers):
            callback(record)
        if self._scalars is not None and (record.skipped or record.step % self._every == 0):
            norm = self._norms.get(record.step)
            self._try_scalars(partial(self._scalars.write, record, loss=row[1], gradient_norm=norm))

    def _try_scalars(self, act: Callable[[], None]) -> None:
        """Write the scalars, or close them; after the first failure, which is reported, the loop has none."""
        try:
            act()
        except Exception as error:  # as of a full disk, or of TensorFlow, which need not be an OSError
            if is_interrupt(error):
                raise
            scalars, self._scalars = self._scalars, None
            if scalars is not None:
                self._try_scalars(scalars.close)
                self._fail_log(
                    f"tensorboard: cannot write {scalars.folder} ({getattr(error, 'strerror', None) or error}). The "
                    "loop and its history go on without scalars."
                )

    def _names_of_stepped(self) -> dict[int, str]:
        """The names of the parameters that the optimizers step, by id; a master has the name of its parameter."""
        names = {id(each): name for name, each in self._model.named_parameters()}
        if isinstance(self._probe.amp, Session):
            for optimizer in self._optimizers:
                with suppress(RuntimeError, TypeError):  # not initialized by this session
                    pairs = zip(self._probe.amp.model_params(optimizer), master_params(optimizer), strict=True)
                    names |= {id(master): names[id(weight)] for weight, master in pairs if id(weight) in names}
        return names

    def _first_nonfinite(self, outcome: ScaledStep | ScaleRecord) -> str | None:
        """The model's name of the parameter whose gradient is the first that is not finite.

        A scaler may name it by its place in one of its optimizers. torch's names none: then its gradient is looked for,
        unless they are cleared. Sync: one for each parameter of a step that torch's scaler has skipped, else none.
        """
        first = outcome.first_nonfinite
        if first is None and outcome.skipped and self._probe.waits_for_forward:
            stepped = {*_names_by_place(self._model, self._optimizers).values()}
            bad = [name for name in names_of_nonfinite_gradients(self._model) if name in stepped]
            return bad[-1] if bad else None
        if first is None or not first.startswith("param_groups["):
            return first
        names = _names_by_place(self._model, self._optimizers)
        if len(self._optimizers) == 1 and first in names:
            return names[first]
        bad = names_of_nonfinite_gradients(self._model)
        return bad[-1] if bad else None

    def _fail(self, text: str) -> None:
        self._failures.append(text)
        if len(self._failures) == 1:
            self._warn(text)

    def _fail_once(self, text: str) -> None:
        """Tell what each batch would tell again."""
        if text not in self._failures:
            self._fail(text)

    def _fail_log(self, text: str) -> None:
        """A log fails at most twice, when its lines wait and when they are lost, scalars once; each is a warning."""
        self._failures.append(text)
        self._warn(text)

    def _warn(self, text: str) -> None:
        warnings.warn(f"amplab.watch: {text}", RuntimeWarning, stacklevel=3)


class _Outcome:
    """The outcome of a step that is not recorded yet, its loss, and its number once that is known."""

    __slots__ = ("loss", "outcome", "step")

    def __init__(self, outcome: ScaledStep | ScaleRecord, loss: float | Tensor | None) -> None:
        self.outcome, self.loss = outcome, loss
        self.step: int | None = None


class _Hook(NamedTuple):
    """A function of torch that registers a hook, the hook, and the dict in which torch keeps it."""

    register: Callable[..., RemovableHandle]
    hook: Callable[..., Any]
    kept: dict[int, Any]


class _Hooks:
    """Hooks of a watch by name, registered only while they are needed: torch calls a module without hooks faster.

    They are removed without their handles, since an interrupt may come before a handle is stored.
    """

    def __init__(self, **hooks: _Hook) -> None:
        self._hooks = hooks
        self._needed: set[str] = set()

    def need(self, name: str, needed: bool = True) -> None:
        """Register a hook or remove it, unless that is done."""
        if needed and name not in self._needed:
            register, hook, kept = self._hooks[name]
            remove_hook(hook, kept)  # one whose registration was interrupted
            register(hook)
            self._needed.add(name)
        elif not needed and name in self._needed:
            remove_hook(*self._hooks[name][1:])
            self._needed.discard(name)

    def end(self) -> None:
        """Remove all hooks."""
        for _, hook, kept in self._hooks.values():
            remove_hook(hook, kept)
        self._needed.clear()


def _names_by_place(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return the model's names of the parameters of the first optimizer by their places in it."""
    names = {id(each): name for name, each in model.named_parameters()}
    return {
        f"param_groups[{number}]['params'][{place}]": names[id(each)]
        for number, group in enumerate(optimizers[0].param_groups)
        for place, each in enumerate(group["params"])
        if id(each) in names
    }


@shows_calls("amplab.watch(model, optimizer, scaler=scaler, step=loss_of)")
def watch(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    scaler: Scaler | ModuleType | None = None,
    loss: Loss | None = None,
    step: Loss | None = None,
    log: str | PathLike[str] | None = None,
    every: int = 50,
    tensorboard: str | PathLike[str] | None = None,
) -> Watch:
    """Return a watch for a ``with`` block around a training loop.

    The loop computes what it computes without a watch. One difference is possible, in the first step and in one of a
    thousand, whose ops are looked at: under any dispatch mode torch computes the gradients of ``prod``, and of
    ``masked_fill`` with a tensor as its value, by another formula, whose last bits may differ.

    ``loss=`` and ``step=`` run again, several times. Pass functions that compute the loss and change nothing else. What
    they change all the same is taken back as far as names in their code lead to it: weights, random generators,
    variables, also those of your other files, of a thread and of a context, attributes of your functions, classes,
    tensors and schedulers, gradients and optimizers of other models, arrays and objects in the batch, and what
    containers, arrays and objects of your own classes hold. Not taken back are files, pipes and what another program
    sees, what your modes around the loop note (a `TorchFunctionMode` or `TorchDispatchMode`, saved-tensor hooks, a
    profiler, a counter of FLOPs), caches of functools, attributes of scripted modules, tensors of more than 256 MiB,
    what objects after the first 1,000 of a container hold, what code in a text names that ``eval`` runs, hooks that a
    step registers and modules that it adds to others, weak dicts, and objects, classes and modules of installed
    packages and of Python.

    A step does not run again if its code names arrays of more than 256 MiB, containers of more than four million
    elements, tensors in shared memory, iterators, or something for which it may wait, such as a queue, a barrier or a
    lock that is held; nor while a `threading.Thread` of yours runs code that draws random numbers, or may write to what
    the step names. For what it may wait is not known of the number of a file, as ``os.read`` takes it, and what threads
    of a pool write is not known: what one writes to such things while a step runs again is taken back.

    A step with a closure, ``optimizer.step(closure)``, uses the gradients that the closure computes. Measured and
    explained are those of its first run, as LBFGS runs it several times in a step. Hooks of other code on the step may
    get the closure with a function around it.

    If another thread is alive when the block ends, as in a notebook, amplab's hooks on the steps of all optimizers stay
    registered in the process; they do nothing until the next watch or tool.

    Args:
        model: the model, or a wrapper of it such as DataParallel or DDP.
        optimizer: one or several; a step of the first one is a step of the run.
        scaler: a GradScaler of amplab or torch, a `Session`, the module ``amp``, or None for this thread's
            ``amp.initialize`` if there was one, else for a loop without a scale.
        loss, step: how a step runs again, as `amplab.xray` takes them: `loss(model(inputs), labels)`, or `step(batch)`.
            With one of them and ``w.batches(loader)``, skipped steps run again and are explained; if no scaler
            skips steps, those with a loss of inf or NaN.
        log: folder or .jsonl file of the run log, which `amplab.lab.load_run` reads; None for no log. With torch's
            GradScaler a step is known, and in the log, when the next call of the model, `Watch.loss` or batch comes, or
            the block ends.
        every: count the exponents of the gradients in every such step. The largest gradient is measured in every 16th
            step as well, so that replays of the history with other scales know most steps.
        tensorboard: folder of scalars for TensorBoard, which must be installed.

    Raises:
        TypeError: another type of argument. ValueError: ``every`` below 1, a scripted model, an unwritable `log`, an
            address as `tensorboard`.
        ImportError: `tensorboard` is given and TensorBoard is not installed.

    Sync: one per step for each of the loss, the scale and the learning rate that is on a device.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(model, optimizer) as w:
    ...     for batch in w.batches([torch.ones(4, 2)] * 3):
    ...         optimizer.zero_grad()
    ...         w.loss(model(batch).square().mean()).backward()
    ...         optimizer.step()
    >>> len(w.history), w.history.skip_count, len(w.findings())
    (3, 0, 0)
    """
    optimizers = optimizers_of(optimizer)
    _check_watched(model, optimizers)
    check_options(log=log, every=every, tensorboard=tensorboard)
    _check_rerun(model, loss, step)
    scalars = None if tensorboard is None else TensorBoardScalars(tensorboard)
    return Watch(model, optimizers, scaler=scaler, loss=loss, step=step, log=log, every=every, scalars=scalars)


def _check_watched(model: Any, optimizers: Sequence[Optimizer]) -> None:
    """Raise unless `model` is a module that takes hooks, with at least one optimizer."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: expected a torch.nn.Module.")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "the model is scripted and takes no hooks: expected the original module, from before torch.jit."
        )
    check_values(f"model={type(model).__name__}", list(model.parameters()))
    if not optimizers:
        raise TypeError("0 optimizers: expected a torch.optim.Optimizer, or a list of them.")


def _check_rerun(model: nn.Module, loss: Any, step: Any) -> None:
    """Raise a TypeError unless `loss` and `step` can run a step again."""
    if step is not None:
        if loss is not None:
            raise TypeError("got both loss= and step=: expected one of them; a step computes the loss itself.")
        bound_to_batch("watch", "step", step, model, (), such="lambda batch: loss_of(model, batch)")
    elif loss is not None:
        check_loss_function(loss)


def check_options(*, log: Any, every: Any, tensorboard: Any) -> None:
    """Raise a TypeError or ValueError for the first wrong option of `watch`."""
    if log is not None and not isinstance(log, str | PathLike):
        raise TypeError(f"log={log!r}: expected a folder or a .jsonl file, or None for no log.")
    if log is not None:
        check_writable(log, "log=", "Leave log= out to watch without a log.")
    if tensorboard is not None and not isinstance(tensorboard, str | PathLike):
        raise TypeError(f"tensorboard={tensorboard!r}: expected a folder, or None for no scalars.")
    if tensorboard is not None:
        given_path(tensorboard, "tensorboard")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r}: expected a whole number of steps > 0, such as 50.")
