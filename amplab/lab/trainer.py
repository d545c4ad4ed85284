"""The trainer: one experiment in a thread of its own, driven from any thread, telling what happens and drawing nothing.

Controls return at once. The state changes in the call; what touches the experiment (a changed config, a fault, a trace,
a reset) waits in a queue for the next step boundary, where the trainer's thread does it, in order. All events come from
that thread. A single step is in `experiment.py`, the thread in `worker.py`, the subscribers in `publisher.py`, what is
kept in `recorder.py`.
"""

from __future__ import annotations

import atexit
import math
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

from amplab import kernels
from amplab.amp import MemoryUse
from amplab.lab.config import ExperimentConfig
from amplab.lab.events import ConfigChanged, Event, Failed, GradientsReady, SkipExplained, StateChanged, TraceReady
from amplab.lab.experiment import GRADIENTS_EVERY, Experiment, check_fault
from amplab.lab.history import History
from amplab.lab.publisher import Callback, Publisher
from amplab.lab.recorder import Recorder
from amplab.lab.worker import Worker

__all__ = ["STEP_LIMIT", "Trainer"]

STEP_LIMIT = 1_000_000
"""Steps after which a run pauses by itself, so that a forgotten one fills no disk."""

_EXIT_SECONDS = 5.0


class Trainer:
    """Runs one experiment.

    States: "ready" (nothing has run), "running", "paused", "stopped" (the log is closed), "failed". A reset leads from
    any of them to "ready".

    The trainer's thread computes with one intra-op thread, which makes runs repeatable and leaves the other cores to
    the page; other threads keep their number.

    Args:
        config: The experiment; None for the default one.
        log: Folder or .jsonl file of the run log, None for no log. A file that is there is never written over.
        step_limit: Steps after which a run pauses by itself.

    Raises:
        ImportError: The task's data are not installed.
        ValueError: The batch is larger than the task.

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
        self._recorder = self._new_recorder()
        self._worker = Worker(step=self._train, is_wanted=lambda: self._state == "running", on_error=self._fail)
        self._turn = self._worker.turn  # guards the four below
        self._wanted = self._experiment.config
        self._state = "ready"
        self._budget: int | None = None  # steps until it pauses, None for no end
        self._asked: set[str] = set()  # requests that wait in the queue
        self._has_told_kernels = self._has_told_buffers = False
        kernels.ensure(on_report=_no_warning)
        _LIVE.add(self)

    @property
    def state(self) -> str:
        """One of `STATES`."""
        return self._state

    @property
    def config(self) -> ExperimentConfig:
        """What is in effect; a change takes effect at the next step boundary."""
        return self._experiment.config

    @property
    def history(self) -> History:
        """The run so far; a reset begins a new one and leaves the old one as it is."""
        return self._recorder.history

    @property
    def log_path(self) -> Path | None:
        """The file of the run log, None before the first step and where there is none."""
        return self._recorder.log_path

    @property
    def loss_scale(self) -> float:
        """The scale that the next step will use."""
        return self._experiment.loss_scale

    @property
    def shrinking(self) -> bool:
        """Whether an injected underflow is on."""
        return self._experiment.shrinking

    @property
    def failures(self) -> tuple[Failed, ...]:
        """The last failures, for a view that is opened later."""
        return self._publisher.failures

    def memory(self) -> MemoryUse:
        """Return the bytes of parameters, gradients, masters and optimizer state; see `Experiment.memory`."""
        return self._experiment.memory()

    def accuracy(self) -> float:
        """Measure the share of held-out images classified correctly, at the next step boundary, and return it."""
        return self._worker.ask(lambda: self._experiment.accuracy())  # noqa: PLW0108  a reset makes another one

    def __repr__(self) -> str:
        """Return one line with the state and the config."""
        return f"<Trainer {self._state} at step {len(self.history)}: {self.config}>"

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with every event, in the trainer's thread; return a function that ends this."""
        return self._publisher.subscribe(callback)

    def start(self, steps: int | None = None) -> None:
        """Train, until paused or for `steps` more steps.

        Raises:
            RuntimeError: Stopped or failed; reset() first.
            ValueError: `steps` is not a whole number > 0.
        """
        if steps is not None:
            _check_steps(steps)
        with self._turn:
            self._refuse_unless_alive("start()")
            self._budget = steps
            self._enter("running")

    def resume(self) -> None:
        """Train on after a pause: `start()` by another name."""
        self.start()

    def pause(self) -> None:
        """Rest at the next step boundary; harmless when nothing runs."""
        with self._turn:
            if self._state == "running":
                self._enter("paused")

    def step(self) -> None:
        """Make one step, then rest.

        Raises:
            RuntimeError: Stopped or failed; reset() first.
        """
        with self._turn:
            self._refuse_unless_alive("step()")
            self._worker.post(self._train_once)
            self._enter("paused")

    def stop(self) -> None:
        """End the run: rest and close the log. A reset begins a new one."""
        with self._turn:
            self._enter("stopped")
            self._worker.post(lambda: self._recorder.close())  # noqa: PLW0108  as above

    def reset(self, config: ExperimentConfig | None = None) -> None:
        """Begin anew from the seed: fresh weights, an empty history, a new log.

        Args:
            config: The new experiment; None for the present one.
        """
        with self._turn:
            self._wanted = config or self._wanted
            self._worker.post(partial(self._rebuild, self._wanted))
            self._enter("ready", again=True)

    def change(self, **fields: object) -> None:
        """Change fields of the config at the next step boundary; weights and optimizer state are kept.

        A new opt_level drops the overrides that make no sense there.

        Raises:
            ValueError: An unknown field, a value that it may not hold, or a field that needs new weights.
        """
        with self._turn:
            config = self._wanted.changed(**fields)
            self._experiment.check_switch(self._wanted, config)
            self._wanted = config
            self._worker.post(partial(self._switch, config))

    def inject(self, fault: str, *, on: bool | None = None) -> None:
        """Disturb the next step: "overflow", "nan", or "underflow", which stays on until switched off.

        Args:
            fault: One of `FAULTS`; see `Experiment.inject`.
            on: True or False to switch; None arms "overflow" and "nan" for one step and toggles "underflow".

        Raises:
            ValueError: There is no such fault.
        """
        check_fault(fault)
        self._worker.post(partial(self._disturb, fault, on))

    def request_trace(self) -> None:
        """Ask for a `TraceReady` at the next step boundary, at once when nothing runs."""
        self._ask("trace", lambda: TraceReady(self._experiment.trace(), len(self.history), self.config.opt_level))

    def request_gradients(self) -> None:
        """Ask for a `GradientsReady` at the next step boundary, at once when nothing runs."""
        self._ask("gradients", lambda: GradientsReady(self._experiment.gradients()))

    def request_explanation(self) -> None:
        """Ask for a `SkipExplained` of the last skipped step (there must be one); it takes several steps' time."""
        self._ask("explanation", lambda: SkipExplained(self.history.skips()[-1].step, self._experiment.explain_skip()))

    def run(self, steps: int) -> History:
        """Train `steps` steps and return the history when they are done; an interrupt pauses at a step boundary.

        Raises:
            RuntimeError: It is running already, stopped or failed, or it fails on the way.
            ValueError: `steps` is not a whole number > 0.
        """
        _check_steps(steps)
        try:
            with self._turn:
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
        """Wait until nothing runs and every control has taken effect; return whether that came within `timeout` s.

        Raises:
            RuntimeError: Called in a callback, that is in the trainer's own thread.
        """
        return self._worker.wait(timeout)

    # Any thread, under the lock

    def _refuse_unless_alive(self, call: str) -> None:
        if self._state in ("stopped", "failed"):
            raise RuntimeError(f"{call}: the run has {self._state}; call reset() to begin anew.")

    def _enter(self, state: str, note: str = "", *, again: bool = False) -> None:
        if self._state != state or again:
            self._state = state
            self._worker.post(partial(self._announce, state, note))

    def _ask(self, name: str, answer: Callable[[], Event]) -> None:
        def publish() -> None:
            self._asked.discard(name)
            self._attempt(f"{name} failed; the run is not touched.", lambda: self._publisher.publish(answer()))

        with self._turn:
            if name not in self._asked:
                self._asked.add(name)
                self._worker.post(publish)

    # The trainer's thread, between two steps

    def _train(self) -> None:
        if self._experiment.steps_done % GRADIENTS_EVERY == 0:
            self._attempt("gradients failed.", lambda: self._recorder.keep(self._experiment.gradients().sample))
        record = self._experiment.step()
        self._recorder.append(record)
        self._publisher.publish(record)
        if record.accuracy is not None:
            self._tell_kernels()
        if not math.isfinite(record.loss):
            self._tell_buffers(record.step)
        if self._budget is not None:
            self._count_down()
        if self._experiment.steps_done >= self._step_limit:
            self._end_at_limit()

    def _train_once(self) -> None:
        if self._state != "failed":  # in the meantime
            self._train()

    def _count_down(self) -> None:
        with self._turn:
            self._budget -= 1
            if self._budget <= 0:
                self.pause()

    def _end_at_limit(self) -> None:
        with self._turn:
            if self._state == "running":
                self._enter("paused", f"{self._step_limit} steps are done, the limit of one run; reset() begins anew.")

    def _announce(self, state: str, note: str) -> None:
        self._tell_kernels()
        if state != "running":
            self._recorder.flush()
        self._publisher.publish(StateChanged(state, len(self.history), note))

    def _switch(self, config: ExperimentConfig) -> None:
        previous, step = self.config, len(self.history)
        if config == previous:
            return
        self._experiment.switch(config)
        self._recorder.note("config", step=step, config=str(config))
        self._publisher.publish(ConfigChanged(config, previous, step))

    def _rebuild(self, config: ExperimentConfig) -> None:
        previous = self.config
        self._recorder.close()
        self._experiment = Experiment(config)
        self._has_told_buffers = False
        self._publisher.forget_run()
        self._recorder = self._new_recorder()
        self._publisher.publish(ConfigChanged(config, previous, 0, reset=True))

    def _disturb(self, fault: str, on: bool | None) -> None:
        self._experiment.inject(fault, on=on)
        armed = self._experiment.shrinking if fault == "underflow" else on is not False
        self._recorder.note("inject", step=len(self.history), fault=fault, on=armed)

    def _tell_kernels(self) -> None:
        """Tell once that a build of the kernels has failed."""
        report = kernels.report()
        if report.status == "failed" and not self._has_told_kernels:
            self._has_told_kernels = True
            self._publisher.publish(Failed(str(report)))

    def _tell_buffers(self, step: int) -> None:
        """Tell once that a bad batch has stayed in the model although its step was skipped."""
        if self._has_told_buffers or not (names := self._experiment.nonfinite_buffers()):
            return
        self._has_told_buffers = True
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = (
            f"Step {step} left NaN or inf in {names[0]}{more}: BatchNorm takes a batch into its running statistics "
            f"in the forward pass, before a step can be skipped. Accuracy is measured with these: reset to begin "
            f"anew; in a loop of your own check the batch first."
        )
        self._publisher.publish(Failed(text, damaged=True))

    def _new_recorder(self) -> Recorder:
        def tell(text: str) -> None:
            self._publisher.publish(Failed(text))

        return Recorder(self._experiment.config, log=self._log, on_failure=tell)

    def _attempt(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001 - a trace is a look at the run, never its end
            self._publisher.publish(Failed(f"{what}\n{traceback.format_exc()}"))

    def _fail(self, text: str) -> None:
        with self._turn:
            self._enter("failed")
        self._recorder.flush()
        self._publisher.publish(Failed(f"The run failed at step {len(self.history)}.\n{text}", fatal=True))


def _check_steps(steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: expected a whole number > 0, such as 300.")


_LIVE: weakref.WeakSet[Trainer] = weakref.WeakSet()


def _no_warning(report: kernels.BuildReport) -> None:
    """Take the place of the warning that a failed build gives in the midst of a step; trainers tell it as an event."""


def _stop_all() -> None:
    """End what still runs when Python exits: the log is closed, and no thread is inside torch when it goes away."""
    for trainer in list(_LIVE):
        if trainer.state == "running":
            trainer.stop()
        trainer._worker.end(_EXIT_SECONDS)  # one at rest may be answering a request


atexit.register(_stop_all)
