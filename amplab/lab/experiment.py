"""One experiment: a task, a model, an optimizer and an `amplab.amp.Session`, trained step by step by its owner.

    images, labels = batch(step)
    loss = cross_entropy(model(images), labels)          # under session.casting()
    with scale_loss(loss * shrink) as scaled: (scaled * fault).backward()
    optimizer.step()                                      # skipped if a gradient overflowed

`trainer.py` runs it in a thread, `views` shows it. Injected faults are real: an overflow is a gradient that float16
cannot represent, not a flag.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amplab.amp import MemoryUse, ScaleRecord, Session
from amplab.diagnose import FirstNonfinite, TwinReport, twin
from amplab.formats.exponents import BINS, LOWEST_EXPONENT
from amplab.kernels import tensor_stats
from amplab.lab.config import FIELDS, LIVE_FIELDS, OPTIMIZERS, Change, ExperimentConfig
from amplab.lab.events import GradientRecord, StepRecord
from amplab.lab.models import build_model
from amplab.lab.step_rerun import StepRerun
from amplab.lab.step_stages import StageRecorder, StepStages
from amplab.lab.tasks import load_task
from amplab.trace import Trace, trace_step, xray
from amplab.trace.random_states import random_states_kept

__all__ = ["ACCURACY_EVERY", "FAULTS", "UNDERFLOW_SHRINK", "Experiment", "check_fault", "samples_gradients"]

FAULTS = ("overflow", "underflow", "nan")

ACCURACY_EVERY = 25
"""Steps between two measurements of the accuracy."""

_SAMPLED = ((200, 20), (2_000, 50), (math.inf, 200))  # until this step, a histogram of the gradients every so many

UNDERFLOW_SHRINK = 2.0**-16

_OVERFLOW_LOG2 = 60  # gradients from 2^-44 on then overflow in float16, and no gradient here overflows in float32
_FLOAT32_TOP = 2.0**127

_SESSION_FIELDS = tuple(name for name, each in FIELDS.items() if each.change is Change.NEW_SESSION)


class Experiment:
    """A model in training, one step at a time.

    The same config gives the same steps bit for bit on the same machine, with one compute thread
    (`torch.set_num_threads(1)`; the trainer sets it for its own thread).

    Args:
        config: What to train, and how.

    Raises:
        ImportError: The task's data are not installed.
        ValueError: The batch is larger than the training set.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self._config = config
        self._task = load_task(config.task, config.seed)
        self._task.batches_per_epoch(config.batch_size)
        self._model = build_model(config.model, config.hidden, config.seed)
        self._optimizer = _build_optimizer(config, self._model.parameters())
        self._session = Session()
        self._session.subscribe(self._store_record)
        self._initialize(config)
        self._loss_scale = self._session.loss_scale()
        self._scaled: ScaleRecord | None = None
        self._memory = self._session.memory()
        self._measure_memory_until = 2  # the optimizer creates its state in its first step
        self._step = 0
        self._began: float | None = None
        self._faults: set[str] = set()
        self._shrinking = False
        self._rerun = StepRerun(self._model, None, self._loss_again, self._session)
        self._last: StepRecord | None = None  # while the step can run again
        self._recorder: StageRecorder | None = None

    @property
    def config(self) -> ExperimentConfig:
        """The config in effect."""
        return self._config

    @property
    def model(self) -> nn.Module:
        """The model, in the dtype that the opt_level sets."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; at O2 it updates the masters."""
        return self._optimizer

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
        """The scale that the next step will use; readable from any thread."""
        return self._loss_scale

    @property
    def armed(self) -> frozenset[str]:
        """The faults that will go into the next step."""
        return frozenset(self._faults | ({"underflow"} if self._shrinking else set()))

    @property
    def shrinking(self) -> bool:
        """Whether an injected underflow is on."""
        return self._shrinking

    def step(self) -> StepRecord:
        """Train on the next batch and return what happened. Sync: one."""
        if self._began is None:
            self._began = time.perf_counter()
        images, labels = self._batch(self._step, self._faults)
        self._rerun.forget()
        self._rerun.remember({"images": images, "labels": labels})
        self._optimizer.zero_grad(set_to_none=True)
        with self._session.casting():
            loss = F.cross_entropy(self._model(images), labels)
            with self._session.scale_loss(self._shrunk(loss), self._optimizer) as scaled:
                root = self._overflowing(scaled, self._loss_scale, self._faults)
                if self._recorder is not None:
                    self._recorder.see_loss(loss, root)
                root.backward()
        if self._step < self._measure_memory_until or self._step % ACCURACY_EVERY == 0:
            self._memory = self._session.memory()
        self._optimizer.step()
        record = self._record(loss, self._began)
        self._last = record
        self._loss_scale = record.next_loss_scale
        self._faults.clear()
        self._step += 1
        return record

    def step_in_stages(self, parameter: str | None = None) -> tuple[StepRecord, StepStages]:
        """Train on the next batch as `step` does, bit for bit, and record its stages.

        Args:
            parameter: Name of the parameter that is recorded even if the model is too large to record all.

        Sync: several.
        """
        recorder = StageRecorder(self._model, [self._optimizer], self._session, first=parameter)
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
          runs.
        - "nan": a pixel of the next batch is NaN. With a dynamic scale the weights are safe. The running statistics of
          a BatchNorm are not, because the forward pass updates them before a step can be skipped.
        - "underflow": the loss is multiplied by 2^-16 from the next step on, until it is switched off. The gradients
          are not multiplied back.

        Args:
            fault: One of `FAULTS`.
            on: True or False to switch the fault on or off; None arms "overflow" and "nan" for the next step and
                toggles "underflow".

        Raises:
            ValueError: There is no such fault.
        """
        check_fault(fault)
        if fault == "underflow":
            self._shrinking = not self._shrinking if on is None else on
        elif on is False:
            self._faults.discard(fault)
        else:
            self._faults.add(fault)

    def switch(self, config: ExperimentConfig) -> None:
        """Use another config from the next step on, with weights and optimizer state kept.

        The loss scale is also kept if it was and stays dynamic, unless init_scale changed. A new optimizer starts
        without state.

        Raises:
            ValueError: A changed field needs new weights, or the batch is larger than the training set.
        """
        old = self._config
        self.check_switch(old, config)
        self._last = None
        if any(getattr(old, name) != getattr(config, name) for name in _SESSION_FIELDS):
            keeps_scale = old.is_dynamic and config.is_dynamic and old.init_scale == config.init_scale
            kept = self._session.state_dict() if keeps_scale else None
            self._session.reset()
            if old.optimizer != config.optimizer:
                self._optimizer = _build_optimizer(config, self._model.parameters())
            self._initialize(config)
            if kept is not None:
                self._session.load_state_dict(_with_upper_limit(kept, config.max_loss_scale))
            self._loss_scale = self._session.loss_scale()
            self._measure_memory_until = self._step + 2
        for group in self._optimizer.param_groups:
            group["lr"] = config.learning_rate
            if "momentum" in group:
                group["momentum"] = config.momentum
        self._config = config

    def check_switch(self, old: ExperimentConfig, new: ExperimentConfig) -> None:
        """Raise ValueError if `switch` from `old` to `new` would."""
        _refuse_new_weights(old, new)
        self._task.batches_per_epoch(new.batch_size)

    def accuracy(self) -> float:
        """Return the share of held-out images that the model classifies correctly. Sync: one."""
        self._model.eval()
        try:
            with torch.no_grad(), self._session.casting():
                predicted = self._model(self._task.held_out_images).argmax(dim=1)  # (held_out,)
        finally:
            self._model.train()
        return float((predicted == self._task.held_out_labels).float().mean().item())

    def trace(self) -> Trace:
        """Record the forward and backward of the next batch, op by op; the experiment does not change."""
        images, labels = self._task.batch(self._step, self._config.batch_size)
        return trace_step(
            self._model,
            lambda: F.cross_entropy(self._model(images), labels),
            casting=self._session.casting(),
            loss_scale=self._loss_scale,
        )

    @property
    def last_skip(self) -> StepRecord | None:
        """The last step if it was skipped: its batch, weights and random state are still there. Else None."""
        return self._last if self._last is not None and self._last.skipped else None

    def explain_skip(self) -> FirstNonfinite | None:
        """Run `last_skip` again from the state in which it began; return which op overflowed first, and why.

        The experiment does not change.

        Returns:
            The explanation; None if there is no such step, or if it is finite when it runs again.

        Sync: a few.
        """
        skip = self.last_skip
        return None if skip is None else self._rerun.first_nonfinite(skip.loss_scale)

    def _loss_again(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of the last step, with the faults that went into it."""
        if self._last is None:
            raise RuntimeError("no step can run again: expected one that has just ended.")
        faults = set((self._last.injected or "").split("+"))
        loss = F.cross_entropy(self._model(batch["images"]), batch["labels"])
        shrunk = loss * UNDERFLOW_SHRINK if "underflow" in faults else loss
        return self._overflowing(shrunk, self._last.loss_scale, faults)

    def gradients(self) -> GradientRecord:
        """Return the exponents of the gradients of the next batch, in float32 at the current (master) weights.

        An injected underflow shrinks them as it shrinks the loss. The experiment does not change: dropout draws
        what the next step will draw again.
        """
        with random_states_kept(()):
            model = self._float32_copy()
            images, labels = self._task.batch(self._step, self._config.batch_size)
            self._shrunk(F.cross_entropy(model(images), labels)).backward()
        grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        stats = tensor_stats(list(grads.values()), low=LOWEST_EXPONENT, bins=BINS).read()
        layers = tuple(zip(grads, (each.exponents for each in stats), strict=True))
        return GradientRecord(step=self._step, loss_scale=self._loss_scale, layers=layers)

    def activations(self) -> int | None:
        """Return the bytes that the forward of the next batch keeps for its backward; the experiment does not change.

        They include 16-bit copies of weights. None for a model that calls `torch.func`, where they cannot be counted.
        """
        images, labels = self._task.batch(self._step, self._config.batch_size)
        with self._session.casting():
            kept = xray(self._model, step=lambda: F.cross_entropy(self._model(images), labels)).kept
        return None if kept is None else kept.total

    def twin(self, *, steps: int = 10) -> TwinReport:
        """Train a float32 copy and one in this precision from the present weights, and compare them module by module.

        Both take the next batches. The experiment does not change.
        """
        config, first = self._config, self._step
        return twin(
            self._float32_copy(),
            lambda number: self._task.batch(first + number, config.batch_size),
            "O0",
            _settings(config),
            steps=steps,
            loss=F.cross_entropy,
            optimizer=lambda weights: _build_optimizer(config, weights),
            seed=config.seed,
        )

    def nonfinite_buffers(self) -> tuple[str, ...]:
        """Return the names of the model's buffers that hold NaN or inf, which a skipped step keeps. Sync: one."""
        buffers = [(name, buffer) for name, buffer in self._model.named_buffers() if buffer.is_floating_point()]
        return tuple(name for name, buffer in buffers if not torch.isfinite(buffer).all())

    def memory(self) -> MemoryUse:
        """Return the last measured bytes of parameters, gradients, masters and optimizer state.

        They are measured just before the optimizer's step, when the gradients exist: in the two steps after a change
        and every 25 steps.
        """
        return self._memory

    def _initialize(self, config: ExperimentConfig) -> None:
        # A run that skips every step can be worth watching.
        self._session.initialize(self._model, self._optimizer, verbosity=0, on_collapse="warn", **_settings(config))

    def _store_record(self, record: ScaleRecord) -> None:
        self._scaled = record

    def _batch(self, step: int, faults: Set[str]) -> tuple[Tensor, Tensor]:
        images, labels = self._task.batch(step, self._config.batch_size)
        if "nan" in faults:
            images[0, 0, 0, 0] = math.nan  # in a copy, since `batch` indexes by rows
        return images, labels

    def _shrunk(self, loss: Tensor) -> Tensor:
        return loss * UNDERFLOW_SHRINK if self._shrinking else loss

    def _overflowing(self, scaled: Tensor, scale: float, faults: Set[str]) -> Tensor:
        if "overflow" not in faults:
            return scaled
        if self._config.opt_level == "O0":
            return scaled * _FLOAT32_TOP * _FLOAT32_TOP
        return scaled * math.ldexp(1.0 / scale, _OVERFLOW_LOG2)

    @property
    def _last_scaled(self) -> ScaleRecord:
        if self._scaled is None:
            raise RuntimeError("no training step has run yet; run a step first.")
        return self._scaled

    def _record(self, loss: Tensor, began: float) -> StepRecord:
        scaled = self._last_scaled
        injected = [fault for fault in FAULTS if fault in self._faults or (fault == "underflow" and self._shrinking)]
        measured = (self._step + 1) % ACCURACY_EVERY == 0
        value = loss.item()
        return StepRecord(
            step=self._step,
            loss=value,
            loss_scale=scaled.loss_scale,
            next_loss_scale=scaled.next_loss_scale,
            skipped=scaled.skipped,
            first_nonfinite=scaled.first_nonfinite,
            opt_level=self._config.opt_level,
            accuracy=self.accuracy() if measured else None,
            seconds=round(time.perf_counter() - began, 6),
            injected="+".join(injected) or None,
            grad_exponent=self._largest_exponent(value),
        )

    def _largest_exponent(self, loss: float) -> float | None:
        """Return floor(log2) of the largest unscaled gradient; of a skipped step, of its gradients in float32."""
        if self._last_scaled.skipped:
            faulty = self._faults or not math.isfinite(loss)
            return math.inf if faulty else self.gradients().sample.histogram.largest_exponent
        grads = [weight.grad for weight in self._session.master_params(self._optimizer) if weight.grad is not None]
        if not grads:
            return None
        largest = torch.cat([grad.reshape(-1) for grad in grads]).abs_().max().item()
        if largest == 0.0:
            return -math.inf
        return math.frexp(largest)[1] - 1.0 if math.isfinite(largest) else math.inf

    def _float32_copy(self) -> nn.Module:
        """Return another model with the current weights in float32 (the masters if there are any)."""
        config = self._config
        model = build_model(config.model, config.hidden, config.seed)
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), self._session.master_params(self._optimizer), strict=True):
                parameter.copy_(master)
        return model


