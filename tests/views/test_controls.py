"""The controls: what they offer, what they disable and why, and what the page's messages do to a real trainer."""

import json

import pytest
from long_step import busy

from amplab import lab
from amplab.lab import FIELDS, ExperimentConfig, Trainer
from amplab.lab.config import OVERRIDES
from amplab.lab.levels import why_no_override
from amplab.views.controls import act, controls_payload, field_value
from amplab.views.messages import refusal

LEVELS = list(lab.LEVELS)


def payload(config: ExperimentConfig) -> dict:
    return controls_payload(config, state="ready", refusal=None, shrinking=False, armed=[])


@pytest.mark.parametrize("level", LEVELS)
def test_an_override_is_disabled_with_the_reason_of_its_level(level: str) -> None:
    fields = payload(ExperimentConfig(opt_level=level))["fields"]
    for name, field in fields.items():
        assert field["reason"] == (why_no_override(level, name) if name in OVERRIDES else None)
        assert (field["value"] is None) or name not in OVERRIDES


def test_some_override_is_disabled_and_some_is_not() -> None:
    fields = [payload(ExperimentConfig(opt_level=level))["fields"][name] for level in LEVELS for name in OVERRIDES]
    reasons = [field["reason"] for field in fields]
    assert None in reasons
    assert any(reasons)


def test_every_field_has_its_declared_label_and_a_reset_is_announced() -> None:
    fields = payload(ExperimentConfig())["fields"]
    assert {name: field["label"] for name, field in fields.items()} == {n: each.label for n, each in FIELDS.items()}
    announced = {name for name, field in fields.items() if "starts over" in field["title"]}
    assert announced == {"task", "model", "hidden", "seed"}


@pytest.mark.parametrize("level", LEVELS)
def test_every_payload_is_json_and_offers_each_level_with_one_line(level: str) -> None:
    shown = payload(ExperimentConfig(opt_level=level))
    assert json.loads(json.dumps(shown)) == shown
    assert [each["name"] for each in shown["levels"]] == LEVELS
    assert all(each["line"] and "\n" not in each["line"] + each["brief"] for each in shown["levels"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"opt_level": "O3"}, "without master weights"),
        ({"opt_level": "O3", "master_weights": True}, "BatchNorm too; the optimizer steps float32 master weights"),
        ({"opt_level": "O3", "keep_batchnorm_fp32": True}, "except BatchNorm; the optimizer steps the float16 weights"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": False}, "BatchNorm too; the optimizer steps float32 master"),
        ({"opt_level": "O2", "master_weights": False}, "except BatchNorm; the optimizer steps the float16 weights"),
        ({"opt_level": "O2", "master_weights": True}, "except BatchNorm; the optimizer steps float32 master weights"),
    ],
)
def test_the_line_of_a_level_says_what_its_overrides_make_of_it(changes: dict, said: str) -> None:
    shown = payload(ExperimentConfig(**changes))
    lines = {each["name"]: each["line"] for each in shown["levels"]}
    assert said in lines[changes["opt_level"]]
    others = {each["name"]: each["line"] for each in payload(ExperimentConfig())["levels"]}
    assert all(lines[name] == others[name] for name in lines if name != changes["opt_level"])


@pytest.mark.parametrize("level", ["O1", "autocast-fp16"])
def test_what_is_said_of_batchnorm_is_what_its_op_does(level: str) -> None:
    reason = payload(ExperimentConfig(opt_level=level))["fields"]["keep_batchnorm_fp32"]["reason"]
    assert "weights and statistics stay float32" in reason
    experiment = lab.Experiment(ExperimentConfig(model="cnn", opt_level=level, hidden=16))
    norm = next(each for each in experiment.trace().records if each.op == "batch_norm" and each.inputs)
    assert str(norm.inputs[0].dtype) == "torch.float16"
    assert {str(value.dtype) for name, value in experiment.model.state_dict().items() if "norm" in name} <= {
        "torch.float32",
        "torch.int64",
    }


def test_the_text_is_the_config_that_can_be_parsed_back() -> None:
    config = ExperimentConfig(opt_level="O2", master_weights=False, init_scale=2.0**20)
    shown = payload(config)
    assert ExperimentConfig.parse(shown["text"]) == config
    assert shown["fields"]["master_weights"]["value"] is False
    assert [False, "False"] in shown["fields"]["master_weights"]["options"]


