"""The trainer: runs one experiment in its own thread, is controlled from any thread, and publishes events.

Controls return at once, with the new state set. Changes of the experiment (a config, a fault, a trace, a reset) wait in
a queue for the next step boundary, where the trainer's thread makes them in order. A step that accumulates many batches
is taken back for a control that would wait for it; see `Experiment.goes_on`. All events come from that thread. A single
step is in `experiment.py`, the run and what replaces it in `present_run.py`, the queue in `controls.py`, the thread in
`worker.py`, the subscribers in `events.py`.
"""

from __future__ import annotations

import atexit
import math
import os
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from numbers import Integral
from operator import methodcaller
from os import PathLike
from pathlib import Path
from typing import Concatenate, ParamSpec

from amplab import kernels
from amplab.amp import MemoryUse
from amplab.diagnose import Findings
from amplab.lab.batches import ReadingStopped
from amplab.lab.checkpoints import Checkpoint
from amplab.lab.comparison import Comparison, Progress, levels_of
from amplab.lab.config import FIELDS, ExperimentConfig
from amplab.lab.config_remedies import ConfigRemedy
from amplab.lab.controls import Controls
from amplab.lab.drawing_turns import leaving_turn
from amplab.lab.events import (
    ActivationsReady,
    Callback,
    Event,
    Failed,
    GradientSample,
    GradientsReady,
    InputsReady,
    LevelTraced,
    MemoryCounted,
    Publisher,
    RunsChanged,
    StagesReady,
    StateChanged,
    StepRecord,
    TraceReady,
    TwinReady,
)
from amplab.lab.experiment import Experiment, StepStopped, samples_gradients
from amplab.lab.faults import fault_named
from amplab.lab.history import History
from amplab.lab.kept_runs import KeptRun, KeptRuns
from amplab.lab.memory_count import level_memory
from amplab.lab.present_run import PresentRun
from amplab.lab.rank_exchange import RankExchange, RankLost
from amplab.lab.run_log.json_lines import is_number
from amplab.lab.run_store import RunStore
from amplab.lab.scale_growth import ScaleGrowth
from amplab.lab.step_explainer import StepExplainer
from amplab.lab.step_stages import StepStages
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


P = ParamSpec("P")


