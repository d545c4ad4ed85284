"""Passes a trainer's events to the dashboard's widgets, and the page's messages to the trainer.

Everything runs in the ticker's thread; the trainer's thread and the kernel's only queue a job or wake the ticker. The
run is drawn at most ten times a second, and nothing while no page is open. What the tabs show is their own business:
they get every event, and every message that the page sends from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from amplab import kernels
from amplab.lab import (
    ConfigChanged,
    Event,
    ExperimentConfig,
    Failed,
    FaultSwitched,
    StateChanged,
    StepRecord,
    Trainer,
    Undone,
)
from amplab.lab.checkpoints import Checkpoint
from amplab.lab.tasks import score_named
from amplab.policies import cpu_half_mode
from amplab.views.controls import act, controls_payload
from amplab.views.gallery import GalleryDesk, gallery_titles
from amplab.views.live_payload import modes_line, summary
from amplab.views.messages import refusal
from amplab.views.notice_board import CELL_WAITS, Notice, NoticeBoard, failure, offer, refused_message, saved_offer
from amplab.views.parts import Controls, Gallery, LiveView, Message, Notices, Panels, StatusLine, TakeAway
from amplab.views.status import Status
from amplab.views.tabs import TABS
from amplab.views.tabs.runs_payload import overlays
from amplab.views.take_away import file_of, take_setting
from amplab.views.ticker import Pace, Ticker

__all__ = ["Parts", "Presenter"]


SLOW = 0.3
"""Seconds between two drawings of the runs of a comparison."""

_A_MOMENT = 2.0  # seconds


@dataclass(frozen=True)
class Parts:
    """The widgets that a dashboard consists of."""

    notices: Notices
    gallery: Gallery
    controls: Controls
    status: StatusLine
    live: LiveView
    take_away: TakeAway
    panels: Panels


class Presenter:
    """Updates the widgets of one trainer until closed.

    Args:
        trainer: The experiment.

    Attributes:
        parts: The widgets.
        unanswered: The config that was offered instead of the present one, until the person chooses; None for none.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.unanswered: ExperimentConfig | None = None
        self._board = NoticeBoard()
        self._saved: Checkpoint | None = None  # what "Continue it" continues
        self._wanted: ExperimentConfig | None = None  # what "Start new" in the offer begins
        self._answers = 0
        self._undone: str | None = None  # until the next message of the page
        self._refusal: str | None = None
        self._asked: set[str] = set()  # faults that wait for the end of a step until the trainer has armed them
        self._shrinking_asked: bool | None = None
        self._scale = 0.0  # what the next step will use, as the trainer's thread last set it
        self._unsubscribe: Callable[[], None] = lambda: None
        self._ticker = Ticker(self._tick, on_failure=lambda text: self._put(failure(text)))
        self._gallery = GalleryDesk(trainer, self._ticker.wake)
        self._overlaying = Pace(SLOW, self._ticker.wake)
        self._tabs = {each.name: each(self) for each in TABS}
        self.parts = Parts(
            notices=Notices(self._queued("notices", self._on_notice)),
            gallery=Gallery(self._queued("gallery", self._on_gallery), scenarios=gallery_titles()),
            controls=Controls(self._queued("controls", self._on_control), shown=self._controls()),
            status=StatusLine(self._queued("status", lambda _: self._on_status())),
            live=LiveView(self._ticker.wake, self._queued("live", self._on_panels)),
            take_away=TakeAway(self._queued("take_away", self._on_take_away)),
            panels=Panels(self._queued("panels", self._on_panels), [(each.name, each.label) for each in TABS]),
        )
        self._status = Status(trainer, self._ticker.wake, lambda shown: self.parts.status.set_trait("shown", shown))
        self.parts.panels.observe(lambda change: self._ticker.call(lambda: self._on_tab(change["new"])), "tab")
        # Before the first step: without a listener, a build writes its outcome to stderr.
        kernels.ensure(on_report=lambda _: self._ticker.wake())
        self._ticker.call(self._begin)

    def offer(self, wanted: ExperimentConfig | None) -> None:
        """Ask whether to continue this experiment or to begin `wanted` (None: the present config)."""
        self.unanswered = None if wanted in (None, self._trainer.config) else wanted
        self._ticker.call(lambda: self._offer(wanted))

    def offer_saved(self, saved: Checkpoint) -> None:
        """Ask whether to continue a run of a kernel that has ended."""
        self._saved = saved
        self._ticker.call(lambda: self._put(saved_offer(saved.name, str(saved.config), saved.step, saved.others)))

    @contextmanager
    def cell_waits(self) -> Iterator[None]:
        """Tell, if a block takes longer than a moment, that a cell waits for the run."""
        timer = threading.Timer(_A_MOMENT, lambda: self._ticker.call(lambda: self._put(CELL_WAITS)))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            self._ticker.call(lambda: self._withdraw(CELL_WAITS))

    def wait(self) -> None:
        """Wait until what was asked of the widgets so far is done, such as the requests with which the tabs begin."""
        self._ticker.wait()

    def close(self) -> None:
        """End the ticker; the trainer continues. The widgets are closed by the box that they are in."""
        self._ticker.call(self._end)
        self._ticker.close()

    # For the tabs

    @property
    def trainer(self) -> Trainer:
        """The experiment."""
        return self._trainer

    def wake(self) -> None:
        """Request a tick."""
        self._ticker.wake()

    def is_shown(self, tab: str) -> bool:
        """Whether a page is open and shows this tab."""
        return self.parts.live.is_open and self.parts.panels.tab == tab

    def show(self, tab: str, payload: dict[str, Any]) -> None:
        """Set what the page draws in this tab."""
        self.parts.panels.show(tab, payload)

    def select(self, step: int | None) -> None:
        """Select a step in the charts and in every tab; None selects nothing."""
        self.parts.live.selected = self.parts.panels.selected = step
        for tab in self._tabs.values():
            tab.on_select(step)
        self._ticker.wake()

    # In other threads

    def _queued(self, part: str, answer: Callable[[Message], None]) -> Callable[[Message], None]:
        """Return the listener of a part: it queues the answer to a sound message, of selections the last one's."""

        def listen(message: Message) -> None:
            if (why := refusal(part, message)) is not None:
                self._ticker.call(lambda: self._put(refused_message(why)))
            elif message["type"] == "select":
                self._ticker.call_latest("select", lambda: answer(message))
            else:
                self._ticker.call(lambda: answer(message))

        return listen

    def _hear(self, event: Event) -> None:
        """Receive an event in the trainer's thread, at every step."""
        if isinstance(event, StepRecord):
            self._scale = event.next_loss_scale
            if self.parts.live.is_open:
                self._ticker.wake()
        else:
            # Read here, between two steps: during a change of level a session has no scale.
            self._scale = self._trainer.loss_scale
            self._ticker.call(lambda: self._on_event(event))

    # In the ticker's thread: events of the trainer

    def _begin(self) -> None:
        self._unsubscribe = self._trainer.subscribe(self._hear)
        for past in self._trainer.failures:
            self._put_failure(past)
        self._show_controls()
        for tab in self._tabs.values():
            tab.begin()

    def _end(self) -> None:
        self._unsubscribe()
        self._gallery.close()

    def _on_event(self, event: Event) -> None:
        match event:
            case ConfigChanged():
                self._undone = None  # an `Undone` follows the change that takes something back
                self._on_config(event)
            case Undone(text):
                self._undone, self._refusal = text, None
                self._shrinking_asked = None
            case FaultSwitched(fault):
                self._asked.discard(fault)
            case Failed() if not self._gallery.expects(event.text):
                self._put_failure(event)
            case StateChanged():
                self._on_state(event)
        self._status.on_event(event)
        for tab in self._tabs.values():
            tab.on_event(event)
        self._ticker.wake()

    def _on_state(self, event: StateChanged) -> None:
        """Withdraw the offer of a run instead of the present one when the present one goes on."""
        if event.state == "running" or (event.state == "paused" and self._saved is not None):
            self._saved = self.unanswered = None
            self._board.remove_kind("offer")
            self.parts.notices.notices = self._board.payload()
        if event.note:
            self._put(Notice("note", "Paused", event.note, of_run=True))

    def _on_config(self, event: ConfigChanged) -> None:
        if event.reset:
            self.unanswered = None
            self._asked, self._shrinking_asked = set(), None
            self._board.remove_of_run()
            self.parts.notices.notices = self._board.payload()
            self.select(None)

    # In the ticker's thread: messages of the page

    def _on_control(self, message: Message) -> None:
        self._undone = None
        self._refusal = act(self._trainer, message)
        self._answers += 1
        if message["type"] == "inject" and self._refusal is None:
            self._ask_for(message["kind"])
        self._show_controls()
        self._ticker.wake()

    def _ask_for(self, fault: str) -> None:
        """Remember a fault until the trainer has armed it, so that the page shows it at once."""
        if fault == "underflow":
            self._shrinking_asked = not self._is_shrinking()
        else:
            self._asked.add(fault)

    def _is_shrinking(self) -> bool:
        if self._shrinking_asked == self._trainer.shrinking:
            self._shrinking_asked = None
        return self._trainer.shrinking if self._shrinking_asked is None else self._shrinking_asked

    def _on_notice(self, message: Message) -> None:
        self._board.remove(message["id"])
        if not self._board.has_kind("offer"):
            self.unanswered = None
        if message["type"] in ("new", "reset"):
            try:
                self._trainer.reset(self._wanted if message["type"] == "new" else None)
            except ValueError as refusal:  # its code is not here any more
                self._put_failure(Failed(str(refusal), attempted=True))
        elif message["type"] == "continue" and self._saved is not None:
            saved, self._saved = self._saved, None  # once: a second press may come before the page has drawn
            self._trainer.continue_saved(saved)
        self.parts.notices.notices = self._board.payload()

    def _on_status(self) -> None:
        self._refusal = self._status.on_message()
        self._show_controls()
        self._ticker.wake()

    def _on_gallery(self, message: Message) -> None:
        self._gallery.on_message(message, self.parts.gallery)
        self._show_controls()
        self._ticker.wake()

    def _on_take_away(self, message: Message) -> None:
        if message["type"] == "file":
            self.parts.take_away.send(file_of(self._trainer, message["kind"]))
        else:
            self.parts.take_away.send({"kind": "answer", "text": take_setting(self._trainer, message["text"])})

    def _on_panels(self, message: Message) -> None:
        if message["type"] == "select":
            self.select(message["step"])
        else:
            self._tabs[message["tab"]].on_message(message)
            self._ticker.wake()

    def _on_tab(self, tab: str) -> None:
        if tab in self._tabs:  # the page writes it
            self._tabs[tab].on_open()
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
            self._gallery.show(self.parts.gallery)
            self._show_frame()
            self._status.tick()
            for tab in self._tabs.values():
                tab.tick()

    def _controls(self) -> dict[str, object]:
        shown = controls_payload(
            self._trainer.config,
            state=self._trainer.state,
            refusal=self._refusal,
            shrinking=self._is_shrinking(),
            armed=sorted((self._trainer.armed | self._asked) - {"underflow"}),
            speed=self._trainer.speed,
            last_change=self._trainer.last_change,
            undone=self._undone,
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
            score=score_named(trainer.config.task),
        )
        self.parts.live.draw(history, figures)
        if trainer.comparison is None or self._overlaying.is_due(trainer.kept.version):
            task = trainer.config.task
            self.parts.live.overlay((trainer.kept.version, task), lambda rows: overlays(trainer.kept.runs, task, rows))

    def _put_failure(self, failed: Failed) -> None:
        if failed.mended:
            self._put(Notice("note", "Works again", failed.text))
            return
        self._put(failure(failed.text, fatal=failed.fatal, damaged=failed.damaged, attempted=failed.attempted))

    def _withdraw(self, notice: Notice) -> None:
        self._board.withdraw(notice)
        self.parts.notices.notices = self._board.payload()

    def _put(self, notice: Notice) -> None:
        self._board.put(notice)
        self.parts.notices.notices = self._board.payload()
