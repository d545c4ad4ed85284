"""What the live view shows, as plain values: the run thinned to the width of a screen, and the figures above it.

Each frame holds the whole run, and what was changed in it. Its rows are float64 `(rows, 4)`: step, loss, loss scale
used, marks (`SKIPPED` + `INJECTED`). NaN and inf stay in the rows; the page draws them on the upper edge. No widget
here.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, fields

import numpy as np

from amplab.amp import MemoryUse
from amplab.kernels import BuildReport
from amplab.lab import History
from amplab.lab.tasks import Score
from amplab.lab.watched_run import NO_LEVEL

__all__ = [
    "INJECTED",
    "MARKS",
    "ROWS",
    "SKIPPED",
    "change_marks",
    "frame_rows",
    "memory_parts",
    "modes_line",
    "summary",
]

Mark = tuple[int, str, str, str]
"""Step, field, label and text of a change."""

SKIPPED = 1
INJECTED = 2
ROWS = 800
"""Rows of a frame: the charts are about 600 px wide, and a pixel column needs its least and its greatest value."""


_LEAST_ROWS = 16  # of `History.thinned`

MARKS = 200
"""Changes in a frame."""


def frame_rows(
    history: History, low: float = -math.inf, high: float = math.inf, *, limit: int = ROWS, logarithmic: bool = False
) -> np.ndarray:
    """Return the run, or its steps from `low` to `high`, as float64 `(rows, 4)`, with every skipped step.

    There are at most about `limit` rows. A range that is short enough is complete. `logarithmic` spreads the rows over
    an axis that is logarithmic in the steps, else over a linear one.
    """
    if logarithmic and len(history) > limit:
        octaves = _octaves(max(low, 0.0), min(high, len(history) - 1.0))
        share = max(limit // max(len(octaves), 1), _LEAST_ROWS)
        return np.concatenate([np.empty((0, 4)), *(frame_rows(history, *each, limit=share) for each in octaves)])
    thinned = history.thinned(["loss", "loss_scale", "injected"], limit, low, high)
    injected = thinned["injected"] != None  # noqa: E711 - elementwise on an object array
    marks = SKIPPED * thinned["skipped"] + INJECTED * injected
    return np.column_stack([thinned["step"], thinned["loss"], thinned["loss_scale"], marks]).astype(np.float64)


def _octaves(low: float, high: float) -> list[tuple[float, float]]:
    """Return ranges of equal length on a logarithmic axis, which begins at step -1.

    >>> _octaves(0, 10)
    [(0, 0), (1, 2), (3, 6), (7, 10)]
    """
    octaves = []
    while low <= high:
        octaves.append((low, min(2 * low, high)))
        low = 2 * low + 1
    return octaves


def change_marks(history: History, limit: int = MARKS) -> list[Mark]:
    """Return what the run began with and the latest changes as (step, field, label, text), at most `limit` of them."""
    changes = [change for change in history.changes if change.label != NO_LEVEL]
    kept = changes if len(changes) <= limit else [changes[0], *changes[1 - limit :]]
    return [(change.step, change.field, change.label, change.text) for change in kept]


def summary(
    history: History,
    *,
    loss_scale: float,
    rate: float | None,
    memory: MemoryUse | None,
    modes: str,
    score: Score | None = None,
    unknown: tuple[str, ...] = (),
) -> dict[str, object]:
    """Return the figures of a frame as JSON values.

    Args:
        history: The run.
        loss_scale: Scale that the next step will use.
        rate: Steps per second, None while nothing runs.
        memory: Bytes that training holds, None if unknown.
        modes: One line on how float16 is computed and which kernels are used.
        score: What is measured on held-out data; None if nothing is, so that the page hides it.
        unknown: Figures that this run does not have and the page hides.
    """
    return {
        "step": len(history),
        "skipped": history.skip_count,
        "scale": loss_scale,
        "score": history.last_score,
        "score_label": "" if score is None else score.name[:1].upper() + score.name[1:],
        "score_is_share": score is not None and score.is_share,
        "rate": rate,
        "memory": None if memory is None else memory.total,
        "memory_parts": "" if memory is None else memory_parts(memory),
        "modes": modes,
        "unknown": unknown if score is not None else (*unknown, "score"),
    }


def memory_parts(memory: MemoryUse) -> str:
    """Return the parts as one line; optional parts appear only if they are not 0.

    >>> memory_parts(MemoryUse(parameters=104488, gradients=0, masters=0, optimizer_state=208976))
    'parameters 104,488 B · gradients 0 B · masters 0 B · optimizer state 208,976 B'
    """
    held = [field for field in fields(memory) if field.default is MISSING or getattr(memory, field.name)]
    parts = {field.name.replace("_", " "): getattr(memory, field.name) for field in held}
    return " · ".join(f"{name} {count:,} B" for name, count in parts.items())


def modes_line(kernels: BuildReport, half_mode: str) -> str:
    """Return how numbers are computed here, in one line.

    >>> modes_line(BuildReport("building", "CPU kernels"), "native")
    'float16 on CPU: native arithmetic · kernels: PyTorch, until those in C++ are built'
    """
    return f"float16 on CPU: {_HALF_MODES[half_mode]} · kernels: {_KERNELS[kernels.status].format(kernels)}"


_HALF_MODES = {
    "fp32_accumulate": "accumulated in float32 and rounded once, as on tensor cores",
    "native": "native arithmetic",
}
_KERNELS = {
    "reference": "PyTorch",
    "building": "PyTorch, until those in C++ are built",
    "built": "C++",
    "failed": "PyTorch ({0.cause}; to enable C++: {0.remedy})",
}
