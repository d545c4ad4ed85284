"""One experiment: a task, a model, an optimizer and an `amplab.amp.Session`, stepped by whoever holds it.

    images, labels = batch(step)
    loss = cross_entropy(model(images), labels)          # under session.casting()
    with scale_loss(loss * shrink) as scaled: (scaled * fault).backward()
    optimizer.step()                                      # left out when a gradient overflowed

It has no thread and draws nothing: `trainer.py` runs it, `views` shows it. Injected faults take the real path: an
overflow is a gradient that float16 cannot hold, not a flag.
"""

from __future__ import annotations

import math
import time
from collections.abc import Set

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amplab.amp import MemoryUse, ScaleRecord, Session
from amplab.diagnose import FirstNonfinite, first_nonfinite
from amplab.formats.exponents import BINS, LOWEST_EXPONENT
from amplab.kernels import tensor_stats
from amplab.lab.config import FIELDS, LIVE_FIELDS, OPTIMIZERS, Change, ExperimentConfig
from amplab.lab.events import GradientRecord, StepRecord
from amplab.lab.models import build_model
from amplab.lab.tasks import load_task
from amplab.trace import Trace, trace_step

__all__ = ["ACCURACY_EVERY", "FAULTS", "GRADIENTS_EVERY", "UNDERFLOW_SHRINK", "Experiment", "check_fault"]

FAULTS = ("overflow", "underflow", "nan")

ACCURACY_EVERY = 25
"""Steps from one measured accuracy to the next."""

GRADIENTS_EVERY = 200
"""Steps from one kept histogram of the gradients to the next."""

UNDERFLOW_SHRINK = 2.0**-16

