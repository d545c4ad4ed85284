"""A scenario: one effect of mixed precision as data, from the config that shows it to the change that mends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from amplab.lab.changes import config_changes
from amplab.lab.config import LIVE_FIELDS, ExperimentConfig
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
    def resets(self) -> bool:
        """Whether the run begins again."""
        return self.starts_over or any(name not in LIVE_FIELDS for name in self.changes)


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

    @property
    def fixed_config(self) -> ExperimentConfig:
        """The config with the fix."""
        return self.config if self.fix is None else self.config.changed(**self.fix.changes)

    @property
    def fix_in_words(self) -> str:
        """The change that the fix makes, in the labels of the dashboard; empty without one.

        >>> from amplab.lab.scenarios import SCENARIOS
        >>> SCENARIOS["underflow"].fix_in_words
        'opt_level O3 → O2'
        """
        return ", ".join(change.text for change in config_changes(self.config, self.fixed_config, 0))
