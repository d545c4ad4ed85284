"""plotly's figure: its arrays are binary, a reloaded page is built from the latest, and it follows the theme."""

import numpy as np
import pytest

from amplab.views.gradient_figure import make_figure, set_theme, show_curves
from amplab.views.gradients_payload import HIGH, LOW, Curves


def some(height: float) -> Curves:
    exponents = np.arange(LOW, HIGH + 1)
    flat = np.full(len(exponents), height, np.float32)
    return Curves(exponents, flat, 2 * flat)


def test_both_curves_and_the_zones_are_there_from_the_start() -> None:
    figure = make_figure(some(1.0), dark=False)
    assert [trace.name for trace in figure.data] == ["unscaled", "scaled"]
    assert figure.data[0].line.dash != figure.data[1].line.dash, "told apart without colour"
    assert len(figure.layout.shapes) == 3
    assert [note.text for note in figure.layout.annotations] == ["→ 0", "subnormal", "normal", "→ inf"]


def test_a_reloaded_page_gets_the_latest_arrays() -> None:
    figure = make_figure(some(1.0), dark=False)
    show_curves(figure, some(3.0))
    for trace, height in zip(figure.get_state()["_widget_data"], (3.0, 6.0), strict=True):
        assert trace["y"]["dtype"] == "float32", "a binary buffer, not a list"
        np.testing.assert_array_equal(np.frombuffer(trace["y"]["buffer"], np.float32), np.float32(height))


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_curves_stand_out_from_the_page(dark: bool) -> None:
    figure = make_figure(some(1.0), dark=not dark)
    set_theme(figure, dark=dark)
    assert figure.layout.font.color == ("rgba(255,255,255,0.72)" if dark else "rgba(0,0,0,0.72)")
    assert figure.data[1].line.color == ("#56b4e9" if dark else "#0b6bb8")
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
