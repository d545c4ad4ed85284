"""The gradients' histogram as a plotly figure that follows JupyterLab's theme; plotly is imported when one is made.

One `FigureWidget` is 5 MB of JavaScript, so it is made when its tab is first opened, and only its arrays change after
that: float32, as binary buffers. What the curves hold is in `gradients_payload.py`.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

from amplab.display.palette import PALETTE
from amplab.views.gradients_payload import HIGH, LOW, Curves, float16_zones

if TYPE_CHECKING:
    from plotly.graph_objects import FigureWidget

__all__ = ["HEIGHT", "load_plotly", "make_figure", "set_theme", "show_curves"]

HEIGHT = 238
ACCENT = dict(zip((False, True), PALETTE["accent"], strict=True))
INK = {False: "rgba(0,0,0,0.72)", True: "rgba(255,255,255,0.72)"}
GRID = {False: "rgba(0,0,0,0.09)", True: "rgba(255,255,255,0.10)"}
LOST = "#d55e00"  # Okabe-Ito vermillion, as the marks of skipped steps


def load_plotly() -> None:
    """Import plotly, which takes a second or more the first time; in any thread."""
    from plotly.graph_objects import FigureWidget  # noqa: F401


def make_figure(curves: Curves, *, dark: bool) -> FigureWidget:
    """Return the figure with both curves drawn; all traces are there from the start, a later one is lost on reload."""
    import plotly.graph_objects as go

    line = {"shape": "hvh", "width": 1.6}
    shared = {"x": curves.exponents, "mode": "lines", "fill": "tozeroy"}
    traces = [
        go.Scatter(y=curves.unscaled, name="unscaled", line=line | {"dash": "dot"}, **shared),
        go.Scatter(y=curves.scaled, name="scaled", line=line, **shared),
    ]
    figure = _figure_class()(data=traces, layout=_layout())
    figure.update_traces(hovertemplate="2<sup>%{x}</sup>: %{y:.2f} %")
    figure._config = {"responsive": True, "displaylogo": False, "displayModeBar": False}
    set_theme(figure, dark=dark)
    return figure


@functools.cache
def _figure_class() -> type[FigureWidget]:
    """Return a FigureWidget that takes in no message of the page in the midst of an edit.

    Plotly sends an edit by setting a trait and clearing it at once. While another thread takes in a message, traitlets
    holds all notices back and keeps the last of each trait: the page would be told of the clearing and not of the edit.
    """
    from plotly.graph_objects import FigureWidget

    class Figure(FigureWidget):
        def __init__(self, *args: object, **kwargs: object) -> None:
            self._edits = threading.RLock()
            super().__init__(*args, **kwargs)

        def set_state(self, sync_data: dict) -> None:
            with self._edits:
                super().set_state(sync_data)

    return Figure


def show_curves(figure: FigureWidget, curves: Curves) -> None:
    """Draw other curves, in one message."""
    with figure._edits, figure.batch_update():
        figure.data[0].y = curves.unscaled
        figure.data[1].y = curves.scaled
    # The display hook renews the state that a reloaded page is built from; messages alone would leave it as it was.
    figure._repr_mimebundle_()


def set_theme(figure: FigureWidget, *, dark: bool) -> None:
    """Colour text, grid and curves for a light or a dark page; the backgrounds are transparent."""
    with figure._edits, figure.batch_update():
        figure.layout.font.color = INK[dark]
        for axis in (figure.layout.xaxis, figure.layout.yaxis):
            axis.gridcolor = axis.zerolinecolor = GRID[dark]
        figure.data[0].line.color = INK[dark]
        figure.data[0].fillcolor = GRID[dark]
        figure.data[1].line.color = ACCENT[dark]
        figure.data[1].fillcolor = _faint(ACCENT[dark])
    figure._repr_mimebundle_()


def _layout() -> dict:
    zones = float16_zones()
    return {
        "template": "none",
        "autosize": True,
        "height": HEIGHT,
        "margin": {"l": 34, "r": 6, "t": 30, "b": 30},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 11},
        "hovermode": "x unified",
        "legend": {"orientation": "h", "x": 0, "y": 1.19, "font": {"size": 11}},
        "xaxis": {
            "title": {"text": "gradient magnitude", "standoff": 2, "font": {"size": 11}},
            "range": [LOW, HIGH + 1],
            "dtick": 8,
            "tickprefix": "2<sup>",
            "ticksuffix": "</sup>",
            "zeroline": False,
        },
        "yaxis": {"rangemode": "tozero", "ticksuffix": " %", "nticks": 5},
        "shapes": [_band(*zone) for zone in zones if zone[2] != "normal"],
        "annotations": [_name(*zone) for zone in zones],
    }


def _band(start: float, end: float, name: str) -> dict:
    """What float16 loses is washed in vermillion; subnormals, which lose bits, more faintly."""
    wash = 0.05 if name == "subnormal" else 0.12
    place = {"xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": 0, "y1": 1}
    return {"type": "rect", "layer": "below", "line": {"width": 0}, "fillcolor": LOST, "opacity": wash, **place}


def _name(start: float, end: float, name: str) -> dict:
    place = {"xref": "x", "yref": "paper", "x": (start + end) / 2, "y": 1.0, "yanchor": "bottom"}
    return {"text": name, "showarrow": False, "font": {"size": 10}, **place}


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.22)"
