"""The widgets of the dashboard, each an anywidget: its traits, its front end, and the listener for its messages.

A message of the page is a dict with a "type". It goes to the one listener that the widget was created with. The
docstring of `amplab.views` lists the files that set the traits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anywidget
import numpy as np
import traitlets

from amplab.lab import History
from amplab.lab.run_log.json_lines import is_number
from amplab.views.assets import WEB, module, stylesheet
from amplab.views.hearing import Hearing
from amplab.views.live_payload import ROWS, change_marks, frame_rows

__all__ = [
    "Controls",
    "MOST_PAGES",
    "MOST_UNANSWERED",
    "Gallery",
    "LiveView",
    "Message",
    "Notices",
    "Panels",
    "TakeAway",
    "StatusLine",
    "close_inside",
]

Message = dict[str, Any]
"""A message of the page, decoded from JSON."""

MOST_PAGES = 64
"""Pages that a view remembers: one that is killed does not say that it closes."""

MOST_UNANSWERED = 600
"""Frames that a page may leave without an answer before it counts as lost, about a minute's."""

_ASKED_EVERY = 100  # frames

BEHIND_ROWS = 8 * ROWS
"""Rows of an overlay in the steps that a page asks for, which are up to eight times those of the present run."""

RowsOf = Callable[[History], np.ndarray]
Lines = list[tuple[dict[str, object], np.ndarray]]
"""Name, color and dash of each line, with its rows."""


class Part(anywidget.AnyWidget):
    """A widget with one listener and a short repr."""

    def __init__(self, listener: Callable[[Message], None], **traits: object) -> None:
        super().__init__(**traits)
        self._hear = listener
        self.on_msg(lambda _widget, content, _buffers: self._receive(content))

    def _receive(self, content: object) -> None:
        """Pass on a message; what is none is ignored, as the page of another version could send it."""
        if isinstance(content, dict) and isinstance(content.get("type"), str):
            self._hear(content)

    def __repr__(self) -> str:
        """Return the name alone, which is the same in every kernel."""
        return f"<amplab {type(self).__name__}>"


def close_inside(box: Any) -> None:
    """Close every widget in a box, layouts and styles too: ipywidgets keeps each until it is closed itself."""
    for child in getattr(box, "children", ()):
        close_inside(child)
        child.close()
    for own in ("layout", "style"):
        if hasattr(box, own):
            getattr(box, own).close()


class Controls(Part):
    """All settings of an experiment; `controls_payload` builds `shown`, which must be given from the start."""

    _esm = module("controls.js")
    shown = traitlets.Dict().tag(sync=True)


class StatusLine(Part):
    """How the run is, in one line; `status_payload` builds `shown`."""

    _esm = module("status.js")
    shown = traitlets.Dict().tag(sync=True)


