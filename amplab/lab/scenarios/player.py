"""Plays a scenario on a trainer: starts its run, injects its faults, and pauses when what must be seen was seen.

Between two steps, in the trainer's thread, it checks the condition; so the same scenario ends at the same step on the
same machine. A setting that the person changes meanwhile stays changed: the condition is then met or not. A reset by
the person ends the scenario.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from amplab.lab.config import ExperimentConfig
from amplab.lab.events import ConfigChanged, Event, Failed, StepRecord
from amplab.lab.kept_runs import LONGEST_NAME
from amplab.lab.scenarios.conditions import Condition, Observed
from amplab.lab.scenarios.scenario import Scenario
from amplab.lab.tasks import score_named
from amplab.lab.trainer import Trainer

__all__ = ["STAGES", "Play", "Player"]

STAGES = ("playing", "seen", "mending", "mended", "missed", "left")


@dataclass(frozen=True)
class Play:
    """How far a scenario is.

    Attributes:
        stage: One of `STAGES`. "missed": what must be seen was not, within the steps; "left": the run was reset.
        begin: Step at which the scenario, or its fix, began.
        seen: What was seen, with numbers.
        mended: What was seen after the fix, with numbers.
    """

    stage: str = "playing"
    begin: int = 0
    seen: str = ""
    mended: str = ""

    @property
    def is_going(self) -> bool:
        """Whether something is still to be seen."""
        return self.stage in ("playing", "mending")


class Player:
    """One scenario on one trainer.

    Args:
        trainer: Its run is reset when the scenario starts.
        scenario: What to play.
        tell: Called in the trainer's thread whenever `play` has changed.

    Attributes:
        play: How far it is; replaced as a whole, so that any thread can read it.

    >>> from amplab.lab import Trainer
    >>> from amplab.lab.scenarios import SCENARIOS
    >>> trainer = Trainer()
    >>> player = Player(trainer, SCENARIOS["static-scale"])
    >>> player.start(); _ = trainer.wait()
    >>> player.play.stage
    'seen'
    >>> player.fix(); _ = trainer.wait()
    >>> player.play.stage
    'mended'
    """

    def __init__(self, trainer: Trainer, scenario: Scenario, tell: Callable[[], None] = lambda: None) -> None:
        self.trainer = trainer
        self.scenario = scenario
        self.play = Play()
        self._tell = tell
        self._awaits_reset = self._awaits_change = False
        self._before_fix: tuple[Play, ExperimentConfig] | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Reset the trainer to the scenario's config and start it."""
        self._unsubscribe()
        self.play, self._awaits_reset, self._awaits_change = Play(), True, False
        self._unsubscribe = self.trainer.subscribe(self._hear)
        self.trainer.reset(self.scenario.config, name=_run_name(self.scenario.title))
        self._arm(0)
        self.trainer.start()

    def fix(self) -> None:
        """Make the change that mends the run, and continue it.

        Raises:
            ValueError: The scenario has no fix, or the present config does not accept it.
            RuntimeError: The run has stopped.
        """
        fix = self.scenario.fix
        if fix is None:
            raise ValueError(f"scenario {self.scenario.name}: has no fix, because nothing is wrong.")
        before, config = self.play, self.trainer.wanted_config.changed(**fix.changes)
        self._before_fix = (before, self.trainer.config)
        self._awaits_reset, self._awaits_change = fix.resets, not fix.resets and config != self.trainer.config
        self.play = replace(before, stage="mending", begin=0 if fix.resets else len(self.trainer.history))
        try:
            if fix.resets:
                self.trainer.reset(config, name=_run_name(self.scenario.title, ", fixed"))
            else:
                self.trainer.change(**fix.changes)
            self.trainer.start()
        except BaseException:
            self.play, self._awaits_reset, self._awaits_change = before, False, False
            raise

    @property
    def steps_done(self) -> int:
        """Steps since the present stage began; 0 until its reset or its change has taken effect."""
        if self._awaits_reset or self._awaits_change:
            return 0
        return max(0, len(self.trainer.history) - self.play.begin)

    def close(self) -> None:
        """Stop watching the run, which goes on."""
        self._unsubscribe()

    @property
    def steps(self) -> int:
        """Steps within which the present stage ends."""
        fix = self.scenario.fix
        return fix.steps if fix is not None and self.play.stage in ("mending", "mended") else self.scenario.steps

    # In the trainer's thread

    def _hear(self, event: Event) -> None:
        match event:
            case ConfigChanged(config=config, reset=reset) if self._is_fix_undone(config, reset=reset):
                self._take_fix_back()
            case ConfigChanged(reset=True):
                if not self._awaits_reset:
                    self._unsubscribe()
                    self._become(stage="left")
                self._awaits_reset = False
            case ConfigChanged() if self._awaits_change:
                self._awaits_change = False
                self._become(begin=event.step)
            case StepRecord() if self._is_watching:
                self._arm(event.step + 1)
                self._check(None)
            case Failed(fatal=True) if self.play.is_going:
                self._check(event.error)

    def _is_fix_undone(self, config: ExperimentConfig, *, reset: bool) -> bool:
        """Whether a change took back the fix: its fields, or the run that it replaced is back."""
        fix = self.scenario.fix
        if fix is None or self._before_fix is None or self.play.stage not in ("mending", "mended"):
            return False
        if self._awaits_reset or self._awaits_change:
            return False
        if reset:
            return fix.resets and config == self._before_fix[1]
        return any(getattr(config, name) != value for name, value in fix.changes.items())

    def _take_fix_back(self) -> None:
        """Be where the fix began, so that it can be made again."""
        if self._before_fix is not None:
            self.play = self._before_fix[0]
        self._tell()

    @property
    def _is_watching(self) -> bool:
        return self.play.is_going and not self._awaits_reset and not self._awaits_change

    def _arm(self, step: int) -> None:
        """Inject what goes into `step`, which is the next one."""
        for injection in self.scenario.injections:
            if injection.step == step and self.play.stage == "playing":
                self.trainer.inject(injection.fault, on=True)

    def _check(self, failure: str | None) -> None:
        is_mending, fix = self.play.stage == "mending", self.scenario.fix
        sees: Condition = fix.sees if is_mending and fix is not None else self.scenario.sees
        run = Observed(self.trainer.history, self.play.begin, score_named(self.trainer.config.task), failure)
        found = sees.met(run)
        if found is not None:
            numbers = {**run.numbers(), **found}
            if is_mending and fix is not None:
                self._become(stage="mended", mended=fix.seen.format(**numbers))
            else:
                self._become(stage="seen", seen=self.scenario.seen.format(**numbers))
        elif failure is not None or run.steps >= self.steps:
            self._become(stage="missed")
        if not self.play.is_going:
            self.trainer.pause()

    def _become(self, **changes: object) -> None:
        self.play = replace(self.play, **changes)  # type: ignore[arg-type]  # replace checks the names
        self._tell()


def _run_name(title: str, ending: str = "") -> str:
    """Return the name of a scenario's run among the kept ones.

    >>> _run_name("Updates too small for float16 weights", ", fixed")
    'Updates too smal…, fixed'
    """
    room = LONGEST_NAME - len(ending)
    return (title if len(title) <= room else f"{title[: room - 1].rstrip()}…") + ending
