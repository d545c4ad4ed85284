"""Scenarios as data, their conditions, and the player; `tests/views/test_gallery.py` plays all of them."""

from dataclasses import replace

import pytest

from amplab.lab import Experiment, ExperimentConfig, History, StepRecord, Trainer
from amplab.lab.scenarios import SCENARIOS, Observed, Player
from amplab.lab.scenarios.conditions import (
    CHECK_EVERY,
    Both,
    Fails,
    LossFalls,
    LossIsNaN,
    LossStays,
    ScaleRises,
    ScoreReaches,
    ScoreStays,
    Skips,
    Steps,
)
from amplab.lab.tasks import ACCURACY, Score

NAN = float("nan")

pytestmark = pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped:UserWarning")


def record(step: int, **changes: object) -> StepRecord:
    plain = {"loss": 1.0, "loss_scale": 65536.0, "next_loss_scale": 65536.0, "skipped": False, "opt_level": "O1"}
    rest = {"first_nonfinite": None, "score": None, "seconds": 0.01 * step, "injected": None}
    return StepRecord(step=step, **{**plain, **rest, **changes})


def observed(*records: dict, begin: int = 0, **keys: object) -> Observed:
    history = History()
    for step, changes in enumerate(records):
        history.append(record(step, **changes))
    return Observed(history, begin, **keys)


def skip(scale: float = 4.0, **more: object) -> dict:
    return {"skipped": True, "loss_scale": scale, "next_loss_scale": scale / 2, "first_nonfinite": "a.weight", **more}


# Conditions


def test_skips_in_a_row_are_counted_from_the_beginning_alone() -> None:
    run = observed({}, skip(), {}, skip(8.0), skip(4.0))
    assert Skips(2).met(run) == {"step": "3", "before": "2³", "after": "2²", "parameter": "a.weight"}
    assert Skips(3).met(run) is None
    assert Skips().met(run)["step"] == "1"
    assert Skips().met(replace(run, begin=2))["step"] == "3"


def test_an_injected_skip_is_no_skip_of_the_run_itself() -> None:
    run = observed({}, skip(injected="overflow"), {})
    assert Skips().met(run) is None
    assert Skips(injected="overflow").met(run)["step"] == "1"


def test_a_loss_that_stays_and_one_that_falls() -> None:
    still = observed(*[{"loss": 1.0}] * CHECK_EVERY * 2)
    assert LossStays(0.9, steps=50).met(still) == {}
    assert LossStays(0.9, steps=75).met(still) is None, "too early"
    assert LossFalls(0.5).met(still) is None
    falling = observed(*({"loss": 1.0 / (step + 1)} for step in range(CHECK_EVERY * 2)))
    assert LossFalls(0.5).met(falling) == {}
    assert LossStays(0.9, steps=50).met(falling) is None
    nan = observed(*[{"loss": 1.0}] * 30, *[{"loss": NAN}] * 20)
    assert LossFalls(0.5).met(nan) is None
    assert LossStays(0.9, steps=50).met(nan) is None
    assert LossIsNaN(20).met(nan) == {"step": "30"}
    assert LossIsNaN(21).met(nan) is None


def test_a_score_is_judged_in_its_own_direction() -> None:
    run = observed(*[{}] * (CHECK_EVERY - 1), {"score": 0.5}, score=ACCURACY)
    assert ScoreReaches(0.5).met(run) == {}
    assert ScoreReaches(0.6).met(run) is None
    assert ScoreStays(0.6, steps=25).met(run) == {}
    assert ScoreStays(0.4, steps=25).met(run) is None
    lower = replace(run, score=Score("perplexity"))
    assert ScoreReaches(0.6).met(lower) == {}
    assert ScoreReaches(0.4).met(lower) is None
    unmeasured = observed(*[{}] * CHECK_EVERY, score=None)
    assert ScoreReaches(0.0).met(unmeasured) is None


def test_a_nan_score_reaches_nothing() -> None:
    run = observed(*[{}] * (CHECK_EVERY - 1), {"score": NAN}, score=ACCURACY)
    assert ScoreReaches(0.0).met(run) is None
    assert ScoreStays(0.5, steps=25).met(run) == {}


def test_both_needs_all_at_the_same_time_and_gives_the_numbers_of_all() -> None:
    run = observed({"next_loss_scale": 2.0**18}, skip())
    assert Both(Steps(2), Skips()).met(run)["step"] == "1"
    assert Both(Steps(3), Skips()).met(run) is None
    rising = observed({}, {"next_loss_scale": 2.0**18})
    assert ScaleRises(4).met(rising) == {"first_scale": "2¹⁶"}
    assert ScaleRises(8).met(rising) is None


def test_a_failure_is_known_by_its_words() -> None:
    run = replace(observed(), failure="ValueError: no. Use BCEWithLogitsLoss, or 0.5. Or not.")
    assert Fails("BCEWithLogitsLoss").met(run) == {"advice": "Use BCEWithLogitsLoss, or 0.5."}
    assert Fails("softmax").met(run) is None
    assert run.numbers()["failure"].startswith("ValueError")


# The data


