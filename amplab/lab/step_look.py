"""The doctor's rules on steps of a running loop: the first one, and one in every thousand.

    the loop     what happens to gradients from backward to step, by a `LoopRecorder`
    the values   of every op of a forward and a backward, by a `StepWatcher`; only in the body of ``w.batches(loader)``,
                 because its modes must begin and end outside of the loop's own blocks

Nothing of the program runs a second time: no random number, collective or hook. A step that overflows shows neither, so
the next one is looked at. Notes are left to `amplab.doctor`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amplab.diagnose import Finding
from amplab.diagnose.first_nonfinite import Setting
from amplab.diagnose.observed_step.values import StepWatcher, named_tensors
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.rules.arithmetic import arithmetic_findings
from amplab.diagnose.rules.digits import digits_findings
from amplab.diagnose.rules.gradients import gradient_findings, left_over
from amplab.diagnose.rules.nonfinite import api_in_use
from amplab.diagnose.rules.updates import averages_lost, updates_lost
from amplab.diagnose.rules.values import value_findings
from amplab.diagnose.train_step.loop_recorder import LoopRecorder
from amplab.diagnose.train_step.loop_state import scales_of
from amplab.diagnose.train_step.rehearsal import Rehearsal
from amplab.display.numbers import count
from amplab.lab.scale_probe import ScaleProbe
from amplab.lab.watched_run import NO_LEVEL
from amplab.policies.casting.function_modes import OwnMode, function_modes, without_function_modes
from amplab.policies.casting.thread_scopes import THREAD
from amplab.policies.signals import is_interrupt
from amplab.scalers.unscaler import is_sharded
from amplab.trace import Trace
from amplab.trace.argument_checks import check_model
from amplab.trace.as_found import Undo
from amplab.trace.dispatch_mode import DispatchMode, current_backward, drop_ended
from amplab.trace.recorder import Recorder

__all__ = ["StepLook"]

T = TypeVar("T")
_EVERY = 1000  # steps from one look to the next
_TRIES = 20  # looks that may end because the step is skipped; then the next one is _EVERY steps later


class StepLook:
    """Looks at steps of one watched loop.

    Attributes:
        traced: the last step whose ops were seen, and its trace; None before that.

    Args:
        model: the model; if it is compiled, nothing is looked at.
        optimizers: those of the loop.
        probe: tells the scale and who scales.
        tell: called with the step and each finding above a note.
        fail: called with a sentence if a look fails; the loop goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        probe: ScaleProbe,
        tell: Callable[[int, Finding], object],
        fail: Callable[[str], object],
    ) -> None:
        self._model, self._optimizers, self._probe = model, optimizers, probe
        self._tell, self._fail = tell, fail
        self._loop: _LoopLook | None = None
        self._values: _ValueLook | None = None
        self.traced: tuple[int, Trace] | None = None  # the last step whose ops were seen, and these
        self._step = 0
        self._next_loop = self._next_values = 0  # the first step at which to look again
        self._tries = 0
        self._has_dropped = False  # a step has dropped the gradients of a backward
        self._looks = self._value_looks = 0
        self._has_batches = False
        self._grad_enabled: bool | None = None  # when the body of the last look at values began
        self._is_possible = _runs_op_by_op(model)
        self.rests = False
        self._around: tuple[list[object], list[object]] = ([], [])  # the modes in which the loop begins

    def rest(self) -> None:
        """Look at nothing: nobody may say when the loop has ended, and the mode of a look would stay on."""
        self._is_possible, self.rests = False, True

    def begin(self) -> None:
        """The loop begins. Sync: none."""
        self._around = _modes_of_others()
        self._begin_loop()

    def batch_begins(self, batch: Any) -> None:
        """The body of ``w.batches`` begins: between the blocks of the loop. Sync: several in a look."""
        self._has_batches, self._grad_enabled = True, None
        drop_ended(in_loop=True)
        if self._loop is not None and self._loop.is_over:
            self._end_loop()
        self._begin_loop()
        if self._loop is not None:
            self._loop.recorder.batch += 1
        if self._step >= self._next_values and self._values is None and self._may_begin(names_calls=True):
            with self._guarded():
                self._grad_enabled = torch.is_grad_enabled()
                self._values = _ValueLook(self._model, batch, self._probe, lambda: self._loop)
                self._values.begin()

    def batch_ends(self) -> None:
        """The body has ended. Sync: as `batch_begins`."""
        look = self._values
        if look is not None:
            with self._guarded():
                findings = look.findings()
                self._is_possible = self._is_possible and not look.meets_fast_path
                if look.is_whole:
                    self._next_values = self._seen_step + _EVERY
                    self._value_looks += 1
                for found in findings:
                    self._report(found)
                if look.trace is not None:
                    self.traced = self._seen_step, look.trace
        self._values = None  # not before: after an interrupt the end of the watch ends the look

    def interrupted(self) -> None:
        """An interrupt has ended the loop, perhaps where a block of torch ends: a look prolongs that."""
        THREAD.own.drop_ended()
        if self._grad_enabled is not None:
            torch.set_grad_enabled(self._grad_enabled)

    def see_loss(self, loss: Tensor) -> None:
        """A step's loss, before it is scaled."""
        drop_ended(in_loop=True)  # a look that has ended in the last backward
        if self._loop is None and self._values is None:
            return  # most steps
        with self._guarded():
            if self._loop is not None:
                self._loop.recorder.follow_loss(loss)
            if self._values is not None:
                self._values.see_loss(loss)

    def pause(self) -> None:
        """Other code is about to run the model: what it does is not the loop's."""
        if self._values is not None:
            self._values.is_over = True
        if self._loop is not None:
            self._loop.stop()
            self._loop = None

    def step_begins(self) -> None:
        """An optimizer is about to step: its ops have no rules, and are many."""
        if self._values is not None:
            self._values.is_over = True

    def step_ends(self, step: int, *, skipped: bool) -> None:
        """An optimizer has stepped or skipped. Sync: as `batch_begins`."""
        self._step = step + 1
        if self._values is not None:
            self._values.is_over = True
        look = self._loop
        if look is None:
            if not self._has_batches:
                self._begin_loop()
        elif look.is_over and not self._has_batches:
            self._end_loop()
        elif skipped or look.recorder.overflowed:
            found = self._found(look.recorder.rehearsal(), skipped=skipped)
            self.pause()
            self._tries += 1
            if found or self._tries > _TRIES:
                self._tries, self._next_loop = 0, self._seen_step + _EVERY
            elif not self._has_batches:
                self._begin_loop()
        else:
            look.is_over = True  # what follows the step, such as an average of the weights, belongs to it

    def end(self) -> None:
        """The loop has ended. Sync: as `batch_begins`."""
        self.batch_ends()
        if self._loop is not None:
            self._end_loop()
        drop_ended()

    def looked_at(self) -> Iterator[str]:
        """What was examined, and what the loop has to use for the rest."""
        if self.rests:
            yield "not looked at: the ops of a step; a callback has no block whose end would end the look"
            return
        if not self._is_possible:
            yield (
                "not looked at: the ops of a step; the program compiles or calls a transformer in eval mode, the model "
                "is sharded or has an RNN, or a look failed"
            )
            return
        if self._looks:
            yield f"looked at the gradients of {count(self._looks, 'step')}: unscaling, clipping, updates"
        if self._value_looks:
            yield f"looked at the values of every op of {count(self._value_looks, 'step')}"
        else:
            yield "not looked at: the values of ops; use for batch in w.batches(loader)"

    def _begin_loop(self) -> None:
        if self._loop is None and self._step >= self._next_loop and self._may_begin():
            with self._guarded():
                self._loop = _LoopLook(self._model, self._optimizers, self._probe)
                self._loop.begin(self._end_while_tracing)

    def _end_while_tracing(self) -> None:
        """End all looks: the tracer of torch.jit records what an op returns under their modes as a constant."""
        self.pause()
        if self._values is not None:
            self._values.drop()

    def _may_begin(self, *, names_calls: bool = False) -> bool:
        """Whether a look is possible now: the end of a block that the loop is in would end the mode of the look.

        Such blocks take the topmost mode off the stack: that of dispatch modes, or of function modes. A backward, whose
        hook may step an optimizer, restores all modes.

        Args:
            names_calls: whether the look has a function mode.
        """
        if _compiles():
            self._is_possible = False
            self.pause()
        now = _modes_of_others()
        is_outside = now[0] == self._around[0] and (not names_calls or now == self._around)
        return self._is_possible and is_outside and current_backward() < 0 and not _is_traced()

    def _end_loop(self) -> None:
        look = self._loop
        if look is None:
            return
        self._tries, self._next_loop = 0, self._seen_step + _EVERY
        with self._guarded():
            try:
                seen = look.recorder.rehearsal()
            finally:
                look.stop()
            self._loop = None  # not before: after an interrupt the end of the watch ends the look
            if look.recorder.failure is not None:
                raise look.recorder.failure
            self._found(seen)
            self._looks += bool(seen.stepped)

    @property
    def _seen_step(self) -> int:
        """The step that has ended last."""
        return max(self._step - 1, 0)

    @property
    def _api(self) -> Api:
        style = ApiStyle(self._probe.kind)
        if style is ApiStyle.APEX:
            return Api.of_opt_level(self._probe.opt_level.replace(NO_LEVEL, ""), style)
        return Api(style, ApiStyle.AMPLAB if style is ApiStyle.AMPLAB else ApiStyle.TORCH)

    def _found(self, seen: Rehearsal, *, skipped: bool = False) -> list[Finding]:
        """Report what a recorded step shows, and return it: of a skipped one, what an earlier step has left."""
        if skipped:
            findings = [*left_over(seen, self._api)]
        else:  # also a step that overflowed and went past its scaler
            findings = [*gradient_findings(seen, self._api), *updates_lost(seen.lost), *averages_lost(seen.averages)]
            self._has_dropped = self._has_dropped and bool(seen.dropped)  # of two steps that follow each other
        for each in findings:
            if each.name != "zero-grad-in-accumulation" or self._has_dropped:
                self._report(each)
            else:  # an iteration that was given up has dropped its gradients, too; look at the next step as well
                self._has_dropped, self._next_loop = True, self._step
        return findings

    def _report(self, found: Finding) -> None:
        if found.severity != "note":
            self._tell(self._seen_step, found)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A look that fails ends, is told once, and is not repeated."""
        try:
            yield
        except Exception as error:  # the loop goes on
            if is_interrupt(error):
                raise
            self._is_possible = False
            self.pause()
            self._fail(f"the look at step {self._step} failed: {type(error).__name__}: {error}")


def _register(hook: Callable[[nn.Module, Any], None], undo: Undo) -> None:
    """Call a hook before the forward of every module, until `undo` ends."""
    undo.register(register_module_forward_pre_hook, hook, nn.modules.module._global_forward_pre_hooks)


def _modes_of_others() -> tuple[list[object], list[object]]:
    """Return the dispatch modes and the function modes of this thread that are not amplab's."""
    dispatch: list[object] = [each for each in _get_current_dispatch_mode_stack() if not isinstance(each, DispatchMode)]
    return dispatch, [mode for mode in function_modes() if not isinstance(mode, OwnMode)]