_OVERFLOW_LOG2 = 60  # gradients of 2^-44 and more then leave float16, none that occurs here leaves float32
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
        ValueError: The batch is larger than the task.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self._config = config
        self._task = load_task(config.task, config.seed)
        self._task.batches_per_epoch(config.batch_size)
        self._model = build_model(config.model, config.hidden, config.seed)
        self._optimizer = _build_optimizer(config, self._model)
        self._session = Session()
        self._session.subscribe(self._remember)
        self._initialize(config)
        self._loss_scale = self._session.loss_scale()
        self._scaled: ScaleRecord | None = None
        self._memory = self._session.memory()
        self._weigh_until = 2  # the optimizer makes its state in its first step
        self._step = 0
        self._began: float | None = None
        self._faults: set[str] = set()
        self._shrinking = False
        self._last_skip: tuple[int, float, frozenset[str]] | None = None

    @property
    def config(self) -> ExperimentConfig:
        """What is in effect."""
        return self._config

    @property
    def model(self) -> nn.Module:
        """The model, in whatever dtype the opt_level gave it."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; at O2 it steps the masters."""
        return self._optimizer

    @property
    def session(self) -> Session:
        """The mixed-precision session of this experiment alone."""
        return self._session

    @property
    def steps_done(self) -> int:
        """How many steps were made; also the number of the next one."""
        return self._step

    @property
    def loss_scale(self) -> float:
        """The scale that the next step will use; may be read from any thread."""
        return self._loss_scale

    @property
    def shrinking(self) -> bool:
        """Whether an injected underflow is on."""
        return self._shrinking

    def step(self) -> StepRecord:
        """Train on the next batch and return what happened. Sync: one."""
        began = time.perf_counter()
        self._began = began if self._began is None else self._began
        images, labels = self._batch(self._step, self._faults)
        self._optimizer.zero_grad(set_to_none=True)
        with self._session.casting():
            loss = F.cross_entropy(self._model(images), labels)
            with self._session.scale_loss(self._shrunk(loss), self._optimizer) as scaled:
                self._blown_up(scaled, self._loss_scale, self._faults).backward()
        if self._step < self._weigh_until or self._step % ACCURACY_EVERY == 0:
            self._memory = self._session.memory()
        self._optimizer.step()
        record = self._record(loss)
        if record.skipped:
            self._last_skip = record.step, record.loss_scale, frozenset(self._faults)
        self._loss_scale = record.next_loss_scale
        self._faults.clear()
        self._step += 1
        return record

    def inject(self, fault: str, *, on: bool | None = None) -> None:
        """Disturb the training.

        - "overflow": the next backward starts from a scaled loss so large that gradients leave float16 (at O0:
          float32). A dynamic scale skips the step; a static one lets it into the weights, as it does in real runs.
        - "nan": a pixel of the next batch is NaN. Weights are safe under a dynamic scale; the running statistics of a
          BatchNorm are not, because forward updates them before anything can be skipped.
        - "underflow": the loss is multiplied by 2^-16 from the next step on, until switched off; the gradients are not
          multiplied back.

        Args:
            fault: One of `FAULTS`.
            on: True or False to switch it on or off; None arms "overflow" and "nan" for the next step and toggles
                "underflow".

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
        """Go on under another config, from the next step on, with weights and optimizer state kept.

        The loss scale goes on too where it was and is dynamic, unless init_scale itself changed. A new optimizer starts
        without state.

        Raises:
            ValueError: A field changed that needs new weights, or the batch is larger than the task.
        """
        old = self._config
        self.check_switch(old, config)
        if any(getattr(old, name) != getattr(config, name) for name in _SESSION_FIELDS):
            keeps_scale = old.is_dynamic and config.is_dynamic and old.init_scale == config.init_scale
            kept = self._session.state_dict() if keeps_scale else None
            self._session.reset()
            if old.optimizer != config.optimizer:
                self._optimizer = _build_optimizer(config, self._model)
            self._initialize(config)
            if kept is not None:
                self._session.load_state_dict(_below_ceiling(kept, config))
            self._loss_scale = self._session.loss_scale()
            self._weigh_until = self._step + 2
        for group in self._optimizer.param_groups:
            group["lr"] = config.learning_rate
            if "momentum" in group:
                group["momentum"] = config.momentum
        self._config = config

    def check_switch(self, old: ExperimentConfig, new: ExperimentConfig) -> None:
        """Raise ValueError where `switch` from `old` to `new` would."""
        _refuse_new_weights(old, new)
        self._task.batches_per_epoch(new.batch_size)

    def accuracy(self) -> float:
        """Return the share of held-out images that the model classifies correctly. Sync: one."""
        self._model.eval()
        try:
            with torch.no_grad(), self._session.casting():
                guesses = self._model(self._task.held_out_images).argmax(dim=1)  # (held_out,)
        finally:
            self._model.train()
        return (guesses == self._task.held_out_labels).float().mean().item()

    def trace(self) -> Trace:
        """Record the forward and backward of the next batch, op by op; the experiment is left as it was."""
        images, labels = self._task.batch(self._step, self._config.batch_size)
        return trace_step(
            self._model,
            lambda: F.cross_entropy(self._model(images), labels),
            casting=self._session.casting(),
            loss_scale=self._loss_scale,
        )

    def explain_skip(self) -> FirstNonfinite | None:
        """Run the last skipped step again and say which op left its range first, and why.

        It runs at the present weights, which are those it had until the next clean step. The experiment is left as it
        was. None where no step was skipped, or where its batch does not overflow any more. Sync: a few.
        """
        if self._last_skip is None:
            return None
        step, scale, faults = self._last_skip
        images, labels = self._batch(step, faults)

        def loss() -> Tensor:
            shrunk = self._shrunk(F.cross_entropy(self._model(images), labels))
            return self._blown_up(shrunk, scale, faults)

        batch = {"images": images, "labels": labels}
        return first_nonfinite(self._model, batch, step=loss, scaler=self._session, loss_scale=scale)

    def gradients(self) -> GradientRecord:
        """Return the exponents of the gradients of the next batch, in float32 at the present (master) weights.

        An injected underflow shrinks them as it shrinks the loss. The experiment is left as it was.
        """
        twin = self._float32_twin()
        images, labels = self._task.batch(self._step, self._config.batch_size)
        self._shrunk(F.cross_entropy(twin(images), labels)).backward()
        names, parameters = zip(*twin.named_parameters(), strict=True)
        stats = tensor_stats([each.grad for each in parameters], low=LOWEST_EXPONENT, bins=BINS).read()
        layers = tuple(zip(names, (each.exponents for each in stats), strict=True))
        return GradientRecord(step=self._step, loss_scale=self._loss_scale, layers=layers)

    def nonfinite_buffers(self) -> tuple[str, ...]:
        """Return the names of the model's buffers that hold NaN or inf; no skipped step takes them back. Sync: one."""
        buffers = [(name, buffer) for name, buffer in self._model.named_buffers() if buffer.is_floating_point()]
        return tuple(name for name, buffer in buffers if not torch.isfinite(buffer).all())

    def memory(self) -> MemoryUse:
        """Return the bytes of parameters, gradients, masters and optimizer state, as last weighed.

        They are weighed when the gradients are there, just before the optimizer's step: in the two steps after a change
        and every 25 steps.
        """
        return self._memory

    def _initialize(self, config: ExperimentConfig) -> None:
        dynamic = {"dynamic_init_scale": config.init_scale, "scale_window": config.growth_interval}
        self._session.initialize(
            self._model,
            self._optimizer,
            opt_level=config.opt_level,
            keep_batchnorm_fp32=config.keep_batchnorm_fp32,
            master_weights=config.master_weights,
            loss_scale=config.loss_scale,
            verbosity=0,
            on_collapse="warn",  # a run that skips for ever is there to be looked at
            min_loss_scale=config.min_loss_scale,
            max_loss_scale=config.max_loss_scale,
            **(dynamic if config.is_dynamic else {}),
        )

    def _remember(self, record: ScaleRecord) -> None:
        self._scaled = record

    def _batch(self, step: int, faults: Set[str]) -> tuple[Tensor, Tensor]:
        images, labels = self._task.batch(step, self._config.batch_size)
        if "nan" in faults:
            images[0, 0, 0, 0] = math.nan  # indexing by rows made a copy
        return images, labels

    def _shrunk(self, loss: Tensor) -> Tensor:
        return loss * UNDERFLOW_SHRINK if self._shrinking else loss

    def _blown_up(self, scaled: Tensor, scale: float, faults: Set[str]) -> Tensor:
        if "overflow" not in faults:
            return scaled
        if self._config.opt_level == "O0":
            return scaled * _FLOAT32_TOP * _FLOAT32_TOP
        return scaled * math.ldexp(1.0 / scale, _OVERFLOW_LOG2)

    def _record(self, loss: Tensor) -> StepRecord:
        scaled = self._scaled
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
            seconds=round(time.perf_counter() - self._began, 6),
            injected="+".join(injected) or None,
            grad_exponent=self._largest_exponent(value),
        )

    def _largest_exponent(self, loss: float) -> float | None:
        """floor(log2) of the largest unscaled gradient; of a skipped step the one it has in float32, computed anew."""
        if self._scaled.skipped:
            faulty = self._faults or not math.isfinite(loss)
            return math.inf if faulty else self.gradients().sample.histogram.largest_exponent
        grads = [weight.grad for weight in self._session.master_params(self._optimizer) if weight.grad is not None]
        if not grads:
            return None
        largest = torch.cat([grad.reshape(-1) for grad in grads]).abs_().max().item()
        if largest == 0.0:
            return -math.inf
        return math.frexp(largest)[1] - 1.0 if math.isfinite(largest) else math.inf

    def _float32_twin(self) -> nn.Module:
        """Return a model of its own with the present weights in float32 (the masters where there are any)."""
        config = self._config
        twin = build_model(config.model, config.hidden, config.seed)
        with torch.no_grad():
            for parameter, master in zip(twin.parameters(), self._session.master_params(self._optimizer), strict=True):
                parameter.copy_(master)
        return twin


