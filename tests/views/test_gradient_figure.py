"""plotly's figure: its arrays are binary, a reloaded page is built from the latest, and it follows the theme."""

import threading

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


def test_an_edit_while_a_message_of_the_page_is_taken_in_reaches_the_page() -> None:
    figure = make_figure(some(1.0), dark=False)
    told, taking_in, go_on = [], threading.Event(), threading.Event()
    figure.observe(lambda change: told.append(change.new), "_py2js_update")
    trait = figure.traits()["_js2py_layoutDelta"]
    plain = trait.metadata["from_json"]

    def slow(value: object, widget: object) -> object:
        taking_in.set()
        go_on.wait(10)
        return plain(value, widget)

    trait.tag(from_json=slow)
    try:
        page = threading.Thread(target=figure.set_state, args=({"_js2py_layoutDelta": None},))
        page.start()
        assert taking_in.wait(10)
        edit = threading.Thread(target=set_theme, args=(figure,), kwargs={"dark": True})
        edit.start()
        edit.join(0.5)  # without a lock it is over by now, and the page was told nothing
        go_on.set()
        page.join(10)
        edit.join(10)
    finally:
        trait.tag(from_json=plain)
    assert any(message and "font.color" in str(message) for message in told)
