"""The strip of scenarios without a page: every scenario is played, and mended, by the messages that the page sends."""

import pytest

from amplab.lab import ExperimentConfig, Trainer
from amplab.lab.scenarios import SCENARIOS
from amplab.views import Dashboard

pytestmark = pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped:UserWarning")


@pytest.fixture
def lab(trainer: Trainer, wire: list[dict]):
    made = Dashboard(trainer)
    tell(made._presenter.parts.live, type="hello", view="a")
    yield made
    made.close()


def tell(part, **message: object) -> None:
    """Deliver a message as the page sends it."""
    part._handle_custom_msg(message, [])


def gallery(lab: Dashboard):
    return lab._presenter.parts.gallery


def choose(lab: Dashboard, name: str, until) -> None:
    tell(gallery(lab), type="choose", name=name)
    until(lambda: gallery(lab).chosen.get("name") == name)


def stage(lab: Dashboard) -> str:
    return gallery(lab).chosen["stage"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_shows_what_it_promises_and_its_fix_mends_it(lab: Dashboard, until, name: str) -> None:
    scenario = SCENARIOS[name]
    choose(lab, name, until)
    assert gallery(lab).chosen["expect"] == scenario.expect
    until(lambda: stage(lab) not in ("playing", "left"))
    shown = gallery(lab).chosen
    assert shown["stage"] == "seen", (shown, lab.trainer.failures)
    assert shown["seen"]
    assert not set("{}–") & set(shown["seen"]), "every number was measured"
    assert lab.trainer.config == scenario.config
    assert lab.trainer.state != "running", "it stops where the effect is seen"
    injected = [record.step for record in lab.trainer.history.records() if record.injected]
    assert injected == [injection.step for injection in scenario.injections]
    assert (shown["fix"] is None) == (scenario.fix is None)
    if scenario.fix is None:
        return
    assert shown["fix"]["is_ready"]
    tell(gallery(lab), type="fix")
    until(lambda: stage(lab) in ("mended", "missed"))
    shown = gallery(lab).chosen
    assert shown["stage"] == "mended", (shown, lab.trainer.history.last)
    assert not set("{}–") & set(shown["fix"]["text"])
    assert lab.trainer.config == scenario.fixed_config
    assert not shown["fix"]["is_ready"]


def test_the_titles_are_there_before_anything_is_chosen(lab: Dashboard) -> None:
    assert [each["name"] for each in gallery(lab).scenarios] == list(SCENARIOS)
    assert gallery(lab).chosen == {}


def test_a_reset_by_the_person_ends_a_scenario_and_closing_leaves_the_run_alone(lab: Dashboard, until) -> None:
    choose(lab, "first-overflow", until)
    until(lambda: stage(lab) == "seen")
    tell(lab._presenter.parts.controls, type="reset")
    until(lambda: stage(lab) == "left")
    assert "reset" in gallery(lab).chosen["seen"] or gallery(lab).chosen["seen"]
    choose(lab, "first-overflow", until)
    until(lambda: stage(lab) == "seen")
    steps = len(lab.trainer.history)
    tell(gallery(lab), type="close")
    until(lambda: gallery(lab).chosen == {})
    assert len(lab.trainer.history) == steps


def test_a_changed_setting_can_keep_the_effect_away_and_the_strip_says_so(lab: Dashboard, until) -> None:
    lab.trainer.set_speed(20)  # slow enough to change it before the effect is there
    choose(lab, "overflow-spiral", until)
    tell(lab._presenter.parts.controls, type="change", field="opt_level", value="O1")
    until(lambda: lab.trainer.config.opt_level == "O1")
    lab.trainer.set_speed(None)
    until(lambda: stage(lab) == "missed")
    assert "setting" in gallery(lab).chosen["seen"]
    assert not gallery(lab).chosen["fix"]["is_ready"]
    tell(gallery(lab), type="again")
    until(lambda: stage(lab) == "seen")
    assert lab.trainer.config == SCENARIOS["overflow-spiral"].config


def test_a_fix_that_cannot_be_made_says_why(lab: Dashboard, until) -> None:
    choose(lab, "overflow-spiral", until)
    until(lambda: stage(lab) == "seen")
    lab.trainer.stop()
    tell(gallery(lab), type="fix")
    until(lambda: gallery(lab).chosen["fix"]["is_refused"])
    assert "stopped" in gallery(lab).chosen["fix"]["text"]
    assert stage(lab) == "seen"


def test_the_error_that_a_scenario_shows_is_in_the_strip_alone(lab: Dashboard, until) -> None:
    choose(lab, "bce", until)
    until(lambda: stage(lab) == "seen")
    settle(lab, until)
    assert "BCEWithLogitsLoss" in gallery(lab).chosen["seen"]
    assert lab._presenter.parts.notices.notices == []
    tell(gallery(lab), type="close")
    lab.trainer.reset()
    lab.trainer.start()
    until(lambda: lab._presenter.parts.notices.notices)  # without the scenario it is a message again


def settle(lab: Dashboard, until) -> None:
    """Wait until the trainer and the ticker have done all their jobs."""
    lab.trainer.wait()
    done: list[bool] = []
    lab._presenter._ticker.call(lambda: done.append(True))
    until(lambda: done)


def test_choosing_while_a_run_is_on_starts_the_scenario_from_its_own_first_step(trainer: Trainer, until) -> None:
    trainer.start()
    lab = Dashboard(trainer)
    tell(lab._presenter.parts.live, type="hello", view="a")
    until(lambda: len(trainer.history) > 20)
    choose(lab, "first-overflow", until)
    until(lambda: stage(lab) == "seen")
    alone = Trainer(ExperimentConfig())
    alone.reset(SCENARIOS["first-overflow"].config)
    alone.run(len(trainer.history))
    assert trainer.history.column("loss").tolist() == alone.history.column("loss").tolist(), "watching changes nothing"
    lab.close()