def test_every_scenario_is_short_and_says_what_it_does() -> None:
    assert len(SCENARIOS) == 12
    for name, scenario in SCENARIOS.items():
        assert name == scenario.name
        assert 80 <= len(scenario.expect) <= 330, name
        assert len(scenario.title) <= 40, name
        assert ExperimentConfig.parse(str(scenario.config)) == scenario.config
        if scenario.fix is not None:
            assert scenario.fixed_config != scenario.config
            assert len(scenario.fix.changes) == 1, "one change mends it"


@pytest.mark.parametrize("seed", range(5))
def test_without_a_scale_small_targets_are_not_learned_whatever_the_seed(seed: int) -> None:
    """O0 learns them; O3 and a scale of 1 do not, at all; O1 and O2 with a dynamic scale do."""
    config = SCENARIOS["underflow"].config.changed(seed=seed)
    assert r_squared(config.changed(opt_level="O0")) > 0.5
    assert abs(r_squared(config)) < 0.05
    assert abs(r_squared(config.changed(opt_level="O1", loss_scale=1.0))) < 0.05
    assert r_squared(config.changed(opt_level="O2")) > 0.5


def r_squared(config: ExperimentConfig) -> float:
    experiment = Experiment(config)
    for _ in range(40):
        experiment.step()
    return experiment.score()


# The player


@pytest.fixture
def trainer():
    made = Trainer(ExperimentConfig(hidden=16))
    yield made
    made.stop()
    assert made.wait(10)


def play(trainer: Trainer, name: str) -> Player:
    player = Player(trainer, SCENARIOS[name])
    player.start()
    assert trainer.wait(60)
    return player


def test_a_scenario_ends_at_the_same_step_each_time(trainer: Trainer) -> None:
    first = play(trainer, "first-overflow").play
    steps = len(trainer.history)
    assert first.stage == "seen"
    assert trainer.history.skip_count == 1
    assert trainer.state == "paused"
    assert play(trainer, "first-overflow").play == first
    assert len(trainer.history) == steps


def test_what_was_seen_has_the_numbers_of_the_run(trainer: Trainer) -> None:
    player = play(trainer, "first-overflow")
    skipped = trainer.history.skips()[0]
    assert f"Step {skipped.step} was skipped" in player.play.seen
    assert skipped.first_nonfinite in player.play.seen


def test_the_fix_continues_the_run_or_starts_over_as_it_says(trainer: Trainer) -> None:
    player = play(trainer, "overflow-spiral")
    steps = len(trainer.history)
    player.fix()
    assert trainer.wait(60)
    assert player.play.stage == "mended"
    assert player.play.begin == steps
    assert trainer.history.level_changes()[-1] == (steps, "O1")
    player = play(trainer, "static-scale")
    player.fix()
    assert trainer.wait(60)
    assert player.play.stage == "mended"
    assert trainer.history.skip_count < len(trainer.history) / 2
    assert trainer.history.column("loss")[-1] < 1


def test_a_change_that_the_person_has_made_already_mends_it_too(trainer: Trainer) -> None:
    player = play(trainer, "overflow-spiral")
    trainer.change(opt_level="O1")
    assert trainer.wait(10)
    player.fix()
    assert trainer.wait(60)
    assert player.play.stage == "mended"


def test_an_error_that_was_not_expected_ends_the_scenario(trainer: Trainer) -> None:
    bad = replace(SCENARIOS["bce"], name="other", sees=Skips())
    player = Player(trainer, bad)
    player.start()
    assert trainer.wait(60)
    assert player.play.stage == "missed"
    assert trainer.state == "failed"


def test_a_scenario_without_a_fix_refuses_one(trainer: Trainer) -> None:
    player = play(trainer, "first-overflow")
    with pytest.raises(ValueError, match="first-overflow"):
        player.fix()


def test_a_closed_player_hears_nothing(trainer: Trainer) -> None:
    player = Player(trainer, SCENARIOS["first-overflow"])
    player.start()
    player.close()
    trainer.pause()
    assert trainer.wait(60)
    assert player.play.stage == "playing"


def test_a_fix_that_is_undone_can_be_made_again(trainer: Trainer) -> None:
    player = play(trainer, "overflow-spiral")
    seen = player.play
    player.fix()
    assert trainer.wait(60)
    trainer.undo()
    assert trainer.wait(60)
    assert trainer.config.opt_level == "O2"
    assert player.play == seen
    player.fix()
    assert trainer.wait(60)
    assert player.play.stage == "mended"


def test_a_fix_that_started_over_and_is_undone_can_be_made_again(trainer: Trainer) -> None:
    player = play(trainer, "static-scale")
    seen = player.play
    player.fix()
    assert trainer.wait(60)
    assert [run.name for run in trainer.kept.runs] == ["A static scale that is…"]
    assert trainer.present_name.endswith(", fixed")
    trainer.undo()
    assert trainer.wait(60)
    assert player.play == seen
    assert trainer.config == SCENARIOS["static-scale"].config
    trainer.reset()
    assert trainer.wait(60)
    assert player.play.stage == "left"


def test_a_scenario_begins_at_step_0_whatever_was_trained_before(trainer: Trainer) -> None:
    trainer.run(30)
    player = Player(trainer, SCENARIOS["first-overflow"])
    steps = []
    trainer.subscribe(lambda _: steps.append(player.steps_done))
    player.start()
    assert player.steps_done < 30
    assert trainer.wait(60)
    assert steps[0] == 0
    assert steps == sorted(steps)
