"""A run that is not steered from here, on the lab's charts: a watch while its loop runs, or a log read back.

The loop's thread publishes and only wakes the ticker; the ticker's thread builds what is shown and is alone in touching
widgets.
"""

from __future__ import annotations

import time
from html import escape

import ipywidgets

from amplab import kernels
from amplab.display.html import html_table, name, page
from amplab.display.numbers import count, power
from amplab.lab import Run, Watch
from amplab.lab.watched_run import NO_LEVEL
from amplab.policies import cpu_half_mode
from amplab.views.live_payload import frame_rows, modes_line
from amplab.views.parts import LiveView
from amplab.views.ticker import Ticker

__all__ = ["RunView"]

SLOW = 0.5
"""Seconds between two drawings of the findings."""

LIMIT = 50
"""Skipped steps in the table."""

_UNKNOWN = ("accuracy", "memory")  # figures that a run of one's own has not


class RunView(ipywidgets.VBox):
    """Charts, skipped steps and findings of a run.

    Args:
        run: a `Watch`, which goes on being drawn as its loop goes on, or a `Run` from `load_run`.

    >>> from amplab.lab import ExperimentConfig, Trainer, load_run
    >>> import tempfile
    >>> trainer = Trainer(ExperimentConfig(hidden=16), log=tempfile.mkdtemp())
    >>> _ = trainer.run(3)
    >>> trainer.stop(); _ = trainer.wait()
    >>> view = RunView(load_run(trainer.log_path))
    >>> view
    <amplab run of 3 steps: amplab/1 task=digits model=mlp opt_level=O1 hidden=16>
    >>> view.close()
    """

    def __init__(self, run: Run | Watch) -> None:
        self.run = run
        self._views: set[str] = set()
        self._words_due = 0.0
        self._words_of: tuple[int, int] | None = None
        self._ticker = Ticker(self._tick, on_failure=self._show_failure)
        self._live = LiveView(lambda message: self._ticker.call(lambda: self._answer(message)))
        self._words = ipywidgets.HTML()
        super().__init__([ipywidgets.HTML(f"<code>{escape(str(run.config))}</code>"), self._live, self._words])
        self.add_class("amp-side")
        self._unsubscribe = run.subscribe(lambda _: self._ticker.wake()) if isinstance(run, Watch) else None
        self._ticker.call(self._show_words)

    def close(self) -> None:
        """Take the widgets off the page; the run goes on."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._ticker.close()
        super().close()

    def __repr__(self) -> str:
        """Return one line with the number of steps."""
        return f"<amplab run of {len(self.run.history)} steps: {self.run.config}>"

    def _answer(self, message: dict) -> None:
        if message["type"] == "hello":
            self._views.add(message["view"])
            self._ticker.wake()
        else:
            self._views.discard(message["view"])

    def _tick(self) -> None:
        if not self._views:
            return
        history = self.run.history
        levels = [mark for mark in history.level_changes() if mark[1] != NO_LEVEL]
        self._live.show_frame(frame_rows(history), levels=levels, summary=self._figures())
        self._show_words()

    def _figures(self) -> dict:
        history, last = self.run.history, self.run.history.last
        return {
            "step": len(history),
            "skipped": history.skip_count,
            "scale": 1.0 if last is None else last.next_loss_scale,
            "accuracy": history.last_accuracy,
            "rate": history.rate() if isinstance(self.run, Watch) else None,
            "memory": None,
            "memory_parts": "",
            "modes": modes_line(kernels.report(), cpu_half_mode()),
            "unknown": _UNKNOWN if isinstance(self.run, Watch) else (*_UNKNOWN, "rate"),
        }

    def _show_words(self) -> None:
        """Draw the findings and the last skipped steps, not too often."""
        history, now = self.run.history, time.monotonic()
        present = (len(history), history.skip_count)
        if present == self._words_of:
            return
        if now < self._words_due:
            self._ticker.wake()
            return
        self._words_due, self._words_of = now + SLOW, present
        self._words.value = self.run.findings()._repr_html_() + _skips_html(self.run)

    def _show_failure(self, text: str) -> None:
        self._words.value = f"<pre>{escape(text)}</pre>"


def _skips_html(run: Run | Watch) -> str:
    """The skipped steps, newest first."""
    history = run.history
    latest = history.skips(max(0, history.skip_count - LIMIT))
    if not latest:
        return page("No step was skipped.")
    lines = [
        (
            f"{record.step:,}",
            _power(record.loss_scale),
            _power(record.next_loss_scale),
            name(record.first_nonfinite or ""),
        )
        for record in reversed(latest)
    ]
    heads = ("step", "loss scale", "next", "first gradient that is not finite")
    said = f"{count(history.skip_count, 'step')} skipped" + (f", the last {LIMIT}" if len(latest) == LIMIT else "")
    return page(said, html_table(heads, lines, right={0, 1, 2}, caption="Skipped steps, newest first"))


def _power(scale: float) -> str:
    return power(scale, raised=True)
