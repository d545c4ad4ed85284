"""Replay a run with another loss-scaling rule: `WhatIf` for one rule, `WhatIfs` for several.

    what_if(record, rule).scales         the loss scale at every step
    what_if(record, rule).lost_share     share of the gradients that float16 rounds to 0 at those scales

Pure functions of a `ScaleHistory`; the replay itself is `amplab.scalers.replay`. Whether a larger scale overflows is
decided from the largest gradient *of a parameter*: a larger gradient inside the model overflows earlier, and no run log
contains it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from amplab.display.charts import scale_drawing
from amplab.display.numbers import count, percent, power
from amplab.display.table import Card, Column, Table
from amplab.formats import FLOAT16, ExponentHistogram, FloatFormat
from amplab.formats.kept_property import kept_property
from amplab.scalers import PUBLISHED_RULES, Replay, ScaleRule, replay, steps_lost
from amplab.scalers.recorded_overflows import REASONS

__all__ = ["ScaleHistory", "WhatIf", "WhatIfs", "named_rule", "what_if", "what_ifs"]


@dataclass(frozen=True)
class ScaleHistory:
    """The loss scales of a run, and what is needed to replay it with other ones.

    Raises:
        TypeError, ValueError: columns of different lengths, or fields of another type.

    Attributes:
        scales: the loss scale of every step.
        skipped: whether the step was skipped.
        grad_exponents: floor(log2) of the largest unscaled gradient of every step, as `amplab.scalers.replay` takes it;
            None if not measured.
        samples: (step, histogram of all unscaled gradients) at some steps.
        fmt: the format that the gradients are computed in.
    """

    scales: Sequence[float]
    skipped: Sequence[bool]
    grad_exponents: Sequence[float | None]
    samples: Sequence[tuple[int, ExponentHistogram]] = ()
    fmt: FloatFormat = FLOAT16

    def __post_init__(self) -> None:
        columns = {name: getattr(self, name) for name in ("scales", "skipped", "grad_exponents")}
        for name, column in columns.items():
            if isinstance(column, str) or not hasattr(column, "__len__"):
                raise TypeError(f"{name}={type(column).__name__}: expected a list with one value per step.")
        if len({len(column) for column in columns.values()}) > 1:
            sizes = ", ".join(f"{name} of {len(column)}" for name, column in columns.items())
            raise ValueError(f"{sizes}: expected one value per step in all three.")
        kinds = set(map(type, self.grad_exponents)) - {type(None)}
        if not all(issubclass(kind, Real) for kind in kinds):
            raise TypeError("grad_exponents: expected numbers, floor(log2) of the largest gradient; None if unknown.")
        if not all(step >= 0 and isinstance(taken, ExponentHistogram) for step, taken in self.samples):
            raise TypeError("samples: expected pairs (step, ExponentHistogram); see amplab.formats.exponent_histogram.")
        if not isinstance(self.fmt, FloatFormat):
            raise TypeError(f"fmt={self.fmt!r}: expected a FloatFormat, such as amplab.formats.FLOAT16.")


@dataclass(frozen=True, repr=False)
class WhatIf:
    """A recorded run, replayed with another scaling rule.

    Attributes:
        name: the name of the rule.
        replay: the run with this rule.
        record: the recorded run.
    """

    name: str
    replay: Replay
    record: ScaleHistory

    @property
    def scales(self) -> tuple[float, ...]:
        """The loss scale at every step."""
        return self.replay.scales

    @property
    def skips(self) -> tuple[int, ...]:
        """The steps that are skipped."""
        return self.replay.skips

    @property
    def lost_from(self) -> int | None:
        """The step whose overflow is taken, from which on the weights are inf or NaN; None if there is none."""
        return self.replay.lost_from

    @property
    def steps_lost(self) -> int:
        """Steps lost compared with the recorded run; negative: gained.

        They include those after the rule ended the run, and those from an overflow on that was taken.
        """
        return steps_lost(self.replay.path, self.record.skipped)

    @property
    def certain_until(self) -> int | None:
        """The number of steps, from the first, that the record determines; None if it determines all.

        This is also the number of the first step for which the record does not show whether it overflows: its own
        loss scale still follows from the record, the later ones are a guess.
        """
        doubtful = np.flatnonzero(self.replay.reasons)
        return int(doubtful[0]) if len(doubtful) else None

    @property
    def _certain_steps(self) -> str:
        """How many steps the record determines, in words."""
        if self.certain_until is None:
            return "every step"
        return f"the first {self.certain_until:,}" if self.certain_until else "no step"

    @property
    def doubt(self) -> str | None:
        """Why the record does not determine that step; None if it determines all."""
        return None if self.certain_until is None else REASONS[self.replay.reasons[self.certain_until]]

    @kept_property
    def lost_share(self) -> float | None:
        """Mean share of the non-zero gradient elements that are 0 in the format at these scales.

        The mean is over the steps with a histogram; None if there are none. All are lost once the weights are.
        """
        scales = self.replay.path.scales
        reached = [(step, taken) for step, taken in self.record.samples if step < len(scales)]
        gone = len(scales) if self.lost_from is None else self.lost_from
        lost = (
            taken.lost_share(float(scales[step]), self.record.fmt) if step < gone else 1.0 for step, taken in reached
        )
        shares = [1.0 if share is None else share for share in lost]  # a scale of 0 loses all
        return sum(shares) / len(shares) if shares else None

    def row(self) -> dict[str, str]:
        """Return the row of a table: column -> text."""
        path = self.replay.path
        overflows = int(path.found_infs.sum())
        return {
            "rule": self.name,
            "lowest": power(float(path.scales.min())),
            "highest": power(float(path.scales.max())),
            "last": power(float(path.scales[-1])),
            "skips": f"{overflows if path.skips else 0:,}",
            "inf taken": f"{0 if path.skips else overflows:,}",
            "steps lost": _more(self.steps_lost),
            "gradients lost": "–" if self.lost_share is None else percent(self.lost_share),
            "certain": self._certain_steps,
        }

    def __repr__(self) -> str:
        return f"<WhatIf: {', '.join(f'{title} {cell}' for title, cell in self.row().items())}>"

    def __str__(self) -> str:
        """Return the row, and why later steps are a guess."""
        return str(WhatIfs((self,)))

    def _repr_html_(self) -> str:
        return WhatIfs((self,))._repr_html_()


@dataclass(frozen=True, repr=False)
class WhatIfs:
    """One recorded run with several rules."""

    runs: tuple[WhatIf, ...]

    def __iter__(self) -> Iterator[WhatIf]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, name: str) -> WhatIf:
        """Return the run with the rule of this name."""
        for run in self.runs:
            if run.name == name:
                return run
        raise KeyError(f"{name!r}: not one of these rules; choose from {', '.join(run.name for run in self.runs)}.")

    def rows(self) -> list[dict[str, str]]:
        """Return one row per rule: column -> text."""
        return [run.row() for run in self.runs]

    def __str__(self) -> str:
        """A table, and under it every doubt and every rule that ended the run."""
        return str(self._card())

    def __repr__(self) -> str:
        lost = ", ".join(f"{run.name} {_more(run.steps_lost)}" for run in self.runs)
        return f"<WhatIfs: steps lost: {lost or 'no rule'}>"

    def _notes(self) -> Iterator[str]:
        for run in self.runs:
            if run.lost_from is not None:
                yield (
                    f"{run.name}, step {run.lost_from}: the gradients overflow and the step is taken: this rule skips "
                    "none. The weights are then inf or NaN, and the run is lost."
                )
            if run.doubt is not None:
                yield f"{run.name}, a guess from step {run.certain_until} on: {run.doubt}."
            if run.replay.stopped is not None:
                yield f"{run.name}, step {len(run.replay) - 1}: the rule ends the run: {run.replay.stopped}"

    def _repr_html_(self) -> str:
        return self._card().html()

    def _card(self) -> Card:
        if not self.runs:
            return Card("no rule")
        rows = self.rows()
        recorded = self.runs[0].record
        curves = {"recorded": np.asarray(recorded.scales), **{run.name: run.replay.path.scales for run in self.runs}}
        skipped = np.count_nonzero(recorded.skipped)
        steps = count(len(recorded.scales), "step")
        said = f"The loss scale of {steps}, of which {skipped:,} were skipped, under other rules"
        columns = [Column(title, right=title not in ("rule", "certain")) for title in rows[0]]
        table = Table(columns, [list(row.values()) for row in rows], caption=said)
        return Card(said, (scale_drawing(curves), table, *self._notes()))


def what_if(record: ScaleHistory, rule: ScaleRule | str, name: str | None = None) -> WhatIf:
    """Replay a recorded run with one rule.

    Args:
        record: the recorded run.
        rule: a rule, which may be your own, or the name of a published one: torch, apex, Ascend, jmp, Keras, DeepSpeed
            or Megatron.
        name: the name in the table; by default the name or the class of the rule.

    Raises:
        ValueError: no published rule has that name, or the record has no step.

    Sync: none.

    >>> record = ScaleHistory(scales=[65536.0] * 3, skipped=[False] * 3, grad_exponents=[-3.0, -3.0, -3.0])
    >>> what_if(record, "Megatron").skips
    (0, 1, 2)
    """
    named, rule = named_rule(rule)
    if not isinstance(record, ScaleHistory):
        raise TypeError(
            f"record={type(record).__name__}: expected a ScaleHistory; for a recorded run call run.replay(rule)."
        )
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name={name!r}: expected a name for the rule, or None for its own.")
    if not len(record.scales):
        raise ValueError("what_if(record): the record has no step; expected at least one.")
    run = replay(rule, gradient_exponents=record.grad_exponents, recorded_scales=record.scales, fmt=record.fmt)
    return WhatIf(name or named, run, record)


def what_ifs(record: ScaleHistory, rules: Mapping[str, ScaleRule] | None = None) -> WhatIfs:
    """Replay a recorded run with several rules, by default with all published ones.

    Args:
        record: the recorded run.
        rules: name -> rule, or name -> name of a published one.

    Raises:
        TypeError, ValueError: as `what_if`; `rules` is not a dict.
    """
    if rules is None:
        rules = PUBLISHED_RULES
    if not isinstance(rules, Mapping):
        raise TypeError(
            f"rules={type(rules).__name__}: expected a dict of name -> rule, such as {{'jmp': 'jmp'}}; what_if(record, "
            "rule) takes a single one."
        )
    return WhatIfs(tuple(what_if(record, rule, name) for name, rule in rules.items()))


def named_rule(rule: ScaleRule | str) -> tuple[str, ScaleRule]:
    """Return a rule and its name.

    Raises:
        ValueError: no published rule has that name. TypeError: neither a name nor a rule.
    """
    if not isinstance(rule, str):
        if isinstance(rule, type) or not all(hasattr(rule, name) for name in ("start", "next", "skips_on_overflow")):
            raise TypeError(f"rule={rule!r}: expected a rule, such as DynamicScale(init_scale=1024.0), or a name.")
        return type(rule).__name__, rule
    for name, published in PUBLISHED_RULES.items():
        if name.lower() == rule.lower():
            return name, published
    raise ValueError(f"rule={rule!r}: no published rule has that name; choose from {', '.join(PUBLISHED_RULES)}.")


def _more(steps: int) -> str:
    """A number of lost steps with its sign."""
    return f"{steps:+,}".replace("-", "−") if steps else "0"
