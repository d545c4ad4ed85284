"""Passes a trainer's events to the dashboard's widgets, and the page's messages to the trainer.

Everything runs in the ticker's thread; the trainer's thread and the kernel's only queue a job or wake the ticker. The
run is drawn at most ten times a second, the overflows twice, the gradients once, and nothing while no page is open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from amplab import kernels
from amplab.lab import (
    FIELDS,
    ConfigChanged,
    Event,
    ExperimentConfig,
    Failed,
    GradientRecord,
    GradientsReady,
    SkipExplained,
    StateChanged,
    StepRecord,
    TraceReady,
    Trainer,
)
from amplab.policies import cpu_half_mode
from amplab.trace import Trace
from amplab.views.controls import act, controls_payload
from amplab.views.dtypes_payload import dtypes_payload
from amplab.views.gradients_payload import gradients_payload
from amplab.views.live_payload import frame_rows, modes_line, summary
from amplab.views.notice_board import Notice, NoticeBoard, failure, offer
from amplab.views.overflows_payload import is_broken, overflows_payload
from amplab.views.parts import Controls, LiveView, Message, Notices, Panels
from amplab.views.ticker import Pace, Ticker

__all__ = ["Parts", "Presenter"]

SLOW = 0.5
"""Seconds between two drawings of the overflow table."""

SLOWER = 1.0
"""Seconds between two drawings of the gradients: each takes a forward and a backward pass."""

RETRACED = tuple(name for name, each in FIELDS.items() if each.changes_dtypes)
"""Fields whose change needs a new trace."""


@dataclass(frozen=True)
class Parts:
    """The widgets that a dashboard consists of."""

    notices: Notices
    controls: Controls
    live: LiveView
    panels: Panels


class Presenter:
    """Updates the widgets of one trainer until closed.

    Args:
        trainer: The experiment.

    Attributes:
        parts: The widgets.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._board = NoticeBoard()
        self._wanted: ExperimentConfig | None = None  # what "Start new" in the offer begins
        self._answers = 0
        self._refusal: str | None = None
        self._armed: set[str] = set()
        self._shrinking_asked: bool | None = None
        self._traced: tuple[str, Trace] | None = None
        self._levels = trainer.history.level_changes() or [(0, trainer.config.opt_level)]
        self._scale = 0.0  # what the next step will use, as the trainer's thread last set it
        self._unsubscribe: Callable[[], None] = lambda: None
        self._ticker = Ticker(self._tick, on_failure=lambda text: self._put(failure(text)))
        self._overflows = Pace(SLOW, self._ticker.wake)
        self._gradients = Pace(SLOWER, self._ticker.wake)
        self.parts = Parts(
            notices=Notices(self._queued(self._on_notice)),
            controls=Controls(self._queued(self._on_control), shown=self._controls()),
            live=LiveView(self._ticker.wake),
            panels=Panels(self._queued(lambda _: None)),
        )
        self.parts.panels.observe(lambda _: self._ticker.call(self._on_tab), "tab")
        # Before the first step: without a listener, a build writes its outcome to stderr.
        kernels.ensure(on_report=lambda _: self._ticker.wake())
        self._ticker.call(self._begin)

    def offer(self, wanted: ExperimentConfig | None) -> None:
        """Ask whether to continue this experiment or to begin `wanted` (None: the present config)."""
        self._ticker.call(lambda: self._offer(wanted))

    def close(self) -> None:
        """End the ticker and the widgets; the trainer continues."""
        self._ticker.call(self._end)
        self._ticker.close()
        for part in vars(self.parts).values():
            part.close()

    # In other threads

    def _queued(self, answer: Callable[[Message], None]) -> Callable[[Message], None]:
        return lambda message: self._ticker.call(lambda: answer(message))

    def _hear(self, event: Event) -> None:
        """Receive an event in the trainer's thread, at every step."""
        if isinstance(event, StepRecord):
            self._scale = event.next_loss_scale
            if self._armed and event.injected is not None:
                done = event.injected.split("+")
                self._ticker.call(lambda: self._armed.difference_update(done))
            self._ticker.wake()
        else:
            # Read here, between two steps: during a change of level a session has no scale.
            self._scale = self._trainer.loss_scale
            self._ticker.call(lambda: self._on_event(event))

    # In the ticker's thread: events of the trainer

    def _begin(self) -> None:
        self._unsubscribe = self._trainer.subscribe(self._hear)
        for past in self._trainer.failures:
            self._put(failure(past.text, fatal=past.fatal, damaged=past.damaged))
        self._show_controls()
        self._trainer.request_trace()

    def _end(self) -> None:
        self._unsubscribe()

    def _on_event(self, event: Event) -> None:
        match event:
            case TraceReady():
                self._show_trace(event)
            case GradientsReady():
                self._show_gradients(event.record)
            case SkipExplained():
                self._overflows.forget()
            case ConfigChanged():
                self._on_config(event)
            case Failed():
                self._put(failure(event.text, fatal=event.fatal, damaged=event.damaged))
            case StateChanged(note=note) if note:
                self._put(Notice("note", "Paused", note, of_run=True))
        self._ticker.wake()

    def _on_config(self, event: ConfigChanged) -> None:
        if event.reset:
            self._levels, self._armed, self._shrinking_asked = [(0, event.config.opt_level)], set(), None
            self._overflows.forget()
            self._board.remove_of_run()
            self.parts.notices.notices = self._board.payload()
        elif self._levels[-1][1] != event.config.opt_level:
            kept = [mark for mark in self._levels if mark[0] < event.step]
            self._levels = [*kept, (event.step, event.config.opt_level)]
        if event.config.model != event.previous.model:
            self._traced = None
        if any(getattr(event.config, name) != getattr(event.previous, name) for name in RETRACED):
            self._trainer.request_trace()

    # In the ticker's thread: messages of the page

    def _on_control(self, message: Message) -> None:
        self._refusal = act(self._trainer, message)
        self._answers += 1
        if message["type"] == "inject" and self._refusal is None:
            self._arm(message["kind"])
        self._show_controls()
        self._ticker.wake()

    def _arm(self, fault: str) -> None:
        """Remember a fault until the trainer has carried it out, so that the page shows it at once."""
        if fault == "underflow":
            self._shrinking_asked = not self._is_shrinking()
        else:
            self._armed.add(fault)

    def _is_shrinking(self) -> bool:
        if self._shrinking_asked == self._trainer.shrinking:
            self._shrinking_asked = None
        return self._trainer.shrinking if self._shrinking_asked is None else self._shrinking_asked

    def _on_notice(self, message: Message) -> None:
        self._board.remove(message["id"])
        if message["type"] == "new":
            self._trainer.reset(self._wanted)
        elif message["type"] == "reset":
            self._trainer.reset()
        self.parts.notices.notices = self._board.payload()

    def _on_tab(self) -> None:
        self._ticker.wake()

    def _offer(self, wanted: ExperimentConfig | None) -> None:
        trainer = self._trainer
        self._wanted = wanted
        other = None if wanted in (None, trainer.config) else str(wanted)
        self._put(offer(str(trainer.config), len(trainer.history), trainer.state, other))

    # In the ticker's thread: drawing

    def _tick(self) -> None:
        if self.parts.live.is_open:
            self._show_controls()
            self._show_frame()
            self._show_overflows()
            self._request_gradients()

    def _controls(self) -> dict[str, object]:
        shown = controls_payload(
            self._trainer.config,
            state=self._trainer.state,
            refusal=self._refusal,
            shrinking=self._is_shrinking(),
            armed=sorted(self._armed),
        )
        # A refused value is still in its field: a new number makes the page write the field again.
        return shown | {"answers": self._answers}

    def _show_controls(self) -> None:
        self.parts.controls.shown = self._controls()

    def _show_frame(self) -> None:
        trainer, history = self._trainer, self._trainer.history
        figures = summary(
            history,
            loss_scale=self._scale,
            rate=history.rate() if trainer.state == "running" else None,
            memory=trainer.memory(),
            modes=modes_line(kernels.report(), cpu_half_mode()),
        )
        self.parts.live.show_frame(frame_rows(history), levels=self._levels, summary=figures)

    def _show_overflows(self) -> None:
        history = self._trainer.history
        if self._overflows.is_due((history.skip_count, is_broken(history))):
            self.parts.panels.overflows = overflows_payload(history)

    def _request_gradients(self) -> None:
        trainer = self._trainer
        present = (len(trainer.history), trainer.shrinking, trainer.config)
        if self.parts.panels.tab == "gradients" and self._gradients.is_due(present):
            trainer.request_gradients()

    def _show_gradients(self, record: GradientRecord) -> None:
        if self.parts.live.is_open and self.parts.panels.tab == "gradients":
            self.parts.panels.gradients = gradients_payload(record)
        else:  # another view of this run asked for them, or it is too late
            self._gradients.forget()

    def _show_trace(self, event: TraceReady) -> None:
        before = self._traced
        self._traced = (event.opt_level, event.trace)
        self.parts.panels.dtypes = dtypes_payload(
            event.trace,
            before=before and before[1],
            levels=(before and before[0], event.opt_level),
        )

    def _put(self, notice: Notice) -> None:
        self._board.put(notice)
        self.parts.notices.notices = self._board.payload()