class LiveView(Part):
    """Figures and charts. Frames are messages, since no state must be kept for a page that is not open.

    Args:
        on_open: Called in the kernel's thread when a page opens the view.
        listener: Receives the other messages: {"type": "select", "step": the step, or None}.

    Now and then a frame asks the pages for an answer, {"type": "seen", "view"}. A page that has crashed or lost its
    connection gives none, and counts as closed after `MOST_UNANSWERED` frames: the Jupyter server keeps in memory what
    is sent to it. Frames sent while the kernel can hear no page, as in a cell, do not count; see `hearing.py`. The next
    message of the page opens it again.

    A page asks for a part of the run with {"type": "range", "view", "low", "high"}, or with "last" in place of both for
    the newest steps; "low" of None ends that. With "logarithmic", the rows are spread over a logarithmic axis, also
    those of the whole run. {"type": "behind", "view", "low", "high", "logarithmic"} asks for these steps of the
    overlays.

    Attributes:
        selected: The selected step, None for none.
    """

    _esm = module("live.js")
    _css = stylesheet("dashboard.css")
    selected = traitlets.Int(None, allow_none=True).tag(sync=True)

    def __init__(self, on_open: Callable[[], None], listener: Callable[[Message], None] = lambda _: None) -> None:
        self._pages: dict[str, int] = {}  # turns of the hearing at the last message, in its order
        self._hearing = Hearing(self._forget_lost)
        self._ranges: dict[str, Message] = {}  # by page
        self._sent: dict[str, tuple[object, ...]] = {}  # the run and the steps that a page has
        self._overlaid: object = None  # the version of the overlays that every page has
        self._behind: dict[str, Message] = {}  # the steps of the overlays that a page has asked for
        self._on_open, self._listener = on_open, listener
        super().__init__(self._on_page)

    def close(self) -> None:
        """Remove the view from the pages, and hear none any more."""
        if hasattr(self, "_hearing"):  # else an interrupt has come before it was made
            self._hearing.end()
        super().close()

    @property
    def is_open(self) -> bool:
        """Whether a page shows the view."""
        return bool(self._pages)

    def _on_page(self, message: Message) -> None:
        match message:
            case {"type": "seen", "view": str(view)} if view in self._pages:
                self._see(view)
            case {"type": "hello" | "seen", "view": str(view)}:
                self._see(view)
                self._overlaid = None
                self._on_open()
            case {"type": "bye", "view": str(view)}:
                self._forget(view)
            case {"type": "range", "view": str(view)} if _is_range(message):
                self._see(view)
                self._ranges = {**self._ranges, view: message}
                self._sent.pop(view, None)
                self._on_open()
            case {"type": "behind", "view": str(view), "low": low, "high": high} if is_number(low) and is_number(high):
                self._see(view)
                self._behind[view] = message
                self._on_open()
            case {"type": "select", "step": int() | None}:
                self._listener(message)

    def _see(self, view: str) -> None:
        """Count a page as open, and the one that was heard of longest ago as closed if there are too many."""
        self._pages.pop(view, None)
        self._pages[view] = self._hearing.turns
        if len(self._pages) > MOST_PAGES:
            self._forget(next(iter(self._pages)))

    def _forget_lost(self, turns: int) -> None:
        """Count the pages as closed that were not heard of for too long."""
        for view in [view for view, heard in [*self._pages.items()] if turns - heard > MOST_UNANSWERED]:
            self._forget(view)

    def _forget(self, view: str) -> None:
        self._pages.pop(view, None)
        self._ranges = {each: wanted for each, wanted in self._ranges.items() if each != view}
        self._behind.pop(view, None)
        self._sent.pop(view, None)

    def draw(self, history: History, summary: dict[str, object]) -> None:
        """Draw the whole run, and for each page that shows a part of it, its steps.

        Args:
            history: The run.
            summary: The figures.
        """
        for view, wanted in self._ranges.items():
            self._draw_range(view, wanted, history)
        asks = self._hearing.ask() % _ASKED_EVERY == 1
        rows, marks = frame_rows(history), change_marks(history)
        self._send_rows(rows, kind="frame", changes=marks, summary=summary, asks=asks)

    def overlay(self, version: object, lines: Callable[[RowsOf], Lines]) -> None:
        """Draw the lines of other runs behind the present one, unless the pages have this version of them.

        Args:
            version: Changes when the lines do.
            lines: Returns name, color and dash of each line, with its rows, which a function of its history gives.
        """
        if version != self._overlaid:
            self._overlaid = version
            self._send_lines(lines(frame_rows), kind="overlays")
        while self._behind:
            view, wanted = self._behind.popitem()  # the kernel's thread adds some
            shown = {"low": wanted["low"], "high": wanted["high"], "logarithmic": bool(wanted.get("logarithmic"))}
            self._send_lines(lines(partial(frame_rows, limit=BEHIND_ROWS, **shown)), kind="behind", view=view, **shown)

    def _send_lines(self, lines: Lines, **content: object) -> None:
        buffers = [np.ascontiguousarray(rows).data for _, rows in lines]
        self.send({**content, "overlays": [line for line, _ in lines]}, buffers=buffers)

    def _draw_range(self, view: str, wanted: Message, history: History) -> None:
        """Send the rows of a page's range, unless it has them."""
        count, logarithmic = len(history), bool(wanted.get("logarithmic"))
        if "last" in wanted:
            high = max(count, wanted["last"]) - 1
            low = high - wanted["last"] + 1
        elif wanted["low"] is not None:
            low, high = wanted["low"], wanted["high"]
        elif logarithmic:
            low, high = 0, count - 1
        else:
            return
        shown = (id(history), low, high, min(high, count - 1))
        if self._sent.get(view) != shown:
            self._sent[view] = shown
            rows = frame_rows(history, low, high, logarithmic=logarithmic)
            self._send_rows(rows, kind="range", view=view, low=low, high=high, logarithmic=logarithmic)

    def _send_rows(self, rows: np.ndarray, **content: object) -> None:
        """Send float64 `(rows, 4)`, see `live_payload`."""
        self.send(content, buffers=[np.ascontiguousarray(rows).data])