@pytest.mark.parametrize(
    ("changes", "mode", "fixed"),
    [
        ({}, "level", None),
        ({"opt_level": "O3"}, "level", 1.0),
        ({"opt_level": "O3", "loss_scale": "dynamic"}, "dynamic", None),
        ({"loss_scale": 128.0}, "static", 128.0),
    ],
)
def test_the_loss_scale_says_who_decides_it(changes: dict, mode: str, fixed: float | None) -> None:
    scale = payload(ExperimentConfig(**changes))["scale"]
    assert (scale["mode"], scale["fixed"]) == (mode, fixed)


def test_the_learning_rate_is_the_one_in_effect() -> None:
    config = ExperimentConfig(optimizer="adam")
    assert payload(config)["fields"]["lr"]["value"] == config.learning_rate


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("growth_interval", 50.0, 50),
        ("growth_interval", 2.5, 2.5),  # left for ExperimentConfig to refuse
        ("lr", 1, 1.0),
        ("max_loss_scale", 65536, 65536.0),
        ("min_loss_scale", None, None),
        ("master_weights", True, True),
        ("loss_scale", "dynamic", "dynamic"),
    ],
)
def test_numbers_from_the_page_get_the_fields_type(name: str, value: object, field: object) -> None:
    found = field_value(name, value)
    assert found == field
    assert type(found) is type(field)


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


def test_a_field_that_needs_new_weights_resets_the_run_which_continues(trainer: Trainer, until) -> None:
    act(trainer, {"type": "start"})
    until(lambda: len(trainer.history) > 3)
    old = trainer.history
    act(trainer, change("model", "cnn"))
    until(lambda: trainer.history is not old and len(trainer.history) > 3)
    assert trainer.config.model == "cnn"
    assert trainer.config.hidden == 16
    assert trainer.state == "running"


def test_a_rate_that_is_typed_after_a_change_of_the_optimizer_is_kept(trainer: Trainer) -> None:
    """Also where it is the usual one of the optimizer before, and the change of that waits for a long step."""
    typed = trainer.config.usual_learning_rate
    with busy(trainer):
        act(trainer, change("optimizer", "adam"))
        act(trainer, change("lr", typed))
    assert trainer.wait(10)
    assert (trainer.config.optimizer, trainer.config.learning_rate) == ("adam", typed)


@pytest.mark.parametrize("before", [change("opt_level", "O2"), {"type": "inject", "kind": "underflow"}])
def test_undo_takes_back_a_speed_that_was_set_while_a_change_waits(trainer: Trainer, before: dict) -> None:
    with busy(trainer):
        act(trainer, before)
        act(trainer, {"type": "speed", "value": 100.0})
        act(trainer, {"type": "undo"})
    assert trainer.wait(10)
    assert trainer.speed is None
    assert (trainer.config.opt_level, trainer.shrinking) in (("O2", False), ("O1", True))


@pytest.mark.parametrize("again", [20, 100])
def test_a_speed_that_is_set_while_an_undo_waits_is_kept(trainer: Trainer, again: float) -> None:
    act(trainer, {"type": "speed", "value": 20})
    with busy(trainer):
        act(trainer, {"type": "undo"})
        act(trainer, {"type": "speed", "value": again})
        assert trainer.speed == again
    assert trainer.wait(10)
    assert (trainer.speed, trainer.last_change) == (again, f"Speed: {again} steps/s")
    act(trainer, {"type": "undo"})
    assert trainer.wait(10)
    assert (trainer.speed, trainer.last_change) == (None, None)


@pytest.mark.parametrize(
    "changed",
    [
        lambda kept: kept.rename(1, "another"),
        lambda kept: kept.show(1, is_shown=False),
        lambda kept: kept.remove(1),
    ],
    ids=["rename", "hide", "remove"],
)
def test_undo_takes_back_what_was_done_to_a_kept_run_while_a_change_waits(trainer: Trainer, changed) -> None:
    trainer.run(1)
    trainer.reset()
    assert trainer.wait(10)
    with busy(trainer):
        act(trainer, change("lr", 0.5))
        changed(trainer.kept)
        act(trainer, {"type": "undo"})
    assert trainer.wait(10)
    (run,) = trainer.kept.runs
    assert (run.name, run.is_shown, trainer.config.lr) == ("Run 1", True, 0.5)


