"""Messages of the page, carried out on a real trainer; refusals come back as sentences."""

import pytest

from amplab.lab import Trainer
from amplab.views.actions import act


def change(field: str, value: object) -> dict:
    return {"type": "change", "field": field, "value": value}


def test_the_buttons_of_a_run(trainer: Trainer, until) -> None:
    assert act(trainer, {"type": "step"}) is None
    until(lambda: len(trainer.history) == 1)
    act(trainer, {"type": "start"})
    until(lambda: len(trainer.history) > 5)
    act(trainer, {"type": "pause"})
    trainer.wait(10)
    assert trainer.state == "paused"
    act(trainer, {"type": "reset"})
    trainer.wait(10)
    assert (trainer.state, len(trainer.history)) == ("ready", 0)


def test_a_level_changes_while_it_runs(trainer: Trainer, until) -> None:
    act(trainer, {"type": "start"})
    until(lambda: len(trainer.history) > 3)
    assert act(trainer, change("opt_level", "O2")) is None
    until(lambda: trainer.history.last.opt_level == "O2")
    assert trainer.state == "running"
    assert trainer.history.record(0).opt_level == "O1"


def test_a_field_that_needs_new_weights_begins_anew_and_runs_on(trainer: Trainer, until) -> None:
    act(trainer, {"type": "start"})
    until(lambda: len(trainer.history) > 3)
    old = trainer.history
    act(trainer, change("model", "cnn"))
    until(lambda: trainer.history is not old and len(trainer.history) > 3)
    assert trainer.config.model == "cnn"
    assert trainer.config.hidden == 16
    assert trainer.state == "running"


def test_a_fault_goes_into_the_next_step(trainer: Trainer) -> None:
    act(trainer, {"type": "inject", "kind": "overflow"})
    trainer.run(1)
    assert trainer.history.last.skipped
    assert trainer.history.last.injected == "overflow"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (change("lr", -1), "lr=-1: expected a number > 0"),
        (change("growth_interval", 2.5), "growth_interval=2.5"),
        (change("min_loss_scale", 2.0**30), "at most max_loss_scale=2**24"),
        (change("master_weights", True), "need no masters"),
        (change("model", "transformer"), "one of mlp, cnn"),
        ({"type": "inject", "kind": "fire"}, "choose from overflow"),
    ],
)
def test_a_refusal_is_a_sentence_and_changes_nothing(trainer: Trainer, message: dict, said: str) -> None:
    before = trainer.config
    assert said in act(trainer, message)
    trainer.wait(10)
    assert trainer.config == before


def test_a_stopped_run_says_what_to_do(trainer: Trainer) -> None:
    trainer.stop()
    assert "reset()" in act(trainer, {"type": "start"})


def test_an_unknown_message_is_a_mistake_of_ours(trainer: Trainer) -> None:
    with pytest.raises(KeyError):
        act(trainer, {"type": "explode"})
