"""The trainer: runs one experiment in its own thread, is controlled from any thread, and publishes events.

Controls return at once, with the new state set. Changes of the experiment (a config, a fault, a trace, a reset) wait in
a queue for the next step boundary, where the trainer's thread makes them in order. All events come from that thread. A
single step is in `experiment.py`, the thread in `worker.py`, the subscribers in `events.py`, the history and the log of
the run in `run_store.py`.
"""

from __future__ import annotations

import atexit
import math
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

from amplab import kernels
from amplab.amp import MemoryUse
from amplab.lab.config import ExperimentConfig
from amplab.lab.events import (
    Callback,
    ConfigChanged,
    Event,
    Failed,
    GradientsReady,
    Publisher,
    SkipExplained,
    StateChanged,
    TraceReady,
)
from amplab.lab.experiment import GRADIENTS_EVERY, Experiment, check_fault
from amplab.lab.history import History
from amplab.lab.run_store import RunStore
from amplab.lab.worker import Worker

__all__ = ["STEP_LIMIT", "Trainer"]

STEP_LIMIT = 1_000_000
"""Steps after which a run pauses by itself, so that a forgotten run does not fill the disk."""

_EXIT_SECONDS = 5.0


class Trainer:
    """Runs one experiment.

    States: "ready" (no step yet), "running", "paused", "stopped" (the log is closed), "failed". A reset leads from any
    of them to "ready".

    The trainer's thread computes with one intra-op thread, which makes runs repeatable and leaves the other cores to
    the browser. Other threads keep their number.

    Args:
        config: The experiment; None for the default one.
        log: Folder or .jsonl file of the run log, None for no log. An existing file is never overwritten.
        step_limit: Steps after which a run pauses by itself.

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
    ) -> None:
        self._experiment = Experiment(config or ExperimentConfig())
        self._log = log
        self._step_limit = step_limit
        self._publisher = Publisher()
        self._store = self._new_store()
        self._worker = Worker(
            step=self._train,
            is_wanted=lambda: self._state == "running",
            on_error=self._fail,
            seconds_left=lambda: self._due - time.monotonic(),
        )
        self._lock = self._worker.lock  # guards the six attributes below
        self._wanted = self._experiment.config
        self._state = "ready"
        self._steps_left: int | None = None  # until it pauses; None for no limit
        self._requests: set[str] = set()  # that wait in the queue
        self._speed: float | None = None
        self._due = 0.0  # when the next step may begin, by time.monotonic()
        self._has_reported_kernels = self._has_reported_buffers = False
        kernels.ensure(on_report=_no_warning)
        _LIVE.add(self)

    @property
    def state(self) -> str:
        """One of `STATES`."""
        return self._state

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
    def speed(self) -> float | None:
        """Steps per second at most, None for full speed; see `set_speed`."""
        return self._speed

    @property
    def failures(self) -> tuple[Failed, ...]:
        """The last failures, for a view that is opened later."""
        return self._publisher.failures

    def memory(self) -> MemoryUse:
        """Return the bytes of parameters, gradients, masters and optimizer state; see `Experiment.memory`."""
        return self._experiment.memory()

    def score(self) -> float | None:
        """Measure the task's score on held-out data at the next step boundary and return it; None if it has none."""
        return self._worker.ask(lambda: self._experiment.score())  # noqa: PLW0108  a reset replaces the experiment

    def __repr__(self) -> str:
        """Return one line with the state and the config."""
        return f"<Trainer {self._state} at step {len(self.history)}: {self.config}>"

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
            self._refuse_unless_alive("start()")
            self._steps_left = steps
            if self._state != "running":
                self._due = 0.0
            self._enter("running")

    def resume(self) -> None:
        """Continue after a pause; the same as `start()`."""
        self.start()

    def pause(self) -> None:
        """Stop training at the next step boundary; no effect if nothing runs."""
        with self._lock:
            if self._state == "running":
                self._enter("paused")

    def step(self) -> None:
        """Train one step, then pause.

        Raises:
            RuntimeError: The run has stopped or failed; call reset() first.
        """
        with self._lock:
            self._refuse_unless_alive("step()")
            self._worker.post(self._train_once)
            self._enter("paused")

    def set_speed(self, speed: float | None) -> None:
        """Limit how many steps the run takes per second, from now on; the steps themselves do not change.

        Controls still take effect at once. The speed is kept by a reset.

        Args:
            speed: Steps per second, a number > 0; None for full speed.

        Raises:
            ValueError: Another value.
        """
        if speed is not None and (isinstance(speed, bool) or not isinstance(speed, int | float) or not speed > 0):
            raise ValueError(f"speed={speed!r}: expected steps per second, a number > 0, or None for full speed.")
        with self._lock:
            begun = self._due - _period(self._speed)
            self._speed = speed
            self._due = begun + _period(speed)
            self._worker.wake()

    def stop(self) -> None:
        """End the run and close its log. A reset starts a new run."""
        with self._lock:
            self._enter("stopped")
            self._worker.post(lambda: self._store.close())  # noqa: PLW0108  a reset replaces the store

    def reset(self, config: ExperimentConfig | None = None) -> None:
        """Start again from the seed: new weights, an empty history, a new log.

        Args:
            config: The new experiment; None for the current one.
        """
        with self._lock:
            self._wanted = config or self._wanted
            self._worker.post(partial(self._rebuild, self._wanted))
            self._enter("ready", again=True)

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
            self._worker.post(partial(self._switch, config))

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
        """Request a `TraceReady` at the next step boundary, which is now if nothing runs."""
        self._request("trace", lambda: TraceReady(self._experiment.trace(), len(self.history), self.config.opt_level))

    def request_gradients(self) -> None:
        """Request a `GradientsReady` at the next step boundary, which is now if nothing runs."""
        self._request("gradients", lambda: GradientsReady(self._experiment.gradients()))

    def request_explanation(self) -> None:
        """Request a `SkipExplained` of the last skipped step, which must exist; it takes the time of several steps."""
        self._request(
            "explanation", lambda: SkipExplained(self.history.skips()[-1].step, self._experiment.explain_skip())
        )

    def run(self, steps: int) -> History:
        """Train `steps` steps and return the history when they are done; an interrupt pauses at a step boundary.

        Raises:
            RuntimeError: The experiment is running already, has stopped or failed, or fails in one of these steps.
            ValueError: `steps` is not a whole number > 0.
        """
        _check_steps(steps)
        try:
            with self._lock:
                if self._state == "running":
                    raise RuntimeError(f"run({steps}): the experiment is running already; call pause() first.")
                self.start(steps)
            self.wait()
        except KeyboardInterrupt:
            self.pause()
            self.wait()
            raise
        if self._state == "failed":
            raise RuntimeError(f"run({steps}): failed at step {len(self.history)}. {self.failures[-1].text}")
        return self.history

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing runs and every control has taken effect; return whether that took at most `timeout` s.

        Raises:
            RuntimeError: Called in a callback, that is in the trainer's own thread.
        """
        return self._worker.wait(timeout)

    # Any thread, under the lock

    def _refuse_unless_alive(self, call: str) -> None:
        if self._state in ("stopped", "failed"):
            raise RuntimeError(f"{call}: the run has {self._state}; call reset() to start again.")

    def _enter(self, state: str, note: str = "", *, again: bool = False) -> None:
        if self._state != state or again:
            self._state = state
            self._worker.post(partial(self._announce, state, note))

    def _request(self, name: str, answer: Callable[[], Event]) -> None:
        def publish() -> None:
            self._requests.discard(name)
            self._attempt(f"{name} failed; the run is not changed.", lambda: self._publisher.publish(answer()))

        with self._lock:
            if name not in self._requests:
                self._requests.add(name)
                self._worker.post(publish)

    # The trainer's thread, between two steps

    def _train(self) -> None:
        with self._lock:
            self._due = time.monotonic() + _period(self._speed)
        if self._experiment.steps_done % GRADIENTS_EVERY == 0:
            self._attempt("gradients failed.", lambda: self._store.keep(self._experiment.gradients().sample))
        record = self._experiment.step()
        self._store.append(record)
        if (mixed := self._experiment.mixed_scales) is not None:
            self._store.keep_scales(mixed)
        self._publisher.publish(record)
        if record.score is not None:
            self._report_kernels()
        if not math.isfinite(record.loss):
            self._report_buffers(record.step)
        self._count_down()
        if self._experiment.steps_done >= self._step_limit:
            self._end_at_limit()

    def _train_once(self) -> None:
        if self._state != "failed":  # since step() was called
            self._train()

    def _count_down(self) -> None:
        with self._lock:
            if self._steps_left is not None:
                self._steps_left -= 1
                if self._steps_left <= 0:
                    self.pause()

    def _end_at_limit(self) -> None:
        with self._lock:
            if self._state == "running":
                note = f"{self._step_limit} steps are done, the limit of one run; call reset() to start again."
                self._enter("paused", note)

    def _announce(self, state: str, note: str) -> None:
        self._report_kernels()
        if state != "running":
            self._store.flush()
        self._publisher.publish(StateChanged(state, len(self.history), note))

    def _switch(self, config: ExperimentConfig) -> None:
        previous, step = self.config, len(self.history)
        if config == previous:
            return
        self._experiment.switch(config)
        self._store.note("config", step=step, config=str(config))
        self._publisher.publish(ConfigChanged(config, previous, step))

    def _rebuild(self, config: ExperimentConfig) -> None:
        previous = self.config
        self._store.close()
        self._experiment = Experiment(config)
        self._has_reported_buffers = False
        self._publisher.forget_run()
        self._store = self._new_store()
        self._publisher.publish(ConfigChanged(config, previous, 0, reset=True))

    def _disturb(self, fault: str, on: bool | None) -> None:
        self._experiment.inject(fault, on=on)
        armed = self._experiment.shrinking if fault == "underflow" else on is not False
        self._store.note("inject", step=len(self.history), fault=fault, on=armed)

    def _report_kernels(self) -> None:
        """Report once that a build of the kernels has failed."""
        report = kernels.report()
        if report.status == "failed" and not self._has_reported_kernels:
            self._has_reported_kernels = True
            self._publisher.publish(Failed(str(report)))

    def _report_buffers(self, step: int) -> None:
        """Report once that a bad batch has changed the model although its step was skipped."""
        if self._has_reported_buffers or not (names := self._experiment.nonfinite_buffers()):
            return
        self._has_reported_buffers = True
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = (
            f"Step {step} left NaN or inf in {names[0]}{more}: BatchNorm updates its running statistics in the forward "
            f"pass, before a step can be skipped. Held-out data are scored with these statistics. Reset to start "
            f"again; in a loop of your own check the batch before the forward pass."
        )
        self._publisher.publish(Failed(text, damaged=True))

    def _new_store(self) -> RunStore:
        def report(text: str) -> None:
            self._publisher.publish(Failed(text))

        return RunStore(self._experiment.config, log=self._log, on_failure=report)

    def _attempt(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001 - a trace that fails does not end the run
            self._publisher.publish(Failed(f"{what}\n{traceback.format_exc()}"))

    def _fail(self, text: str) -> None:
        with self._lock:
            self._enter("failed")
        self._store.flush()
        self._publisher.publish(Failed(f"The run failed at step {len(self.history)}.\n{text}", fatal=True))


def _check_steps(steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: expected a whole number > 0, such as 300.")


def _period(speed: float | None) -> float:
    """Return the seconds from one step to the next, 0 at full speed."""
    return 0.0 if speed is None else 1.0 / speed


_LIVE: weakref.WeakSet[Trainer] = weakref.WeakSet()


def _no_warning(report: kernels.BuildReport) -> None:
    """Replace the warning about a failed build during a step; trainers publish an event instead."""


def _stop_all() -> None:
    """End what still runs when Python exits: close the log, and let no thread be inside torch when torch goes away."""
    for trainer in list(_LIVE):
        if trainer.state == "running":
            trainer.stop()
        trainer._worker.end(_EXIT_SECONDS)  # a paused trainer may be answering a request


atexit.register(_stop_all)
