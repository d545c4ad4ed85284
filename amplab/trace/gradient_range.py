"""`gradient_range`: the share of the gradients that float16 flushes to zero, by parameter, and the largest loss scale.

    flushed(s)   = the share of finite x != 0 with |s x| < 2^-25
    largest fit  = the largest power of two s with every |s x| below 2^16
    range left   = log2(largest fit / s), the powers of two by which the scale can grow

A loss scale only shifts the histogram of exponents, so one measurement is valid for every scale.
`amplab.formats.exponents` counts the exponents.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch

from amplab.display.drawings import exponent_drawing, range_edges
from amplab.display.html import Markup, markup, name, styled
from amplab.display.numbers import count, percent, power
from amplab.display.table import Card, Cell, Column, Table
from amplab.formats import FLOAT16, ExponentHistogram, FloatFormat
from amplab.formats.kept_property import kept_property
from amplab.policies import disable_casts
from amplab.trace.argument_checks import check_gradients_on, check_loss_scale
from amplab.trace.as_found import leaves_as_found
from amplab.trace.handed_step import Loss, Models, as_model, handed_step, shows_calls
from amplab.trace.named_state import named_state_kept
from amplab.trace.statistics import Statistics
from amplab.trace.step import run_backward
from amplab.trace.untouched import untouched

__all__ = ["GradientRange", "gradient_range"]

_EMPTY = ExponentHistogram(np.zeros(1, np.int64), 0, 0, 0, 0, 0)


@dataclass(frozen=True, eq=False, repr=False)
class GradientRange:
    """The exponents of the gradients by layer, compared with the range of a format.

    The record of an experiment has the same fields: `GradientRange(record.layers, record.loss_scale)`.

    Attributes:
        layers: name and histogram of the unscaled gradient of each parameter.
        loss_scale: the loss scale to evaluate.
        format: the format that stores the gradients.
    """

    layers: tuple[tuple[str, ExponentHistogram], ...]
    loss_scale: float = 1.0
    format: FloatFormat = FLOAT16

    def __post_init__(self) -> None:
        check_loss_scale(self.loss_scale)
        if not (isinstance(self.layers, Sequence) and all(map(_is_layer, self.layers))):
            raise TypeError("layers: expected pairs of a name and an ExponentHistogram, such as record.layers.")
        if not isinstance(self.format, FloatFormat):
            raise TypeError(f"format={self.format!r}: expected a FloatFormat, such as amplab.formats.FLOAT16.")

    @classmethod
    def of_scaled(
        cls, layers: Iterable[tuple[str, ExponentHistogram]], scaled_by: float, loss_scale: float | None = None
    ) -> "GradientRange":
        """Return the range of gradients that are still scaled by `scaled_by`."""
        shift = -math.log2(scaled_by)
        unscaled = tuple((name, histogram.shifted(shift)) for name, histogram in layers)
        return cls(unscaled, scaled_by if loss_scale is None else loss_scale)

    @kept_property
    def total(self) -> ExponentHistogram:
        """The histogram of all layers."""
        return reduce(add, (histogram for _, histogram in self.layers)) if self.layers else _EMPTY

    @property
    def lost_unscaled(self) -> float:
        """The share of non-zero elements that the format flushes to zero at scale 1."""
        return self.total.underflow_fraction(self.format)

    @property
    def lost(self) -> float:
        """The share of non-zero elements that the format flushes to zero at `loss_scale`."""
        return self.at_scale(self.total).underflow_fraction(self.format)

    @property
    def largest_fit(self) -> float | None:
        """The largest power of two at which no element overflows; None if no element is non-zero."""
        return _largest_fit(self.total, self.format)

    @property
    def range_left(self) -> float | None:
        """The powers of two by which the scale can grow before an element overflows; negative if one overflows now."""
        fit = self.largest_fit
        return None if fit is None else math.log2(fit / self.loss_scale)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict for each layer.

        Keys: `name`, `lost_unscaled`, `lost`, `overflowed` (shares of the non-zero elements), `largest_fit`, `lowest`
        and `highest` exponent (None if there is none), `zeros`, `infs`, `nans`, `total`.
        """
        return [self._row(name, histogram) for name, histogram in self.layers]

    def __str__(self) -> str:
        return str(self._card())

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        left = self.range_left
        if self.largest_fit is None or left is None:
            return f"All {self.total.total:,} elements of the gradients are zero or non-finite."
        powers = f"{abs(left):g} {'power' if abs(left) == 1 else 'powers'} of two"
        verb = "is" if left == 1 else "are"
        room = f"{powers} {verb} left" if left >= 0 else f"it is {powers} too large"
        return (
            f"{self.format.name} loses {percent(self.lost_unscaled)} at scale 1 and {percent(self.lost)} at scale "
            f"{power(self.loss_scale)}; the largest scale that fits is {power(self.largest_fit)}: {room}."
            f"{self._all_zero()}"
        )

    def _all_zero(self) -> str:
        """Say how many parameters have no gradient but zeros; their elements are in none of the shares."""
        zero = sum(histogram.total > 0 and histogram.zeros == histogram.total for _, histogram in self.layers)
        return (
            f" The gradients of {zero} of {count(len(self.layers), 'parameter')} are all 0 and not counted."
            if zero
            else ""
        )

    def __repr__(self) -> str:
        return f"GradientRange({self.sentence})"

    def _repr_html_(self) -> str:
        return self._card().html()

    def _card(self) -> Card:
        if not self.layers:
            return Card(self.sentence)
        scale = power(self.loss_scale)
        columns = (
            Column("parameter", as_html=name),
            Column("elements", right=True),
            Column(f"exponents at {scale}"),
            Column("lost at 1", right=True),
            Column(f"lost at {scale}", right=True),
            Column("overflow", right=True),
            Column("largest fit", right=True),
        )
        rows = zip(self.rows(), (self.at_scale(histogram) for _, histogram in self.layers), strict=True)
        lines = [_cells(row, scaled, self.format) for row, scaled in rows]
        table = Table(columns, lines, f"Gradients by parameter against {self.format.name}")
        return Card(self.sentence, (_legend(self.format), table))

    def at_scale(self, histogram: ExponentHistogram) -> ExponentHistogram:
        """Return a histogram of unscaled gradients, scaled by `loss_scale`."""
        return histogram.shifted(math.log2(self.loss_scale))

    def _row(self, name: str, histogram: ExponentHistogram) -> dict[str, Any]:
        scaled = self.at_scale(histogram)
        lowest, highest = histogram.span or (None, None)
        return {
            "name": name,
            "lost_unscaled": histogram.underflow_fraction(self.format),
            "lost": scaled.underflow_fraction(self.format),
            "overflowed": scaled.overflow_fraction(self.format),
            "largest_fit": _largest_fit(histogram, self.format),
            "lowest": lowest,
            "highest": highest,
            **{count: getattr(histogram, count) for count in ("zeros", "infs", "nans", "total")},
        }


