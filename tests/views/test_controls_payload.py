"""The controls' payload: what is offered, what is greyed and why, and values that come back from the page."""

import json

import pytest

from amplab.amp import OPT_LEVELS, explain_override
from amplab.lab import ExperimentConfig
from amplab.views.controls_payload import BOOLEAN_OVERRIDES, controls_payload, field_value

LEVELS = list(OPT_LEVELS)


def payload(config: ExperimentConfig) -> dict:
    return controls_payload(config, state="ready", refusal=None, shrinking=False, armed=[])


@pytest.mark.parametrize("level", LEVELS)
def test_an_override_is_greyed_with_the_reason_of_its_level(level: str) -> None:
    shown = payload(ExperimentConfig(opt_level=level))["overrides"]
    assert [each["reason"] for each in shown] == [explain_override(level, name) for name in BOOLEAN_OVERRIDES]
    assert all(each["value"] == "default" for each in shown)


def test_some_override_is_greyed_and_some_is_not() -> None:
    reasons = [each["reason"] for level in LEVELS for each in payload(ExperimentConfig(opt_level=level))["overrides"]]
    assert None in reasons
    assert any(reasons)


@pytest.mark.parametrize("level", LEVELS)
def test_every_payload_is_json_and_offers_each_level_with_one_line(level: str) -> None:
    shown = payload(ExperimentConfig(opt_level=level))
    assert json.loads(json.dumps(shown)) == shown
    assert [each["name"] for each in shown["levels"]] == LEVELS
    assert all(each["line"] and "\n" not in each["line"] + each["brief"] for each in shown["levels"])


def test_the_text_is_the_config_that_can_be_parsed_back() -> None:
    config = ExperimentConfig(opt_level="O2", master_weights=False, init_scale=2.0**20)
    shown = payload(config)
    assert ExperimentConfig.parse(shown["text"]) == config
    assert shown["overrides"][1]["value"] == "false"


@pytest.mark.parametrize(
    ("changes", "mode", "dynamic", "fixed"),
    [
        ({}, "level", True, None),
        ({"opt_level": "O3"}, "level", False, 1.0),
        ({"opt_level": "O3", "loss_scale": "dynamic"}, "dynamic", True, None),
        ({"loss_scale": 128.0}, "static", False, 128.0),
    ],
)
def test_the_loss_scale_says_who_decides_it(changes: dict, mode: str, dynamic: bool, fixed: float | None) -> None:
    scale = payload(ExperimentConfig(**changes))["scale"]
    assert (scale["mode"], scale["dynamic"], scale["fixed"]) == (mode, dynamic, fixed)


def test_the_learning_rate_is_the_one_in_effect() -> None:
    assert payload(ExperimentConfig(optimizer="adam"))["lr"] == ExperimentConfig(optimizer="adam").learning_rate


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
