"""A run that the lab does not control, on the lab's charts and tabs: a watch of a loop, or a log that was read back.

A run of several ranks has a table of them above the charts, and the charts mark where they differ.

    tab              a watch                                         a log
    Op dtypes        the last step that `w.batches` let it look at   absent: a log holds no ops
    Gradients        measured nearest the selected step, or last     the same
    Skipped steps    every skipped step with its reason              the same
    Findings         what the rules find                             the same

The loop's thread publishes and only wakes the ticker; the ticker's thread builds the payloads and is the only one that
changes widgets.
"""

from __future__ import annotations

from html import escape

import ipywidgets

from amplab import kernels
from amplab.display.html import page
from amplab.lab import ExperimentConfig, Run, Watch
from amplab.lab.tasks import score_named
from amplab.lab.watched_run import NO_LEVEL
from amplab.policies import cpu_half_mode
from amplab.views.live_payload import modes_line, summary
from amplab.views.parts import LiveView, Message, Panels
from amplab.views.tabs.dtypes import DtypesTab
from amplab.views.tabs.dtypes_payload import TracedLevel, dtypes_payload
from amplab.views.tabs.findings import FindingsTab
from amplab.views.tabs.findings_payload import findings_payload
from amplab.views.tabs.gradients import GradientsTab
from amplab.views.tabs.gradients_payload import stored_payload
from amplab.views.tabs.skipped import SkippedTab
from amplab.views.tabs.skipped_payload import skipped_payload
from amplab.views.ticker import Pace, Ticker

__all__ = ["RunView"]

SLOW = 0.5
"""Seconds between two drawings of the tabs."""

_UNKNOWN = ("memory",)  # figures that only the lab's own experiments have
_NO_OPS = "No op seen yet: the first step is looked at in the body of `for batch in w.batches(loader)`."


class RunView(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """Charts and tabs of a run: op dtypes, gradients, skipped steps, findings.

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
        self._live = LiveView(self._ticker.wake, self._on_message)
        shown = (FindingsTab, SkippedTab, GradientsTab, *((DtypesTab,) if isinstance(run, Watch) else ()))
        self.panels = Panels(self._on_message, [(tab.name, tab.label) for tab in shown])
        self._traced: int | None = None  # the step whose ops are drawn
        self._measured: tuple[int | None, int] | None = None  # the selected step and the samples that are drawn
        self._notice = ipywidgets.HTML()
        head = ipywidgets.HTML(f"<code>{escape(str(run.config))}</code>")
        ranks = [ipywidgets.HTML(page("", run.rank_table().html()))] if isinstance(run, Run) and run.ranks else []
        super().__init__([head, *ranks, self._notice, self._live, self.panels])
        self.add_class("amp-side")
        self._unsubscribe = run.subscribe(lambda _: self._ticker.wake()) if isinstance(run, Watch) else None
        self._ticker.call(self._draw_tabs)

    def close(self) -> None:
        """Remove the widgets from the page; the run continues."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._ticker.close()
        super().close()

    def __repr__(self) -> str:
        """Return one line with the number of steps."""
        return f"<amplab run of {len(self.run.history)} steps: {self.run.config}>"

    def _on_message(self, message: Message) -> None:
        if message["type"] == "select":
            self._ticker.call(lambda: self._select(message["step"]))

    def _select(self, step: int | None) -> None:
        self._live.selected = self.panels.selected = step
        self._draw_gradients()

    def _tick(self) -> None:
        if not self._live.is_open:
            return
        self._live.draw(self.run.history, self._figures())
        history = self.run.history
        if self._pace.is_due((len(history), len(history.explanations))):
            self._draw_tabs()

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

    def _draw_tabs(self) -> None:
        history = self.run.history
        self.panels.show(FindingsTab.name, findings_payload(self.run.findings(), {}, steps=len(history)))
        self.panels.show(SkippedTab.name, skipped_payload(history))
        self._draw_gradients()
        if isinstance(self.run, Watch):
            self._draw_ops(self.run)

    def _draw_gradients(self) -> None:
        """Draw the gradients measured nearest to the selected step, or the last ones."""
        history, selected = self.run.history, self._live.selected
        samples = history.gradient_samples
        wanted = (selected, len(samples))
        if not samples or wanted == self._measured:
            return
        self._measured = wanted
        drawn = None if selected is None else stored_payload(history, selected)
        self.panels.show(
            GradientsTab.name, drawn or stored_payload(history, samples[-1].step, named="Measured in step") or {}
        )

    def _draw_ops(self, watch: Watch) -> None:
        """Draw the ops of the last step that the watch has looked at."""
        if watch.traced is None:
            self.panels.show(DtypesTab.name, {"rows": [], "summary": "", "empty": _NO_OPS, "fixed": True})
            return
        step, trace = watch.traced
        if step != self._traced:
            self._traced = step
            level = watch.config.opt_level.replace(NO_LEVEL, "") or watch.config.scaling
            self.panels.show(DtypesTab.name, dtypes_payload(TracedLevel(level, trace)) | {"fixed": True})

    def _show_failure(self, text: str) -> None:
        self._notice.value = f"<pre>{escape(text)}</pre>"
