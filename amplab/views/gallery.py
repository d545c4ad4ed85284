"""The strip of scenarios above the controls: what it shows, as plain values, and what its messages do.

    {"type": "choose", "name"}, {"type": "again" | "fix" | "close"}

Choosing a scenario starts its run. `amplab.lab.scenarios` has the scenarios and plays them; gallery.js draws.
"""

from __future__ import annotations

from collections.abc import Callable

from amplab.display.numbers import count
from amplab.lab import Trainer
from amplab.lab.scenarios import SCENARIOS, Observed, Play, Player, Scenario
from amplab.lab.scenarios.conditions import Fails
from amplab.views.parts import Gallery, Message

__all__ = ["GalleryDesk", "chosen_payload", "gallery_titles"]

_STAGES = {
    "playing": "Running",
    "seen": "Seen",
    "mending": "Running with the fix",
    "mended": "Fixed",
    "missed": "Not seen",
    "left": "Ended",
}
_MISSED = "What was expected did not show, which happens if a setting is changed meanwhile. Run it again."
_LEFT = "The run was reset, so this scenario has ended. Run it again, or choose another one."


def gallery_titles() -> list[dict[str, str]]:
    """Return name and title of every scenario, in order."""
    return [{"name": scenario.name, "title": scenario.title} for scenario in SCENARIOS.values()]


def chosen_payload(scenario: Scenario, play: Play, *, step: int, steps: int, refusal: str | None) -> dict[str, object]:
    """Return what the page shows of the chosen scenario.

    Args:
        scenario: The scenario.
        play: How far it is.
        step: Steps since the present stage began.
        steps: Steps within which it ends.
        refusal: Why the fix was refused, None if it was not.
    """
    names = list(SCENARIOS)
    following = names[(names.index(scenario.name) + 1) % len(names)]
    return {
        "name": scenario.name,
        "title": scenario.title,
        "stage": play.stage,
        "status": _status(play, step),
        "progress": min(step / steps, 1.0) if play.is_going else None,
        "expect": scenario.expect,
        "seen": play.seen or {"missed": _MISSED, "left": _LEFT}.get(play.stage, ""),
        "fix": _fix(scenario, play, refusal),
        "next": {"name": following, "title": SCENARIOS[following].title},
        "config": str(scenario.config),
    }


def _status(play: Play, step: int) -> str:
    return f"{_STAGES[play.stage]}: {count(step, 'step')}" if play.is_going else _STAGES[play.stage]


def _fix(scenario: Scenario, play: Play, refusal: str | None) -> dict[str, object] | None:
    """Return the button and the text of the fix; None for a scenario in which nothing is wrong."""
    fix = scenario.fix
    if fix is None:
        return None
    text = play.mended
    if not text:
        text = _MISSED if play.stage == "missed" and play.seen else fix.why
    return {
        "label": scenario.fix_in_words,
        "text": refusal or text,
        "is_refused": refusal is not None,
        "is_ready": play.stage == "seen" or (play.stage == "missed" and bool(play.seen)),
    }


class GalleryDesk:
    """Plays the scenario that the page chooses, and shows how far it is. Everything runs in the ticker's thread.

    Args:
        trainer: The experiment.
        wake: Requests a tick; called in the trainer's thread.
    """

    def __init__(self, trainer: Trainer, wake: Callable[[], None]) -> None:
        self._trainer = trainer
        self._wake = wake
        self._player: Player | None = None
        self._refusal: str | None = None

    def on_message(self, message: Message, part: Gallery) -> None:
        """Do what the page asks for."""
        self._refusal = None
        match message["type"]:
            case "choose":
                self._play(Player(self._trainer, SCENARIOS[message["name"]], self._wake))
            case "again" if self._player is not None:
                self._play(self._player)
            case "fix" if self._player is not None:
                self._fix(self._player)
            case "close":
                self.close()
        self.show(part)

    def show(self, part: Gallery) -> None:
        """Set what the page draws."""
        player = self._player
        if player is None:
            part.chosen = {}
            return
        play = player.play
        part.chosen = chosen_payload(
            player.scenario,
            play,
            step=player.steps_done,
            steps=player.steps,
            refusal=self._refusal,
        )

    def expects(self, failure: str) -> bool:
        """Return whether an error is what the scenario shows, so that no message about it is needed above the strip."""
        player = self._player
        if player is None or player.play.stage not in ("playing", "seen"):
            return False
        run = Observed(self._trainer.history, 0, failure=failure)
        return isinstance(player.scenario.sees, Fails) and player.scenario.sees.met(run) is not None

    def close(self) -> None:
        """Forget the scenario; its run goes on."""
        if self._player is not None:
            self._player.close()
        self._player = None

    def _play(self, player: Player) -> None:
        self.close()
        self._player = player
        player.start()

    def _fix(self, player: Player) -> None:
        try:
            player.fix()
        except (ValueError, RuntimeError) as refusal:
            self._refusal = str(refusal)