def _compiles() -> bool:
    """Whether the program has compiled something: what it calls in a look would run as it is, for good, or raise.

    That something is referenced still is not known; `torch._dynamo.reset()` forgets it.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(backend is not None for backend in dynamo.cached_backends.values())


def _is_traced() -> bool:
    """Whether the tracer of torch.jit records what this thread computes."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]  # torch's own stubs


def _runs_op_by_op(model: nn.Module) -> bool:
    """Whether the ops of a model can be followed without changing a result: not if compiled, sharded or with an RNN.

    An RNN in float16 on the CPU runs op by op when it is followed, and each op rounds, see `followed_step`.
    """
    try:
        check_model(model)
    except (TypeError, ValueError):
        return False
    is_followed = not any(is_sharded(each) for each in model.parameters())
    return is_followed and not any(isinstance(each, nn.RNNBase) for each in model.modules())


class _LoopLook:
    """A `LoopRecorder` that is switched on from `begin` until `stop`; `is_over` once its step has ended."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], probe: ScaleProbe) -> None:
        self.recorder = LoopRecorder(model, optimizers, probe.amp)
        self.recorder.scales = scales_of(probe.amp)
        self.is_over = False
        self._undo = Undo()

    def begin(self, end_while_tracing: Callable[[], None]) -> None:
        """Switch it on; a module that `torch.jit.trace` calls in this thread ends it by calling the function."""
        thread = get_ident()

        def before(_module: nn.Module, _inputs: object) -> None:
            if _is_traced() and get_ident() == thread:
                end_while_tracing()

        _register(before, self._undo)
        self.recorder.record(self._undo)

    def stop(self) -> None:
        """Switch it off; a second call does nothing."""
        self._undo.end()


_WITH_FAST_PATH = nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder


class _ValueLook:
    """Follows the ops of this thread from `begin` until `findings`.

    Its own ops are hidden from the look that `loop` returns.
    """

    def __init__(self, model: nn.Module, batch: Any, probe: ScaleProbe, loop: Callable[[], _LoopLook | None]) -> None:
        self.is_over, self.loop = False, loop
        self.meets_fast_path = self.is_dropped = False
        self._thread = get_ident()
        self.trace: Trace | None = None
        self._probe = probe
        self._watcher = _UntilOver(StepWatcher(named_tensors(model, batch), detailed=True), self)
        self._recorder = Recorder(model, self._watcher, outlives=True)
        self._undo = Undo()

    def begin(self) -> None:
        """Switch it on."""
        _register(self._end_before, self._undo)
        self._recorder.follow(self._undo)

    def _end_before(self, module: nn.Module, _inputs: Any) -> None:
        """End before a module whose forward computes other numbers while a function mode is on, or is traced."""
        if get_ident() != self._thread:
            return
        if isinstance(module, _WITH_FAST_PATH) and not module.training:
            self.meets_fast_path = True
        if self.meets_fast_path or _is_traced():
            self.drop()

    def drop(self) -> None:
        """Switch it off, and find nothing."""
        self.is_dropped = True
        self._undo.end()

    def see_loss(self, loss: Tensor) -> None:
        with without_function_modes():
            self._watcher.inner.note_loss(loss)

    def findings(self) -> list[Finding]:
        """Stop, and return what the values show; nothing where the loss or a gradient is not finite. Sync: one."""
        self._undo.end()
        if self._recorder.failure is not None:
            raise self._recorder.failure
        if not self.is_whole or self.is_dropped:
            return []
        events = self._recorder.events[: self._watcher.seen]
        last = max((place for place, event in enumerate(events) if event.place.backward), default=None)
        if last is None:
            return []
        step = self._watcher.inner.observed(events[: last + 1], self._probe.scale())
        self.trace = step.trace
        if not step.values[step.loss].summary.is_finite:
            return []
        api = api_in_use(self._setting(), step)
        return [*value_findings(step, api), *arithmetic_findings(step, api), *digits_findings(step, api)]

    @property
    def is_whole(self) -> bool:
        """Whether every op so far has ended: not after an interrupt, or an error, in one."""
        return not self._watcher.is_in_op

    def _setting(self) -> Setting:
        level = self._probe.opt_level.replace(NO_LEVEL, "")
        return Setting(
            self._probe.scale(), api_style=ApiStyle(self._probe.kind), dynamic=self._probe.dynamic, level=level
        )


class _UntilOver:
    """Passes the tensors of ops to a watcher until its look is over; an `amplab.trace.recorder.Observer`."""

    def __init__(self, inner: StepWatcher, look: _ValueLook) -> None:
        self.inner, self._look = inner, look
        self.seen, self.is_in_op = 0, False

    def before(self, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._look.is_over or self.is_in_op:
            return None
        self.is_in_op = True
        return self._alone(self.inner.before, overload, args, kwargs)

    def after(self, seen: Any, event: Any, result: Any) -> None:
        if seen is not None and not self._look.is_over:
            self._alone(self.inner.after, seen, event, result)
            self.seen, self.is_in_op = self.seen + 1, False

    def _alone(self, measure: Callable[..., T], *given: Any) -> T:
        """Measure, which takes some tens of ops, without a record of these."""
        loop = self._look.loop()
        if loop is None:
            return measure(*given)
        try:
            loop.recorder.rests = True
            return measure(*given)
        finally:
            loop.recorder.rests = False
