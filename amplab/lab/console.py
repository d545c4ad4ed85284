"""The lab in a terminal: train with a progress bar, a line for each skipped step, and a table at the end.

The trainer trains in its own thread; the calling thread prints, at most ten times a second. `amplab.cli` reads the
options of `amplab train`; `amplab.lab.open` shows the same experiment in a notebook.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TextIO

from amplab.amp import MemoryUse
from amplab.display.numbers import number, size
from amplab.lab.checkpoints import Checkpoint
from amplab.lab.config import ExperimentConfig
from amplab.lab.events import StepRecord
from amplab.lab.experiment import Experiment
from amplab.lab.rank_exchange import RankExchange, SilentRanks
from amplab.lab.run_log import check_writable, runs_directory
from amplab.lab.tasks import score_named
from amplab.lab.trainer import Trainer

__all__ = ["TrainSummary", "check_trainable", "train"]

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 2.0
_STEP_SECONDS = 3.0  # for the end of a step after Ctrl+C, before a line says that it takes longer
_BAR = 24


@dataclass(frozen=True)
class TrainSummary:
    """The result of a training.

    Attributes:
        config: What was trained.
        steps: Number of steps.
        skipped: Number of skipped steps.
        loss: Loss of the last step, None without a step.
        score: The task's score on held-out data at the end; None if training failed or the task has none.
        loss_scale: Scale at the end.
        steps_per_second: Average of the whole run, None before the second step.
        memory: Bytes at the end.
        log_path: The run log, of several ranks the folder of their logs; None if it could not be written.
        interrupted: Whether Ctrl+C ended the training.
        failure: The error that ended the training, None without one.
        log_failure: Why the log does not hold every step, None if it does.
    """

    config: ExperimentConfig
    steps: int
    skipped: int
    loss: float | None
    score: float | None
    loss_scale: float
    steps_per_second: float | None
    memory: MemoryUse
    log_path: Path | None
    interrupted: bool
    failure: str | None
    log_failure: str | None

    @property
    def exit_status(self) -> int:
        """0 if all steps are done and in the log, 130 if interrupted, 1 if training or its log failed."""
        if self.failure:
            return 1
        return 130 if self.interrupted else int(self.log_failure is not None)

    def __str__(self) -> str:
        """Return the table."""
        rate = self.steps_per_second
        score = score_named(self.config.task)
        dynamic = "dynamic" if self.config.is_dynamic else "static"
        rows = [
            ("steps", f"{self.steps}, {self.skipped} skipped"),
            ("loss", "–" if self.loss is None else f"{self.loss:.4f}"),
            *([(score.name, f"{score.text(self.score)} on held-out data")] if score is not None else []),
            ("loss scale", f"{number(self.loss_scale)} ({dynamic})"),
            ("speed", "–" if rate is None else f"{rate:.0f} steps/s"),
            ("parameters", size(self.memory.parameters)),
            ("gradients", size(self.memory.gradients)),
            ("master weights", size(self.memory.masters)),
            ("optimizer state", size(self.memory.optimizer_state)),
            ("run log", str(self.log_path or "none: it could not be written")),
        ]
        return "\n".join(f"{name:16}{value}" for name, value in rows)


def train(
    config: ExperimentConfig,
    *,
    steps: int,
    log_path: str | PathLike[str] | None = None,
    stream: TextIO | None = None,
    exchange: RankExchange | None = None,
    checkpoint: Checkpoint | None = None,
) -> TrainSummary:
    """Train `steps` steps, print the progress and a table of results, and write a run log.

    Ctrl+C stops at a step boundary and prints the table for the steps that are done; the log is complete up to there.
    A second one does not wait for the boundary: it raises KeyboardInterrupt.

    Args:
        config: What to train.
        steps: Number of steps, > 0.
        log_path: Folder or .jsonl file of the log, None for `runs_directory()`. An existing file is never overwritten;
            path-2 is used instead.
        stream: Where to print, None for the standard output. A terminal gets a bar, anything else a line every two
            seconds.
        exchange: With the other ranks, if several processes train together; an interrupt of one stops all of them
            after the same step.
        checkpoint: Where to continue, None for the start; `steps` counts from the start.

    Raises:
        ImportError: The task's data are not installed.
        RuntimeError: The run cannot continue from `checkpoint`.
        ValueError: `steps` is not a whole number > 0, the batch is larger than the training set, or no log can be
            written to `log_path`.
    """
    _check_log(log_path)
    trainer = Trainer(config, log=runs_directory() if log_path is None else log_path, exchange=exchange)
    if checkpoint is not None:
        trainer.continue_saved(checkpoint)
        trainer.wait()
        if len(trainer.history) != checkpoint.step:
            raise RuntimeError(trainer.failures[-1].text)
    progress = _Progress(trainer, steps, sys.stdout if stream is None else stream)
    silent = None if exchange is None else SilentRanks(exchange.place)
    interrupted = False
    try:
        if len(trainer.history) < steps or checkpoint is None:
            trainer.start(steps - len(trainer.history))
        while not trainer.wait(_REDRAW_SECONDS):
            progress.show()
            if silent is not None:
                _tell(silent, progress)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        _pause(trainer, exchange, progress if interrupted else None)
    interrupted |= exchange is not None and "stop" in exchange.agreed
    progress.finish(interrupted)
    summary = _summary(trainer, interrupted)
    trainer.stop()
    trainer.wait()
    progress.show()  # what has become of the last lines of the log
    summary = _with_log(summary, trainer, exchange)
    progress.line(f"\n{summary}")
    return summary


def check_trainable(config: ExperimentConfig, log_path: str | PathLike[str] | None = None) -> None:
    """Raise what `train` would raise before its first step, before several processes are started that would.

    Raises:
        ImportError, ValueError: As `train`.
        RuntimeError: Kernels are required and cannot be built.
    """
    _check_log(log_path)
    Experiment(config)


def _check_log(log_path: str | PathLike[str] | None) -> None:
    if log_path is not None:
        check_writable(log_path, "--log ", f"Leave --log out to write to {runs_directory()}.")


def _tell(silent: SilentRanks, progress: _Progress) -> None:
    """Print which ranks do not answer: rank 0 with its progress, another one, which prints none, as an error."""
    with suppress(RuntimeError):  # the store has ended; so does the step, which says why
        for line in silent.news():
            if silent.place.rank == 0:
                progress.line(line)
            else:
                sys.stderr.write(f"amplab train: {line}\n")


def _pause(trainer: Trainer, exchange: RankExchange | None, progress: _Progress | None) -> None:
    """Stop training after a step: of several ranks after the same one, since each waits for the others in a step.

    After an interrupt, `progress` gets a line if the step takes long.
    """
    if exchange is None:
        trainer.pause()
        if progress is not None and not trainer.wait(_STEP_SECONDS):
            kept = "" if trainer.log_path is None else "; the log has every step so far"
            progress.line(f"Waiting for the end of the present step. Press Ctrl+C again to end now{kept}.")
    elif trainer.state == "running":
        exchange.request("stop")
    trainer.wait()


class _Progress:
    """Prints news: a line for each skipped step and failure, and the status as a bar or as a line every two seconds."""

    def __init__(self, trainer: Trainer, steps: int, stream: TextIO) -> None:
        self._trainer = trainer
        self._steps = steps
        self._stream = stream
        self._draws_bar = stream.isatty()
        self._skips = 0
        self._failures = 0
        self._bar_width = 0
        self._next_line = time.monotonic() + _LINE_SECONDS
        self.line(str(trainer.config))

    def show(self) -> None:
        """Print the news since the last call."""
        for record in self._trainer.history.skips(self._skips):
            self._skips += 1
            self.line(_skip_line(record))
        for failure in self._trainer.failures[self._failures :]:
            self._failures += 1
            self.line(failure.text)
        if self._draws_bar:
            self._draw_bar()
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_SECONDS
            self.line(self._status())

    def finish(self, interrupted: bool) -> None:
        """Print the remaining news and the final status."""
        self._draws_bar, self._next_line = False, math.inf
        self.show()
        self.line(f"{self._status()}{'  interrupted' if interrupted else ''}")

    def line(self, text: str) -> None:
        """Print a line in place of the bar."""
        self._erase()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _draw_bar(self) -> None:
        done = len(self._trainer.history) * _BAR // self._steps
        text = f"[{'#' * done}{'.' * (_BAR - done)}] {self._status()}"
        self._erase()
        self._stream.write(text)
        self._stream.flush()
        self._bar_width = len(text)

    def _erase(self) -> None:
        if self._bar_width:
            self._stream.write(f"\r{' ' * self._bar_width}\r")
            self._bar_width = 0

    def _status(self) -> str:
        history = self._trainer.history
        last, rate = history.last, history.rate()
        parts = [f"{len(history)}/{self._steps}"]
        if last is not None:
            parts += [f"loss {last.loss:.4f}", f"scale {number(last.next_loss_scale)}"]
        score = score_named(self._trainer.config.task)
        if score is not None and history.last_score is not None:
            parts.append(f"{score.name} {score.text(history.last_score)}")
        if rate is not None:
            parts.append(f"{rate:.0f} steps/s")
        return "  ".join(parts)


def _skip_line(record: StepRecord) -> str:
    where = f" in {record.first_nonfinite}" if record.first_nonfinite else ""
    return (
        f"step {record.step}: gradient overflow{where} at loss scale {number(record.loss_scale)}; "
        f"step skipped, scale now {number(record.next_loss_scale)}"
    )


def _summary(trainer: Trainer, interrupted: bool) -> TrainSummary:
    history = trainer.history
    failed = trainer.state == "failed" or trainer.paused_by is not None
    return TrainSummary(
        config=trainer.config,
        steps=len(history),
        skipped=history.skip_count,
        loss=None if history.last is None else history.last.loss,
        score=None if failed else trainer.score(),
        loss_scale=trainer.loss_scale,
        steps_per_second=history.rate(math.inf),
        memory=trainer.memory(),
        log_path=trainer.log_path,
        interrupted=interrupted,
        failure=trainer.failures[-1].text if failed else None,
        log_failure=None,
    )


def _with_log(summary: TrainSummary, trainer: Trainer, exchange: RankExchange | None) -> TrainSummary:
    """Return the summary of a stopped trainer with its log, which is closed."""
    path = trainer.log_path
    if path is not None:
        return replace(summary, log_path=path if exchange is None else path.parent)
    told = [failure.text for failure in trainer.failures if failure.text.startswith("log: ")]
    return replace(summary, log_path=None, log_failure=told[-1] if told else "log: it could not be written.")
