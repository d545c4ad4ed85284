"""The gradients' tab: plotly's figure and the layers beside it, both made when the tab is first opened.

What is shown comes from `gradients_payload.py`, the figure from `gradient_figure.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets

from amplab.lab import GradientRecord
from amplab.views.gradient_figure import make_figure, set_theme, show_curves
from amplab.views.gradients_payload import curves, layers_html

if TYPE_CHECKING:
    from plotly.graph_objects import FigureWidget

__all__ = ["GradientBox"]


class GradientBox(ipywidgets.Box):
    """A box that is empty until it is shown a record; used by the ticker's thread alone."""

    def __init__(self) -> None:
        super().__init__()
        self.add_class("amp-gradients")
        self._figure: FigureWidget | None = None
        self._layers = ipywidgets.HTML()
        self._layers.add_class("amp-layers")
        self._dark = False

    def show(self, record: GradientRecord, *, dark: bool) -> None:
        """Draw a record in the colours of the page."""
        if self._figure is None:
            self._figure, self._dark = make_figure(curves(record), dark=dark), dark
            self.children = (self._figure, self._layers)
        else:
            show_curves(self._figure, curves(record))
        self._layers.value = layers_html(record)
        self.follow(dark=dark)

    def follow(self, *, dark: bool) -> None:
        """Take on the page's theme."""
        if self._figure is not None and dark != self._dark:
            set_theme(self._figure, dark=dark)
            self._dark = dark
