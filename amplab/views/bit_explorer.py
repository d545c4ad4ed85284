"""The bit explorer: choose a number format, flip bits or type a number, and see its value and its rounding.

The widget has one `BitState`; each message of the page, and each method, replaces it and publishes the new payload.
`bit_explorer_payload.py` builds the payload; `bit_explorer.js` and `bit_explorer.css` draw it.
"""

from typing import Any

import anywidget
import traitlets

from amplab.display.palette import PALETTE
from amplab.display.text import escape
from amplab.views.assets import module, stylesheet
from amplab.views.bit_explorer_payload import BitState, explorer_payload

__all__ = ["BitExplorer", "explorer_html"]

_CELL = "display:inline-block;width:22px;margin:1px;text-align:center;border:1px solid"


MOST_STEPS = 2**12
"""From one number to another, in one call or message."""


class BitExplorer(anywidget.AnyWidget):
    """Explore the bits, the value, the neighbors and the range of the formats of mixed precision.

    Each action of the page is a method too: `enter`, `pick`, `flip`, `step`.

    >>> explorer = BitExplorer("2049")
    >>> explorer.value
    2048.0
    >>> explorer.pick("bfloat16")
    >>> explorer
    BitExplorer('2049', 'bfloat16'): 0x4500 = 2048, spacing 2⁴

    Args:
        number: a number, or text such as ``"2^-24"`` or ``"1 + 2^-11"``, which is read exactly and rounded once;
            ``"0x3c00"`` is a pattern.
        format_name: a name in `amplab.formats.FORMATS`.

    Raises:
        ValueError: `number` is not a number, or no format has that name.
    """

    _esm = module("bit_explorer.js")
    _css = stylesheet("bit_explorer.css")

    payload = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(self, number: float | str = 1.0, format_name: str = "float16") -> None:
        super().__init__()
        self._state = BitState(format_name)
        self.enter(number)
        self.on_msg(self._receive)

    @property
    def format_name(self) -> str:
        """The name of the format."""
        return self._state.format_name

    @property
    def bits(self) -> int:
        """The pattern."""
        return self._state.bits

    @property
    def value(self) -> float:
        """The value of the pattern."""
        return self._state.value

    def enter(self, number: float | str) -> None:
        """Show the number of the format nearest to `number`, which may be text as in the constructor.

        Raises:
            ValueError: `number` is not a number.
        """
        state = self._state
        state = state.with_number(number) if isinstance(number, str) else state.with_value(number)
        if state.problem:
            raise ValueError(state.problem)
        self._show(state)

    def pick(self, format_name: str) -> None:
        """Show the same number in another format.

        Raises:
            ValueError: No format has that name.
        """
        self._show(self._state.with_format(format_name))

    def flip(self, position: int) -> None:
        """Flip one bit, counted from the lowest (0).

        Raises:
            ValueError: The format has no such bit.
        """
        self._show(self._state.with_flipped(position))

    def step(self, steps: int = 1) -> None:
        """Go up by `steps` numbers of the format, or down if `steps` is negative.

        Raises:
            ValueError: More than `MOST_STEPS` at once.
        """
        if abs(steps) > MOST_STEPS:
            raise ValueError(f"step({steps}): expected at most {MOST_STEPS} steps up or down; enter a number instead.")
        self._show(self._state.with_step(steps))

    def _show(self, state: BitState) -> None:
        self._state = state
        self.set_trait("payload", explorer_payload(state))

    def _receive(self, _widget: anywidget.AnyWidget, message: dict[str, Any], _buffers: list[memoryview]) -> None:
        """Answer the page: one key names the action, its value is the argument."""
        match message:
            case {"flip": int() as position}:
                self.flip(position)
            case {"step": int() as steps} if abs(steps) <= MOST_STEPS:
                self.step(steps)
            case {"pick": str() as format_name}:
                self.pick(format_name)
            case {"enter": str() as text}:
                self._show(self._state.with_number(text))  # the payload says why a text is not a number

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/html": explorer_html(self.payload)}, metadata

    def __repr__(self) -> str:
        """One line with the numbers, the same in every run."""
        shown = self.payload
        entered = shown["typed"] or shown["value"]
        spacing = f", spacing {shown['spacing']}" if shown["spacing"] else ""
        return f"BitExplorer({entered!r}, {shown['format']!r}): {shown['hex']} = {shown['value']}{spacing}"


def explorer_html(payload: dict[str, Any]) -> str:
    """Return the pattern, the value and its rounding in each format as HTML for a page without a kernel.

    The elements have inline styles, because JupyterLab removes all other styles from a notebook that is not trusted.
    The hues are those for a light ground: white text on them is readable in both themes.
    """
    cells = "".join(_cell(bit) for bit in payload["bits"])
    asked = f"{escape(payload['typed'])} → " if payload["typed"] else ""
    story = f"<div>{escape(payload['rounding']['text'])}</div>" if payload["rounding"] else ""
    rows = "".join(
        f"<tr><td style='text-align:left'>{escape(row['label'])}</td><td>{escape(row['result'])}</td>"
        f"<td style='text-align:left'>{escape(row['words'])}</td></tr>"
        for row in payload["ruler"]["rows"]
    )
    return (
        f"<div>{cells}</div>"
        f"<div>{escape(payload['format'])} {escape(payload['hex'])}: "
        f"{asked}<b>{escape(payload['value'])}</b>{_formula(payload['formula'])}</div>"
        f"{story}<table>{rows}</table>"
        "<div><i>A static picture. Run this cell to flip the bits.</i></div>"
    )


def _cell(bit: dict[str, Any]) -> str:
    hue, _ = PALETTE[bit["field"]]
    filled = f";background-color:{hue};color:#fff" if bit["on"] else ""
    return f"<span style='{_CELL} {hue}{filled}'>{int(bit['on'])}</span>"


def _formula(formula: dict[str, Any] | None) -> str:
    if formula is None:
        return ""
    return (
        f" = (−1)<sup>{formula['sign']}</sup> × 2<sup>{formula['exponent']}</sup>"
        f" × {formula['significand']}<sub>2</sub>"
    )
