"""The trainer: runs one experiment in its own thread, is controlled from any thread, and publishes events.

Controls return at once, with the new state set. Changes of the experiment (a config, a fault, a trace, a reset) wait in
a queue for the next step boundary, where the trainer's thread makes them in order. A step that accumulates many batches
is taken back for a control that would wait for it; see `Experiment.goes_on`. All events come from that thread. A single
step is in `experiment.py`, the queue in `controls.py`, the thread in `worker.py`, the subscribers in `events.py`, the
history and the log of the run in `run_store.py`, its checkpoints in `run_saver.py`.
"""

from __future__ import annotations

import atexit
import math
import os
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import cast

from amplab import kernels
from amplab.amp import MemoryUse
from amplab.amp.run_state.paths import given_path
from amplab.diagnose import Findings, run_findings
from amplab.display.numbers import count, size
from amplab.lab.batches import ReadingStopped
from amplab.lab.changes import config_changes
from amplab.lab.checkpoints import Checkpoint
from amplab.lab.comparison import Comparison, Progress, levels_of
from amplab.lab.config import FIELDS, ExperimentConfig
from amplab.lab.config_remedies import ConfigRemedy
from amplab.lab.controls import Controls
from amplab.lab.events import (
    ActivationsReady,
    Callback,
    ConfigChanged,
    Event,
    Failed,
    GradientSample,
    GradientsReady,
    InputsReady,
    LevelTraced,
    MemoryCounted,
    Publisher,
    Reading,
    RunsChanged,
    StagesReady,
    StateChanged,
    StepRecord,
    TraceReady,
    TwinReady,
    Undone,
)
from amplab.lab.experiment import Experiment, StepStopped, samples_gradients
from amplab.lab.faults import check_fault
from amplab.lab.findings import (
    LOOK_BACK,
    observed_run,
    with_explained,
    with_injected,
)
from amplab.lab.history import History
from amplab.lab.kept_runs import MOST_BYTES, KeptRun, KeptRuns
from amplab.lab.memory_count import level_memory
from amplab.lab.rank_exchange import RankExchange, RankLost
from amplab.lab.run_log.json_lines import is_number
from amplab.lab.run_saver import RunSaver
from amplab.lab.run_store import RetiredLogs, RunStore
from amplab.lab.step_explainer import StepExplainer
from amplab.lab.step_stages import StepStages
from amplab.lab.undo import UndoList
from amplab.trace import Trace
from amplab.trace.input_statistics import InputStatistics

__all__ = ["LOWEST_SPEED", "STEP_LIMIT", "Trainer", "tasks_in_use"]

STEP_LIMIT = 1_000_000
"""Steps after which a run pauses by itself, so that a forgotten run does not fill the disk."""

LOWEST_SPEED = 0.001
"""Steps per second: at a lower speed a run that goes on looks like one that hangs."""

_STEP_SECONDS = 3.0  # for the end of a step after an interrupt
_PATIENCE = 0.1  # seconds between two looks at a run that is waited for
_EXIT_SECONDS = 5.0
_PAUSE_SECONDS = 2.0  # in which a pause explains left-over skips; the others have a button


