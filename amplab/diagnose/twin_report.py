"""What a pair of twins had to say: every error of every step, the table per module, and the place where they part."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape

from amplab.diagnose.trial import TrialStep
from amplab.diagnose.twin_errors import TwinError

__all__ = ["TwinReport", "TwinRow", "TwinStep"]

_TITLES = ("module", "what", "dtype", "relative, first", "relative, last", "worst", "ulps of half", "cosine")


@dataclass(frozen=True)
class TwinRow:
    """One tensor of one step.

    Attributes:
        step: from 0.
        module: path of the module, or name of the parameter; empty for the model itself. "#2" is a second call.
        what: "output", "output grad" or "weight grad", without the loss scale.
        dtype: of the right one.
        error: how far it is from the left one.
        cancels: it is 0 but for rounding, so that its error says nothing.
    """

    step: int
    module: str
    what: str
    dtype: str
    error: TwinError
    cancels: bool = False

    def __str__(self) -> str:
        """One sentence's worth."""
        e = self.error
        far = f"relative error {e.relative:.2g}, {e.ulps:.2g} ulps of half, cosine {e.cosine:.4f}"
        return f"step {self.step}, {self.what} of {self.module or 'the model'} ({self.dtype}): " + (
            far if e.is_finite else "not finite"
        )


@dataclass(frozen=True)
class TwinStep:
    """One step of both, and the rows of its comparison in the order of execution."""

    step: int
    left: TrialStep
    right: TrialStep
    rows: tuple[TwinRow, ...]


@dataclass(frozen=True)
class TwinReport:
    """Two precisions in lockstep.

    Attributes:
        left, right: their names.
        steps: every step.
        tolerance: the relative error from which on they have parted.
        left_cuts, right_cuts: how often a dynamic scale was too large and a step made again.
    """

    left: str
    right: str
    steps: tuple[TwinStep, ...]
    tolerance: float
    left_cuts: int = 0
    right_cuts: int = 0

    def rows(self) -> list[TwinRow]:
        """Every comparison of every step."""
        return [row for step in self.steps for row in step.rows]

    @cached_property
    def parted(self) -> TwinRow | None:
        """The first tensor, in the order of execution, that is farther away than the tolerance; None: they agree."""
        return next((row for row in self._judged() if not row.error.relative <= self.tolerance), None)

    @property
    def worst(self) -> TwinRow:
        """The tensor that is farthest away."""
        return max(self._judged(), key=lambda row: row.error.relative)

    def _judged(self) -> Iterator[TwinRow]:
        return (row for row in self.rows() if not row.cancels)

    def text(self) -> str:
        """Where they part, the losses, and a line per tensor: its error in the first, the last and the worst step."""
        lines = [dict(zip(_TITLES, cells, strict=True)) for cells in self._lines()]
        widths = {title: max(len(title), *(len(line[title]) for line in lines)) for title in _TITLES}
        table = ["  ".join(title.ljust(widths[title]) for title in _TITLES).rstrip()]
        table += ["  ".join(line[title].ljust(widths[title]) for title in _TITLES).rstrip() for line in lines]
        return "\n".join([*self._sentences(), *table])

    def __str__(self) -> str:
        """The text."""
        return self.text()

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{title}</th>" for title in _TITLES)
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in cells) + "</tr>"
            for cells in self._lines()
        )
        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in self._sentences())
        return f"<div>{said}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"

    def _sentences(self) -> Iterator[str]:
        last = self.steps[-1]
        yield f"{self.right} beside {self.left}, {len(self.steps)} steps."
        if self.parted is None:
            yield f"They stay together: no relative error above {self.tolerance:g}; the largest: {self.worst}."
        else:
            yield f"They part at {self.parted}."
        yield f"Loss in the last step: {last.left.loss:.6g} ({self.left}), {last.right.loss:.6g} ({self.right})."
        for name, cuts, step in ((self.left, self.left_cuts, last.left), (self.right, self.right_cuts, last.right)):
            if cuts:
                yield f"{name}'s loss scale came down {cuts} times, to {step.loss_scale:g} in the last step."
        for name, skipped in ((self.left, self._skipped("left")), (self.right, self._skipped("right"))):
            if skipped:
                where = f", where {skipped[0].first_nonfinite} was the first" if skipped[0].first_nonfinite else ""
                yield f"{name} skipped {len(skipped)} of {len(self.steps)} steps{where}."

    def _skipped(self, side: str) -> list[TrialStep]:
        return [each for each in (getattr(step, side) for step in self.steps) if each.skipped]

    def _lines(self) -> Iterator[tuple[str, ...]]:
        tensors: dict[tuple[str, str], list[TwinRow]] = {}
        for row in self.rows():
            tensors.setdefault((row.module, row.what), []).append(row)
        for (module, what), rows in tensors.items():
            if rows[0].cancels:
                yield (module, what, rows[-1].dtype, "0 but for rounding", *[""] * 4)
                continue
            worst = max(rows, key=lambda row: row.error.relative).error
            relative = [f"{row.error.relative:.2g}" for row in (rows[0], rows[-1])]
            shown = (module or "(model)", what, rows[-1].dtype, *relative)
            yield (*shown, f"{worst.relative:.2g}", f"{worst.ulps:.2g}", f"{worst.cosine:.5f}")