def _is_range(message: Message) -> bool:
    """Return whether a message names a part of a run in numbers, or none."""
    if "last" in message:
        return is_number(message["last"]) and message["last"] >= 1
    if "low" not in message:
        return False
    return message["low"] is None or (is_number(message["low"]) and is_number(message.get("high")))


class Panels(Part):
    """The tabs below the charts. Each has a trait of its name with its payload, so that only what changed is sent.

    A message of a tab has its name as "tab"; {"type": "select", "step"} selects a step.

    Args:
        listener: Receives the messages.
        tabs: Name and label of each tab, in order.

    Attributes:
        tab: The open tab; the page writes it.
        selected: The selected step, None for none.
    """

    _esm = module("panels.js")
    _css = stylesheet(*sorted(path.name for path in WEB.glob("tab_*.css")))
    tabs: traitlets.List[Any] = traitlets.List().tag(sync=True)
    tab = traitlets.Unicode().tag(sync=True)
    selected = traitlets.Int(None, allow_none=True).tag(sync=True)

    def __init__(self, listener: Callable[[Message], None], tabs: Sequence[tuple[str, str]]) -> None:
        self.add_traits(**{name: traitlets.Dict().tag(sync=True) for name, _ in tabs})
        super().__init__(listener, tabs=[list(each) for each in tabs], tab=tabs[0][0])

    def show(self, tab: str, payload: dict[str, Any]) -> None:
        """Set what the page draws in a tab."""
        setattr(self, tab, payload)

    def shown(self, tab: str) -> dict[str, Any]:
        """Return what the page draws in a tab."""
        payload: dict[str, Any] = getattr(self, tab)
        return payload


class TakeAway(Part):
    """The menu of what one takes along; `take_away.py` makes the files, which are messages.

    Attributes:
        has_setting: Whether a copied configuration can be entered.
    """

    _esm = module("take_away.js")
    _css = stylesheet("take_away.css")
    has_setting = traitlets.Bool(True).tag(sync=True)


class Notices(Part):
    """Tracebacks, messages and offers above everything else.

    Attributes:
        notices: What is shown.
        id_in_kernel: The widget's id; the page asks whether the kernel still has it.
    """

    _esm = module("notices.js")
    notices: traitlets.List[Any] = traitlets.List().tag(sync=True)
    id_in_kernel = traitlets.Unicode().tag(sync=True)

    def __init__(self, listener: Callable[[Message], None]) -> None:
        super().__init__(listener)
        self.id_in_kernel = self.model_id


class Gallery(Part):
    """The strip of scenarios.

    Attributes:
        scenarios: Name and title of each.
        chosen: The one that is played, see `chosen_payload`; empty for none.
    """

    _esm = module("gallery.js")
    _css = stylesheet("gallery.css")
    scenarios: traitlets.List[Any] = traitlets.List().tag(sync=True)
    chosen = traitlets.Dict().tag(sync=True)