def check_fault(fault: str) -> None:
    """Raise ValueError unless `fault` is one of `FAULTS`."""
    if fault not in FAULTS:
        raise ValueError(f"{fault!r}: not a fault that can be injected; choose from {', '.join(FAULTS)}.")


def _build_optimizer(config: ExperimentConfig, model: nn.Module) -> torch.optim.Optimizer:
    choice = OPTIMIZERS[config.optimizer]
    options = {"momentum": config.momentum} if choice.takes_momentum else {}
    return choice.build(model.parameters(), lr=config.learning_rate, **options)


def _refuse_new_weights(old: ExperimentConfig, new: ExperimentConfig) -> None:
    """Raise ValueError where the new config cannot go on with the old one's weights."""
    for name in FIELDS:
        if name not in LIVE_FIELDS and getattr(old, name) != getattr(new, name):
            raise ValueError(
                f"{name}={getattr(new, name)}: expected {getattr(old, name)}, since a change of {name} needs new "
                f"weights; call reset() with the new config. At a step boundary these can change: "
                f"{', '.join(LIVE_FIELDS)}."
            )


def _below_ceiling(state: dict, config: ExperimentConfig) -> dict:
    """Return a session's state with its scales at most max_loss_scale; it sees to the floor itself when it loads."""
    ceiling = config.max_loss_scale
    return {name: {**entry, "loss_scale": min(entry["loss_scale"], ceiling)} for name, entry in state.items()}
