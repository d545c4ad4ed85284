"""The bit explorer: pick a number format, flip bits or type a number, and see what it becomes.

The widget owns one `BitState`; each message from the page, and each method here, replaces it by the next one and
publishes its payload. What is shown is decided in `bit_explorer_payload`, how it looks in bit_explorer.js and .css.
"""

import anywidget
import traitlets

from amplab.display.numbers import value_text
from amplab.views.assets import module, stylesheet
from amplab.views.bit_explorer_payload import BitState, explorer_payload
from amplab.views.bit_explorer_still import explorer_html

__all__ = ["BitExplorer"]


class BitExplorer(anywidget.AnyWidget):
    """Explore the bits, the value, the neighbours and the range of the formats of mixed precision.

    Everything a click does, a method does too: `enter`, `pick`, `flip`, `step`.

    >>> explorer = BitExplorer("2049")
    >>> explorer.value
    2048.0
    >>> explorer.pick("bfloat16")
    >>> explorer
    BitExplorer('2049', 'bfloat16'): 0x4500 = 2048, spacing 2⁴

    Args:
        number: a number, or text such as ``"2^-24"`` or ``"1 + 2^-11"``; ``"0x3c00"`` is a pattern.
        format_name: a name in `amplab.formats.FORMATS`.

    Raises:
        ValueError: if the number cannot be read, or no format has that name.
    """

    _esm = module("bit_explorer.js")
    _css = stylesheet("bit_explorer.css")

    payload = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(self, number: float | str = 1.0, format_name: str = "float16") -> None:
        """Start with a number in a format."""
        super().__init__()
        self._state = BitState(format_name)
        self.enter(number)
        self.on_msg(self._receive)

    @property
    def format_name(self) -> str:
        """Name of the format that is shown."""
        return self._state.format_name

    @property
    def bits(self) -> int:
        """The pattern that is shown."""
        return self._state.bits

    @property
    def value(self) -> float:
        """The number that the pattern stands for."""
        return self._state.value

    def enter(self, number: float | str) -> None:
        """Show the number nearest to `number` (see the class for what may be written).

        Raises:
            ValueError: if the number cannot be read.
        """
        text = number if isinstance(number, str) else value_text(float(number))
        state = self._state.with_number(text)
        if state.problem:
            raise ValueError(state.problem)
        self._show(state)

    def pick(self, format_name: str) -> None:
        """Show the same number in another format.

        Raises:
            ValueError: if no format has that name.
        """
        self._show(self._state.with_format(format_name))

    def flip(self, position: int) -> None:
        """Flip one bit, counted from the lowest (0).

        Raises:
            ValueError: if the format has no such bit.
        """
        self._show(self._state.with_flipped(position))

    def step(self, steps: int = 1) -> None:
        """Go to the next number of the format, upwards, or downwards where `steps` is negative."""
        self._show(self._state.with_step(steps))

    def _show(self, state: BitState) -> None:
        self._state = state
        self.set_trait("payload", explorer_payload(state))

    def _receive(self, _widget: anywidget.AnyWidget, message: dict, _buffers: list) -> None:
        """Answer the page: one key names the action, its value is the argument."""
        match message:
            case {"flip": int() as position}:
                self.flip(position)
            case {"step": int() as steps}:
                self.step(steps)
            case {"pick": str() as format_name}:
                self.pick(format_name)
            case {"enter": str() as text}:
                self._show(self._state.with_number(text))  # what cannot be read is shown with its reason

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict, dict] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/html": explorer_html(self.payload)}, metadata

    def __repr__(self) -> str:
        """One line with the numbers, the same in every run."""
        shown = self.payload
        asked = shown["typed"] or shown["value"]
        spacing = f", spacing {shown['spacing']}" if shown["spacing"] else ""
        return f"BitExplorer({asked!r}, {shown['format']!r}): {shown['hex']} = {shown['value']}{spacing}"
