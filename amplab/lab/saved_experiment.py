"""What a checkpoint of the lab holds besides the run state of `save_run_state`, checked as it is read."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from amplab.amp.run_state.file_format import RunStateError, read_run_state
from amplab.lab.faults import FAULTS
from amplab.lab.model_buffers import is_state_of_buffers
from amplab.lab.run_log.json_lines import is_count, is_number

__all__ = ["read_saved"]


def read_saved(path: Path, *, whole: bool = True) -> tuple[int, dict[str, Any]]:
    """Return the number of steps and the extra values of a saved experiment.

    Args:
        path: The file.
        whole: Whether to read and check all of it, which takes a second for each GB.

    Raises:
        OSError: The file cannot be read.
        RunStateError: It is damaged, or holds something else.
    """
    state = read_run_state(path, whole=whole)
    steps, extra = state.get("position"), state.get("extra")
    if is_count(steps) and isinstance(extra, dict) and _is_of_the_lab(extra):
        return steps, extra
    raise RunStateError(
        f"{path} is a run state, but none that the lab saved: expected its config, faults, time and length of the log. "
        "Load it with amp.load_run_state."
    )


def _is_of_the_lab(extra: dict[str, Any]) -> bool:
    return (
        isinstance(extra.get("config"), str)
        and isinstance(extra.get("armed"), list)
        and all(fault in FAULTS for fault in extra["armed"])
        and is_number(extra.get("seconds"))
        and is_count(extra.get("log_bytes", 0))
        and isinstance(extra.get("saved", ""), str)
        and _are(is_count, extra.get("epoch", []), (0, 2))
        and _are(is_count, extra.get("accumulates_since", [0, 0]), (2,))
        and _are(lambda state: isinstance(state, dict), extra.get("schedules", []))
        and _are(lambda name: isinstance(name, str), extra.get("left_out", []))
        and is_state_of_buffers(extra)
        and isinstance(switched := extra.get("switched", {}), dict)
        and all(isinstance(name, str) and isinstance(on, bool) for name, on in switched.items())
        and all(_is_state(extra.get(name, {})) for name in ("own", "made", "data"))
        and is_number(extra.get("learning_rate", 0.0))
        and isinstance(digests := extra.get("digests", {}), dict)
        and all(isinstance(each, str) for each in (*digests, *digests.values()))
    )


def _is_state(state: Any) -> bool:
    return isinstance(state, dict) and all(
        isinstance(path, str) and isinstance(values, dict) and all(isinstance(name, str) for name in values)
        for path, values in state.items()
    )


def _are(is_such: Callable[[Any], bool], values: Any, lengths: Container[int] | None = None) -> bool:
    return isinstance(values, list) and (lengths is None or len(values) in lengths) and all(map(is_such, values))
