"""A run that the lab does not control, on the lab's charts: a watch of a loop, or a log that was read back.

The loop's thread publishes and only wakes the ticker; the ticker's thread builds the payloads and is the only one that
changes widgets.
"""

from __future__ import annotations

from html import escape

import ipywidgets

from amplab import kernels
from amplab.display.html import html_table, name, page
from amplab.display.numbers import count, power
from amplab.lab import ExperimentConfig, Run, Watch
from amplab.lab.tasks import score_named
from amplab.policies import cpu_half_mode
from amplab.views.live_payload import modes_line, summary
from amplab.views.parts import LiveView
from amplab.views.ticker import Pace, Ticker

__all__ = ["RunView"]

SLOW = 0.5
"""Seconds between two drawings of the findings."""

LIMIT = 50
"""Skipped steps in the table."""

_UNKNOWN = ("memory",)  # figures that only the lab's own experiments have


class RunView(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """Charts, skipped steps and findings of a run.

    Args:
        run: A `Watch`, which is drawn live while its loop runs, or a `Run` from `load_run`.

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
        self._ticker = Ticker(self._tick, on_failure=self._show_failure)
        self._pace = Pace(SLOW, self._ticker.wake)
        self._live = LiveView(
            self._ticker.wake, lambda message: self._ticker.call(lambda: self._select(message["step"]))
        )
        self._findings = ipywidgets.HTML()
        super().__init__([ipywidgets.HTML(f"<code>{escape(str(run.config))}</code>"), self._live, self._findings])
        self.add_class("amp-side")
        self._unsubscribe = run.subscribe(lambda _: self._ticker.wake()) if isinstance(run, Watch) else None
        self._ticker.call(self._show_findings)

    def close(self) -> None:
        """Remove the widgets from the page; the run continues."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._ticker.close()
        super().close()

    def __repr__(self) -> str:
        """Return one line with the number of steps."""
        return f"<amplab run of {len(self.run.history)} steps: {self.run.config}>"

    def _tick(self) -> None:
        if not self._live.is_open:
            return
        self._live.draw(self.run.history, self._figures())
        self._show_findings()

    def _select(self, step: int | None) -> None:
        self._live.selected = step

    def _figures(self) -> dict[str, object]:
        history, is_watch = self.run.history, isinstance(self.run, Watch)
        last = history.last
        config = self.run.config
        return summary(
            history,
            loss_scale=1.0 if last is None else last.next_loss_scale,
            rate=history.rate() if is_watch else None,
            memory=None,
            modes=modes_line(kernels.report(), cpu_half_mode()),
            score=score_named(config.task) if isinstance(config, ExperimentConfig) else None,
            unknown=_UNKNOWN if is_watch else (*_UNKNOWN, "rate"),
        )

    def _show_findings(self) -> None:
        """Draw the findings and the last skipped steps."""
        history = self.run.history
        if self._pace.is_due((len(history), history.skip_count)):
            self._findings.value = self.run.findings()._repr_html_() + _skips_html(self.run)

    def _show_failure(self, text: str) -> None:
        self._findings.value = f"<pre>{escape(text)}</pre>"


def _skips_html(run: Run | Watch) -> str:
    """The skipped steps, newest first."""
    history = run.history
    latest = history.skips(max(0, history.skip_count - LIMIT))
    if not latest:
        return page("No step was skipped.")
    lines = [
        (
            f"{record.step:,}",
            power(record.loss_scale, raised=True),
            power(record.next_loss_scale, raised=True),
            name(record.first_nonfinite or ""),
        )
        for record in reversed(latest)
    ]
    heads = ("step", "loss scale", "next", "first gradient that is not finite")
    listed = f"; the last {LIMIT} are listed" if history.skip_count > LIMIT else ""
    table = html_table(heads, lines, right={0, 1, 2}, caption="Skipped steps, newest first")
    return page(f"{count(history.skip_count, 'step')} skipped{listed}", table)
