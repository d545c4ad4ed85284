"""One experiment: a task, a model, its optimizers and an `amplab.amp.Session`, trained step by step by its owner.

    for each optimizer:
        for each of its losses:
            loss = task's loss(model, batch(step))        # under session.casting()
            with scale_loss(loss * shrink) as scaled: (scaled * fault).backward()
        optimizer.step()                                  # skipped if a gradient overflowed

A step accumulates the gradients of several batches if the config says so; then each loss is divided by their number.
Such a step can take minutes. Its owner may stop it after any batch; see `Experiment.goes_on`.

`trainer.py` runs it in a thread, `views` shows it; `faults.py` has the faults that can be injected.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.amp import MemoryUse, ScaleRecord, Session, load_run_state, save_run_state
from amplab.diagnose import Findings, FirstNonfinite, TwinReport, doctor, twin
from amplab.formats.exponents import BINS, LOWEST_EXPONENT
from amplab.kernels import tensor_stats
from amplab.lab.batches import ReadingStopped, copied
from amplab.lab.compute_threads import own_number_kept
from amplab.lab.config import OWN, ExperimentConfig
from amplab.lab.config_field import SettingRefused
from amplab.lab.drawing_turns import drawing_alone
from amplab.lab.events import GradientRecord, MixedScales, StepRecord
from amplab.lab.faults import (
    after_step,
    fault_named,
    faults_in,
    faults_named,
    nan_in_first_activation,
    overflowing,
    shrunk,
    switched,
    with_nan,
)
from amplab.lab.float32_modules import check_float32_modules, names_of_modules
from amplab.lab.forward_again import unseen
from amplab.lab.kept_attributes import KeptAttributes
from amplab.lab.kept_weights import KeptWeights
from amplab.lab.model_buffers import ModelBuffers
from amplab.lab.models import MODELS, build_model
from amplab.lab.own_changes import OwnChanges
from amplab.lab.past_skips import PastSkip, PastSkips
from amplab.lab.rank_exchange import RankExchange
from amplab.lab.saved_experiment import read_saved
from amplab.lab.scale_growth import ScaleGrowth, growth_of_rule
from amplab.lab.schedule_states import left_out, load_states, schedules_in_hooks, states_of
from amplab.lab.session_settings import (
    kept_scales,
    needs_new_session,
    optimizer_maker,
    refuse_new_weights,
    session_settings,
)
from amplab.lab.step_rerun import StepRerun
from amplab.lab.step_stages import StageRecorder, StepStages
from amplab.lab.task_optimizers import TaskOptimizers
from amplab.lab.tasks import OWN_TASK, TASKS, Task, TaskLoss, load_task, task_choice
from amplab.policies.nested_tensors import floating_tensors_in
from amplab.policies.signals import is_interrupt
from amplab.scalers import ScaleRule, ScaleState
from amplab.trace import Trace, trace_step, xray
from amplab.trace.as_found import leaves_as_found
from amplab.trace.forwarded_modules import buffers_kept
from amplab.trace.handed_step import ModelGroup
from amplab.trace.kept_tensors import KeptBytes
from amplab.trace.optimizer_hooks import keeping_failures_of_hooks
from amplab.trace.optimizer_states import OptimizerState
from amplab.trace.random_states import random_states_kept
from amplab.trace.recorder import Observer
from amplab.trace.tensor_copies import TensorCopy, restore_all, write_value
from amplab.trace.untouched import modules_kept

__all__ = [
    "SCORE_EVERY",
    "Experiment",
    "StepStopped",
    "samples_gradients",
]

SCORE_EVERY = 25
"""Steps between two measurements of the score on held-out data."""

_SAMPLED = ((200, 20), (2_000, 50), (math.inf, 200))  # until this step, a histogram of the gradients every so many

_MOST_BYTES_CHECKED = 2**28  # of weights and masters
_LEARNS_WRITTEN = 3  # steps; a teacher that follows equal weights does not move in the first one

_NUMBERED = re.compile(r"models\[(\d+)\]\.")


@dataclass(frozen=True)
class _Part:
    """One forward and backward of a step.

    Attributes:
        batch: Number of its batch among those that the step accumulates.
        loss_id: Number of its loss among those of the task.
        loss: That loss.
    """

    batch: int
    loss_id: int
    loss: TaskLoss


class StepStopped(Exception):
    """A step of several batches was stopped after one of them; the experiment is as before the step."""


P = ParamSpec("P")
R = TypeVar("R")


def _is_look(look: Callable[Concatenate[Experiment, P], R]) -> Callable[Concatenate[Experiment, P], R]:
    """Let a look at the next step leave what code of one's own keeps."""

    @functools.wraps(look)
    def looking(self: Experiment, /, *args: P.args, **named: P.kwargs) -> R:
        with self.code_kept():
            return look(self, *args, **named)

    return looking


