"""The explorable drawing: values of its controls, messages of the page, errors of the drawing, and its text."""

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from html_outline import outline

from amplab.display.charts import bar_chart
from amplab.views import Choice, Explorable, Slider
from amplab.views.explorable import explorable_payload, picture_html

EVIL = '<b a="x">'


class Drawing:
    """What a lesson draws: HTML and a line of numbers."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_html_(self) -> str:
        return f"<i>{self.text}</i>"

    def __repr__(self) -> str:
        return self.text


def product(scale: int, level: str) -> Drawing:
    if scale == 13:
        raise ArithmeticError("no 13")
    return Drawing(f"{level} × {scale}")


def explorable() -> Explorable:
    return Explorable(product, scale=Slider(0, 32, value=8, label="loss scale 2^"), level=Choice(("O0", "O1")))


def send(widget: Explorable, **values: Any) -> None:
    """Do what the page does."""
    widget._handle_msg(
        {"content": {"data": {"method": "custom", "content": {"set": values, "turn": "t-1"}}}, "buffers": []}
    )


def test_the_repr_has_the_values_and_the_drawing() -> None:
    assert repr(explorable()) == "Explorable(scale=8, level='O0'): O0 × 8"
    lines = Explorable(lambda side: Drawing("a\nb"), side=Slider(1, 2))
    assert repr(lines) == "Explorable(side=1):\na\nb"


def test_set_draws_again() -> None:
    shown = explorable()
    shown.set(scale=9, level="O1")
    assert shown.values == {"scale": 9, "level": "O1"}
    assert shown.payload["html"] == "<i>O1 × 9</i>"
    assert shown.payload["said"] == ["loss scale 2⁹", "level O1"]


@pytest.mark.parametrize(
    "values", [{"scale": 33}, {"scale": 8.5}, {"scale": "8"}, {"scale": True}, {"level": "O2"}, {"width": 1}]
)
def test_a_value_that_a_control_does_not_have_is_refused(values: dict[str, Any]) -> None:
    shown = explorable()
    with pytest.raises(ValueError, match=f"{next(iter(values))}="):
        shown.set(**values)
    assert repr(shown) == repr(explorable())


def test_a_drawing_that_raises_changes_nothing() -> None:
    shown = explorable()
    with pytest.raises(ArithmeticError, match="no 13"):
        shown.set(scale=13, level="O1")
    assert repr(shown) == repr(explorable())


def test_the_page_moves_a_slider() -> None:
    shown = explorable()
    send(shown, scale=9)
    assert shown.values["scale"] == 9
    assert (shown.payload["turn"], shown.payload["problem"]) == ("t-1", "")


@pytest.mark.parametrize(("values", "said"), [({"scale": 13}, "ArithmeticError: no 13"), ({"scale": 99}, "99")])
def test_the_page_is_told_why_nothing_was_drawn(values: dict[str, Any], said: str) -> None:
    shown = explorable()
    send(shown, **values)
    assert said in shown.payload["problem"]
    assert (shown.payload["turn"], shown.payload["html"]) == ("t-1", "<i>O0 × 8</i>")  # the last picture stays
    send(shown, scale=10)
    assert (shown.payload["problem"], shown.payload["html"]) == ("", "<i>O0 × 10</i>")


def test_other_messages_are_ignored() -> None:
    shown = explorable()
    content = {"data": {"method": "custom", "content": {"set": [1]}}}
    shown._handle_msg({"content": content, "buffers": []})
    assert repr(shown) == repr(explorable())


def test_one_drawing_at_a_time() -> None:
    inside: list[int] = []
    crowds: list[int] = []

    def slow(side: int) -> int:
        inside.append(side)
        threading.Event().wait(0.01)
        crowds.append(len(inside))
        inside.remove(side)
        return side

    shown = Explorable(slow, side=Slider(1, 9))
    threads = [threading.Thread(target=shown.set, kwargs={"side": side}) for side in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(crowds) == {1}


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return what `call` returns in a thread of its own, where a lock that it waits for in vain fails the test."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert answers, "it hangs or has failed"
    return answers[0]


def test_set_in_draw_takes_effect_after_the_present_drawing() -> None:
    shown: list[Explorable] = []
    drawn: list[tuple[int, int]] = []

    def ordered(low: int, high: int) -> Drawing:
        drawn.append((low, high))
        if low > high:
            shown[0].set(high=low)
        return Drawing(f"{low} to {high}")

    shown.append(Explorable(ordered, low=Slider(0, 9), high=Slider(0, 9)))
    within(5, lambda: shown[0].set(low=5))
    assert repr(shown[0]) == "Explorable(low=5, high=5): 5 to 5"
    assert drawn == [(0, 0), (5, 0), (5, 5)]
    within(5, lambda: send(shown[0], low=7))
    assert [control["value"] for control in shown[0].payload["controls"]] == [7, 7]


def test_a_refused_set_in_draw_and_a_second_drawing_that_fails_change_nothing() -> None:
    shown: list[Explorable] = []

    def jumping(side: int) -> int:
        if side == 5:
            shown[0].set(side=6)
        if side == 6:
            raise ArithmeticError("no 6")
        if side == 7:
            shown[0].set(side=70)
        return side

    shown.append(Explorable(jumping, side=Slider(0, 9)))
    for side, error in ((5, ArithmeticError), (7, ValueError)):
        with pytest.raises(error, match=r"no 6|expected 0 to 9"):
            shown[0].set(side=side)
        assert repr(shown[0]) == "Explorable(side=0): 0"
    shown[0].set(side=1)
    assert repr(shown[0]) == "Explorable(side=1): 1"


def test_a_draw_that_always_sets_another_value_ends() -> None:
    shown: list[Explorable] = []

    def restless(side: int) -> int:
        if shown:
            shown[0].set(side=1 - side)
        return side

    shown.append(Explorable(restless, side=Slider(0, 1)))
    with pytest.raises(RuntimeError, match=r"set\(\) in draw"):
        shown[0].set(side=1)
    assert repr(shown[0]) == "Explorable(side=0): 0"
    send(shown[0], side=1)
    assert "RuntimeError" in shown[0].payload["problem"]


def test_two_explorables_that_set_each_other_agree_also_from_two_threads() -> None:
    pair: list[Explorable] = []

    def follows(other: int) -> Callable[[int], int]:
        def draw(side: int) -> int:
            threading.Event().wait(0.001)
            if len(pair) == 2:
                pair[other].set(side=side)
            return side

        return draw

    pair += [Explorable(follows(1), side=Slider(0, 9)), Explorable(follows(0), side=Slider(0, 9))]

    def moved(place: int) -> bool:
        for side in range(10):
            send(pair[place], side=side)
        return True

    threads = [threading.Thread(target=moved, args=(place,), daemon=True) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert pair[0].values == pair[1].values == {"side": 9}


def test_the_payload_is_plain() -> None:
    payload = explorable().payload
    assert json.loads(json.dumps(payload)) == payload
    slider, choice = payload["controls"]
    assert slider == {"kind": "slider", "name": "scale", "label": "loss scale", "power": True, "low": 0, "high": 32,
                      "step": 1, "value": 8}  # fmt: skip
    assert choice == {"kind": "choice", "name": "level", "label": "level", "options": ["O0", "O1"], "value": "O0"}


def test_text_is_escaped() -> None:
    controls = {"side": Choice((EVIL, "a"), label=EVIL)}
    payload = explorable_payload(controls, {"side": EVIL}, EVIL)
    assert EVIL not in payload["html"]
    assert EVIL not in picture_html(payload)


def test_a_long_text_is_cut_for_the_screen_reader() -> None:
    payload = explorable_payload({"side": Slider(1, 2)}, {"side": 1}, "x" * 5000)
    assert len(payload["text"]) < 400


def test_a_page_without_a_kernel_gets_the_drawing() -> None:
    shown = Explorable(lambda side: bar_chart({"area": side**2}), side=Slider(1, 9, value=3))
    data, _ = shown._repr_mimebundle_()
    assert data["text/plain"] == "Explorable(side=3): area 9"
    read = outline(data["text/html"])
    assert "side 3" in read.words
    assert read.counts["svg"] == 1


@pytest.mark.parametrize(
    ("slider", "given", "value"),
    [
        (Slider(0, 1, step=0.1), 0.30000000000000004, 0.3),
        (Slider(0.5, 2, step=0.5), 2, 2.0),
        (Slider(0, 10, 5, 5), 10, 10),
        (Slider(-3, 3), -1.0, -1),
    ],
)
def test_a_slider_accepts_its_steps(slider: Slider, given: float, value: float) -> None:
    assert (slider.accept(given), type(slider.accept(given))) == (value, type(value))


@pytest.mark.parametrize("slider", [(3, 3), (3, 1), (0, 1, 2), (0, 2, 0.5), (0, 2, 1, 0), (0, 2, 1, 3)])
def test_a_slider_that_cannot_move_is_refused(slider: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Slider(*slider)


@pytest.mark.parametrize(("options", "value"), [((), None), (("a", "a"), None), (("a", "b"), "c"), ((1, "1"), None)])
def test_a_choice_of_nothing_is_refused(options: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        Choice(options, value)


def test_a_choice_returns_the_value_behind_the_text() -> None:
    shown = Explorable(lambda size: size + 1, size=Choice((1, 2, 3)))
    send(shown, size="2")
    assert (shown.values, repr(shown)) == ({"size": 2}, "Explorable(size=2): 3")


@pytest.mark.parametrize("controls", [{}, {"side": (0, 1)}])
def test_controls_must_be_controls(controls: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="Slider"):
        Explorable(product, **controls)


def test_the_style_sheet_has_no_color_of_one_theme() -> None:
    sheet = re.sub(r"--[\w-]+:[^;}]*", "", Explorable._css.split("/* A drawing")[1])
    assert re.findall(r"#[0-9a-f]{3,6}", re.sub(r"var\([^()]*\)", "", sheet)) == []
