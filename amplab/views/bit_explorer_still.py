"""The bit explorer as a still picture: HTML for pages where no kernel runs, such as a notebook just opened.

Plain elements with inline styles, since a notebook that is not trusted keeps nothing else. The hues are those for a
light ground: white text on them is readable in both themes.
"""

from html import escape

from amplab.display.palette import PALETTE

__all__ = ["explorer_html"]

CELL = "display:inline-block;width:22px;margin:1px;text-align:center;border:1px solid"


def explorer_html(payload: dict) -> str:
    """Return the pattern, the value, its neighbours and each format's rounding as HTML."""
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
        "<div><i>A still picture. Run this cell to flip the bits.</i></div>"
    )


def _cell(bit: dict) -> str:
    hue, _ = PALETTE[bit["field"]]
    filled = f";background-color:{hue};color:#fff" if bit["on"] else ""
    return f"<span style='{CELL} {hue}{filled}'>{int(bit['on'])}</span>"


def _formula(formula: dict | None) -> str:
    if formula is None:
        return ""
    return (
        f" = (−1)<sup>{formula['sign']}</sup> × 2<sup>{formula['exponent']}</sup>"
        f" × {formula['significand']}<sub>2</sub>"
    )