def test_runs_that_are_removed_while_an_undo_waits_come_back_at_their_places(trainer: Trainer) -> None:
    for _ in range(2):
        trainer.run(1)
        trainer.reset()
    assert trainer.wait(10)
    with busy(trainer):
        trainer.kept.remove(1)
        act(trainer, {"type": "undo"})
        trainer.kept.remove(2)
        act(trainer, {"type": "undo"})
    assert trainer.wait(10)
    assert [run.name for run in trainer.kept.runs] == ["Run 1", "Run 2"]


def test_a_rate_that_is_typed_while_an_undo_waits_is_kept(trainer: Trainer) -> None:
    act(trainer, change("optimizer", "adam"))
    assert trainer.wait(10)
    with busy(trainer):
        act(trainer, {"type": "undo"})
        act(trainer, change("lr", trainer.config.usual_learning_rate))
    typed = ExperimentConfig(optimizer="adam").usual_learning_rate
    assert trainer.wait(10)
    assert (trainer.config.optimizer, trainer.config.learning_rate) == ("sgd", typed)


@pytest.mark.parametrize("before", [change("momentum", 0.5), {"type": "undo"}], ids=["change", "undo"])
def test_the_usual_rate_that_is_typed_while_a_control_waits_is_the_default(trainer: Trainer, before: dict) -> None:
    with busy(trainer):
        act(trainer, before)
        act(trainer, change("lr", trainer.config.usual_learning_rate))
    assert trainer.wait(10)
    assert trainer.config.lr is None
    act(trainer, change("optimizer", "adam"))
    assert trainer.wait(10)
    assert trainer.config.learning_rate == trainer.config.usual_learning_rate


def test_undo_shows_no_change_to_a_default_that_is_named(trainer: Trainer) -> None:
    trainer.change(lr=trainer.config.usual_learning_rate)
    assert trainer.wait(10)
    assert trainer.config.lr is not None
    assert trainer.last_change is None


def test_the_default_is_that_of_the_optimizer_that_is_wanted(trainer: Trainer) -> None:
    with busy(trainer):
        act(trainer, change("optimizer", "adam"))
        act(trainer, change("lr", 0.5))
        act(trainer, {"type": "default", "field": "lr"})
    assert trainer.wait(10)
    assert trainer.config == ExperimentConfig(hidden=16, optimizer="adam")


def test_run_n_steps_pauses_after_them(trainer: Trainer) -> None:
    assert act(trainer, {"type": "run", "steps": 7.0}) is None
    assert trainer.wait(20)
    assert (trainer.state, len(trainer.history)) == ("paused", 7)


def test_a_run_of_n_steps_that_starts_over_makes_all_of_them(trainer: Trainer, until) -> None:
    act(trainer, {"type": "speed", "value": 20})
    act(trainer, {"type": "run", "steps": 7})
    until(lambda: len(trainer.history) > 2)
    for field, value in (("hidden", 24), ("seed", 1)):
        assert act(trainer, change(field, value)) is None
    assert trainer.wait(20)
    assert (trainer.state, len(trainer.history), trainer.config.seed) == ("paused", 7, 1)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (None, "N steps: no number was entered; "),
        ("not a number", "N steps: not a number is not allowed; "),
        *((steps, f"{steps} steps: ") for steps in (0, -3, 2.5)),
    ],
)
def test_run_n_steps_refuses_what_is_not_a_number_of_steps(trainer: Trainer, steps: object, said: str) -> None:
    message = {"type": "run", "steps": steps}
    assert refusal("controls", message) is None
    assert act(trainer, message) == f"Run {said}expected a whole number > 0, such as 100."
    assert trainer.state == "ready"


def test_the_speed_is_set_and_shown(trainer: Trainer) -> None:
    assert act(trainer, {"type": "speed", "value": 5}) is None
    shown = controls_payload(
        trainer.config, state="ready", refusal=None, shrinking=False, armed=[], speed=trainer.speed
    )
    assert shown["speed"] == 5
    act(trainer, {"type": "speed", "value": None})
    assert trainer.speed is None


