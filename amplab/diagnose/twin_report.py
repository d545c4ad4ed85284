"""The report of `twin`: every error of every step, a table per module, and where the two precisions diverge.

    relative  ||b - a|| / ||a||                     0: equal;  inf: b is not finite where a is
    ulps      median |b - a| / ulp_half(a)          of the elements that differ; 0.5: the rounding error of a in float16
    cosine    a . b / (||a|| ||b||)                 1: the same direction

Errors are computed in float64; where both tensors are 0 they are equal.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from amplab.diagnose.trial import TrialStep
from amplab.display.html import Markup, chip, name
from amplab.display.numbers import power
from amplab.display.table import Card, Cell, Column, Table
from amplab.formats import FLOAT16
from amplab.formats.kept_property import kept_property

__all__ = ["TwinError", "TwinReport", "TwinRow", "TwinStep", "twin_error"]

_COLUMNS = (
    Column("module", as_html=name),
    Column("dtype", as_html=chip),
    Column("relative error, first to last step"),
    *(Column(title, right=True) for title in ("first error", "last error", "worst error", "ulps of half", "cosine")),
)
_LOW, _HIGH, _WIDTH = -6, 1, 160  # powers of ten of an error that are drawn, pixels

_LOWEST = FLOAT16.min_exponent
_MANTISSA = FLOAT16.mantissa_bits
_LARGE, _HALF_ULP = 0.01, 0.5


@dataclass(frozen=True)
class TwinError:
    """The difference between a tensor and its twin; see the module's table."""

    relative: float
    ulps: float
    cosine: float

    @property
    def is_finite(self) -> bool:
        """Whether both were finite."""
        return math.isfinite(self.relative)

    @property
    def is_too_small(self) -> bool:
        """Whether a large error is less than half an ulp: the numbers are smaller than float16's smallest."""
        return self.relative > _LARGE and self.ulps < _HALF_ULP


def twin_error(left: Tensor, right: Tensor) -> TwinError:
    """Return the error of `right` against `left`, of the same shape and any floating-point dtypes. Sync: one.

    >>> twin_error(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 1.5]))
    TwinError(relative=0.5, ulps=512.0, cosine=1.0)
    """
    a, b = left.detach().double().flatten(), right.detach().double().flatten()  # (elements,)
    difference = b - a
    apart, size, other = (each.norm() for each in (difference, a, b))
    apart_by = (difference.abs() / _ulp_of_half(a))[difference != 0]
    ulps = apart_by.median() if len(apart_by) else torch.zeros_like(apart)
    apart, size, other, product, ulps = torch.stack([apart, size, other, a @ b, ulps]).tolist()
    if not math.isfinite(size) or not math.isfinite(other):
        return TwinError(math.inf, math.inf, math.nan)
    if apart == 0:
        return TwinError(0.0, 0.0, 1.0)
    relative = apart / size if size else math.inf
    return TwinError(relative, ulps, product / (size * other) if size and other else 0.0)


def _ulp_of_half(x: Tensor) -> Tensor:
    exponent = torch.frexp(x).exponent - 1
    return torch.ldexp(torch.ones_like(x), exponent.clamp(min=_LOWEST) - _MANTISSA)


@dataclass(frozen=True)
class TwinRow:
    """One tensor of one step.

    Attributes:
        step: from 0.
        module: path of the module, or name of the parameter; empty for the model itself. "#2" is a second call.
        what: "output", "output grad" or "weight grad", without the loss scale.
        dtype: of the right side's tensor.
        error: of the right side against the left.
        cancels: the tensor is 0 except for rounding, so its relative error is meaningless.
    """

    step: int
    module: str
    what: str
    dtype: str
    error: TwinError
    cancels: bool = False

    def __str__(self) -> str:
        """Return one line."""
        e = self.error
        ulps = "too small for float16" if e.is_too_small else f"{e.ulps:.2g} ulps of half"
        far = f"relative error {_share(e.relative)}, {ulps}, cosine {e.cosine:.4f}"
        return f"step {self.step}, {self.what} of {self.module or 'the model'} ({self.dtype}): " + (
            far if e.is_finite else "not finite"
        )


@dataclass(frozen=True)
class TwinStep:
    """One step of both sides, and the rows of the comparison in the order of execution."""

    step: int
    left: TrialStep
    right: TrialStep
    rows: tuple[TwinRow, ...]