def _as_whole(control: Callable[Concatenate[Trainer, P], None]) -> Callable[Concatenate[Trainer, P], None]:
    """Let a control take effect as a whole or not at all; see `controls.py`."""

    @wraps(control)
    def whole(self: Trainer, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._controls.as_whole(partial(control, self, *args, **kwargs))

    return whole


class Trainer:
    """Runs one experiment.

    States: "ready" (no step yet), "running", "paused", "stopped" (the step that runs is the last one; after it the log
    is closed, for which `wait` waits), "failed". A reset leads from any of them to "ready".

    What a step raises while it reads its batches, or in a hook after an optimizer's step, pauses the run, which can go
    on: see `paused_by`. What it raises in between fails the run. Until an optimizer has begun to step, the run is then
    saved as it was before, if it has a log, and `continue_from` continues it there.

    The trainer's thread computes with one intra-op thread, which makes runs repeatable and leaves the other cores to
    the browser. Other threads keep their number.

    Trainers of one process take turns, step by step: torch has one CPU generator for all threads, which the step of a
    model that draws random numbers seeds and restores (see `register_model`). Such a run has the bits that it has
    alone, unless another thread draws during a step; and what another thread draws then is not what its seed says, and
    may come twice. The models of the lab draw none. Code of one's own that a trainer calls, such as what makes a model
    or measures a score, may train with another trainer and wait for it; waiting for the one that calls it is an error.

    Under a tracer written in Python, such as pdb, Ctrl-C in a call of the trainer may leave a lock taken, for which its
    thread then waits: CPython may interrupt between the end of a ``with`` block and the release of a lock. Restart the
    kernel, and continue the run from its checkpoint.

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
        self._step_limit = step_limit
        self._publisher = Publisher()
        config = config or ExperimentConfig()
        self._controls = Controls(
            config,
            step=self._train,
            announce=self._announce,
            on_idle=self._want_present,
            on_error=lambda text: self._run.fail(text),  # noqa: PLW0108  made below
            on_rest=lambda: self._run.save_paused(),  # noqa: PLW0108
        )
        self._worker = self._controls.worker
        self._run = PresentRun(config, log, controls=self._controls, publisher=self._publisher, exchange=exchange)
        self._comparison: Comparison | None = None
        self._lock = self._controls.lock
        self._trace: tuple[object, TraceReady] | None = None  # the last one that was requested, and of what step
        self._paced: float | None = None  # the speed as the changes that are made have left it
        self._has_reported_kernels = False
        kernels.ensure(on_report=_no_warning)
        _LIVE.add(self)

    @property
    def state(self) -> str:
        """One of `STATES`."""
        return self._controls.state

    @property
    def config(self) -> ExperimentConfig:
        """The config in effect; a change takes effect at the next step boundary."""
        return self._run.experiment.config

    @property
    def wanted_config(self) -> ExperimentConfig:
        """The config that will be in effect once all changes that wait are made; what a control begins from."""
        return self._controls.config

    @property
    def history(self) -> History:
        """The run so far; a reset starts a new history and leaves the old one unchanged."""
        return self._run.store.history

    @property
    def log_path(self) -> Path | None:
        """The file of the run log, None before the first step and without a log."""
        return self._run.store.log_path

    @property
    def loss_scale(self) -> float:
        """The scale that the next step will use."""
        return self._run.experiment.loss_scale

    @property
    def scale_growth(self) -> ScaleGrowth | None:
        """When that scale grows next; None if it is static."""
        return self._run.experiment.scale_growth

    @property
    def shrinking(self) -> bool:
        """Whether an injected underflow is on."""
        return self._run.experiment.shrinking

    @property
    def draws(self) -> bool:
        """Whether a step, or a look at one, draws random numbers: it then seeds the generators, and restores them."""
        return self._run.experiment.draws

    @property
    def nonfinite_buffers(self) -> tuple[str, ...]:
        """Names of buffers that hold inf or NaN, and did not at first, as seen with the last score or bad loss."""
        return self._run.nonfinite_buffers

    @property
    def armed(self) -> frozenset[str]:
        """The faults that will go into the next step."""
        return self._run.experiment.armed

    @property
    def kept(self) -> KeptRuns:
        """The runs beside the present one: those that a reset replaced, and those of `compare`."""
        return self._run.kept

    @property
    def present_name(self) -> str:
        """The name that the present run has among the kept ones once it is kept."""
        return self._run.name

    @property
    def has_begun(self) -> bool:
        """Whether there was a step, a change or a comparison: a run, or a list of changes, that a new trainer lacks."""
        has_run = self._controls.steps_made > 0 or self.comparison is not None or bool(self._run.kept.runs)
        return has_run or self.last_change is not None

    @property
    def last_change(self) -> str | None:
        """What `undo` would take back, in words; None for nothing."""
        return self._run.changes.last

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
        return self._run.paused_by

    def findings(self) -> Findings:
        """Return what the rules find in this run, the most harmful first.

        They read the last steps, the skipped steps that were explained, and an examination by `amplab.doctor` of the
        step after the first one and after each change, without its notes. What was found in single steps before the
        latest change of the config is left out, and so are steps that were skipped because of an injected fault.
        """
        return self._run.findings()

    def memory(self) -> MemoryUse:
        """Return the bytes of parameters, gradients, masters and optimizer state; see `Experiment.memory`."""
        return self._run.experiment.memory()

    def score(self) -> float | None:
        """Measure the task's score on held-out data at the next step boundary and return it; None if it has none."""
        return self._worker.ask(lambda: self._run.experiment.score())  # noqa: PLW0108  a reset replaces the experiment

    def __repr__(self) -> str:
        """Return one line with the state and the config."""
        return f"<Trainer {self.state} at step {len(self.history)}: {self.config}>"

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with every event, in the trainer's thread; return a function that ends this."""
        return self._publisher.subscribe(callback)

    @_as_whole
    def start(self, steps: int | None = None) -> None:
        """Train until paused, or for `steps` more steps.

        Raises:
            RuntimeError: The run has stopped or failed; call reset() first.
            ValueError: `steps` is not a whole number > 0.
        """
        steps = None if steps is None else _checked_steps(steps)
        self._controls.refuse_unless_alive("start()")
        self._controls.start(steps)
        self._run.paused_by = None

    def resume(self) -> None:
        """Continue after a pause; the same as `start()`."""
        self.start()

    def pause(self) -> None:
        """Stop training at the next step boundary; no effect if nothing runs.

        A step that accumulates several batches is taken back after the present one, unless the model is one's own.
        """
        self._controls.pause()

    @_as_whole
    def step(self) -> None:
        """Train one step, then pause. A change that is made meanwhile waits for it; a reset and a stop do not.

        Raises:
            RuntimeError: The run has stopped or failed; call reset() first.
        """
        self._controls.refuse_unless_alive("step()")
        self._worker.post(self._train_once)
        self._controls.enter("paused")

    @_as_whole
    def step_in_stages(self, parameter: str | None = None) -> None:
        """Train one step that is recorded in its stages, then pause; a `StagesReady` follows its `StepRecord`.

        The step is the one that `step()` would have made, bit for bit.

        Args:
            parameter: Name of the parameter that is recorded even if the model is too large to record all.

        Raises:
            RuntimeError: The run has stopped or failed; call reset() first.
        """
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
        speed = None if speed is None else float(speed)
        with self._lock:
            self._controls.pace(speed)
            self._controls.in_turn(partial(self._pace, speed))

    def _pace(self, speed: float | None, *, is_undo: bool = False) -> None:
        """Set the speed again, after what was made before it: an undo may have set that of a speed before."""
        previous, self._paced = self._paced, speed
        if speed != previous and not is_undo:
            text = "Speed: full speed" if speed is None else f"Speed: {speed:g} steps/s"
            self._run.changes.record(text, partial(self._pace, previous, is_undo=True), kind="speed")
        self._controls.pace(speed)

    @_as_whole
    def stop(self) -> None:
        """End the run after the step that runs, and close its log; `wait` waits for that. A reset starts a new run."""
        self.stop_comparison()
        self._controls.stops += 1
        self._controls.enter("stopped")
        self._worker.post(self._run.end_logs)

    def reset(self, config: ExperimentConfig | None = None, *, name: str | None = None) -> None:
        """Start again from the seed: new weights, an empty history, a new log. The present run is kept in `kept`.

        Args:
            config: The new experiment; None for the current one.
            name: Name of the new run among the kept ones; None for the next number.

        Raises:
            ValueError: Its task is code of one's own that this process does not have, its batch is larger than the
                training set, or its float32_modules name none of the present model.
        """
        self._reset(config or self._controls.config, lambda: self._run.rebuild(config or self.config, name))

    @_as_whole
    def reset_with(self, /, **fields: object) -> None:
        """Start again, as `reset`, with some fields of the config changed; changes that are queued are made first.

        Raises:
            ValueError: An unknown field, or a value that the field does not accept.
        """
        change = methodcaller("changed", **fields)
        self._reset(change(self._controls.config), lambda: self._run.with_changed(change, self._run.rebuild))

    @_as_whole
    def restart_with(self, /, **fields: object) -> None:
        """Start again, as `reset_with`; if the run goes on, so does the new one, for all the steps it was asked for.

        Raises:
            ValueError: An unknown field, or a value that the field does not accept.
        """
        goes_on, steps = self.state == "running", self._controls.steps_asked
        self.reset_with(**fields)
        if goes_on:
            self.start(steps)

    @_as_whole
    def _reset(self, wanted: ExperimentConfig, rebuild: Callable[[], object]) -> None:
        self._run.experiment.check_task(wanted)
        self._controls.change(rebuild, replaces=True, sets_state=True)
        self._controls.config = wanted
        self._controls.enter("ready", again=True)

    def change(self, **fields: object) -> None:
        """Change fields of the config at the next step boundary; weights and optimizer state are kept.

        A new opt_level drops the overrides that have no meaning there.

        Raises:
            ValueError: An unknown field, a value that the field does not accept, or a field that needs new weights.
        """
        self._change(methodcaller("changed", **fields))

    def change_rate(self, rate: object) -> None:
        """Change the learning rate, as `change`, to one that a person enters: the usual one is the default.

        Raises:
            ValueError: The field does not accept it.
        """
        self._change(methodcaller("with_rate", rate))

    @_as_whole
    def _change(self, change: Callable[[ExperimentConfig], ExperimentConfig]) -> None:
        config = change(self._controls.config)
        self._run.experiment.check_switch(self._controls.config, config)
        self._controls.change(lambda: self._run.with_changed(change, self._run.switch))
        self._controls.config = config

    @_as_whole
    def apply(self, remedy: ConfigRemedy) -> None:
        """Make the change of a remedy: at the next step boundary, or by starting again if it says so.

        Raises:
            ValueError: The config has changed since, and refuses the change.
        """
        if not remedy.restarts:
            self.change(**remedy.changes)
            return
        self.restart_with(**remedy.changes)
        if self.state != "running":
            self.start()

    def undo(self) -> None:
        """Take back the latest change of the config, fault, reset or change of `kept`; no effect if there is none.

        A changed config is put back with the weights as they are. A reset is taken back by continuing the run that it
        replaced. An `Undone` event says what was taken back.
        """
        self._controls.change(self._run.take_back, replaces=True)  # if the change was a reset

    @_as_whole
    def continue_from(self, run: KeptRun) -> None:
        """Continue a kept run, bit for bit as if it had not been replaced; the present run is kept.

        Raises:
            ValueError: The run is not kept any more or is in training, or has no weights from before it failed, or
                since they were dropped, in memory or on disk.
        """
        self._run.kept.check_can_continue(run)
        self._controls.change(partial(self._run.bring_back, run), replaces=True)
        self._controls.config = run.config

    @_as_whole
    def continue_saved(self, checkpoint: Checkpoint) -> None:
        """Continue a run of another process from its checkpoint, bit for bit as if not interrupted, once it is started.

        The present run pauses and is kept. The new log begins with the steps up to the checkpoint; the old one does not
        change. A checkpoint that cannot be read is a `Failed`, and the present run does not change.
        """
        self._controls.pause()  # now: a start that comes while it is read is one of the saved run
        self._controls.change(partial(self._run.restore, checkpoint), replaces=True)
        self._controls.config = checkpoint.config

    @_as_whole
    def compare(self, configs: Sequence[ExperimentConfig] | None = None, *, steps: int = 300) -> None:
        """Train other experiments beside this one, one after the other, each `steps` steps; they are added to `kept`.

        This experiment waits meanwhile and does not change. `stop_comparison` ends it, and so does another call.

        Args:
            configs: The experiments; None for this one at each opt_level, from the same seed. One that cannot begin is
                a `Failed`, and the others train.
            steps: Steps of each.

        Raises:
            ValueError: `steps` is not a whole number > 0.
        """
        steps = _checked_steps(steps)
        self.stop_comparison()
        chosen = levels_of(self._controls.config) if configs is None else configs
        comparison = self._new_comparison(chosen, steps)
        self._worker.post(partial(self._advance_comparison, comparison))
        self._comparison = comparison  # last: what is shown is queued

    def stop_comparison(self) -> None:
        """End `compare` at the next step boundary, also one that waits; what was trained stays in `kept`."""
        if (comparison := self._comparison) is not None:
            comparison.stop()
            self._controls.withdraw()

    def request_activations(self) -> None:
        """Request an `ActivationsReady` at the next step boundary; it takes the time of a few steps."""
        self._request("activations", lambda: ActivationsReady(self._run.experiment.activations()))

    def request_twin(self) -> None:
        """Request a `TwinReady` at the next step boundary; it takes the time of about 30 steps.

        Raises:
            ValueError: The task has several models or optimizers, which twins do not.
        """
        self._run.experiment.check_twin()
        self._request("twin", lambda: TwinReady(self._run.experiment.twin(), len(self.history)))

    def inject(self, fault: str, *, on: bool | None = None) -> None:
        """Disturb the next step: "overflow", "nan", or "underflow", which stays on until it is switched off.

        Args:
            fault: One of `FAULTS`; see `Experiment.inject`.
            on: True or False to switch; None arms "overflow" and "nan" for one step and toggles "underflow".

        Raises:
            ValueError: There is no such fault.
        """
        fault, on = fault_named(fault), None if on is None else bool(on)
        self._controls.change(partial(self._run.disturb, fault, on))

    def request_trace(self) -> None:
        """Request a `TraceReady` at the next step boundary, which is now if nothing runs; of each step there is one."""
        self._request("trace", self._trace_ready)

    def trace(self) -> Trace:
        """Record the next step op by op, at the next step boundary, and return it; the run is not changed."""
        return self._worker.ask(lambda: self._run.experiment.trace())  # noqa: PLW0108  a reset replaces the experiment

    def module_names(self) -> tuple[str, ...]:
        """Return the names of the model's modules, of which `float32_modules` of the config may list some."""
        return self._run.experiment.module_names()

    def request_trace_at(self, opt_level: str) -> None:
        """Request a `LevelTraced`: the step of a fresh model at another level; the run is not changed.

        Raises:
            ValueError: There is no such level.
        """
        config = self._controls.config.changed(opt_level=opt_level)
        self._request(f"trace at {opt_level}", lambda: LevelTraced(Experiment(config).trace(), opt_level))

    def request_inputs(self, index: int) -> None:
        """Request an `InputsReady` of the op with this number in a trace, measured at the next step boundary.

        Raises:
            ValueError: `index` is not a whole number >= 0.
        """
        index = _checked_number("index", index)

        def measure() -> Event:
            inputs = InputStatistics(index)
            self._run.experiment.trace(inputs)
            return InputsReady(index, inputs.inputs, len(self.history))

        self._request(f"inputs of op {index}", measure)

    def request_memory(self, opt_level: str) -> None:
        """Request a `MemoryCounted` of this experiment at a level, counted on a fresh model; the run is not changed.

        Raises:
            ValueError: There is no such level.
        """
        config = self._controls.config.changed(opt_level=opt_level)
        self._request(f"memory at {opt_level}", lambda: MemoryCounted(level_memory(config)))

    def request_gradients(self) -> None:
        """Request a `GradientsReady` at the next step boundary, which is now if nothing runs."""
        self._request("gradients", lambda: GradientsReady(self._run.experiment.gradients()))

    def request_explanation(self, step: int) -> None:
        """Request a `SkipExplained` of a skipped step.

        Its explanation is None if the step was not explained before and is not kept any more; see `explainable`.

        Raises:
            ValueError: `step` is not the number of a step.
        """
        step = _checked_number("step", step)
        self._worker.post(lambda: self._run.explainer.answer(step))

    def request_stages(self, step: int, parameter: str | None = None) -> None:
        """Request a `StagesReady` of a skipped step, which runs again beside the run; see `walkable`.

        Its stages are None if the step is not kept any more, as after a reset.

        Args:
            step: Number of the step.
            parameter: As in `step_in_stages`.

        Raises:
            ValueError: `step` is not the number of a step.
        """
        step = _checked_number("step", step)
        self._request(f"step {step} in stages", lambda: StagesReady(self._run.explainer.stages(step, parameter), step))

    @property
    def explainable(self) -> tuple[int, ...]:
        """The skipped steps that can run again: the latest ones, and the last step."""
        return self._run.explainer.explainable

    @property
    def walkable(self) -> tuple[int, ...]:
        """The skipped steps that `request_stages` can record: those of one optimizer that are kept."""
        return self._run.explainer.walkable

    @leaving_turn
    def run(self, steps: int) -> History:
        """Train `steps` steps and return the history when they are done; an interrupt pauses at a step boundary.

        After an interrupt it waits for the end of the present step, at most 3 seconds.
        If another thread starts the experiment meanwhile, without a limit, it goes on.

        Raises:
            RuntimeError: The experiment is running already, has stopped or failed, or fails in one of these steps; or
                the run is paused because a batch cannot be read or a hook of an optimizer has raised; see `paused_by`.
                Called in the trainer's own thread, as in a callback.
            ValueError: `steps` is not a whole number > 0.
        """
        steps = _checked_steps(steps)
        self._worker.refuse_in_own_thread(f"run({steps})")
        try:
            with self._lock:
                self._worker.refuse_at_end()
                if self.state == "running":
                    raise RuntimeError(f"run({steps}): the experiment is running already; call pause() first.")
                end = self._controls.steps_made + steps + 1  # with one that is made now
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
        if (paused_by := self._run.paused_by) is not None:
            raise RuntimeError(f"run({steps}): paused at step {len(self.history)}. {paused_by.text}")
        return self.history

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing runs and every control has taken effect; return whether that took at most `timeout` s.

        Raises:
            RuntimeError: Called in the trainer's own thread, as in a callback, or in a function that measures a score.
        """
        return self._worker.wait(timeout)

    # Any thread

    def _request(self, name: str, answer: Callable[[], Event]) -> None:
        def publish() -> None:
            self._run.attempt(f"{name} failed; the run is not changed.", lambda: self._publisher.publish(answer()))

        self._controls.answer(name, publish)

    def _want_present(self) -> None:
        self._controls.config = self.config
        if self._run.failure is not None and self.state != "stopped":  # no other run has come in its place
            self._controls.enter("failed")
        self._worker.post(self._run.save_paused)

    # The trainer's thread, between two steps

    def _train(self, step: Callable[[], StepRecord] | None = None) -> None:
        run, experiment = self._run, self._run.experiment
        self._controls.begin_step()
        samples = list[GradientSample]()
        if samples_gradients(experiment.steps_done):
            run.attempt("gradients failed.", lambda: samples.append(experiment.gradients().sample))
        try:
            record = _timed_step(partial(self._keeping, samples, step or experiment.step), run.store)
        except RankLost as lost:
            run.fail(str(lost))
            return
        except (ReadingStopped, StepStopped):
            self._controls.leave_step()
            return
        except BaseException:  # whatever reading raises, the run is as before
            if experiment.phase != "batches" or self._exchange is not None:  # other ranks wait in the step
                raise
            text = f"The batch of step {len(self.history)} could not be read. The run is paused and unchanged"
            run.pause_by(f"{text}: Start reads it again.", traceback.format_exc())
            self._controls.leave_step()
            return
        self._tell_of(record)
        run.save()
        run.retired.write()
        if self._exchange is not None and "stop" in self._exchange.agreed:
            self.pause()
        self._controls.count_step()
        if experiment.steps_done >= self._step_limit and self._controls.steps_left is None:
            self._end_at_limit()

    def _tell_of(self, record: StepRecord) -> None:
        """Write into the log and publish what the step that was made has shown."""
        run, experiment = self._run, self._run.experiment
        if (mixed := experiment.mixed_scales) is not None:
            run.store.keep_scales(mixed)
        if (memory := experiment.memory()) is not run.kept_memory:
            run.kept_memory = memory
            run.store.keep_memory(record.step, memory)
        self._publisher.publish(record)
        run.explainer.after(record)
        if record.score is not None:
            self._report_kernels()
        if experiment.score_failure:
            self._publisher.publish(Failed(f"The held-out score failed.\n{experiment.score_failure}", attempted=True))
            experiment.score_failure = ""
        if raised := experiment.hook_failure:
            text = f"A hook of the optimizer raised after step {record.step}. The step is complete"
            run.pause_by(f"{text}, and the run is paused: Start makes the next one.", raised)
        if record.score is not None or not math.isfinite(record.loss):
            run.nonfinite_buffers = experiment.nonfinite_buffers()
        if not math.isfinite(record.loss):
            run.report_buffers(record.step)

    def _keeping(self, samples: list[GradientSample], step: Callable[[], StepRecord]) -> StepRecord:
        """Train one step and keep a histogram of its gradients, unless it was stopped: it comes again."""
        try:
            return step()
        except BaseException:
            samples.clear()  # the step comes again, or the run ends
            raise
        finally:
            for sample in samples:
                self._run.store.keep(sample)

    def _trace_ready(self) -> TraceReady:
        """Trace the next step once: a dashboard that is opened later gets the same trace."""
        present = self._run.store.run, len(self.history), self.config
        if self._trace is None or self._trace[0] != present:
            self._trace = present, TraceReady(self._run.experiment.trace(), len(self.history), self.config.opt_level)
        return self._trace[1]

    def _train_once(self) -> None:
        if self.state != "failed":  # since step() was called
            with self._controls.withdrawable(is_asked_for=True):
                self._train()
            self._explain_last()

    def _explain_last(self) -> None:
        """Explain the last step if it was skipped; of many batches that takes long, and controls end it."""
        with self._controls.withdrawable():
            self._run.explainer.explain_last()

    def _begin_to_explain(self) -> None:
        """Explain the rows of skips that have no reason, the newest first, while the run is paused."""
        self._explain_left_over(self._run.explainer, self._run.explainer.left_over(), time.monotonic() + _PAUSE_SECONDS)

    def _explain_left_over(self, explainer: StepExplainer, steps: list[int], end: float) -> None:
        """Explain one step, and post the rest: controls take effect in between."""
        is_wanted = self.state == "paused" and explainer is self._run.explainer and time.monotonic() < end
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
            record, stages = self._run.experiment.step_in_stages(parameter)
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
            self._run.store.flush()
            self._run.retired.write()
        if state in ("paused", "stopped"):
            self._run.save(at_rest=True)
        self._publisher.publish(StateChanged(state, len(self.history), note))
        if state == "paused":
            self._explain_last()
            self._begin_to_explain()

    def _new_comparison(self, configs: Sequence[ExperimentConfig], steps: int) -> Comparison:
        def begin(config: ExperimentConfig) -> KeptRun | None:
            name = FIELDS["opt_level"].shown(config.opt_level)
            try:
                experiment = Experiment(config)
            except BaseException:  # noqa: BLE001 - as of modules that the model does not have; the others train
                text = f"A run of the comparison cannot begin: {config}.\n{traceback.format_exc()}"
                self._publisher.publish(Failed(text, attempted=True))
                return None
            store = self._run.new_store(config)
            experiment.goes_on = self._controls.goes_on
            return self._run.kept.keep(name, config, store, experiment, is_compared=True, is_training=True)

        def train(run: KeptRun) -> None:
            if run.experiment is None:
                raise RuntimeError("the run was removed")
            with suppress(StepStopped):
                _timed_step(run.experiment.step, run.store)
                if raised := run.experiment.hook_failure:
                    raise RuntimeError(f"a hook of the optimizer raised {Failed(raised).error}")

        def end(run: KeptRun, error: str) -> None:
            run.is_training, run.error = False, error
            self._run.retired.add(run.store)
            self._run.measure(run)

        return Comparison(configs, steps, begin=begin, train=train, end=end)

    def _advance_comparison(self, comparison: Comparison) -> None:
        goes_on = False
        try:
            with self._controls.withdrawable():
                goes_on = comparison.advance()
        except BaseException:  # noqa: BLE001 - the present run goes on
            self._publisher.publish(Failed(f"The comparison ended.\n{traceback.format_exc()}"))
        self._run.kept.touch()
        self._publisher.publish(RunsChanged())
        if goes_on:
            self._worker.post(partial(self._advance_comparison, comparison))
        elif self._comparison is comparison:
            self._comparison = None

    def _report_kernels(self) -> None:
        """Report once that a build of the kernels has failed."""
        report = kernels.report()
        if report.status == "failed" and not self._has_reported_kernels:
            self._has_reported_kernels = True
            self._publisher.publish(Failed(str(report)))


def _timed_step(step: Callable[[], StepRecord], store: RunStore) -> StepRecord:
    """Train one step, and keep it with the time that it took."""
    began = time.perf_counter()
    record = step()
    store.seconds += time.perf_counter() - began
    store.append(record)
    return record


def _checked_steps(steps: int) -> int:
    """Return a number of steps as an int; raise a ValueError unless it is a whole number > 0."""
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        raise ValueError(f"steps={steps!r}: expected a whole number > 0, such as 300.")
    return int(steps)


def _checked_number(name: str, value: int) -> int:
    """Return the number of a step or of an op as an int, which a page can show; raise a ValueError for another value.

    It is called before what is asked for waits for the trainer's thread.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(f"{name}={value!r}: expected a whole number >= 0, such as 12.")
    return int(value)


_LIVE: weakref.WeakSet[Trainer] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LIVE.clear)  # a forked process has none of their threads


def tasks_in_use() -> set[str]:
    """Return the tasks of all experiments of this process, and of the runs that are kept beside them."""
    configs = [(each.config, each.wanted_config, *(run.config for run in each.kept.runs)) for each in list(_LIVE)]
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
