"""A run as a table: CSV and JSON text, of a run of the lab, of a watched loop or of a log that was read back.

CSV holds one line for each step. JSON holds the config, the columns with their rows, what was changed, and why steps
were skipped; numbers that JSON does not have are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from amplab import __version__
from amplab.display.text import visible
from amplab.lab.events import StepRow
from amplab.lab.history import COLUMNS, History

__all__ = ["run_csv", "run_json"]

_FORMULA = re.compile(r"['\t]|\s*[=+@\uff1d\uff0b\uff0d\uff20-]")  # the latter are = + - @ of full width


def run_csv(history: History | Mapping[int, History]) -> str:
    """Return every step as a line of comma-separated values, below a line with the names of the columns.

    A value that was not measured is empty; NaN and infinities are `nan`, `inf` and `-inf`. A text is one that no
    program takes for a command: control characters are escapes such as `\\x1b`, and an apostrophe stands before a text
    that a spreadsheet would take for a formula, and before one that begins with an apostrophe. Whoever reads the file
    back removes one leading apostrophe.

    Args:
        history: The run; or those of several ranks by rank, as `Run.by_rank`, for a first column "rank".

    Raises:
        TypeError: It is neither.
    """
    _check_history(history, (History, Mapping))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*(["rank"] if isinstance(history, Mapping) else []), *COLUMNS])
    for rank, each in [(None, history)] if isinstance(history, History) else [*history.items()]:
        for block in each.row_blocks():
            rows = ([_harmless(value) if isinstance(value, str) else value for value in row] for row in block)
            writer.writerows(rows if rank is None else ((rank, *row) for row in rows))
    return file.getvalue()


def _check_history(history: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(history, kinds):
        several = ", or a dict of several by rank, as run.by_rank" if Mapping in kinds else ""
        raise TypeError(
            f"history of type {type(history).__name__}: expected a History, as the attribute history of a run, a watch "
            f"or an experiment{several}."
        )


def run_json(history: History, config: object) -> str:
    """Return a run as JSON text.

    Args:
        history: The run.
        config: What was run; its string restores an experiment of the lab.

    Raises:
        TypeError: `history` is no History.
    """
    _check_history(history, (History,))
    explained = {str(step): _plain(each.as_dict()) for step, each in history.explanations.items()}
    entries = {
        "amplab": _json(__version__),
        "config": _json(str(config)),
        "columns": _json(list(COLUMNS)),
        "steps": f"[{', '.join(_json_rows(block) for block in history.row_blocks())}]",
        "changes": _json([asdict(each) for each in history.changes]),
        "explanations": _json(explained),
        "memory": _json([{"step": step, **asdict(used)} for step, used in history.memory]),
    }
    return "{" + ", ".join(f'"{name}": {text}' for name, text in entries.items()) + "}"


@lru_cache(maxsize=1024)
def _harmless(text: str) -> str:
    shown = visible(text)
    return f"'{shown}" if _FORMULA.match(shown) else shown


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _json_rows(block: list[StepRow]) -> str:
    """Return some steps as JSON, without the brackets around them."""
    try:
        text = _json(block)
    except ValueError:  # a number that JSON does not have
        text = _json([[_plain(value) for value in row] for row in block])
    return text[1:-1]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    return value