@dataclass(frozen=True, repr=False)
class TwinReport:
    """Two precisions in lockstep.

    Attributes:
        left, right: their names.
        steps: every step.
        tolerance: the relative error above which they have diverged.
        left_cuts, right_cuts: how many steps were repeated because a dynamic scale was too large.
    """

    left: str
    right: str
    steps: tuple[TwinStep, ...]
    tolerance: float
    left_cuts: int = 0
    right_cuts: int = 0

    def rows(self) -> list[TwinRow]:
        """Return every comparison of every step."""
        return [row for step in self.steps for row in step.rows]

    @kept_property
    def parted(self) -> TwinRow | None:
        """The first tensor, in the order of execution, whose error is above the tolerance; None if there is none."""
        return next((row for row in self._judged() if not row.error.relative <= self.tolerance), None)

    @property
    def worst(self) -> TwinRow:
        """The tensor with the largest relative error."""
        return max(self._judged(), key=lambda row: row.error.relative)

    def _judged(self) -> Iterator[TwinRow]:
        return (row for row in self.rows() if not row.cancels)

    def text(self) -> str:
        """Return where they diverge, the losses, and the errors of each tensor in the first, last and worst step."""
        return str(self._card())

    def __str__(self) -> str:
        """The text."""
        return self.text()

    def __repr__(self) -> str:
        return f"<TwinReport: {self.right} against {self.left}: {self._outcome()}>"

    def _repr_html_(self) -> str:
        return self._card().html()

    def _card(self) -> Card:
        which, outcome, *rest = self._sentences()
        tensors = sorted(self._tensors(), key=lambda rows: _KINDS.index(rows[0].what))  # stable: in order within a kind
        parted = self.parted and (self.parted.module, self.parted.what)
        table = Table(
            _COLUMNS,
            [_cells(rows, self._drawing(rows)) for rows in tensors],
            caption=which,
            groups=[f"{rows[0].what}s" for rows in tensors],
            chosen={place for place, rows in enumerate(tensors) if (rows[0].module, rows[0].what) == parted},
        )
        return Card(outcome, (which, *rest, table))

    def _drawing(self, rows: list[TwinRow]) -> Markup:
        """Draw the first error as a ring and the last as a dot, on a logarithmic line with the tolerance."""
        first, last = (_across(row.error.relative) for row in (rows[0], rows[-1]))
        limit, colour = _across(self.tolerance), "good" if rows[-1].error.relative <= self.tolerance else "error"
        said = f"from {_share(rows[0].error.relative)} to {_share(rows[-1].error.relative)}"
        return Markup(
            f'<svg class="small" viewBox="0 0 {_WIDTH} 14" width="{_WIDTH}" height="14" role="img" aria-label="{said}">'
            f"<title>{said}, on a line from 10^{_LOW} to 10^{_HIGH}; the mark is {self.tolerance:g}</title>"
            f'<rect y="6" width="{_WIDTH}" height="2" opacity="0.13"/>'
            f'<rect x="{limit}" y="1" width="1.5" height="12" opacity="0.5"/>'
            f'<g style="stroke:var(--amp-{colour}); stroke-width:2"><line x1="{first}" x2="{last}" y1="7" y2="7"/>'
            f'<circle cx="{first}" cy="7" r="3" style="fill:none"/>'
            f'<circle cx="{last}" cy="7" r="3.5" style="fill:var(--amp-{colour})"/></g></svg>'
        )

    def _outcome(self) -> str:
        return "they agree" if self.parted is None else f"they part at {self.parted}"

    def _sentences(self) -> Iterator[str]:
        last = self.steps[-1]
        yield f"{self.right} against {self.left}, {len(self.steps)} steps."
        if self.parted is None:
            yield f"They agree: no relative error is above {_share(self.tolerance)}. The largest: {self.worst}."
        else:
            yield f"They part at {self.parted}."
        yield f"Loss in the last step: {last.left.loss:.6g} ({self.left}), {last.right.loss:.6g} ({self.right})."
        for side, cuts, step in ((self.left, self.left_cuts, last.left), (self.right, self.right_cuts, last.right)):
            if cuts:
                yield f"{side}'s loss scale was lowered {cuts} times, to {power(step.loss_scale)} in the last step."
        for side, skipped in ((self.left, self._skipped("left")), (self.right, self._skipped("right"))):
            if skipped:
                where = f", where {skipped[0].first_nonfinite} was the first" if skipped[0].first_nonfinite else ""
                yield f"{side} skipped {len(skipped)} of {len(self.steps)} steps{where}."

    def _skipped(self, side: str) -> list[TrialStep]:
        return [each for each in (getattr(step, side) for step in self.steps) if each.skipped]

    def _tensors(self) -> list[list[TwinRow]]:
        """Return the rows of each tensor, step by step."""
        tensors: dict[tuple[str, str], list[TwinRow]] = {}
        for row in self.rows():
            tensors.setdefault((row.module, row.what), []).append(row)
        return list(tensors.values())


_KINDS = ("output", "output grad", "weight grad")


def _cells(rows: list[TwinRow], drawing: Markup) -> tuple[str, ...]:
    """Return the cells of one tensor's line."""
    start = rows[0].module or "(model)", rows[-1].dtype
    if rows[0].cancels:
        said = "0 except for rounding"
        return *start, Cell("", Markup(said)), Cell(said, Markup("")), *[""] * 4
    worst = max(rows, key=lambda row: row.error.relative).error
    shares = (_share(each) for each in (rows[0].error.relative, rows[-1].error.relative, worst.relative))
    ulps = f"{worst.ulps:,.2g}" if worst.ulps < 100 else f"{worst.ulps:,.0f}"
    ulps = "too small for float16" if worst.is_too_small else ulps
    return *start, Cell("", drawing), *shares, ulps, f"{worst.cosine:.5f}"


def _share(relative: float) -> str:
    """Format a relative error in percent, with two digits.

    >>> _share(0.00036), _share(0.042), _share(3.8), _share(2e-8), _share(math.nan)
    ('0.036 %', '4.2 %', '380 %', '2e-06 %', 'not finite')
    """
    if not math.isfinite(relative):
        return "not finite"
    percent = 100 * relative
    return f"{percent:.0f} %" if percent >= 100 else f"{percent:.2g} %"


def _across(relative: float) -> float:
    exponent = _HIGH if not math.isfinite(relative) else math.log10(max(relative, 10.0**_LOW))
    return round(4 + (_WIDTH - 8) * (min(exponent, _HIGH) - _LOW) / (_HIGH - _LOW), 1)