@shows_calls("amplab.gradient_range(model, batch, loss=criterion)", "amplab.gradient_range(model, step=loss_of)")
@leaves_as_found
def gradient_range(
    model: Models,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    step: Loss | None = None,
    loss_scale: float = 2.0**16,
) -> GradientRange:
    """Run one step without casts and return what float16 would lose of the gradients of the parameters.

    The gradients between layers, which backward computes first, are not counted, although they are often smaller.
    The model is restored as by `amplab.xray`. Its weights keep their dtype; with float32 weights the result includes
    all losses. An `amp` session or autocast region around the call does not cast here.

    Args:
        model, batch, loss, step: see `amplab.xray`; the model may be compiled.
        loss_scale: the loss scale to evaluate.

    Raises:
        TypeError, ValueError: as `amplab.xray`, or for an invalid loss scale.

    Sync: one.

    >>> import torch
    >>> found = gradient_range(torch.nn.Linear(2, 1), torch.full((1, 2), 2.0**-30))
    >>> found.rows()[0]["lost_unscaled"], found.rows()[0]["lost"], found.rows()[1]["lost_unscaled"]
    (1.0, 0.0, 0.0)
    """
    check_loss_scale(loss_scale)
    check_gradients_on()
    model = as_model(model, compiled=True, values=True)
    handed = handed_step("gradient_range", model, batch, loss=loss, step=step)
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    with (
        named_state_kept(loss, step),
        untouched(model) as gradients,
        disable_casts(),
        torch.autocast(device, enabled=False),
    ):
        value = handed()
        gradients.park_leaves_of(value)
        run_backward(value, model)
        measured = Statistics()
        measured.measure_gradients(model)
    measured.fetch()
    return GradientRange(measured.gradients, loss_scale)


def _cells(row: dict[str, Any], scaled: ExponentHistogram, fmt: FloatFormat) -> tuple[str, ...]:
    if scaled.span is None or row["largest_fit"] is None:  # no share of nothing
        return row["name"], _elements(row), "all 0" if scaled.zeros == scaled.total else "–", "–", "–", "–", "–"
    shares = [_share(row[key]) for key in ("lost_unscaled", "lost", "overflowed")]
    span = Cell(f"2^{scaled.span[0]}..2^{scaled.span[1]}", exponent_drawing(scaled, fmt))
    return row["name"], _elements(row), span, *shares, power(row["largest_fit"])


def _elements(row: dict[str, Any]) -> str:
    elements, nonfinite = f"{row['total']:,}", row["infs"] + row["nans"]
    if not nonfinite:
        return elements
    said = f"{nonfinite:,} inf or nan"
    return Cell(f"{elements}, {said}", Markup(f'{elements}<br><span class="bad">{said}</span>'))


def _share(share: float) -> str:
    said = percent(share)
    return Cell(said, Markup(f'<span class="bad">{said}</span>')) if share >= 0.01 else said


def _legend(fmt: FloatFormat) -> Markup:
    lost, normal, top = range_edges(fmt)
    bars = (
        "Each bar is one power of two; its height is the logarithm of the count. The shaded range is what "
        f"{fmt.name} represents: subnormal from 2^{lost}, normal from 2^{normal}, inf from 2^{top}."
    )
    shares = (
        "The shares are of the non-zero gradients of the parameters; those between layers are smaller and not counted."
    )
    key = styled(f'<p class="faint">{markup(bars)} <span class="bad">Red</span> bars are lost.</p>')
    return Markup(f'{key}<p class="faint">{markup(shares)}</p>')


def _is_layer(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], ExponentHistogram)


def _largest_fit(histogram: ExponentHistogram, fmt: FloatFormat) -> float | None:
    return None if histogram.span is None else 2.0 ** (fmt.max_exponent - histogram.span[1])
