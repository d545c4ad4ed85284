"""What the tab of runs and the overlays of the charts show, as plain values: one row and one line for each run.

The present run comes first. A run that a reset replaced has a gray line, a run of a comparison a color; each shown line
has a dash pattern and a label of its own, so that color is never the only difference. No widget here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from amplab.amp import MemoryUse
from amplab.diagnose import TwinReport
from amplab.display.numbers import percent, short_text, size
from amplab.lab import ExperimentConfig, History, KeptRun, Progress, Trainer
from amplab.lab.changes import config_changes
from amplab.lab.kept_runs import MOST_RUNS, last_losses
from amplab.lab.run_status import Measured, RunStatus, verdict
from amplab.lab.tasks import score_named, task_choice
from amplab.views.live_payload import frame_rows

__all__ = ["Style", "outcome", "overlays", "runs_payload", "styles", "twin_payload"]


@dataclass(frozen=True)
class Style:
    """How a line is drawn: a color of the palette, and the lengths of dashes and gaps in px."""

    color: str
    dash: tuple[int, ...]


_PRESENT = Style("accent", ())
_GRAY = "curve-7"
_COLORS = ("curve-3", "curve-2", "curve-4", "curve-6", "curve-5", "ink")
_DASHES = ((7, 3), (2, 2), (9, 3, 2, 3), (4, 3), (12, 3), (5, 2, 1, 2))


def styles(runs: Sequence[KeptRun]) -> dict[int, Style]:
    """Return the style of each shown run by its number."""
    shown = [run for run in runs if run.is_shown]
    compared = [run.number for run in shown if run.is_compared]
    return {
        run.number: Style(
            _COLORS[compared.index(run.number) % len(_COLORS)] if run.is_compared else _GRAY,
            _DASHES[place % len(_DASHES)],
        )
        for place, run in enumerate(shown)
    }


def overlays(
    runs: Sequence[KeptRun], task: str, rows: Callable[[History], np.ndarray] = frame_rows
) -> list[tuple[dict[str, object], np.ndarray]]:
    """Return name, color and dash of each shown run of a task, with its rows.

    The loss of another task has other units: on one axis it would make the present line flat.
    """
    drawn = styles(runs)
    return [
        ({"name": run.name, **_drawn(drawn[run.number])}, rows(run.history))
        for run in runs
        if run.is_shown and run.config.task == task and len(run.history)
    ]


def runs_payload(trainer: Trainer, *, refusal: str | None = None, activations: int | None = None) -> dict[str, object]:
    """Return the table, and how far a comparison is.

    Args:
        trainer: The present run and the kept ones.
        refusal: Why the last message of the page was refused.
        activations: Bytes that a forward of the present run keeps, None if unknown.
    """
    runs, progress = trainer.kept.runs, trainer.comparison
    drawn = styles(runs)
    present = _row(
        trainer.present_name,
        trainer.config,
        trainer.history,
        trainer.memory(),
        trainer.config,
        rate=trainer.history.rate(),
    )
    kept = [_kept_row(run, drawn.get(run.number), trainer.config) for run in runs]
    if activations is not None:
        present["activations"] = size(activations)
    return {
        "count": str(len(runs)) if runs else "",
        "rows": [{**present, **_drawn(_PRESENT), "number": None, "is_shown": True}, *kept],
        "summary": refusal or summary(runs),
        "is_refusal": refusal is not None,
        "progress": None if progress is None else _progress(progress),
    }


def summary(runs: Sequence[KeptRun]) -> str:
    """Return which kept run has the best held-out score, and which failed.

    >>> summary([])
    'Reset keeps the present run here. Run all levels trains each opt_level from the same seed.'
    """
    done = [run for run in runs if not run.is_training]
    if not done:
        return "Reset keeps the present run here. Run all levels trains each opt_level from the same seed."
    failed = [run for run in done if outcome(run)]
    scored = [run for run in done if run.held_out is not None and run not in failed]
    parts = []
    tasks = {run.config.task for run in scored}
    if len(scored) > 1 and len(tasks) == 1:
        measure = score_named(tasks.pop())
        best = max(scored, key=lambda run: (run.held_out or 0) * (1 if measure and measure.higher_is_better else -1))
        parts.append(f"Best held-out score: {best.name}, {_score_text(best.held_out or 0, best.config)}.")
    if failed:
        parts.append("Failed: " + "; ".join(f"{run.name} ({outcome(run)})" for run in failed) + ".")
    untold = [run for run in done if run not in failed and not _has_learned(run)]
    if untold and len(done) > 1:
        parts.append(f"Cannot be told yet whether it learned: {', '.join(run.name for run in untold)}.")
    elif len(done) > 1 and not failed:
        parts.append("All of them learned.")
    if len(runs) == MOST_RUNS:
        parts.append(f"{MOST_RUNS} runs are kept: a new one replaces the oldest, whose log stays.")
    return " ".join(parts) or f"{done[0].name} is kept."


def outcome(run: KeptRun) -> str:
    """Return why a run failed, in a few words; "" if it did not."""
    if run.error:
        return run.error.splitlines()[0]
    status = _verdict(run)
    if status is None or status.has_learned is not False:
        return ""
    if status.kind == "damaged":
        return f"loss is not finite from step {status.step:,}"
    if status.kind == "skipping":
        return f"every step is skipped since step {status.step:,}"
    if status.kind == "diverged":
        return f"diverged at step {status.step:,}"
    return "did not learn" if status.kind == "stuck" else status.why


def _has_learned(run: KeptRun) -> bool:
    status = _verdict(run)
    return status is not None and status.has_learned is True


def _verdict(run: KeptRun) -> RunStatus | None:
    """Return how a run has ended; None while it is in training and before its first step."""
    if run.is_training or not len(run.history):
        return None
    config = run.config
    return verdict(
        run.history,
        floor=config.min_loss_scale if config.is_dynamic else None,
        learning_rate=config.learning_rate,
        measured=Measured(task_choice(config.task), run.held_out),
    )


def twin_payload(report: TwinReport, level: str, step: int) -> dict[str, object]:
    """Return where the twin parts from float32, in a sentence, and the errors of each layer.

    Args:
        report: The twin of the present level against O0.
        level: The level's name.
        step: The step whose weights both started from.
    """
    layers: dict[str, dict[str, float]] = {}
    for row in report.rows():
        if not row.cancels:
            errors = layers.setdefault(_layer(row.module, row.what), {})
            errors[row.what] = max(errors.get(row.what, 0.0), _comparable(row.error.relative))
    parted = report.parted
    if parted is None:
        largest = f"{_WHATS[report.worst.what]} of {_layer(report.worst.module, report.worst.what)}"
        sentence = (
            f"{level} and float32 agree within {percent(report.tolerance)} over {len(report.steps)} steps from step "
            f"{step:,}. The largest difference is {_error(report.worst.error.relative)}, in the {largest}."
        )
    else:
        sentence = (
            f"{level} and float32 part in {_layer(parted.module, parted.what)}: in twin step {parted.step} from step "
            f"{step:,}, its {_WHATS[parted.what]} differs by {_error(parted.error.relative)} "
            f"({percent(report.tolerance)} is the limit)."
        )
    return {
        "sentence": sentence,
        "rows": [
            {
                "layer": layer,
                "errors": [_error(errors[what]) if what in errors else "" for what in _WHATS],
                "is_parted": parted is not None and layer == _layer(parted.module, parted.what),
            }
            for layer, errors in layers.items()
        ],
    }


_WHATS = {"output": "output", "output grad": "gradient of the output", "weight grad": "gradient of the weights"}


def _layer(module: str, what: str) -> str:
    name = module.rpartition(".")[0] if what == "weight grad" else module
    return name or "the model"


def _comparable(relative: float) -> float:
    return relative if math.isfinite(relative) else math.inf


def _error(relative: float) -> str:
    if not math.isfinite(relative):
        return "not finite"
    return percent(relative) if relative < 10 else f"{relative:.0f}×"


def _kept_row(run: KeptRun, style: Style | None, present: ExperimentConfig) -> dict[str, object]:
    row = _row(run.name, run.config, run.history, run.memory, present, rate=run.rate, held_out=run.held_out)
    return {
        **row,
        **_drawn(style or Style(_GRAY, ())),
        "number": run.number,
        "is_shown": run.is_shown,
        "is_training": run.is_training,
        "outcome": outcome(run),
        "activations": "–" if run.activations is None else size(run.activations),
        "can_continue": run.can_continue,
    }


def _row(
    name: str,
    config: ExperimentConfig,
    history: History,
    memory: MemoryUse,
    present: ExperimentConfig,
    *,
    rate: float | None,
    held_out: float | None = None,
) -> dict[str, object]:
    last = last_losses(history)
    score = history.last_score if held_out is None else held_out
    return {
        "name": name,
        "setting": str(config),
        "differs": ", ".join(change.label for change in config_changes(present, config, 0)),
        "steps": f"{len(history):,}",
        "loss": short_text(float(np.mean(last))) if last else "–",
        "held_out": "–" if score is None else _score_text(score, config),
        "skipped": f"{history.skip_count:,}",
        "rate": "–" if rate is None else f"{rate:,.0f}",
        "parameters": size(memory.parameters),
        "masters": size(memory.masters),
        "gradients": size(memory.gradients),
        "optimizer": size(memory.optimizer_state),
        "activations": "–",
        "outcome": "",
        "is_training": False,
        "can_continue": False,
    }


def _score_text(score: float, config: ExperimentConfig) -> str:
    measure = score_named(config.task)
    return short_text(score) if measure is None else measure.text(score)


def _drawn(style: Style) -> dict[str, object]:
    return {"color": style.color, "dash": list(style.dash)}


def _progress(progress: Progress) -> dict[str, object]:
    return {
        "text": f"{progress.name}, run {progress.run} of {progress.runs}: step {progress.step:,} of {progress.steps:,}",
        "share": (progress.run - 1 + progress.step / progress.steps) / progress.runs,
    }