class Trainer:
    """Runs one experiment.

    States: "ready" (no step yet), "running", "paused", "stopped" (the log is closed), "failed". A reset leads from any
    of them to "ready".

    What a step raises while it reads its batches, or in a hook after an optimizer's step, pauses the run, which can go
    on: see `paused_by`. What it raises in between fails the run. Until an optimizer has begun to step, the run is then
    saved as it was before, if it has a log, and `continue_from` continues it there.

    The trainer's thread computes with one intra-op thread, which makes runs repeatable and leaves the other cores to
    the browser. Other threads keep their number.

    Trainers of one process take turns, step by step: torch has one CPU generator for all threads, which the step of a
    model that draws random numbers seeds and restores (see `register_model`). Such a run has the bits that it has
    alone, unless another thread draws during a step; and what another thread draws then is not what its seed says, and
    may come twice. The models of the lab draw none.

    Args:
        config: The experiment; None for the default one.
        log: Folder or .jsonl file of the run log, None for no log. An existing file is never overwritten.
        step_limit: Steps after which a run pauses by itself, unless a number of steps was asked for.
        exchange: With the other ranks, if several processes train this experiment together.

    Raises:
        ImportError: The task's data are not installed.
        ValueError: The batch is larger than the training set.

    >>> trainer = Trainer(ExperimentConfig(hidden=16))
    >>> trainer.run(3)
    <History: 3 steps, 0 skipped>
    >>> trainer.change(opt_level="O2")
    >>> trainer.run(1).last.opt_level
    'O2'
    """

    def __init__(
        self,
        config: ExperimentConfig | None = None,
        log: str | PathLike[str] | None = None,
        *,
        step_limit: int = STEP_LIMIT,
        exchange: RankExchange | None = None,
    ) -> None:
        self._exchange = exchange
        self._experiment = Experiment(config or ExperimentConfig(), exchange=exchange)
        self._log = None if log is None else given_path(log, "log").absolute()  # the working folder may change
        self._step_limit = step_limit
        self._publisher = Publisher()
        self._changes = UndoList()
        self._kept = KeptRuns(self._changes, self._save_dropped)
        self._comparison: Comparison | None = None
        self._store = self._new_store(self._experiment.config)
        self._retired = RetiredLogs()
        self._explainer = self._new_explainer()
        self._saver = RunSaver(exchange, self._publisher.publish)
        self._name, self._runs_begun = "Run 1", 1
        self._controls = Controls(
            step=self._train, announce=self._announce, on_idle=self._want_present, on_error=self._fail
        )
        self._worker = self._controls.worker
        self._lock = self._controls.lock  # guards the attribute below
        self._wanted = self._experiment.config  # once all changes that are queued are made
        self._memory: MemoryUse | None = None  # as last kept
        self._trace: tuple[object, TraceReady] | None = None  # the last one that was requested, and of what step
        self._failure: Failed | None = None  # of the present run; a reset has changed the state already
        self._saved_at_failure: Path | None = None  # as it was before the step that failed
        self._paused_by: Failed | None = None  # since the last start
        self._has_reported_kernels = self._has_reported_buffers = False
        self._nonfinite_buffers: tuple[str, ...] = ()
        self._experiment.task.tell_of_reading(self._goes_on_reading)
        self._experiment.goes_on = self._controls.goes_on
        kernels.ensure(on_report=_no_warning)
        _LIVE.add(self)

    @property
    def state(self) -> str:
        """One of `STATES`."""
        return self._controls.state

    @property
    def config(self) -> ExperimentConfig:
        """The config in effect; a change takes effect at the next step boundary."""
        return self._experiment.config

    @property
    def history(self) -> History:
        """The run so far; a reset starts a new history and leaves the old one unchanged."""
        return self._store.history

    @property
    def log_path(self) -> Path | None:
        """The file of the run log, None before the first step and without a log."""
        return self._store.log_path

    @property
    def loss_scale(self) -> float:
        """The scale that the next step will use."""
        return self._experiment.loss_scale

    @property
    def shrinking(self) -> bool:
        """Whether an injected underflow is on."""
        return self._experiment.shrinking

    @property
    def draws(self) -> bool:
        """Whether a step, or a look at one, draws random numbers: it then seeds the generators, and restores them."""
        return self._experiment.draws

    @property
    def nonfinite_buffers(self) -> tuple[str, ...]:
        """Names of buffers that hold inf or NaN, and did not at first, as seen with the last score or bad loss."""
        return self._nonfinite_buffers

    @property
    def armed(self) -> frozenset[str]:
        """The faults that will go into the next step."""
        return self._experiment.armed

    @property
    def kept(self) -> KeptRuns:
        """The runs beside the present one: those that a reset replaced, and those of `compare`."""
        return self._kept

    @property
    def present_name(self) -> str:
        """The name that the present run has among the kept ones once it is kept."""
        return self._name

    @property
    def has_begun(self) -> bool:
        """Whether there was a step, a change or a comparison: a run, or a list of changes, that a new trainer lacks."""
        has_run = self._controls.steps_made > 0 or self.comparison is not None or bool(self._kept.runs)
        return has_run or self.last_change is not None

    @property
    def last_change(self) -> str | None:
        """What `undo` would take back, in words; None for nothing."""
        return self._changes.last

    @property
    def comparison(self) -> Progress | None:
        """How far `compare` is, None while it does not run."""
        comparison = self._comparison
        return None if comparison is None else comparison.progress

    @property
    def speed(self) -> float | None:
        """Steps per second at most, None for full speed; see `set_speed`."""
        return self._controls.speed

    @property
    def failures(self) -> tuple[Failed, ...]:
        """The last failures, for a view that is opened later."""
        return self._publisher.failures

    @property
    def paused_by(self) -> Failed | None:
        """What has paused the run since its last start, such as a batch that could not be read; None for nothing."""
        return self._paused_by

    def findings(self) -> Findings:
        """Return what the rules find in this run, the most harmful first.

        They read the last steps, the skipped steps that were explained, and an examination by `amplab.doctor` of the
        step after the first one and after each change, without its notes. What was found in single steps before the
        latest change of the config is left out, and so are steps that were skipped because of an injected fault.
        """
        store, config = self._store, self.config
        history = store.history
        interval = config.growth_interval if config.is_dynamic else None
        observed = observed_run(history, config, growth_interval=interval)
        left_out = min(len(history), LOOK_BACK) - len(observed)
        changes = (each.step for each in history.changes if each.field not in ("start", "fault", "restart"))
        since = max(changes, default=0)
        of_steps = [(step, each) for step, each in (*store.found, *store.examined) if step >= since]
        ranked = with_explained(run_findings(observed), of_steps, history.skipped_steps())
        ranked = with_injected(ranked, history)
        looked_at = [f"looked at {count(len(history), 'step')}"]
        if left_out:
            looked_at.append(f"left out {count(left_out, 'step')} that an injected fault made skip")
        return replace(ranked, looked_at=tuple(looked_at))

    def memory(self) -> MemoryUse:
        """Return the bytes of parameters, gradients, masters and optimizer state; see `Experiment.memory`."""
        return self._experiment.memory()

    def score(self) -> float | None:
        """Measure the task's score on held-out data at the next step boundary and return it; None if it has none."""
        return self._worker.ask(lambda: self._experiment.score())  # noqa: PLW0108  a reset replaces the experiment

    def __repr__(self) -> str:
        """Return one line with the state and the config."""
        return f"<Trainer {self.state} at step {len(self.history)}: {self.config}>"

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with every event, in the trainer's thread; return a function that ends this."""
        return self._publisher.subscribe(callback)

    def start(self, steps: int | None = None) -> None:
        """Train until paused, or for `steps` more steps.

        Raises:
            RuntimeError: The run has stopped or failed; call reset() first.
            ValueError: `steps` is not a whole number > 0.
        """
        if steps is not None:
            _check_steps(steps)
        with self._lock:
            self._controls.refuse_unless_alive("start()")
            self._paused_by = None
            self._controls.start(steps)

    def resume(self) -> None:
        """Continue after a pause; the same as `start()`."""
        self.start()

    def pause(self) -> None:
        """Stop training at the next step boundary; no effect if nothing runs.

        A step that accumulates several batches is taken back after the present one, unless the model is one's own.
        """
        self._controls.pause()

    def step(self) -> None:
        """Train one step, then pause. A change that is made meanwhile waits for it; a reset and a stop do not.

        Raises:
            RuntimeError: The run has stopped or failed; call reset() first.
        """
        with self._lock:
            self._controls.refuse_unless_alive("step()")
            self._worker.post(self._train_once)
            self._controls.enter("paused")

    def step_in_stages(self, parameter: str | None = None) -> None:
        """Train one step that is recorded in its stages, then pause; a `StagesReady` follows its `StepRecord`.

        The step is the one that `step()` would have made, bit for bit.

        Args:
            parameter: Name of the parameter that is recorded even if the model is too large to record all.

        Raises:
            RuntimeError: The run has stopped or failed; call reset() first.
        """
        with self._lock:
            self._controls.refuse_unless_alive("step_in_stages()")
            self._worker.post(partial(self._train_in_stages, parameter))
            self._controls.enter("paused")

    def set_speed(self, speed: float | None) -> None:
        """Limit how many steps the run takes per second, from now on; the steps themselves do not change.

        Controls still take effect at once. The speed is kept by a reset.

        Args:
            speed: Steps per second, a number >= `LOWEST_SPEED`; None for full speed.

        Raises:
            ValueError: Another value.
        """
        if speed is not None and not (is_number(speed) and speed >= LOWEST_SPEED):
            raise ValueError(
                f"speed={speed!r}: expected steps per second, a number >= {LOWEST_SPEED}, or None for full speed."
            )
        if speed != self.speed:
            text = "Speed: full speed" if speed is None else f"Speed: {speed:g} steps/s"
            self._changes.record(text, partial(self._controls.pace, self.speed), kind="speed")
            self._controls.pace(speed)

    def stop(self) -> None:
        """End the run and close its log. A reset starts a new run."""
        with self._lock:
            self.stop_comparison()
            self._controls.stops += 1
            self._controls.enter("stopped")
            self._worker.post(self._end_logs)

    def reset(self, config: ExperimentConfig | None = None, *, name: str | None = None) -> None:
        """Start again from the seed: new weights, an empty history, a new log. The present run is kept in `kept`.

        Args:
            config: The new experiment; None for the current one.
            name: Name of the new run among the kept ones; None for the next number.

        Raises:
            ValueError: Its task is code of one's own that this process does not have, or its batch is larger than the
                training set.
        """
        self._reset(config or self._wanted, lambda: self._rebuild(config or self.config, name))

    def reset_with(self, **fields: object) -> None:
        """Start again, as `reset`, with some fields of the config changed; changes that are queued are made first.

        Raises:
            ValueError: An unknown field, or a value that the field does not accept.
        """
        with self._lock:
            self._reset(self._wanted.changed(**fields), lambda: self._with_changed(fields, self._rebuild))

    def _reset(self, wanted: ExperimentConfig, rebuild: Callable[[], object]) -> None:
        self._experiment.check_task(wanted)
        with self._lock:
            self._wanted = wanted
            self._controls.change(rebuild)
            self._controls.enter("ready", again=True)

    def change(self, **fields: object) -> None:
        """Change fields of the config at the next step boundary; weights and optimizer state are kept.

        A new opt_level drops the overrides that have no meaning there.

        Raises:
            ValueError: An unknown field, a value that the field does not accept, or a field that needs new weights.
        """
        with self._lock:
            config = self._wanted.changed(**fields)
            self._experiment.check_switch(self._wanted, config)
            self._wanted = config
            self._controls.change(lambda: self._with_changed(fields, self._switch))

    def apply(self, remedy: ConfigRemedy) -> None:
        """Make the change of a remedy: at the next step boundary, or by starting again if it says so.

        Raises:
            ValueError: The config has changed since, and refuses the change.
        """
        if not remedy.restarts:
            self.change(**remedy.changes)
            return
        with self._lock:
            self.reset_with(**remedy.changes)
            self.start()

    def undo(self) -> None:
        """Take back the latest change of the config, fault, reset or change of `kept`; no effect if there is none.

        A changed config is put back with the weights as they are. A reset is taken back by continuing the run that it
        replaced. An `Undone` event says what was taken back.
        """
        self._controls.change(self._take_back)

    def continue_from(self, run: KeptRun) -> None:
        """Continue a kept run, bit for bit as if it had not been replaced; the present run is kept.

        Raises:
            ValueError: The run is not kept any more or is in training, or has no weights from before it failed, or
                since they were dropped, in memory or on disk.
        """
        self._kept.check_can_continue(run)
        with self._lock:
            self._wanted = run.config
            self._controls.change(partial(self._bring_back, run))

    def continue_saved(self, checkpoint: Checkpoint) -> None:
        """Continue a run of another process from its checkpoint, bit for bit as if not interrupted; then pause.

        The present run is kept. The new log begins with the steps up to the checkpoint; the old one does not change. A
        checkpoint that cannot be read is a `Failed`, and the present run does not change.
        """
        self._controls.change(partial(self._restore, checkpoint))

    def compare(self, configs: Sequence[ExperimentConfig] | None = None, *, steps: int = 300) -> None:
        """Train other experiments beside this one, one after the other, each `steps` steps; they are added to `kept`.

        This experiment waits meanwhile and does not change. `stop_comparison` ends it, and so does another call.

        Args:
            configs: The experiments; None for this one at each opt_level, from the same seed.
            steps: Steps of each.

        Raises:
            ValueError: `steps` is not a whole number > 0.
        """
        _check_steps(steps)
        with self._lock:
            self.stop_comparison()
            chosen = levels_of(self._wanted) if configs is None else configs
            self._worker.post(partial(self._begin_comparison, chosen, steps))

    def stop_comparison(self) -> None:
        """End `compare` at the next step boundary; what was trained stays in `kept`."""
        if (comparison := self._comparison) is not None:
            comparison.stop()
            self._controls.withdraw()

    def request_activations(self) -> None:
        """Request an `ActivationsReady` at the next step boundary; it takes the time of a few steps."""
        self._request("activations", lambda: ActivationsReady(self._experiment.activations()))

    def request_twin(self) -> None:
        """Request a `TwinReady` at the next step boundary; it takes the time of about 30 steps.

        Raises:
            ValueError: The task has several models or optimizers, which twins do not.
        """
        self._experiment.check_twin()
        self._request("twin", lambda: TwinReady(self._experiment.twin(), len(self.history)))

    def inject(self, fault: str, *, on: bool | None = None) -> None:
        """Disturb the next step: "overflow", "nan", or "underflow", which stays on until it is switched off.

        Args:
            fault: One of `FAULTS`; see `Experiment.inject`.
            on: True or False to switch; None arms "overflow" and "nan" for one step and toggles "underflow".

        Raises:
            ValueError: There is no such fault.
        """
        check_fault(fault)
        self._worker.post(partial(self._disturb, fault, on))

    def request_trace(self) -> None:
        """Request a `TraceReady` at the next step boundary, which is now if nothing runs; of each step there is one."""
        self._request("trace", self._trace_ready)

    def trace(self) -> Trace:
        """Record the next step op by op, at the next step boundary, and return it; the run is not changed."""
        return self._worker.ask(lambda: self._experiment.trace())  # noqa: PLW0108  a reset replaces the experiment

    def module_names(self) -> tuple[str, ...]:
        """Return the names of the model's modules, of which `float32_modules` of the config may list some."""
        return self._experiment.module_names()

    def request_trace_at(self, opt_level: str) -> None:
        """Request a `LevelTraced`: the step of a fresh model at another level; the run is not changed.

        Raises:
            ValueError: There is no such level.
        """
        config = self._wanted.changed(opt_level=opt_level)
        self._request(f"trace at {opt_level}", lambda: LevelTraced(Experiment(config).trace(), opt_level))

    def request_inputs(self, index: int) -> None:
        """Request an `InputsReady` of the op with this number in a trace, measured at the next step boundary.

        Raises:
            ValueError: `index` is not a whole number >= 0.
        """
        _check_number(index=index)

        def measure() -> Event:
            inputs = InputStatistics(index)
            self._experiment.trace(inputs)
            return InputsReady(index, inputs.inputs, len(self.history))

        self._request(f"inputs of op {index}", measure)

    def request_memory(self, opt_level: str) -> None:
        """Request a `MemoryCounted` of this experiment at a level, counted on a fresh model; the run is not changed.

        Raises:
            ValueError: There is no such level.
        """
        config = self._wanted.changed(opt_level=opt_level)
        self._request(f"memory at {opt_level}", lambda: MemoryCounted(level_memory(config)))

    def request_gradients(self) -> None:
        """Request a `GradientsReady` at the next step boundary, which is now if nothing runs."""
        self._request("gradients", lambda: GradientsReady(self._experiment.gradients()))

    def request_explanation(self, step: int) -> None:
        """Request a `SkipExplained` of a skipped step.

        Its explanation is None if the step was not explained before and is not kept any more; see `explainable`.

        Raises:
            ValueError: `step` is not the number of a step.
        """
        _check_number(step=step)
        self._worker.post(lambda: self._explainer.answer(step))

    def request_stages(self, step: int, parameter: str | None = None) -> None:
        """Request a `StagesReady` of a skipped step, which runs again beside the run; see `walkable`.

        Its stages are None if the step is not kept any more, as after a reset.

        Args:
            step: Number of the step.
            parameter: As in `step_in_stages`.

        Raises:
            ValueError: `step` is not the number of a step.
        """
        _check_number(step=step)
        self._request(f"step {step} in stages", lambda: StagesReady(self._explainer.stages(step, parameter), step))

    @property
    def explainable(self) -> tuple[int, ...]:
        """The skipped steps that can run again: the latest ones, and the last step."""
        return self._explainer.explainable

    @property
    def walkable(self) -> tuple[int, ...]:
        """The skipped steps that `request_stages` can record: those of one optimizer that are kept."""
        return self._explainer.walkable

    def run(self, steps: int) -> History:
        """Train `steps` steps and return the history when they are done; an interrupt pauses at a step boundary.

        After an interrupt it waits for the end of the present step, at most 3 seconds.
        If another thread starts the experiment meanwhile, without a limit, it goes on.

        Raises:
            RuntimeError: The experiment is running already, has stopped or failed, or fails in one of these steps; or
                the run is paused because a batch cannot be read or a hook of an optimizer has raised; see `paused_by`.
            ValueError: `steps` is not a whole number > 0.
        """
        _check_steps(steps)
        try:
            with self._lock:
                self._worker.refuse_at_end()
                if self.state == "running":
                    raise RuntimeError(f"run({steps}): the experiment is running already; call pause() first.")
                end = self._controls.steps_made + steps
                self.start(steps)
            while not self.wait(_PATIENCE) and self._controls.steps_made <= end:
                pass  # more steps than these only if it was started again
        except KeyboardInterrupt:
            self.pause()
            self.wait(_STEP_SECONDS)
            raise
        if self.state == "failed":
            told = [failure.text for failure in self.failures if failure.fatal]  # none if another thread resets now
            raise RuntimeError(f"run({steps}): failed at step {len(self.history)}. {''.join(told[-1:])}")
        if (paused_by := self._paused_by) is not None:
            raise RuntimeError(f"run({steps}): paused at step {len(self.history)}. {paused_by.text}")
        return self.history

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing runs and every control has taken effect; return whether that took at most `timeout` s.

        Raises:
            RuntimeError: Called in a callback, that is in the trainer's own thread.
        """
        return self._worker.wait(timeout)

    # Any thread

    def _request(self, name: str, answer: Callable[[], Event]) -> None:
        def publish() -> None:
            self._attempt(f"{name} failed; the run is not changed.", lambda: self._publisher.publish(answer()))

        self._controls.answer(name, publish)

    def _want_present(self) -> None:
        self._wanted = self.config

    # The trainer's thread, between two steps

    def _train(self, step: Callable[[], StepRecord] | None = None) -> None:
        self._controls.begin_step()
        samples = list[GradientSample]()
        if samples_gradients(self._experiment.steps_done):
            self._attempt("gradients failed.", lambda: samples.append(self._experiment.gradients().sample))
        try:
            record = _timed_step(partial(self._keeping, samples, step or self._experiment.step), self._store)
        except RankLost as lost:
            self._fail(str(lost))
            return
        except (ReadingStopped, StepStopped):
            self._controls.leave_step()
            return
        except BaseException:  # whatever reading raises, the run is as before
            if self._experiment.phase != "batches" or self._exchange is not None:  # other ranks wait in the step
                raise
            text = f"The batch of step {len(self.history)} could not be read. The run is paused and unchanged"
            self._pause_by(f"{text}: Start reads it again.", traceback.format_exc())
            return
        if (mixed := self._experiment.mixed_scales) is not None:
            self._store.keep_scales(mixed)
        if (memory := self._experiment.memory()) is not self._memory:
            self._memory = memory
            self._store.keep_memory(record.step, memory)
        self._publisher.publish(record)
        self._explainer.after(record)
        if record.score is not None:
            self._report_kernels()
        if self._experiment.score_failure:
            self._publisher.publish(
                Failed(f"The held-out score failed.\n{self._experiment.score_failure}", attempted=True)
            )
            self._experiment.score_failure = ""
        if raised := self._experiment.hook_failure:
            text = f"A hook of the optimizer raised after step {record.step}. The step is complete"
            self._pause_by(f"{text}, and the run is paused: Start makes the next one.", raised)
        if record.score is not None or not math.isfinite(record.loss):
            self._nonfinite_buffers = self._experiment.nonfinite_buffers()
        if not math.isfinite(record.loss):
            self._report_buffers(record.step)
        self._save()
        self._retired.write()
        if self._exchange is not None and "stop" in self._exchange.agreed:
            self.pause()
        self._controls.count_step()
        if self._experiment.steps_done >= self._step_limit and self._controls.steps_left is None:
            self._end_at_limit()

    def _keeping(self, samples: list[GradientSample], step: Callable[[], StepRecord]) -> StepRecord:
        """Train one step and keep a histogram of its gradients, unless it was stopped: it comes again."""
        try:
            return step()
        except BaseException:
            samples.clear()  # the step comes again, or the run ends
            raise
        finally:
            for sample in samples:
                self._store.keep(sample)

    def _trace_ready(self) -> TraceReady:
        """Trace the next step once: a dashboard that is opened later gets the same trace."""
        present = self._store.run, len(self.history), self.config
        if self._trace is None or self._trace[0] != present:
            self._trace = present, TraceReady(self._experiment.trace(), len(self.history), self.config.opt_level)
        return self._trace[1]

    def _pause_by(self, text: str, raised: str) -> None:
        """Pause and save the run between two steps, since something of its owner's has raised."""
        if (saved := self._save(at_rest=True)) is not None:
            text = f"{text} Its checkpoint is {saved}."
        failure = Failed(f"{text}\n{raised}", attempted=True)
        with self._lock:
            self._paused_by = failure
            self.pause()
        self._publisher.publish(failure)

    def _goes_on_reading(self, left: int) -> bool:
        """Tell how many batches are still to be read; stop when a pause or a reset is wanted."""
        self._publisher.publish(Reading(len(self.history), left))
        return self._controls.is_announced

    def _train_once(self) -> None:
        if self.state != "failed":  # since step() was called
            with self._controls.withdrawable(is_asked_for=True):
                self._train()
            self._explain_last()

    def _explain_last(self) -> None:
        """Explain the last step if it was skipped; of many batches that takes long, and controls end it."""
        with self._controls.withdrawable():
            self._explainer.explain_last()

    def _begin_to_explain(self) -> None:
        """Explain the rows of skips that have no reason, the newest first, while the run is paused."""
        self._explain_left_over(self._explainer, self._explainer.left_over(), time.monotonic() + _PAUSE_SECONDS)

    def _explain_left_over(self, explainer: StepExplainer, steps: list[int], end: float) -> None:
        """Explain one step, and post the rest: controls take effect in between."""
        is_wanted = self.state == "paused" and explainer is self._explainer and time.monotonic() < end
        with self._controls.withdrawable():
            is_explained = is_wanted and bool(steps) and explainer.explain_past(steps.pop())
        if is_explained:
            self._worker.post(partial(self._explain_left_over, explainer, steps, end))
        else:
            explainer.end_past()

    def _train_in_stages(self, parameter: str | None) -> None:
        if self.state == "failed":  # since step_in_stages() was called
            return
        recorded: list[StepStages] = []

        def step() -> StepRecord:
            record, stages = self._experiment.step_in_stages(parameter)
            recorded.append(stages)
            return record

        with self._controls.withdrawable(is_asked_for=True):
            self._train(step)
        if recorded:  # else its batch could not be read
            self._explain_last()
            self._publisher.publish(StagesReady(recorded[0], recorded[0].record.step))

    def _end_at_limit(self) -> None:
        with self._lock:
            if self.state == "running":
                note = f"{self._step_limit} steps are done, the limit of one run; call reset() to start again."
                self._controls.enter("paused", note)

    def _announce(self, state: str, note: str) -> None:
        self._report_kernels()
        if state != "running":
            self._store.flush()
            self._retired.write()
        if state in ("paused", "stopped"):
            self._save(at_rest=True)
        self._publisher.publish(StateChanged(state, len(self.history), note))
        if state == "paused":
            self._explain_last()
            self._begin_to_explain()

    def _with_changed(self, fields: Mapping[str, object], act: Callable[[ExperimentConfig], bool]) -> bool:
        """Act with fields of the config in effect changed: an undo before it in the queue may have changed others."""
        try:
            config = self.config.changed(**fields)
        except ValueError as error:
            self._publisher.publish(Failed(f"The change is not possible any more: {error}", attempted=True))
            return False
        return act(config)

    def _switch(self, config: ExperimentConfig, *, is_undo: bool = False) -> bool:
        """Change the config of the present run; return whether it is in effect."""
        previous, step = self.config, len(self.history)
        if config == previous:
            return True
        try:
            self._experiment.switch(config)
        except BaseException:  # noqa: BLE001 - as an optimizer of one's own that cannot be built; the run goes on
            text = f"{_in_words(previous, config)}: not possible; the run is not changed.\n{traceback.format_exc()}"
            self._publisher.publish(Failed(text, attempted=True))
            return False
        if not is_undo:
            values = {name: getattr(previous, name) for name in FIELDS}
            fields = {name: value for name, value in values.items() if value != getattr(config, name)}
            take_back = partial(self._with_changed, fields, partial(self._switch, is_undo=True))
            self._changes.record(_in_words(previous, config), take_back, self._while_present())
        self._explainer.examine_next()
        self._store.change(config, previous, step=step)
        self._publisher.publish(ConfigChanged(config, previous, step))
        self._save_change()
        return True

    def _while_present(self) -> Callable[[], bool]:
        """Return a function that says whether the run that is present now is the present one; it holds no weights."""
        run = self._store.run
        return lambda: self._store.run is run

    def _rebuild(self, config: ExperimentConfig, name: str | None = None, *, undone: object = None) -> bool:
        """Begin a run in place of the present one, or again the run `undone`, which had no step; return whether."""
        previous, steps = self.config, len(self.history)
        try:
            experiment = Experiment(config, exchange=self._exchange)
        except BaseException:  # noqa: BLE001 - as a task without its data; the present run is whole
            text = f"The new run cannot begin; a reset keeps the present one.\n{traceback.format_exc()}"
            if self._exchange is None:
                self._save(at_rest=True)  # a failed run is not saved any more
            self._end_in_failure(Failed(text, fatal=True))
            return False
        replaced = self._retire()
        if undone is None:
            text = ", ".join(filter(None, [f"Reset at step {steps:,}" if steps else "", _in_words(previous, config)]))
            if text:  # a run without a step and with the same config is the same run
                self._record_replacing(text, replaced, previous)
        self._runs_begun += 1
        store = self._new_store(config)
        store.run = undone or store.run
        self._present(name or f"Run {self._runs_begun}", experiment, store, previous)
        return True

    def _record_replacing(self, text: str, replaced: KeptRun | None, previous: ExperimentConfig) -> None:
        """Record that another run is present; undo continues the replaced one, or starts one with its config."""
        if replaced is not None:
            can_continue = partial(self._kept.can_continue, replaced)
            self._changes.record(text, partial(self._bring_back, replaced, is_undo=True), can_continue)
        else:
            self._changes.record(text, partial(self._rebuild, previous, undone=self._store.run))

    def _present(self, name: str, experiment: Experiment, store: RunStore, previous: ExperimentConfig) -> None:
        """Train another experiment from now on."""
        self._name, self._experiment, self._store = name, experiment, store
        self._experiment.task.tell_of_reading(self._goes_on_reading)
        self._experiment.goes_on = self._controls.goes_on
        self._explainer = self._new_explainer()
        self._failure = self._saved_at_failure = self._paused_by = None
        self._has_reported_buffers = False
        self._nonfinite_buffers = experiment.nonfinite_buffers()
        self._publisher.forget_run()
        self._memory = None
        self._publisher.publish(ConfigChanged(experiment.config, previous, len(store.history), reset=True))

    def _retire(self) -> KeptRun | None:
        """Keep the present run and return it; None if it has no step."""
        self._retired.add(self._store)
        if not len(self.history):
            return None
        kept = self._kept.keep(
            self._name, self.config, self._store, self._experiment, failure=self._failure, saved=self._saved_at_failure
        )
        self._worker.post(partial(self._measure, kept))
        return kept

    def _end_logs(self) -> None:
        with self._lock:
            self._controls.stops -= 1
        self._store.close()
        self._retired.close()
        self._saver.end()
        self._experiment.task.rest()

    def _bring_back(self, run: KeptRun, *, is_undo: bool = False) -> bool:
        """Continue a kept run in place of the present one; return whether it does."""
        if not self._kept.can_continue(run):
            return False  # dropped since it was asked for
        is_read = run.is_saved and (run.experiment is None or run.failure is not None)
        experiment = self._read_back(run) if is_read else run.experiment
        if experiment is None:
            return False
        failure = None if is_read else run.failure
        self._kept.take(run)  # first: keeping the present run may drop the oldest one, or its weights
        previous, replaced = self.config, self._retire()
        if not is_undo:
            self._record_replacing(f"Continued {run.name}", replaced, previous)
        self._retired.take_back(run.store)
        run.store.reopen()
        self._present(run.name, experiment, run.store, previous)
        self._tell_left_out(run.name, experiment)
        self._failure = failure
        if failure is not None:
            self._publisher.publish(failure)
        with self._lock:
            if not self._controls.stops and (self.state != "running" or failure):
                self._controls.enter("failed" if failure else "paused", again=True)
        return True

    def _read_back(self, run: KeptRun) -> Experiment | None:
        """Return the experiment of a kept run from its checkpoint; None, which is told, if it cannot be read."""
        try:
            return Experiment.load(cast(Path, run.saved), run.config)[0]
        except BaseException:  # noqa: BLE001 - also of a function of one's own that makes the model
            text = f"{run.name} cannot continue from {run.saved}; the present run is not changed."
            self._publisher.publish(Failed(f"{text}\n{traceback.format_exc()}", attempted=True))
            return None

    def _save_dropped(self, run: KeptRun) -> Path | None:
        """Save a kept run whose weights are about to be dropped, or tell that it cannot continue any more."""
        if run.is_compared or run.failure is not None or run.experiment is None:
            return None
        saved = None
        if self._exchange is None:  # ranks save together
            saved = self._saver.save(run.experiment, run.store, is_running=False, at_rest=True)
        if saved is None:
            self._report(
                f"{run.name} cannot continue any more: its weights, gradients and optimizer states have "
                f"{size(run.memory.total)}, runs beside the present one keep {size(MOST_BYTES)} in memory, and there "
                "is no checkpoint of its last step. Its history and its setting are kept."
            )
        return saved

    def _restore(self, saved: Checkpoint) -> None:
        """Continue a saved run in place of the present one."""
        try:
            experiment, store = self._restored(saved)
        except (OSError, RuntimeError, ValueError) as error:
            self._publisher.publish(Failed(f"The {saved.name} cannot continue: {error}"))
            return
        except BaseException:  # noqa: BLE001 - of a function of one's own that makes the model; the present run is whole
            text = f"The {saved.name} cannot continue; the run is not changed.\n{traceback.format_exc()}"
            self._publisher.publish(Failed(text, attempted=True))
            return
        previous, replaced = self.config, self._retire()
        self._record_replacing(f"Continued the {saved.name}", replaced, previous)
        self._runs_begun += 1
        self._present(saved.name.capitalize(), experiment, store, previous)
        self._tell_left_out(f"The {saved.name}", experiment)
        if self._exchange is not None:
            store.restart(step=experiment.steps_done)
        with self._lock:
            if not self._controls.stops:
                self._controls.enter("paused", again=True)

    def _tell_left_out(self, name: str, experiment: Experiment) -> None:
        """Tell what a checkpoint could not hold of an experiment that was read from one."""
        if experiment.left_out:
            text = f"{name} continues, and {', '.join(experiment.left_out)} begins anew"
            self._publisher.publish(Failed(f"{text}: a checkpoint holds numbers, tensors and text.", attempted=True))

    def _restored(self, saved: Checkpoint) -> tuple[Experiment, RunStore]:
        """Return the experiment and the store of a saved run; a new log that later steps cannot follow is removed."""
        experiment, log = saved.restore(self._exchange)
        try:
            return experiment, RunStore.of_log(log, self._report, steps=saved.step)
        except (OSError, ValueError) as error:
            if self._exchange is None:
                log.unlink(missing_ok=True)
            raise ValueError(str(error).replace(str(log), str(saved.log))) from error

    def _save(self, *, at_rest: bool = False) -> Path | None:
        """Save the run, if it is time, and return its checkpoint if that is of the present step.

        One that has failed is not whole: its weights may have that step already.
        """
        if self._failure is not None:
            return None
        is_running = self.state == "running"
        return self._saver.save(self._experiment, self._store, is_running=is_running, at_rest=at_rest)

    def _save_change(self) -> None:
        """Save what was changed while the run is paused: its process may end before the next step."""
        is_last = self._controls.changes_left < 2  # a slider queues many, and each checkpoint takes time
        if self.state == "paused" and is_last and self._exchange is None:  # other ranks may not be paused yet
            self._save(at_rest=True)

    def _take_back(self) -> None:
        text = self._changes.take_back()
        if text is not None:
            self._publisher.publish(Undone(text))

    def _measure(self, run: KeptRun) -> None:
        """Measure what a kept run shows beside its history."""
        experiment = run.experiment
        if experiment is not None:
            self._attempt("The held-out score failed.", lambda: setattr(run, "held_out", experiment.score()))
            self._attempt("Counting kept bytes failed.", lambda: setattr(run, "activations", experiment.activations()))
            run.memory = experiment.memory()
            experiment.task.rest()
        self._kept.touch()
        self._publisher.publish(RunsChanged())

    def _begin_comparison(self, configs: Sequence[ExperimentConfig], steps: int) -> None:
        def begin(config: ExperimentConfig) -> KeptRun:
            name = FIELDS["opt_level"].shown(config.opt_level)
            store, experiment = self._new_store(config), Experiment(config)
            experiment.goes_on = self._controls.goes_on
            return self._kept.keep(name, config, store, experiment, is_compared=True, is_training=True)

        def train(run: KeptRun) -> None:
            if run.experiment is None:
                raise RuntimeError("the run was removed")
            with suppress(StepStopped):
                _timed_step(run.experiment.step, run.store)
                if raised := run.experiment.hook_failure:
                    raise RuntimeError(f"a hook of the optimizer raised {Failed(raised).error}")

        def end(run: KeptRun, error: str) -> None:
            run.is_training, run.error = False, error
            self._retired.add(run.store)
            self._measure(run)

        self._comparison = Comparison(configs, steps, begin=begin, train=train, end=end)
        self._advance_comparison()

    def _advance_comparison(self) -> None:
        comparison = self._comparison
        if comparison is None:
            return
        goes_on = False
        try:
            with self._controls.withdrawable():
                goes_on = comparison.advance()
        except BaseException:  # noqa: BLE001 - the present run goes on
            self._publisher.publish(Failed(f"The comparison ended.\n{traceback.format_exc()}"))
        self._kept.touch()
        self._publisher.publish(RunsChanged())
        if goes_on:
            self._worker.post(self._advance_comparison)
        else:
            self._comparison = None

    def _disturb(self, fault: str, on: bool | None, *, is_undo: bool = False) -> None:
        was_on = fault in self._experiment.armed
        self._experiment.inject(fault, on=on)
        is_on = fault in self._experiment.armed
        if is_on != was_on and not is_undo:
            is_present = self._while_present()
            self._changes.record(
                f"{'NaN' if fault == 'nan' else fault.capitalize()} {'on' if is_on else 'off'}",
                partial(self._disturb, fault, was_on, is_undo=True),
                lambda: is_present() and (fault in self._experiment.armed) == is_on,
            )
        if fault == "underflow":
            self._explainer.examine_next()
        armed = self._experiment.shrinking if fault == "underflow" else on is not False
        self._store.inject(fault, step=len(self.history), on=armed)
        self._save_change()

    def _report_kernels(self) -> None:
        """Report once that a build of the kernels has failed."""
        report = kernels.report()
        if report.status == "failed" and not self._has_reported_kernels:
            self._has_reported_kernels = True
            self._publisher.publish(Failed(str(report)))

    def _report_buffers(self, step: int) -> None:
        """Report once that a bad batch has changed the model although its step was skipped."""
        if self._has_reported_buffers or not (names := self._nonfinite_buffers):
            return
        self._has_reported_buffers = True
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = (
            f"Step {step} left NaN or inf in {names[0]}{more}: BatchNorm updates its running statistics in the forward "
            f"pass, before a step can be skipped. Held-out data are scored with these statistics. Reset to start "
            f"again; in a loop of your own check the batch before the forward pass."
        )
        self._publisher.publish(Failed(text, damaged=True))

    def _new_store(self, config: ExperimentConfig) -> RunStore:
        return RunStore(config, log=self._log, on_failure=self._report)

    def _new_explainer(self) -> StepExplainer:
        return StepExplainer(self._experiment, self._store, self._publisher.publish, self._attempt)

    def _report(self, text: str) -> None:
        self._publisher.publish(Failed(text))

    def _attempt(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except (ReadingStopped, StepStopped):
            return  # the run is paused, and what was wanted of the step with it
        except BaseException:  # noqa: BLE001 - a trace that fails does not end the run
            self._publisher.publish(Failed(f"{what}\n{traceback.format_exc()}", attempted=True))

    def _fail(self, text: str) -> None:
        what = f"The run failed at step {len(self.history)}."
        self._saved_at_failure = self._saved_at_failure or self._save_before_step()
        if (saved := self._saved_at_failure) is not None and len(self.history):  # a run without a step is not kept
            what = f"{what} It is saved as it was before that step: reset it, then continue it under Runs. ({saved})"
        self._failure = Failed(f"{what}\n{text}", fatal=True)
        self._end_in_failure(self._failure)

    def _save_before_step(self) -> Path | None:
        """Save the run as it was before the step that has raised, if that is possible; return its checkpoint."""
        try:
            is_whole = self._exchange is None and self._experiment.take_back()
            return self._save(at_rest=True) if is_whole else None
        except BaseException:  # noqa: BLE001 - what the step has raised is told
            return None

    def _end_in_failure(self, failure: Failed) -> None:
        if self._exchange is not None:
            self._exchange.is_over = True
        with self._lock:
            self._controls.enter("failed")
        self._store.flush()
        self._publisher.publish(failure)


def _timed_step(step: Callable[[], StepRecord], store: RunStore) -> StepRecord:
    """Train one step, and keep it with the time that it took."""
    began = time.perf_counter()
    record = step()
    store.seconds += time.perf_counter() - began
    store.append(record)
    return record


def _in_words(previous: ExperimentConfig, config: ExperimentConfig) -> str:
    return ", ".join(change.text for change in config_changes(previous, config, 0))


def _check_steps(steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: expected a whole number > 0, such as 300.")


def _check_number(**given: object) -> None:
    """Raise a ValueError unless an argument is the number of a step or of an op; not in the trainer's thread."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
            raise ValueError(f"{name}={value!r}: expected a whole number >= 0, such as 12.")


_LIVE: weakref.WeakSet[Trainer] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LIVE.clear)  # a forked process has none of their threads


def tasks_in_use() -> set[str]:
    """Return the tasks of all experiments of this process, and of the runs that are kept beside them."""
    configs = [(each.config, each._wanted, *(run.config for run in each.kept.runs)) for each in list(_LIVE)]
    return {config.task for those in configs for config in those}


def _no_warning(report: kernels.BuildReport) -> None:
    """Replace the warning about a failed build during a step; trainers publish an event instead."""


def _stop_all() -> None:
    """End what still runs when Python exits: close the log, and let no thread be inside torch when torch goes away."""
    for trainer in list(_LIVE):
        if trainer.state == "running":
            trainer.stop()
        trainer.stop_comparison()
        trainer._worker.end(_EXIT_SECONDS)  # a paused trainer may be answering a request


atexit.register(_stop_all)
