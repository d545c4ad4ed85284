"""A scenario: one effect of mixed precision as data, from the config that shows it to the change that mends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from amplab.lab.config import FIELDS, LIVE_FIELDS, ExperimentConfig, field_named, spell
from amplab.lab.scenarios.conditions import Condition

__all__ = ["Fix", "Injection", "Scenario"]


@dataclass(frozen=True)
class Injection:
    """A fault that goes into a step."""

    step: int
    fault: str


@dataclass(frozen=True)
class Fix:
    """The one change that mends a run.

    Attributes:
        changes: Fields of the config and their new values.
        why: One or two sentences on what it does, and what to expect.
        sees: What must be seen after it.
        seen: Says what was seen, with the numbers of `sees` in braces.
        steps: Steps within which it must be seen.
        starts_over: Whether it needs new weights although its fields do not, because those of the run are spoiled.
    """

    changes: Mapping[str, object]
    why: str
    sees: Condition
    seen: str
    steps: int = 400
    starts_over: bool = False

    @property
    def label(self) -> str:
        """The change in the labels of the dashboard.

        >>> Fix({"opt_level": "O2", "lr": 0.1}, "", None, "").label
        'opt_level: O2, Learning rate: 0.1'
        """
        return ", ".join(f"{FIELDS[name].label}: {_spelled(name, value)}" for name, value in self.changes.items())

    @property
    def resets(self) -> bool:
        """Whether the run begins again."""
        return self.starts_over or any(name not in LIVE_FIELDS for name in self.changes)


def _spelled(name: str, value: object) -> str:
    choices = field_named(name).values.choices()
    return choices.get(value, spell(value)) if isinstance(value, str) else spell(value)


@dataclass(frozen=True)
class Scenario:
    """One effect.

    Attributes:
        name: A word or two, with hyphens.
        title: A few words.
        config: What is trained.
        expect: Says before the run what will happen, and why.
        sees: What must be seen.
        seen: Says afterwards what was seen, with the numbers of `sees` in braces.
        steps: Steps within which it must be seen.
        injections: Faults that go into single steps.
        fix: The change that mends the run, None if nothing is wrong.
    """

    name: str
    title: str
    config: ExperimentConfig
    expect: str
    sees: Condition
    seen: str
    steps: int = 400
    injections: tuple[Injection, ...] = field(default=())
    fix: Fix | None = None