def test_a_fault_goes_into_the_next_step(trainer: Trainer) -> None:
    act(trainer, {"type": "inject", "kind": "overflow"})
    trainer.run(1)
    assert trainer.history.last.skipped
    assert trainer.history.last.injected == "overflow"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (change("lr", -1), "Learning rate: -1 is not allowed; enter a number above 0."),
        (change("lr", None), "Learning rate: no value was entered; enter a number above 0."),
        (change("loss_scale", "none"), "Loss scale: no value was entered; enter an exponent of two from −126 to 127."),
        (change("min_loss_scale", "not a number"), "floor: not a number is not allowed; enter an exponent of two"),
        (change("growth_interval", 2.5), "window: 2.5 is not allowed"),
        (change("min_loss_scale", 2.0**30), "floor 2³⁰ is above ceiling 2²⁴"),
        (change("max_loss_scale", 2.0**10), "init 2¹⁶ is above ceiling 2¹⁰; lower init or raise ceiling first."),
        (change("batch_size", 5000), "Batch size: 5000 is not allowed; expected at most 1437"),
        (change("master_weights", True), "need no masters"),
        (change("model", "transformer"), "Model transformer does not fit Task digits; choose MLP or CNN."),
        ({"type": "inject", "kind": "fire"}, "choose from overflow"),
    ],
)
def test_a_refusal_is_a_sentence_and_changes_nothing(trainer: Trainer, message: dict, said: str) -> None:
    before = trainer.config
    assert said in act(trainer, message)
    trainer.wait(10)
    assert trainer.config == before


def test_each_field_that_differs_offers_its_default_in_words() -> None:
    config = ExperimentConfig(opt_level="O2", optimizer="adam", lr=0.1, init_scale=2.0**20, master_weights=False)
    backs = {name: field["back"] for name, field in payload(config)["fields"].items() if field["back"] is not None}
    assert backs == {
        "opt_level": "O1",
        "optimizer": "SGD",
        "lr": "0.005",
        "init_scale": "2¹⁶",
        "master_weights": "by O2",
    }
    assert payload(ExperimentConfig(lr=0.1))["fields"]["lr"]["back"] is None, "it is the rate in effect by default"


def test_a_field_goes_back_to_its_default_and_undo_restores_the_exact_config(trainer: Trainer) -> None:
    changed = trainer.config.changed(opt_level="O2", lr=1e9, init_scale=2.0**20, master_weights=False)
    trainer.change(opt_level="O2", lr=1e9, init_scale=2.0**20, master_weights=False)
    for name in ("lr", "init_scale", "opt_level"):
        assert act(trainer, {"type": "default", "field": name}) is None
    trainer.wait(10)
    assert trainer.config == ExperimentConfig(hidden=16)  # O1 dropped master_weights
    for _ in range(3):
        act(trainer, {"type": "undo"})
    trainer.wait(10)
    assert trainer.config == changed
    assert act(trainer, {"type": "defaults"}) is None
    trainer.wait(10)
    assert trainer.config == ExperimentConfig(hidden=16), "the model stays"
    act(trainer, {"type": "undo"})
    trainer.wait(10)
    assert trainer.config == changed


def test_the_default_rate_as_it_is_typed_is_the_default(trainer: Trainer) -> None:
    for typed, named in ((0.05, True), (0.1, False)):
        act(trainer, change("lr", typed))
        trainer.wait(10)
        assert trainer.config.learning_rate == typed
        assert ("lr=" in payload(trainer.config)["text"]) == named


def test_a_reset_starts_from_the_values_that_are_shown(trainer: Trainer) -> None:
    act(trainer, {"type": "reset"})
    assert act(trainer, change("max_loss_scale", 2.0**10)) is not None
    assert act(trainer, change("max_loss_scale", 2.0**20)) is None
    act(trainer, change("init_scale", 2.0**18))
    trainer.run(1)
    shown = payload(trainer.config)["fields"]
    assert trainer.history.record(0).loss_scale == shown["init_scale"]["value"] == 2.0**18
    act(trainer, change("lr", 1e9))
    act(trainer, {"type": "reset"})
    trainer.wait(10)
    assert payload(trainer.config)["fields"]["lr"]["back"] == "0.1", "the rate stays, and the page says that it differs"


def test_a_stopped_run_says_what_to_do(trainer: Trainer) -> None:
    trainer.stop()
    assert act(trainer, {"type": "start"}) == "The run has stopped; press Reset to start again."


def test_an_unknown_message_is_a_mistake_of_ours(trainer: Trainer) -> None:
    with pytest.raises(KeyError):
        act(trainer, {"type": "explode"})
