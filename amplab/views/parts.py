"""The parts of the dashboard, each an anywidget: its traits, its front end, and what it hears from the page.

The traits are the truth and only the kernel writes them, except for `tab`, which belongs to the page. A
part's messages (`{"type": …}`) go to the one listener it was made with. What the traits hold is built in the
`*_payload` modules; when they change is decided in `presenter.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import anywidget
import numpy as np
import traitlets

from amplab.views.assets import module, stylesheet

__all__ = ["Controls", "LiveView", "Notices", "Panels"]

Listener = Callable[[dict], None]


class Part(anywidget.AnyWidget):
    """A widget with one listener and a short repr."""

    def __init__(self, listener: Listener, **traits: object) -> None:
        super().__init__(**traits)
        self.on_msg(lambda _widget, content, _buffers: listener(content))

    def __repr__(self) -> str:
        """Return the name alone, the same in every kernel."""
        return f"<amplab {type(self).__name__}>"


class Controls(Part):
    """Every choice of an experiment; see `controls_payload`."""

    _esm = module("controls.js")
    shown = traitlets.Dict().tag(sync=True)


class LiveView(Part):
    """Figures and charts; frames go as messages, since a page that is not there needs none."""

    _esm = module("live.js")
    _css = stylesheet("dashboard.css")

    def show_frame(self, rows: np.ndarray, *, levels: list[tuple[int, str]], summary: dict) -> None:
        """Draw the whole run.

        Args:
            rows: float64 `(rows, 4)`, see `live_payload`.
            levels: (step, opt_level) where it changed.
            summary: The figures.
        """
        self.send({"kind": "frame", "levels": levels, "summary": summary}, buffers=[np.ascontiguousarray(rows).data])


class Panels(Part):
    """The tabs: op dtypes, gradients, overflows."""

    _esm = module("panels.js")
    tab = traitlets.Enum(["dtypes", "gradients", "overflows"], default_value="dtypes").tag(sync=True)
    dtypes = traitlets.Dict().tag(sync=True)
    gradients = traitlets.Dict().tag(sync=True)
    overflows = traitlets.Dict().tag(sync=True)


class Notices(Part):
    """Tracebacks, sentences and offers above everything else."""

    _esm = module("notices.js")
    notices = traitlets.List().tag(sync=True)
