"""A run that the lab does not control, on the lab's charts and tabs: a watch of a loop, or a log that was read back.

A run of several ranks has a table of them above the charts, and the charts mark where they differ.

    tab              a watch                                         a log
    Op dtypes        the last step that `w.batches` let it look at   absent: a log holds no ops
    Gradients        measured nearest the selected step, or last,    the same
                     of each layer too
    Skipped steps    every skipped step with its reason              the same
    Findings         what the rules find                             the same
    Scale            how it moves, and other rules over the run      the same
    Export           charts, CSV, JSON, report                       the same

The loop's thread publishes and only wakes the ticker; the ticker's thread builds the payloads and is the only one that
changes widgets.
"""

from __future__ import annotations

from typing import Any

import ipywidgets

from amplab import kernels
from amplab.display.html import page
from amplab.display.text import escape
from amplab.lab import ExperimentConfig, History, Run, Watch
from amplab.lab.scale_growth import ScaleGrowth
from amplab.lab.tasks import score_named
from amplab.lab.watched_run import NO_LEVEL
from amplab.policies import cpu_half_mode
from amplab.views.live_payload import modes_line, summary
from amplab.views.messages import refusal
from amplab.views.notice_board import refused_message
from amplab.views.parts import LiveView, Message, Panels, TakeAway, close_inside
from amplab.views.tabs.dtypes import DtypesTab
from amplab.views.tabs.dtypes_payload import TracedLevel, dtypes_payload
from amplab.views.tabs.findings import FindingsTab
from amplab.views.tabs.findings_payload import findings_payload
from amplab.views.tabs.gradients import GradientsTab
from amplab.views.tabs.gradients_payload import stored_payload
from amplab.views.tabs.scale import ScaleTab
from amplab.views.tabs.scale_payload import FollowedScale, ScaleSetting
from amplab.views.tabs.skipped import SkippedTab
from amplab.views.tabs.skipped_payload import GONE, UNRECORDED, UNWATCHED, skipped_payload
from amplab.views.tabs.tab import Tab
from amplab.views.take_away import file_of
from amplab.views.ticker import Pace, Ticker

__all__ = ["RunView"]

SLOW = 0.5
"""Seconds between two drawings of the tabs."""

_USUAL_SCALE = 2.0**16  # before the first step
_UNKNOWN = ("memory",)  # figures that only the lab's own experiments have
_NO_OPS = "No op seen yet: the first step is looked at in the body of `for batch in w.batches(loader)`."


class _FollowedRun:
    """What the tab of the scale reads of a trainer, of a run that the lab does not control."""

    def __init__(self, run: Run | Watch) -> None:
        self._run = run

    @property
    def history(self) -> History:
        return self._run.history

    @property
    def loss_scale(self) -> float:
        last = self.history.last
        return 1.0 if last is None else last.next_loss_scale

    @property
    def scale_growth(self) -> ScaleGrowth | None:
        return self._run.scale_growth if isinstance(self._run, Watch) else None

    @property
    def config(self) -> ScaleSetting:
        run, history = self._run, self.history
        first = history.record(0).loss_scale if len(history) else _USUAL_SCALE
        if isinstance(run, Watch):
            return FollowedScale(run.dynamic, run.growth_interval, first)
        if isinstance(run.last_config, ExperimentConfig):
            return run.last_config
        return FollowedScale(history.skip_count > 0 or self.loss_scale != first, None, first)


class _RunDesk:
    """The `Desk` of the tab of the scale."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self.trainer: Any = _FollowedRun(view.run)

    def wake(self) -> None:
        self._view.wake()

    def is_shown(self, tab: str) -> bool:
        return self._view.is_shown(tab)

    def show(self, tab: str, payload: dict[str, Any]) -> None:
        self._view.panels.show(tab, payload)

    def select(self, step: int | None) -> None:
        self._view.select(step)


class RunView(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """Charts and tabs of a run: findings, skipped steps, gradients, scale, op dtypes; and the menu "Export".

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
        ops = (DtypesTab,) if isinstance(run, Watch) else ()
        shown: tuple[type[Tab], ...] = (FindingsTab, SkippedTab, GradientsTab, ScaleTab, *ops)
        self.panels = Panels(self._on_message, [(tab.name, tab.label) for tab in shown])
        self._scale = ScaleTab(_RunDesk(self))
        self._take_away = TakeAway(self._on_take_away, has_setting=False)
        self.panels.observe(lambda _: self._ticker.wake(), "tab")
        self._traced: int | None = None  # the step whose ops are drawn
        self._measured: tuple[int | None, int] | None = None  # the selected step and the samples that are drawn
        self._notice = ipywidgets.HTML()
        head = ipywidgets.HTML(f"<code>{escape(str(run.config))}</code>")
        ranks = [ipywidgets.HTML(page("", run.rank_table().html()))] if isinstance(run, Run) and run.ranks else []
        super().__init__([head, *ranks, self._notice, self._live, self._take_away, self.panels])
        self.add_class("amp-side")
        self.add_class("amp-run")
        self._unsubscribe = run.subscribe(lambda _: self._ticker.wake()) if isinstance(run, Watch) else None
        self._ticker.call(self._draw_tabs)

    def close(self) -> None:
        """Remove the widgets from the page; the run continues."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._ticker.close()
        close_inside(self)
        super().close()

    def __repr__(self) -> str:
        """Return one line with the number of steps."""
        return f"<amplab run of {len(self.run.history)} steps: {self.run.config}>"

    def wake(self) -> None:
        """Request a tick."""
        self._ticker.wake()

    def is_shown(self, tab: str) -> bool:
        """Whether a page is open and shows this tab."""
        return bool(self._live.is_open and self.panels.tab == tab)

    def _on_message(self, message: Message) -> None:
        if self._refuses("panels", message):
            return
        if message["type"] == "select":
            self._ticker.call_latest("select", lambda: self.select(message["step"]))
        elif message["tab"] == ScaleTab.name:
            self._ticker.call(lambda: self._scale.on_message(message))

    def _on_take_away(self, message: Message) -> None:
        if not self._refuses("take_away", message) and message["type"] == "file":
            self._ticker.call(lambda: self._take_away.send(file_of(self.run, message["kind"])))

    def _refuses(self, part: str, message: Message) -> bool:
        """Return whether a message of the page is none, and say so."""
        why = refusal(part, message)
        if why is not None:
            self._ticker.call(lambda: self._show_failure(refused_message(why).text))
        return why is not None

    def select(self, step: int | None) -> None:
        """Select a step in the charts and in every tab; None selects nothing."""
        self._live.selected = self.panels.selected = step
        self._draw_gradients()

    def _tick(self) -> None:
        if not self._live.is_open:
            return
        self._live.draw(self.run.history, self._figures())
        history = self.run.history
        if self._pace.is_due((len(history), history.explained_count)):
            self._draw_tabs()
        self._scale.tick()

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
        self.panels.show(SkippedTab.name, skipped_payload(history, gone=self._gone()))
        self._draw_gradients()
        if isinstance(self.run, Watch):
            self._draw_ops(self.run)

    def _gone(self) -> str:
        """Why a step without explanation has none."""
        if not isinstance(self.run, Watch):
            return UNRECORDED
        return GONE if self.run.can_explain else UNWATCHED

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
