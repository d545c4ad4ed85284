"""What a person takes along from the dashboard: a run as CSV or JSON, a report, and the whole setting as one line.

The page asks with {"type": "file", "kind": one of `FILES`} and gets {"kind": "file", "name", "mime", "text"}, which it
offers as a download. {"type": "setting", "text": a config string} starts the experiment that it names. Pictures of the
charts are made in the page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amplab.lab import ExperimentConfig, Run, Trainer, Watch
from amplab.lab.config_field import SettingRefused
from amplab.lab.float32_modules import check_float32_modules
from amplab.lab.html_report import report_html
from amplab.lab.run_export import run_csv, run_json

__all__ = ["FILES", "file_of", "take_setting"]


def _config(run: Trainer | Watch | Run) -> object:
    return run.last_config if isinstance(run, Run) else run.config


FILES: dict[str, tuple[str, str, Callable[[Trainer | Watch | Run], str]]] = {
    "csv": ("run.csv", "text/csv", lambda run: run_csv(run.history)),
    "json": ("run.json", "application/json", lambda run: run_json(run.history, _config(run))),
    "report": ("run.html", "text/html", report_html),
}
"""Name, type and content of each file."""


def file_of(run: Trainer | Watch | Run, kind: str) -> dict[str, Any]:
    """Return the message with a file.

    >>> trainer = Trainer(ExperimentConfig(hidden=16))
    >>> file_of(trainer, "csv")["text"].split(",")[:2]
    ['step', 'loss']
    """
    name, mime, content = FILES[kind]
    return {"kind": "file", "name": name, "mime": mime, "text": content(run)}


def take_setting(trainer: Trainer, text: str) -> str:
    """Start the experiment that a config string names; return why not, "" if it starts."""
    try:
        config = ExperimentConfig.parse(text.strip())
        check_float32_modules(config)
        trainer.reset(config)
    except SettingRefused as refusal:
        return refusal.shown
    except (ValueError, ImportError) as refusal:
        return str(refusal)
    return ""
