"""The run that a trainer trains: what changes it, what replaces it, what undo takes back, and how it is saved.

Everything here happens in the trainer's thread, between two steps; the trainer itself makes the steps. What waits for
its turn is in `controls.py`, the runs beside this one in `kept_runs.py`, checkpoints in `run_saver.py`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import methodcaller
from os import PathLike
from pathlib import Path
from typing import cast

from amplab.amp import MemoryUse
from amplab.amp.run_state.paths import given_path
from amplab.diagnose import Findings, run_findings
from amplab.display.numbers import count, size
from amplab.lab.batches import ReadingStopped
from amplab.lab.changes import config_changes
from amplab.lab.checkpoints import Checkpoint
from amplab.lab.config import FIELDS, ExperimentConfig
from amplab.lab.controls import Controls
from amplab.lab.events import ConfigChanged, Failed, FaultSwitched, Publisher, Reading, RunsChanged, Undone
from amplab.lab.experiment import Experiment, StepStopped
from amplab.lab.findings import LOOK_BACK, observed_run, with_explained, with_injected, with_lab_remedies
from amplab.lab.kept_runs import MOST_BYTES, KeptRun, KeptRuns
from amplab.lab.rank_exchange import RankExchange
from amplab.lab.run_saver import RunSaver
from amplab.lab.run_store import RetiredLogs, RunStore
from amplab.lab.step_explainer import StepExplainer
from amplab.lab.undo import UndoList

__all__ = ["PresentRun"]


class PresentRun:
    """The present run of one trainer; when another run replaces it, all of it that is of one run is exchanged.

    Args:
        config: The experiment.
        log: As of the `Trainer`.
        controls: What is wanted of the trainer.
        publisher: Where it tells what happens.
        exchange: With the other ranks, if several processes train together.

    Attributes:
        name: That the run has among the kept ones once it is kept.
        experiment: What makes its steps.
        store: Its history and its log.
        explainer: Explains its skipped steps.
        kept: The runs beside it.
        changes: What undo takes back.
        retired: The logs of the runs that it has replaced.
        kept_memory: Its bytes, as last written into the log.
        nonfinite_buffers: As of the `Trainer`.
        failure: What was published when it failed.
        paused_by: What has paused it since the last start.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        log: str | PathLike[str] | None,
        *,
        controls: Controls,
        publisher: Publisher,
        exchange: RankExchange | None,
    ) -> None:
        self._controls, self._publisher, self._exchange = controls, publisher, exchange
        self._log = None if log is None else given_path(log, "log").absolute()  # the working folder may change
        self._saver = RunSaver(exchange, publisher.publish)
        self.changes = UndoList()
        self.kept = KeptRuns(self.record_in_turn, self._save_dropped)
        self.retired = RetiredLogs()
        self._runs_begun = 1
        self._put("Run 1", Experiment(config, exchange=exchange), self.new_store(config))

    def _put(self, name: str, experiment: Experiment, store: RunStore) -> None:
        self.name, self.experiment, self.store = name, experiment, store
        experiment.task.tell_of_reading(self._goes_on_reading)
        experiment.goes_on = self._controls.goes_on
        self.explainer = StepExplainer(experiment, store, self._publisher.publish, self.attempt)
        self.failure: Failed | None = None
        self.paused_by: Failed | None = None
        self.kept_memory: MemoryUse | None = None
        self.nonfinite_buffers: tuple[str, ...] = ()
        self._saved_at_failure: Path | None = None  # as it was before the step that failed
        self._has_reported_buffers = False

    @property
    def config(self) -> ExperimentConfig:
        """The config in effect."""
        return self.experiment.config

    def findings(self) -> Findings:
        """Return what the rules find in this run; see `Trainer.findings`."""
        store, config = self.store, self.config
        history = store.history
        interval = config.growth_interval if config.is_dynamic else None
        observed = observed_run(history, config, growth_interval=interval)
        left_out = min(len(history), LOOK_BACK) - len(observed)
        changes = (each.step for each in history.changes if each.field not in ("start", "fault", "restart"))
        since = max(changes, default=0)
        of_steps = [(step, each) for step, each in (*store.found, *store.examined) if step >= since]
        ranked = with_explained(run_findings(observed), of_steps, history.skipped_steps())
        ranked = with_lab_remedies(with_injected(ranked, history))
        looked_at = [f"looked at {count(len(history), 'step')}"]
        if left_out:
            looked_at.append(f"left out {count(left_out, 'step')} that an injected fault made skip")
        return replace(ranked, looked_at=tuple(looked_at))

    def with_changed(
        self, change: Callable[[ExperimentConfig], ExperimentConfig], act: Callable[[ExperimentConfig], bool]
    ) -> bool:
        """Act with the config in effect changed: an undo before it in the queue may have changed other fields."""
        try:
            config = change(self.config)
        except ValueError as error:
            self._publisher.publish(Failed(f"The change is not possible any more: {error}", attempted=True))
            return False
        return act(config)

    def switch(self, config: ExperimentConfig, *, is_undo: bool = False) -> bool:
        """Change the config of the present run; return whether it is in effect."""
        previous, step = self.config, len(self.store.history)
        if config == previous:
            return True
        try:
            self.experiment.switch(config)
        except BaseException:  # noqa: BLE001 - as an optimizer of one's own that cannot be built; the run goes on
            text = f"{_in_words(previous, config)}: not possible; the run is not changed.\n{traceback.format_exc()}"
            self._publisher.publish(Failed(text, attempted=True))
            return False
        text = _in_words(previous, config)
        if text and not is_undo:  # a default that is named is the same setting
            values = {name: getattr(previous, name) for name in FIELDS}
            fields = {name: value for name, value in values.items() if value != getattr(config, name)}
            take_back = partial(
                self.with_changed, methodcaller("changed", **fields), partial(self.switch, is_undo=True)
            )
            self.changes.record(text, take_back, self._while_present())
        self.explainer.examine_next()
        self.store.change(config, previous, step=step)
        self._publisher.publish(ConfigChanged(config, previous, step))
        return True

    def disturb(self, fault: str, on: bool | None, *, is_undo: bool = False) -> None:
        """Arm a fault for the next step, or switch it; see `Trainer.inject`."""
        was_on = fault in self.experiment.armed
        self.experiment.inject(fault, on=on)
        is_on = fault in self.experiment.armed
        if is_on != was_on and not is_undo:
            is_present = self._while_present()
            self.changes.record(
                f"{'NaN' if fault == 'nan' else fault.capitalize()} {'on' if is_on else 'off'}",
                partial(self.disturb, fault, was_on, is_undo=True),
                lambda: is_present() and (fault in self.experiment.armed) == is_on,
            )
        if fault == "underflow":
            self.explainer.examine_next()
        armed = self.experiment.shrinking if fault == "underflow" else on is not False
        self.store.inject(fault, step=len(self.store.history), on=armed)
        self._publisher.publish(FaultSwitched(fault))

    def record_in_turn(self, text: str, take_back: Callable[[], object]) -> None:
        """Record a change that another thread has made at once, after those that it made before it and that wait."""
        self._controls.in_turn(partial(self.changes.record, text, take_back))

    def take_back(self) -> None:
        """Take back the latest change, and tell which."""
        text = self.changes.take_back()
        if text is not None:
            self._publisher.publish(Undone(text))

    def rebuild(self, config: ExperimentConfig, name: str | None = None, *, undone: object = None) -> bool:
        """Begin a run in place of the present one, or again the run `undone`, which had no step; return whether."""
        previous, steps = self.config, len(self.store.history)
        try:
            experiment = Experiment(config, exchange=self._exchange)
        except BaseException:  # noqa: BLE001 - as a task without its data; the present run is whole
            text = f"The new run cannot begin; a reset keeps the present one.\n{traceback.format_exc()}"
            if self._exchange is None:
                self.save(at_rest=True)  # a failed run is not saved any more
            self._end_in_failure(Failed(text, fatal=True))
            return False
        replaced = self._retire()
        if undone is None:
            text = ", ".join(filter(None, [f"Reset at step {steps:,}" if steps else "", _in_words(previous, config)]))
            if text:  # a run without a step and with the same config is the same run
                self._record_replacing(text, replaced, previous)
        self._runs_begun += 1
        store = self.new_store(config)
        store.run = undone or store.run
        self._present(name or f"Run {self._runs_begun}", experiment, store, previous)
        if undone is not None:
            self._enter("ready")
        return True

    def bring_back(self, run: KeptRun, *, is_undo: bool = False) -> bool:
        """Continue a kept run in place of the present one; return whether it does."""
        if not self.kept.can_continue(run):
            return False  # dropped since it was asked for
        is_read = run.is_saved and (run.experiment is None or run.failure is not None)
        experiment = self._read_back(run) if is_read else run.experiment
        if experiment is None:
            return False
        failure = None if is_read else run.failure
        self.kept.take(run)  # first: keeping the present run may drop the oldest one, or its weights
        previous, replaced = self.config, self._retire()
        if not is_undo:
            self._record_replacing(f"Continued {run.name}", replaced, previous)
        self.retired.take_back(run.store)
        run.store.reopen()
        self._present(run.name, experiment, run.store, previous)
        self._tell_left_out(run.name, experiment)
        self.failure = failure
        if failure is not None:
            self._publisher.publish(failure)
        self._enter("failed" if failure else "paused")
        return True

    def restore(self, saved: Checkpoint) -> None:
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
        self._enter("paused")

    def _enter(self, state: str) -> None:
        """Enter the state of a run that has come in place of another, unless a control wants that of a later one."""
        with self._controls.lock:
            goes_on = self._controls.state == "running" and state != "failed"
            if not goes_on and not self._controls.is_state_set:
                self._controls.enter(state, again=True)

    def pause_by(self, text: str, raised: str) -> None:
        """Pause and save the run between two steps, since something of its owner's has raised.

        Where another run is to take its place, that one is not paused.
        """
        if self._controls.is_replacing:
            return
        if (saved := self.save(at_rest=True)) is not None:
            text = f"{text} Its checkpoint is {saved}."
        failure = Failed(f"{text}\n{raised}", attempted=True)
        with self._controls.lock:
            self.paused_by = failure
            self._controls.pause()
        self._publisher.publish(failure)

    def fail(self, text: str) -> None:
        """End the run in a failure, and save it as it was before the step that has raised, if that is possible."""
        what = f"The run failed at step {len(self.store.history)}."
        self._saved_at_failure = self._saved_at_failure or self._save_before_step()
        if (saved := self._saved_at_failure) is not None and len(
            self.store.history
        ):  # a run without a step is not kept
            what = f"{what} It is saved as it was before that step: reset it, then continue it under Runs. ({saved})"
        self.failure = Failed(f"{what}\n{text}", fatal=True)
        self._end_in_failure(self.failure)

    def _end_in_failure(self, failure: Failed) -> None:
        if self._exchange is not None:
            self._exchange.is_over = True
        with self._controls.lock:
            if not self._controls.is_replacing:  # else it is kept with its failure, and the next run begins
                self._controls.enter("failed")
        self.store.flush()
        self._publisher.publish(failure)

    def save(self, *, at_rest: bool = False) -> Path | None:
        """Save the run, if it is time, and return its checkpoint if that is of the present step.

        One that has failed is not whole: its weights may have that step already.
        """
        if self.failure is not None:
            return None
        is_running = self._controls.state == "running"
        return self._saver.save(self.experiment, self.store, is_running=is_running, at_rest=at_rest)

    def save_paused(self) -> None:
        """Save what has changed while the run is paused: its process may end before the next step."""
        if self._controls.announced == "paused" and self._exchange is None:  # other ranks may not be paused yet
            self.save(at_rest=True)

    def end_logs(self) -> None:
        """Close the logs of this run and of those before it, since the run was stopped."""
        with self._controls.lock:
            self._controls.stops -= 1
        self.store.close()
        self.retired.close()
        self._saver.end()
        self.experiment.task.rest()

    def measure(self, run: KeptRun) -> None:
        """Measure what a kept run shows beside its history."""
        experiment = run.experiment
        if experiment is not None:
            self.attempt("The held-out score failed.", lambda: setattr(run, "held_out", experiment.score()))
            self.attempt("Counting kept bytes failed.", lambda: setattr(run, "activations", experiment.activations()))
            run.memory = experiment.memory()
            experiment.task.rest()
        self.kept.touch()
        self._publisher.publish(RunsChanged())

    def report_buffers(self, step: int) -> None:
        """Report once that a bad batch has changed the model although its step was skipped."""
        if self._has_reported_buffers or not (names := self.nonfinite_buffers):
            return
        self._has_reported_buffers = True
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = (
            f"Step {step} left NaN or inf in {names[0]}{more}: BatchNorm updates its running statistics in the forward "
            f"pass, before a step can be skipped. Held-out data are scored with these statistics. Reset to start "
            f"again; in a loop of your own check the batch before the forward pass."
        )
        self._publisher.publish(Failed(text, damaged=True))

    def new_store(self, config: ExperimentConfig) -> RunStore:
        """Return the store of a run that begins."""
        return RunStore(config, log=self._log, on_failure=self._report)

    def attempt(self, what: str, act: Callable[[], None]) -> None:
        """Do what may fail without ending the run; tell it then."""
        try:
            act()
        except (ReadingStopped, StepStopped):
            return  # the run is paused, and what was wanted of the step with it
        except BaseException:  # noqa: BLE001 - a trace that fails does not end the run
            self._publisher.publish(Failed(f"{what}\n{traceback.format_exc()}", attempted=True))

    def _record_replacing(self, text: str, replaced: KeptRun | None, previous: ExperimentConfig) -> None:
        """Record that another run is present; undo continues the replaced one, or starts one with its config."""
        if replaced is None:
            self.changes.record(text, partial(self.rebuild, previous, undone=self.store.run))
            return
        store = replaced.store

        def can_continue() -> bool:
            return (run := self.kept.of_store(store)) is not None and self.kept.can_continue(run)

        def bring_back() -> bool:
            return (run := self.kept.of_store(store)) is not None and self.bring_back(run, is_undo=True)

        self.changes.record(text, bring_back, can_continue)

    def _present(self, name: str, experiment: Experiment, store: RunStore, previous: ExperimentConfig) -> None:
        """Train another experiment from now on."""
        self._put(name, experiment, store)
        self.nonfinite_buffers = experiment.nonfinite_buffers()
        self._publisher.forget_run()
        self._publisher.publish(ConfigChanged(experiment.config, previous, len(store.history), reset=True))

    def _goes_on_reading(self, left: int) -> bool:
        """Tell how many batches are still to be read; stop when a pause or a reset is wanted."""
        self._publisher.publish(Reading(len(self.store.history), left))
        return self._controls.is_announced

    def _retire(self) -> KeptRun | None:
        """Keep the present run and return it; None if it has no step."""
        self.save_paused()
        self.retired.add(self.store)
        if not len(self.store.history):
            return None
        kept = self.kept.keep(
            self.name, self.config, self.store, self.experiment, failure=self.failure, saved=self._saved_at_failure
        )
        self._controls.worker.post(partial(self.measure, kept))
        return kept

    def _while_present(self) -> Callable[[], bool]:
        """Return a function that says whether the run that is present now is the present one; it holds no weights."""
        run = self.store.run
        return lambda: self.store.run is run

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

    def _save_before_step(self) -> Path | None:
        """Save the run as it was before the step that has raised, if that is possible; return its checkpoint."""
        try:
            is_whole = self._exchange is None and self.experiment.take_back()
            return self.save(at_rest=True) if is_whole else None
        except BaseException:  # noqa: BLE001 - what the step has raised is told
            return None

    def _tell_left_out(self, name: str, experiment: Experiment) -> None:
        """Tell what a checkpoint could not hold of an experiment that was read from one."""
        if experiment.left_out:
            parts = ", ".join(part.rstrip("/") for part in experiment.left_out)
            text = f"{name} continues, but not with what these have kept in attributes: {parts}. A checkpoint holds"
            text = f"{text} numbers, tensors and text, for objects that the code makes again."
            self._publisher.publish(Failed(text, attempted=True))

    def _restored(self, saved: Checkpoint) -> tuple[Experiment, RunStore]:
        """Return the experiment and the store of a saved run; a new log that later steps cannot follow is removed."""
        experiment, log = saved.restore(self._exchange)
        try:
            return experiment, RunStore.of_log(log, self._report, steps=saved.step)
        except (OSError, ValueError) as error:
            if self._exchange is None:
                log.unlink(missing_ok=True)
            raise ValueError(str(error).replace(str(log), str(saved.log))) from error

    def _report(self, text: str) -> None:
        self._publisher.publish(Failed(text))


def _in_words(previous: ExperimentConfig, config: ExperimentConfig) -> str:
    return ", ".join(change.text for change in config_changes(previous, config, 0))
