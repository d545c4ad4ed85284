"""A drawing that a person can change with sliders and choices: the widget of the lessons.

The kernel calls `draw` with the values of the controls at each change. The page sends one change at a time and, while
it waits for the drawing, keeps the latest only; `explorable.js` draws the payload.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import traitlets

from amplab.display.text import escape
from amplab.kernels.fork_renewal import renew_lock_in_forks
from amplab.views.assets import module, stylesheet
from amplab.views.explorable_controls import Choice, Slider

__all__ = ["Explorable", "explorable_payload", "picture_html"]

Control = Slider | Choice
MOST_DRAWINGS = 50
"""For one change, where each drawing sets another value."""

_LONGEST = 300  # characters of a drawing's text that a screen reader is told


_turn = threading.RLock()
"""One drawing at a time: messages of the page may arrive in a thread of their own, and drawings may set others."""
renew_lock_in_forks(sys.modules[__name__], "_turn")


class Explorable(anywidget.AnyWidget):
    """Show what a function draws, with controls for its arguments.

    >>> squares = Explorable(lambda side: side**2, side=Slider(1, 9))
    >>> squares.set(side=3)
    >>> squares
    Explorable(side=3): 9

    Args:
        draw: called with the value of every control by name. Returns anything; its ``_repr_html_()`` is shown if it
            has one, else its repr, which should be short and the same in every run. It takes less than 0.1 s. It may
            call `set`, e.g. to keep one control below another: it is then called again, with those values.
        controls: a `Slider` or a `Choice` for each argument of `draw`.

    Raises:
        TypeError: a control is neither, or there is none.
    """

    _esm = module("explorable.js")
    _css = stylesheet("explorable.css")

    payload = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(self, draw: Callable[..., Any], /, **controls: Control) -> None:
        wrong = [f"{name}={control!r}" for name, control in controls.items() if not isinstance(control, Control)]
        if wrong or not controls:
            raise TypeError(f"Explorable({', '.join(wrong)}): expected a Slider or a Choice for each argument of draw.")
        super().__init__()
        self._draw = draw
        self._controls = controls
        self._set_in_draw: dict[str, Any] | None = None  # a dict while a change is drawn
        self._values = {name: control.start for name, control in controls.items()}
        self._drawing = draw(**self._values)
        self._publish()
        self.on_msg(self._receive)

    @property
    def values(self) -> dict[str, Any]:
        """The value of each control."""
        return dict(self._values)

    def set(self, **values: Any) -> None:
        """Change controls and draw. If `draw` raises, nothing changes.

        In `draw` it takes effect after the present drawing, which is not shown if a value differs.

        Raises:
            ValueError: there is no such control, or it does not have that value.
            RuntimeError: `draw` has set another value in each of `MOST_DRAWINGS` drawings.
        """
        with _turn:
            self._change(values)
            if self._set_in_draw is None:
                self._publish()

    def _change(self, values: Mapping[str, Any]) -> None:
        """Draw with changed values; in `draw`, only note them."""
        accepted = {name: self._accept(name, value) for name, value in values.items()}
        if self._set_in_draw is not None:
            self._set_in_draw.update(accepted)
            return
        changed = {**self._values, **accepted}
        try:
            for _ in range(MOST_DRAWINGS):
                self._set_in_draw = {}
                drawing = self._draw(**changed)
                following = {**changed, **self._set_in_draw}
                if following == changed:
                    break
                changed = following
            else:
                raise RuntimeError(
                    f"set() in draw: {MOST_DRAWINGS} drawings in a row have set another value; "
                    "expected values that draw leaves as they are."
                )
        finally:
            self._set_in_draw = None
        self._values, self._drawing = changed, drawing

    def _accept(self, name: str, value: Any) -> Any:
        if name not in self._controls:
            raise ValueError(f"{name}={value!r}: expected one of the controls {', '.join(self._controls)}.")
        try:
            return self._controls[name].accept(value)
        except ValueError as error:
            raise ValueError(f"{name}={error}") from None

    def _publish(self, *, problem: str = "", turn: str = "") -> None:
        payload = explorable_payload(self._controls, self._values, self._drawing)
        self.set_trait("payload", {**payload, "problem": problem, "turn": turn})

    def _receive(self, _widget: anywidget.AnyWidget, message: dict[str, Any], _buffers: list[memoryview]) -> None:
        """Answer the page: `set` has the changed values, `turn` names the change in the answer."""
        match message:
            case {"set": dict() as values, "turn": str() as turn}:
                with _turn:
                    problem = ""
                    try:
                        self._change(values)
                    except Exception as error:  # noqa: BLE001 - the page shows it, and keeps the picture
                        problem = f"{type(error).__name__}: {error}"
                    self._publish(problem=problem, turn=turn)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/html": picture_html(self.payload)}, metadata

    def __repr__(self) -> str:
        """The values and what the drawing's repr says."""
        values = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        drawn = repr(self._drawing)
        return f"Explorable({values}):{chr(10) if chr(10) in drawn else ' '}{drawn}"


def explorable_payload(controls: Mapping[str, Control], values: Mapping[str, Any], drawing: Any) -> dict[str, Any]:
    """Return what the page draws: the controls, the drawing as HTML, and the values and the drawing as words."""
    html = drawing._repr_html_() if callable(getattr(drawing, "_repr_html_", None)) else None
    said = repr(drawing)
    return {
        "controls": [control.payload(name, values[name]) for name, control in controls.items()],
        "said": [f"{_label(name, control)} {control.text(values[name])}" for name, control in controls.items()],
        "html": html or f"<pre>{escape(said)}</pre>",
        "text": said if len(said) <= _LONGEST else f"{said[:_LONGEST]} …",
    }


def picture_html(payload: Mapping[str, Any]) -> str:
    """Return the values of the controls and the drawing as HTML for a page without a kernel."""
    said = ", ".join(map(escape, payload["said"]))
    return f"<p><b>{said}</b> · <i>run this cell to change it</i></p>{payload['html']}"


def _label(name: str, control: Control) -> str:
    label: str = control.payload(name, control.start)["label"]
    return label