class Experiment:
    """A model in training, one step at a time.

    The same config gives the same steps bit for bit on the same machine, with one compute thread
    (`torch.set_num_threads(1)`; the trainer sets it for its own thread).

    Args:
        config: What to train, and how.
        exchange: With the other ranks, if several processes train together: each one trains batches of its own and
            gradients are averaged. n ranks train the same as one process that accumulates n times as many batches.

    Attributes:
        goes_on: Called before each batch of a step, or of `gradients`, that accumulates several; if it returns False,
            `StepStopped` is raised, and the experiment is as before the call. It is not called of several ranks, which
            wait for each other, and not for a model of one's own: what its forward changes besides parameters and
            buffers, such as a counter in an attribute, could not be taken back.
        left_out: What a checkpoint could not hold, of a loaded experiment.
        phase: Of the step that runs or has raised: "batches" while they are read, before anything has changed,
            "gradients" before an optimizer steps, then "weights"; "" between two steps.
        score_failure: The traceback of the last score that could not be measured in a step; "" if there is none.
        hook_failure: That of hooks that raised after an optimizer's part of the last step, as a schedule at its end.

    Raises:
        ImportError: The task's data are not installed.
        ValueError: The batch is larger than the training set.
    """

    @drawing_alone
    def __init__(self, config: ExperimentConfig, *, exchange: RankExchange | None = None) -> None:
        self._config = config
        self._exchange = exchange
        self._is_own = OWN_TASK.fullmatch(config.task) is not None
        self._task = load_task(config.task, config.seed)
        self._task.check_batch_size(config.batch_size)
        self._model = build_model(config.model, config.hidden, config.seed)
        self._draws = MODELS[config.model].draws
        self._copy: nn.Module | None = None  # building it again would draw
        self._buffers = ModelBuffers(self._model)
        self._optimizers = TaskOptimizers(self._task, self._model, config)
        self._session = Session()
        self._scaled: list[ScaleRecord] = []  # of the present step
        self._session.subscribe(self._scaled.append)
        self._initialize(config)
        own_model = self._model if self._is_own else None
        self._own = OwnChanges(own_model, self._task, lambda: self._optimizers.all, self._kept_tensors)
        self._lowest = self._lowest_scale()
        self._memory = self._session.memory()
        self._measure_memory_until = 2  # the optimizers create their state in their first step
        self._step = 0
        self._accumulates_since = (0, 0)  # a step, and the number of its first batch in the data
        self._began: float | None = None
        self._faults: frozenset[str] = frozenset()  # of the next step
        self._rerun = self._new_rerun()
        self._last: StepRecord | None = None  # while the step can run again
        self._last_loss_id = 0
        self._mixed_scales: MixedScales | None = None
        self._recorder: StageRecorder | None = None
        self._past = PastSkips()
        self.score_failure, self.hook_failure, self.left_out = "", "", tuple[str, ...]()
        self.phase = ""
        self.goes_on: Callable[[], bool] = lambda: True
        is_labs = not self._is_own and MODELS[config.model].build.__module__.startswith("amplab.")
        self._can_stop = is_labs and exchange is None
        self._scalers_before: tuple[ScaleState, ...] = ()
        self._weights_before = KeptWeights(())
        self._written_in_forward: Set[int] = frozenset()  # by id
        self._weights_changes = 0  # by steps that were not skipped
        self._attributes_before = KeptAttributes({})
        self._given: Sequence[Any] | None = None  # batches of a step that runs again

    @property
    def config(self) -> ExperimentConfig:
        """The config in effect."""
        return self._config

    @property
    def task(self) -> Task:
        """What is trained."""
        return self._task

    @property
    def model(self) -> nn.Module:
        """The model, in the dtype that the opt_level sets; several models as one `ModelGroup`."""
        return self._model

    @property
    def optimizer(self) -> Optimizer:
        """The first optimizer; at O2 it updates the masters."""
        return self._optimizers.all[0]

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All optimizers, in the order of their steps."""
        return tuple(self._optimizers.all)

    @property
    def session(self) -> Session:
        """The mixed-precision session of this experiment."""
        return self._session

    @property
    def steps_done(self) -> int:
        """Number of steps so far; also the number of the next step."""
        return self._step

    @property
    def loss_scale(self) -> float:
        """The scale that the next step will use, of several the lowest; readable from any thread."""
        return self._lowest[2].scale

    @property
    def scale_growth(self) -> ScaleGrowth | None:
        """When that scale grows next; None if it is static; readable from any thread."""
        loss_id, rule, state = self._lowest
        return growth_of_rule(rule, state, backwards=self._backwards(loss_id))

    @property
    def mixed_scales(self) -> MixedScales | None:
        """The scale of each loss of the last step if they differ, else None."""
        return self._mixed_scales

    @property
    def draws(self) -> bool:
        """Whether a step draws random numbers: it then seeds the generators, and restores them."""
        return self._draws

    @property
    def armed(self) -> frozenset[str]:
        """The faults that will go into the next step."""
        return self._faults

    @property
    def shrinking(self) -> bool:
        """Whether an injected underflow is on."""
        return "underflow" in self._faults

    @drawing_alone
    def step(self) -> StepRecord:
        """Train on the next batch and return what happened. Sync: one.

        Raises:
            StepStopped: See `goes_on`.
        """
        if self._began is None:
            self._began = time.perf_counter()
        if self._exchange is not None:
            self._exchange.begin_step([*self._model.buffers()])
        was_skipped = self._last is not None and self._last.skipped
        self.phase, self.hook_failure = "batches", ""
        batches = self._batches_now()
        self._scaled.clear()
        self._scalers_before = tuple(scaler.state for scaler in self._session.scalers)
        self._rerun.forget()
        self._rerun.remember(batches[0] if len(batches) == 1 else batches)
        self._attributes_before = self._own.kept(is_of_step=True)
        written = self._written_in_forward if self._weights_changes >= _LEARNS_WRITTEN else None
        self._weights_before, self.phase = KeptWeights(self._weights(), self._unstepped(), written), "gradients"
        with self._taken_back_if_stopped(), own_number_kept():
            record = self._train_on(batches, self._began)
        self._written_in_forward |= self._weights_before.written()
        if record.skipped and self._rerun.is_batch_written:
            batches = self._batches_now()
            self._rerun.renew(batches[0] if len(batches) == 1 else batches)
        self._weights_changes += not record.skipped
        self._last = record
        if record.skipped and self._given is None and self._exchange is None:  # a rank cannot run again by itself
            self._keep_skip(was_skipped=was_skipped)
        self._lowest = self._lowest_scale()
        self._faults = after_step(self._faults)
        self._step += 1
        self.phase = ""
        return record

    def take_back(self) -> bool:
        """Restore what a step that has raised in its forward or backward had changed; return whether that is all.

        Then what `save` saves is as before the step. It is not once an optimizer has begun to step, or if the forward
        has written to weights that an optimizer steps, exchanged buffers, or written in place to a large tensor of an
        attribute. See `KeptWeights` for other weights, such as those of a teacher.
        """
        if self.phase != "gradients" or not self._weights_before.restore():
            return False
        if not (self._rerun.restore_buffers() and self._attributes_before.restore()):
            return False
        for scaler, state in zip(self._session.scalers, self._scalers_before, strict=True):
            scaler.state = state
        self._last, self.phase = None, ""  # the batch of the last step is not kept any more
        return True

    def step_in_stages(self, parameter: str | None = None) -> tuple[StepRecord, StepStages]:
        """Train on the next batch as `step` does, bit for bit, and record its stages.

        Args:
            parameter: Name of the parameter that is recorded even if the model is too large to record all.

        Sync: several.
        """
        recorder = StageRecorder(self._model, self._optimizers.all, self._session, first=parameter)
        self._recorder = recorder
        try:
            with recorder:
                record = self.step()
        finally:
            self._recorder = None
        return record, recorder.stages(record)

    def inject(self, fault: str, *, on: bool | None = None) -> None:
        """Disturb the training.

        - "overflow": the next backward starts from a scaled loss so large that gradients overflow in float16 (at O0:
          in float32). With a dynamic scale the step is skipped; with a static scale it reaches the weights, as in real
          runs. Of a task with several losses it disturbs the first one.
        - "nan": an element of the next batch is NaN; if the batch holds whole numbers only, an element of the first
          activation. With a dynamic scale the weights are safe. The running statistics of a BatchNorm are not, because
          the forward pass updates them before a step can be skipped.
        - "underflow": the loss is multiplied by 2^-16 from the next step on, until it is switched off. The gradients
          are not multiplied back.

        Args:
            fault: One of `FAULTS`.
            on: True or False to switch the fault on or off; None arms "overflow" and "nan" for the next step and
                toggles "underflow".

        Raises:
            ValueError: There is no such fault.
        """
        self._faults = switched(self._faults, fault_named(fault), on)

    def switch(self, config: ExperimentConfig) -> None:
        """Use another config from the next step on, with weights and optimizer state kept.

        The loss scale is also kept if it was and stays dynamic, unless init_scale changed. A new level does not keep a
        scale below 1, to which an overflow that no scale mends has driven it: it starts at init_scale. A new optimizer
        starts without state.

        Raises:
            ValueError: A changed field needs new weights, or the batch is larger than the training set.
            Exception: What the session or an optimizer of one's own raises. The experiment is then as before.
        """
        old = self._config
        self.check_switch(old, config)
        self._last = None
        if needs_new_session(old, config):
            self._switch_session(old, config)
            self._lowest = self._lowest_scale()
            self._measure_memory_until = self._step + 2
            self._rerun = self._new_rerun()  # of the level's buffers
        if old.accumulate != config.accumulate:
            begun, first = self._accumulates_since
            self._accumulates_since = self._step, first + (self._step - begun) * self._batches_of_step()
        if old.learning_rate != config.learning_rate:  # else as code of one's own left them
            self._optimizers.set_rates(config)
        if old.momentum != config.momentum:
            self._optimizers.set_momentum(config)
        self._config = config

    def _new_rerun(self) -> StepRerun:
        rerun = StepRerun(self._model, None, self._loss_again, self._session, keeps=False)
        rerun.begin()
        return rerun

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """Save the experiment between two steps, with `extra` values that `load` returns; see `save_run_state`.

        Raises:
            OSError: The file cannot be written; the last one is unchanged.
            RunStateError: A state holds a value that the file cannot hold.
        """
        schedules = schedules_in_hooks(self._optimizers.all)
        place, (own, lost) = self._task.place_in_data(self._batch_in_data(self._step)), self._own.state()
        lost = [*left_out(schedules), *place.pop("left_out", ()), *lost]
        here = {
            "config": str(self._config),
            "digests": dict(task_choice(self._config.task).digests),
            "armed": sorted(self.armed),
            **place,
            "accumulates_since": list(self._accumulates_since),
            **self._buffers.state(),
            "schedules": states_of(schedules),
            **own,
            "left_out": lost,
            "learning_rate": self._config.learning_rate,
            "seconds": 0.0 if self._began is None else time.perf_counter() - self._began,
        }
        save_run_state(
            path,
            model=self._model,
            optimizer=self._optimizers.all,
            amp=self._session,
            position=self._step,
            extra={**extra, **here},
        )

    @classmethod
    @drawing_alone
    def load(
        cls, path: Path, config: ExperimentConfig | None = None, *, exchange: RankExchange | None = None
    ) -> tuple[Experiment, dict[str, Any]]:
        """Return a saved experiment, which continues bit for bit, and the extra values that were saved with it.

        All ranks load the checkpoint of rank 0: their weights, optimizer states and scales are equal.

        Args:
            path: The file.
            config: The one to continue with; None for the saved one.
            exchange: With the other ranks.

        Raises:
            OSError: The file cannot be read.
            RunStateError: It is damaged, or the model of its config has another shape here.
            ValueError: Its config cannot be read.
        """
        _, extra = read_saved(path)
        experiment = cls(config or ExperimentConfig.parse(extra["config"]), exchange=exchange)
        unregistered = experiment._buffers.load(extra)  # first: some have another shape in the file
        with random_states_kept(()):  # a step draws from its own
            state = load_run_state(
                path, model=experiment._model, optimizer=experiment._optimizers.all, amp=experiment._session
            )
        experiment._step, experiment._measure_memory_until = state.position, state.position + 2
        experiment._accumulates_since = tuple(extra.get("accumulates_since", (0, 0)))
        experiment._task.know_place(extra)
        load_states(schedules_in_hooks(experiment._optimizers.all), extra.get("schedules", []))
        missing = experiment._own.load(extra)
        experiment.left_out = (*extra.get("left_out", ()), *unregistered, *missing)
        experiment._began = time.perf_counter() - extra["seconds"]
        experiment._lowest, experiment._memory = experiment._lowest_scale(), experiment._session.memory()
        for fault in extra["armed"]:
            experiment.inject(fault, on=True)
        return experiment, extra

    def check_task(self, config: ExperimentConfig) -> None:
        """Raise ValueError if no experiment of another config can begin, as far as that is known without its data."""
        if config.task not in TASKS:
            load_task(config.task, config.seed)  # raises
        if config.task == self._config.task:
            self._task.check_batch_size(config.batch_size)
        if (config.task, config.model) == (self._config.task, self._config.model):
            check_float32_modules(config, self._model)

    def check_switch(self, old: ExperimentConfig, new: ExperimentConfig) -> None:
        """Raise ValueError if `switch` from `old` to `new` would."""
        refuse_new_weights(old, new)
        is_own = old.optimizer == new.optimizer == OWN
        if is_own and old.learning_rate != new.learning_rate and self._optimizers.have_own_rates(self._config):
            raise SettingRefused(
                f"lr={new.learning_rate:g}: your optimizer, or a schedule in a hook of it, sets the learning rate; "
                "change it there, and open the lab again.",
                shown="Learning rate: your optimizer, or a schedule in a hook of it, sets it.",
            )
        self._task.check_batch_size(new.batch_size)
        check_float32_modules(new, self._model)

    def code_kept(self) -> AbstractContextManager[None]:
        """Return a scope after which code of one's own keeps what it kept before, such as a count of calls."""
        return self._own.taken_back()

    @drawing_alone
    @leaves_as_found
    @_is_look
    def score(self) -> float | None:
        """Return the task's score on held-out data, None if it has none; the experiment does not change. Sync: one."""
        if self._task.score is None:
            return None
        with modules_kept(self._model), torch.no_grad(), self._session.casting(), self._random_states_kept():
            self._model.eval()
            self._seed_forward(self._step, len(self._task.losses))
            return self._task.measure(self._model)

    @drawing_alone
    @_is_look
    def trace(self, observer: Observer | None = None) -> Trace:
        """Record the forward and backward of the next batch, op by op; the experiment does not change.

        The losses of a task with several are added before the backward.

        Args:
            observer: Reads the tensors of every op.
        """
        step, batch = self._step, self._batch(self._step)
        parts = [part for part in self._parts() if part.batch == 0]
        return trace_step(
            self._model,
            lambda: _sum(self._forward(self._model, part, batch, step) for part in parts),
            casting=self._session.casting(),
            loss_scale=self.loss_scale,
            observer=observer,
            draws=self._draws,
        )

    @drawing_alone
    @_is_look
    def examine(self) -> Findings:
        """Return what `amplab.doctor` finds in the next step; the experiment does not change. Sync: many."""
        step, batch = self._step, self._batch(self._step)
        parts = [part for part in self._parts() if part.batch == 0]
        found = doctor(
            self._model,
            batch,
            step=lambda: shrunk(_sum(self._forward(self._model, part, batch, step) for part in parts), self._faults),
            optimizer=self._optimizers.all,
            scaler=self._session,
        )
        return cast(Findings, found)  # of a model, not of the machine

    def module_names(self) -> tuple[str, ...]:
        """Return the names of the model's modules, of which float32_modules may list some; none of several models."""
        return names_of_modules(self._model)

    @property
    def last_skip(self) -> StepRecord | None:
        """The last step if it was skipped: its batch, weights and random state are still there. Else None."""
        return self._last if self._last is not None and self._last.skipped else None

    @drawing_alone
    @_is_look
    def explain_skip(self) -> FirstNonfinite | None:
        """Run `last_skip` again from the state in which it began; return which op overflowed first, and why.

        The experiment does not change.

        Returns:
            The explanation; None if there is no such step, or if it is finite when it runs again.

        Sync: a few.
        """
        skip = self.last_skip
        return None if skip is None else self._rerun.first_nonfinite(skip.loss_scale)

    @property
    def past_skips(self) -> PastSkips:
        """The skipped steps that can run again, in an experiment that becomes as this one was."""
        return self._past

    def become(self, skip: PastSkip) -> None:
        """Take the state in which another experiment of the same config began a step that it skipped.

        Then `explain_skip` explains that step, and `step` or `step_in_stages` takes it again, once.
        """
        with torch.no_grad():
            for mine, its in zip(self._weights(), skip.weights, strict=True):
                mine.copy_(its)
        for scaler, state in zip(self._session.scalers, skip.scalers, strict=True):
            scaler.state = state
        self._rerun.begin_as(skip.beginning)
        batch = skip.beginning.begun[0].batch
        self._given = batch if self._config.accumulate > 1 else [batch]
        self._own.load(skip.own)
        self._step, self._last, self._last_loss_id = skip.record.step, skip.record, skip.loss_id
        self._faults = faults_in(skip.record.injected)

    def _keep_skip(self, *, was_skipped: bool) -> None:
        """Keep the step that has just been skipped, unless it has changed what is not known to another experiment."""
        if self._weights_before.written() or self._attributes_before.has_drawn:
            return
        own, lost = self._own_before()
        if not lost:
            make = functools.partial(self._past_skip, own=own)
            self._past.keep(self._weights(), is_same=was_skipped and len(self._optimizers.all) == 1, make=make)

    def _own_before(self) -> tuple[dict[str, Any], list[str]]:
        """Return the state of code of one's own as the step began, and the names of what a state cannot hold."""
        if not self._is_own:
            return {}, []
        with self._own.taken_back():
            self._attributes_before.restore()
            return self._own.state()

    def _past_skip(self, weights: tuple[Tensor, ...], own: Mapping[str, Any]) -> PastSkip:
        """Return the step that has just been skipped."""
        if self._last is None:
            raise RuntimeError("no step can run again: expected one that has just ended.")
        return PastSkip(
            self._last, self._config, self._last_loss_id, self._scalers_before, self._rerun.beginning(), weights, own
        )

    def _weights(self) -> list[Tensor]:
        """Return the model's parameters, and what the optimizers step instead: masters."""
        weights: list[Tensor] = list(self._model.parameters())
        known = {id(each) for each in weights}
        stepped = (each for optimizer in self._optimizers.all for each in self._session.master_params(optimizer))
        return weights + [each for each in stepped if id(each) not in known]

    def _unstepped(self) -> list[Tensor]:
        """Return the parameters that no optimizer steps, of a model of one's own."""
        stepped = {name for names in self._optimizers.names for name in names}
        return [each for name, each in self._model.named_parameters() if name not in stepped] if self._is_own else []

    def _loss_again(self, given: Any) -> Tensor:
        """Return the loss that was skipped in the last step, with the faults that went into it."""
        last = self._last
        if last is None:
            raise RuntimeError("no step can run again: expected one that has just ended.")
        batches = [given] if self._config.accumulate == 1 else given
        faults = faults_in(last.injected)
        with unseen():
            self._attributes_before.restore()
            self._weights_before.restore_copies()

        def disturbed(part: _Part) -> Tensor:
            self._stop_if_wanted()
            loss = self._forward(self._model, part, batches[part.batch], last.step, faults)
            return self._disturbed(shrunk(loss, faults), part, last.loss_scale, faults)

        return _sum(disturbed(part) for part in self._parts() if part.loss_id == self._last_loss_id)

    @drawing_alone
    @_is_look
    def gradients(self) -> GradientRecord:
        """Return the exponents of the gradients of the next step, in float32 at the current (master) weights.

        An injected underflow shrinks them as it shrinks the loss. The experiment does not change: dropout draws
        what the next step will draw again.
        """
        model = self._float32_copy(self._copy)
        self._copy = None if self._draws else model  # a model of one's own may hold more than its weights
        grads: dict[str, Tensor] = {}
        for number, names in enumerate(self._optimizers.names):
            model.zero_grad(set_to_none=True)
            with self._random_states_kept(), buffers_kept(model):
                for part in self._parts(number):
                    self._stop_if_wanted()
                    batch = self._batch(self._step, part.batch)
                    shrunk(self._forward(model, part, batch, self._step), self._faults).backward()
            weights = dict(model.named_parameters())
            grads |= {name: grad for name in names if (grad := weights[name].grad) is not None}
        named = [name for name, _ in model.named_parameters() if name in grads]
        stats = tensor_stats([_dense(grads[name]) for name in named], low=LOWEST_EXPONENT, bins=BINS).read()
        layers = tuple(zip(named, (each.exponents for each in stats), strict=True))
        return GradientRecord(step=self._step, loss_scale=self.loss_scale, layers=layers)

    def activations(self) -> int | None:
        """Return the bytes that the forward of the next batch keeps for its backward; the experiment does not change.

        They include 16-bit copies of weights. None for a model that calls `torch.func`, where they cannot be counted.
        """
        kept = self.kept()
        return None if kept is None else kept.total

    @drawing_alone
    @_is_look
    def kept(self, *, batch_size: int | None = None) -> KeptBytes | None:
        """Return what `activations` counts, by module; the experiment does not change.

        Args:
            batch_size: Size of the batch; None for that of the config. Where it has no effect, the batch is the task's.
        """
        size, part = batch_size or self._config.batch_size, self._parts()[0]
        batch = self._task.batch(self._batch_in_data(self._step), size)
        with self._session.casting():
            return xray(self._model, step=lambda: self._forward(self._model, part, batch, self._step)).kept

    @drawing_alone
    @_is_look
    def twin(self, *, steps: int = 10) -> TwinReport:
        """Train a float32 copy and one in this precision from the present weights, and compare them module by module.

        Both take the next batches. The experiment does not change.

        Raises:
            ValueError: The task has several models or optimizers, which twins do not.
        """
        self.check_twin()
        config, first, losses = self._config, self._batch_in_data(self._step), self._task.losses
        return twin(
            self._float32_copy(),
            lambda number: self._task.batch(first + number, config.batch_size),
            "O0",
            session_settings(config),
            steps=steps,
            step=lambda model, batch: _sum(each.of(model, batch) for each in losses),
            optimizer=lambda weights: self._task.optimizer_of(list(weights), optimizer_maker(config)),
            seed=config.seed,
        )

    def check_twin(self) -> None:
        """Raise ValueError if `twin` would."""
        if isinstance(self._model, ModelGroup) or len(self._optimizers.all) > 1:
            raise ValueError(
                f"Twin trains one model with one optimizer, and {self._config.task} has {len(self._optimizers.all)} "
                "optimizers; choose another task."
            )

    @property
    def can_be_checked(self) -> bool:
        """Whether it has code of one's own and is small enough for a second one beside it, to see if that can load."""
        weights = sum(each.nbytes for each in self._weights())
        return self._is_own and weights <= _MOST_BYTES_CHECKED

    def nonfinite_buffers(self) -> tuple[str, ...]:
        """Return the names of the model's buffers that hold NaN or inf, which a skipped step keeps. Sync: one.

        Those that did from the start, as a mask of attention does, are left out.
        """
        return self._buffers.nonfinite()

    def memory(self) -> MemoryUse:
        """Return the last measured bytes of parameters, gradients, masters and optimizer state.

        They are measured just before the optimizer's step, when the gradients exist: in the two steps after a change
        and every 25 steps. Those of a loaded experiment are without gradients until its first step.
        """
        return self._memory

    # -- one step, in parts --------------------------------------------------------------------------

    @contextmanager
    def _taken_back_if_stopped(self) -> Iterator[None]:
        """Take a step back if it is stopped in the block: the next one has the bits that this one would have had."""
        if not self._can_stop or self._config.accumulate == 1:
            yield
            return
        buffers = [TensorCopy.of(each) for each in self._model.buffers()]
        # The first optimizer steps after all of its batches, and is stopped after that only if it has skipped.
        optimizers = [OptimizerState.of(each) for each in self._optimizers.all] if len(self._optimizers.all) > 1 else []
        try:
            yield
        except StepStopped:
            with torch.no_grad():
                restore_all(buffers)
            for state in optimizers:
                state.restore()
            for scaler, before in zip(self._session.scalers, self._scalers_before, strict=True):
                scaler.state = before
            self._drop_gradients()
            self._last, self.phase = None, ""  # what it began with is gone; `past_skips` has it
            raise

    def _drop_gradients(self) -> None:
        """Drop the gradients of the model and of masters, with what the session has noted of their overflow."""
        self._model.zero_grad(set_to_none=True)
        for optimizer in self._optimizers.all:
            optimizer.zero_grad(set_to_none=True)

    def _stop_if_wanted(self) -> None:
        """Raise StepStopped if `goes_on` says so."""
        if self._can_stop and self._config.accumulate > 1 and not self.goes_on():
            raise StepStopped(f"step {self._step} was stopped before its end, and taken back.")

    def _train_on(self, batches: Sequence[Any], began: float) -> StepRecord:
        """Make each optimizer's backwards and its step."""
        losses, exponents = list[Tensor](), list[float]()
        for number, optimizer in enumerate(self._optimizers.all):
            with self._random_states_kept():
                losses += self._backward(number, batches)
            if self._step < self._measure_memory_until or self._step % SCORE_EVERY == 0:
                self._memory = self._session.memory()
            exponents += self._largest_exponent(optimizer)  # O2 drops the gradients of the masters in the step
            with self._random_states_kept():
                self._seed_forward(self._step, -1 - number)  # on all ranks the same: they keep the same weights
                self.phase = "weights"
                self._step_weights(optimizer)
        return self._record(losses, exponents, began)

    def _backward(self, number: int, batches: Sequence[Any]) -> list[Tensor]:
        """Compute the unscaled gradients of one optimizer; return the losses, before any shrinking."""
        optimizer, parts = self._optimizers.all[number], self._parts(number)
        optimizer.zero_grad(set_to_none=True)
        losses, delays = [], self._delays_unscale(number)
        with self._session.casting():
            for part in parts:
                self._stop_if_wanted()
                loss = self._forward(self._model, part, batches[part.batch], self._step, self._faults)
                losses.append(loss.detach())
                with self._session.scale_loss(
                    shrunk(loss, self._faults),
                    optimizer,
                    loss_id=part.loss_id,
                    delay_unscale=delays and part is not parts[-1],  # one check for the sum of all batches
                ) as scaled:
                    root = self._disturbed(scaled, part, self._session.loss_scale(part.loss_id), self._faults)
                    if self._recorder is not None:
                        self._recorder.see_loss(loss, root)
                    root.backward()
                    self._average_gradients(number)
        return losses

    def _step_weights(self, optimizer: Optimizer) -> None:
        """Step an optimizer. What hooks raise after its step is kept in `hook_failure`: the step is made already."""
        failures = list[str]()
        with keeping_failures_of_hooks(optimizer, failures) if self._exchange is None else nullcontext():
            optimizer.step()
        self.hook_failure += "".join(failures)

    def _average_gradients(self, number: int) -> None:
        """Average the new gradients of an optimizer over the ranks while they are scaled: each sees every overflow."""
        if self._exchange is not None:
            weights = (self._model.get_parameter(name) for name in self._optimizers.names[number])
            self._exchange.average_([weight.grad for weight in weights if weight.grad is not None])

    def _batch_in_step(self, number: int) -> int:
        """Return the number of a batch of this rank among those that all ranks train on in one step."""
        rank = 0 if self._exchange is None else self._exchange.place.rank
        return rank * self._config.accumulate + number

    def _batch_in_data(self, step: int, number: int = 0) -> int:
        """Return the number of a batch of this rank in the data; not of a step before the last change of accumulate."""
        begun, first = self._accumulates_since
        return first + (step - begun) * self._batches_of_step() + self._batch_in_step(number)

    def _batches_of_step(self) -> int:
        """Return how many batches all ranks train on in one step."""
        return (1 if self._exchange is None else self._exchange.place.world_size) * self._config.accumulate

    def _parts(self, optimizer: int | None = None) -> list[_Part]:
        """Return the parts of a step, in order; of one optimizer, or all."""
        losses = [each for each in enumerate(self._task.losses) if optimizer in (None, each[1].optimizer)]
        return [_Part(batch, *each) for batch in range(self._config.accumulate) for each in losses]

    def _delays_unscale(self, optimizer: int) -> bool:
        """Whether the backwards of all batches of a step are unscaled together: those of one loss are."""
        return sum(loss.optimizer == optimizer for loss in self._task.losses) == 1

    def _backwards(self, loss_id: int) -> int:
        """Return how often one step moves the scale of a loss."""
        return 1 if self._delays_unscale(self._task.losses[loss_id].optimizer) else self._config.accumulate

    def _forward(self, model: nn.Module, part: _Part, batch: Any, step: int, faults: Set[str] = frozenset()) -> Tensor:
        """Return the loss of one part, with the random numbers that belong to it."""
        place = self._batch_in_step(part.batch) * (len(self._task.losses) + 1) + part.loss_id
        self._seed_forward(step, place)
        without_floats = "nan" in faults and not floating_tensors_in(batch)
        with nan_in_first_activation(model) if without_floats else nullcontext():
            loss = part.loss.of(model, batch)
        return loss if self._config.accumulate == 1 else loss / self._config.accumulate

    def _seed_forward(self, step: int, place: int) -> None:
        if self._draws:
            self._task.seed_forward(step, place)

    def _random_states_kept(self) -> AbstractContextManager[None]:
        """Restore what `_seed_forward` seeds; without it nothing, since other threads may draw meanwhile."""
        return self._task.random_states_kept() if self._draws else nullcontext()

    def _batches_now(self) -> list[Any]:
        """Return the batches of the next step: a step may write to them."""
        if self._given:
            return [copied(each) for each in self._given]
        return [self._batch(self._step, number, self._faults) for number in range(self._config.accumulate)]

    def _batch(self, step: int, number: int = 0, faults: Set[str] = frozenset()) -> Any:
        batch = self._task.batch(self._batch_in_data(step, number), self._config.batch_size)
        return with_nan(batch) if "nan" in faults else batch

    def _disturbed(self, scaled: Tensor, part: _Part, scale: float, faults: Set[str]) -> Tensor:
        """Return a scaled loss, so large that gradients overflow if that fault is armed for this part."""
        if "overflow" not in faults or part.loss_id or part.batch:
            return scaled
        return overflowing(scaled, scale, self._config.level.range_format)

    def _record(self, losses: Sequence[Tensor], exponents: Sequence[float], began: float) -> StepRecord:
        limiting = self._limiting_scale()
        value = sum(loss.item() for loss in losses)
        scales = tuple(each.loss_scale for each in self._scaled)
        self._mixed_scales = MixedScales(self._step, scales) if len({*scales}) > 1 else None
        if limiting.skipped:
            self._last_loss_id = limiting.loss_id
            # After a fault of one step the gradients are not finite; an underflow leaves them as they are.
            faulty = self._faults - after_step(self._faults) or not math.isfinite(value)
            exponents = [math.inf if faulty else self._exponent_of_skip()]
        return StepRecord(
            step=self._step,
            loss=value,
            loss_scale=limiting.loss_scale,
            next_loss_scale=limiting.next_loss_scale,
            skipped=limiting.skipped,
            first_nonfinite=self._name_in_model(limiting.first_nonfinite),
            opt_level=self._config.opt_level,
            score=self._score_of_step() if (self._step + 1) % SCORE_EVERY == 0 else None,
            seconds=round(time.perf_counter() - began, 6),
            injected=faults_named(self._faults),
            grad_exponent=max(exponents, default=None),
        )

    def _exponent_of_skip(self) -> float:
        """Return the largest exponent of the gradients in float32; inf if code of one's own raises there.

        The step is over: its weights are as before it.
        """
        try:
            return self.gradients().sample.histogram.largest_exponent
        except (ReadingStopped, StepStopped):
            raise
        except BaseException:  # noqa: BLE001 - the number is one of a chart
            return math.inf

    def _score_of_step(self) -> float | None:
        """Return the score, or None with `score_failure` if it cannot be measured: the step is made already."""
        try:
            return self.score()
        except Exception as failure:  # of an `evaluate` of one's own
            if is_interrupt(failure):
                raise
            self.score_failure = "".join(traceback.format_exception(failure))
            return None

    def _name_in_model(self, name: str | None) -> str | None:
        """Return a parameter's name as the model has it; a session numbers several models."""
        numbered = _NUMBERED.match(name or "")
        if name is None or numbered is None:
            return name
        children = [child for child, _ in self._model.named_children()]
        return f"{children[int(numbered[1])]}.{name[numbered.end() :]}"

    def _limiting_scale(self) -> ScaleRecord:
        """Return what happened to the scale of this step: of several that of the first skip, else the lowest."""
        if not self._scaled:
            raise RuntimeError("no training step has run yet; run a step first.")
        return next((each for each in self._scaled if each.skipped), None) or min(
            self._scaled, key=lambda each: each.loss_scale
        )

    def _largest_exponent(self, optimizer: Optimizer) -> list[float]:
        """Return floor(log2) of the largest unscaled gradient of an optimizer; nothing if it has none."""
        grads = [weight.grad for weight in self._session.master_params(optimizer) if weight.grad is not None]
        if not grads:
            return []
        largest = torch.cat([_dense(grad).reshape(-1) for grad in grads]).abs_().max().item()
        if largest == 0.0:
            return [-math.inf]
        return [math.frexp(largest)[1] - 1.0 if math.isfinite(largest) else math.inf]

    # -- the session and the optimizers --------------------------------------------------------------

    def _initialize(self, config: ExperimentConfig) -> None:
        # A run that skips every step can be worth watching.
        self._session.initialize(
            [*self._model.children()] if isinstance(self._model, ModelGroup) else self._model,
            self._optimizers.all,
            num_losses=len(self._task.losses),
            verbosity=0,
            on_collapse="warn",
            **session_settings(config),
        )
        self._buffers.begin_level()

    def _switch_session(self, old: ExperimentConfig, new: ExperimentConfig) -> None:
        """Begin the session again with the settings of another config; if it raises, with those of the old one."""
        state, optimizers = self._session.state_dict(), self._optimizers
        self._buffers.end_level()
        self._session.reset()
        try:
            if old.optimizer != new.optimizer:
                self._optimizers = TaskOptimizers(self._task, self._model, new)
            self._initialize(new)
        except BaseException:
            self._session.reset()
            self._optimizers = optimizers
            self._initialize(old)
            self._session.load_state_dict(state)
            raise
        self._own.begin_session()
        if (kept := kept_scales(state, old, new)) is not None:
            self._session.load_state_dict(kept)

    def _lowest_scale(self) -> tuple[int, ScaleRule, ScaleState]:
        """Return the loss whose scale is the lowest, its rule and its state; of several the one that grows last."""
        scalers = enumerate(self._session.scalers)
        states = [(loss_id, scaler.rule, scaler.state) for loss_id, scaler in scalers]
        return min(states, key=lambda each: (each[2].scale, each[2].clean_steps))

    def _kept_tensors(self) -> list[Tensor]:
        """The tensors that a checkpoint has by themselves."""
        return [*self._weights(), *self._model.buffers()]

    def _float32_copy(self, model: nn.Module | None = None) -> nn.Module:
        """Return another model with the current weights in float32 (the masters if there are any) and buffers.

        Args:
            model: One that an earlier call has returned, to write into; None for a new one.
        """
        config = self._config
        model = model or build_model(config.model, config.hidden, config.seed)
        current = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        for optimizer, names in zip(self._optimizers.all, self._optimizers.names, strict=True):
            current |= dict(zip(names, self._session.master_params(optimizer), strict=True))
        ModelBuffers(model).load(self._buffers.state())
        with torch.no_grad():
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                write_value(value, current[name].to(value.dtype))
        return model


def samples_gradients(step: int) -> bool:
    """Return whether a histogram of the gradients is stored at this step: often at first, later every 200 steps.

    >>> [step for step in range(500) if samples_gradients(step)][-8:]
    [160, 180, 200, 250, 300, 350, 400, 450]
    """
    every = next(every for until, every in _SAMPLED if step < until)
    return step % every == 0


def _sum(losses: Iterable[Tensor]) -> Tensor:
    return functools.reduce(operator.add, losses)


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad
