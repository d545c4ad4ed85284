"""What the live view shows, as plain values: the run thinned to a screen, and the figures above it.

A frame is complete in itself. Its rows are float64 `(rows, 4)`: step, loss, loss scale used, marks
(`SKIPPED` + `INJECTED`). NaN and inf stay in the rows; the drawing puts them on the edge. No widget here.
"""

from __future__ import annotations

from dataclasses import MISSING, fields

import numpy as np

from amplab.amp import MemoryUse
from amplab.kernels import BuildReport
from amplab.lab import History

__all__ = ["INJECTED", "ROWS", "SKIPPED", "frame_rows", "memory_parts", "modes_line", "summary"]

SKIPPED = 1
INJECTED = 2
ROWS = 800
"""Rows of a frame: the charts are about 600 px wide, and a pixel column needs its least and its greatest value."""


def frame_rows(history: History, limit: int = ROWS) -> np.ndarray:
    """Return the run as float64 `(rows, 4)`, at most about `limit` rows, every skipped step among them."""
    thinned = history.thinned(["loss", "loss_scale", "injected"], limit)
    injected = thinned["injected"] != None  # noqa: E711 - elementwise on an object array
    marks = SKIPPED * thinned["skipped"] + INJECTED * injected
    return np.column_stack([thinned["step"], thinned["loss"], thinned["loss_scale"], marks]).astype(np.float64)


def summary(history: History, *, loss_scale: float, rate: float | None, memory: MemoryUse, modes: str) -> dict:
    """Return the figures of a frame as JSON values.

    Args:
        history: The run.
        loss_scale: Scale that the next step will use.
        rate: Steps per second, None while nothing runs.
        memory: Bytes that training holds.
        modes: One line on how float16 is computed and which kernels serve.
    """
    return {
        "step": len(history),
        "skipped": history.skip_count,
        "scale": loss_scale,
        "accuracy": history.last_accuracy,
        "rate": rate,
        "memory": memory.total,
        "memory_parts": memory_parts(memory),
        "modes": modes,
    }


def memory_parts(memory: MemoryUse) -> str:
    """Return the parts as one line, without those that most runs have not.

    >>> memory_parts(MemoryUse(parameters=104488, gradients=0, masters=0, optimizer_state=208976))
    'parameters 104,488 B · gradients 0 B · masters 0 B · optimizer state 208,976 B'
    """
    held = [field for field in fields(memory) if field.default is MISSING or getattr(memory, field.name)]
    parts = {field.name.replace("_", " "): getattr(memory, field.name) for field in held}
    return " · ".join(f"{name} {count:,} B" for name, count in parts.items())


def modes_line(kernels: BuildReport, half_mode: str) -> str:
    """Return how numbers are computed here, in one line.

    >>> modes_line(BuildReport("building", "CPU kernels"), "native")
    'float16 on CPU: native arithmetic · kernels: C++ is being built'
    """
    return f"float16 on CPU: {_HALF_MODES[half_mode]} · kernels: {_KERNELS[kernels.status].format(kernels)}"


_HALF_MODES = {"fp32_accumulate": "float32 accumulate, rounded once, as tensor cores do", "native": "native arithmetic"}
_KERNELS = {
    "reference": "pure torch",
    "building": "C++ is being built",
    "built": "C++",
    "failed": "pure torch ({0.cause}; to have C++: {0.remedy})",
}