def samples_gradients(step: int) -> bool:
    """Return whether a histogram of the gradients is stored at this step: often at first, later every 200 steps.

    >>> [step for step in range(500) if samples_gradients(step)][-8:]
    [160, 180, 200, 250, 300, 350, 400, 450]
    """
    every = next(every for until, every in _SAMPLED if step < until)
    return step % every == 0


def check_fault(fault: str) -> None:
    """Raise ValueError unless `fault` is one of `FAULTS`."""
    if fault not in FAULTS:
        raise ValueError(f"{fault!r}: expected a fault that can be injected; choose from {', '.join(FAULTS)}.")


def _settings(config: ExperimentConfig) -> dict[str, Any]:
    """Return the arguments of `Session.initialize` that the config decides."""
    dynamic: dict[str, Any] = {"dynamic_init_scale": config.init_scale, "scale_window": config.growth_interval}
    return {
        "opt_level": config.opt_level,
        "keep_batchnorm_fp32": config.keep_batchnorm_fp32,
        "master_weights": config.master_weights,
        "loss_scale": config.loss_scale,
        "min_loss_scale": config.min_loss_scale,
        "max_loss_scale": config.max_loss_scale,
        **(dynamic if config.is_dynamic else {}),
    }


def _build_optimizer(config: ExperimentConfig, weights: Iterable[Tensor]) -> torch.optim.Optimizer:
    choice = OPTIMIZERS[config.optimizer]
    options = {"momentum": config.momentum} if choice.takes_momentum else {}
    return choice.build(weights, lr=config.learning_rate, **options)


def _refuse_new_weights(old: ExperimentConfig, new: ExperimentConfig) -> None:
    """Raise ValueError if the new config cannot use the weights of the old one."""
    for name in FIELDS:
        if name not in LIVE_FIELDS and getattr(old, name) != getattr(new, name):
            raise ValueError(
                f"{name}={getattr(new, name)}: expected {getattr(old, name)}, since a change of {name} needs new "
                f"weights; call reset() with the new config. At a step boundary these can change: "
                f"{', '.join(LIVE_FIELDS)}."
            )


def _with_upper_limit(state: dict[str, Any], limit: float) -> dict[str, Any]:
    """Return a session's state with scales of at most `limit`; loading applies the lower limit but not this one."""
    return {name: {**entry, "loss_scale": min(entry["loss_scale"], limit)} for name, entry in state.items()}
