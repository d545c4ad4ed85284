"""What lesson 04 measures of each level, and what its checks say to right and wrong answers."""

import pytest
import torch

from amplab.amp import OPT_LEVELS
from amplab.lessons.lesson_04 import (
    OVERRIDES,
    check_dtypes,
    check_o3_as_o2,
    check_one_override,
    climb,
    level_facts,
    level_picture,
    memory_of_levels,
    overrides,
    score_after,
    seconds_per_step,
)

LEVELS = tuple(OPT_LEVELS)
RIGHT_DTYPES = {"O1": ("float32",) * 3, "O2": ("float16", "float32", "float32"), "O3": ("float16",) * 3}


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_seen_at_a_level_is_what_its_properties_say(level: str) -> None:
    properties, rows = OPT_LEVELS[level].properties, level_facts(level).rows
    half_model = properties.cast_model_type is torch.float16
    assert (rows["weights of a convolution"] == "float16") == half_model
    assert (rows["weights of BatchNorm"] == "float16") == (half_model and not properties.keep_batchnorm_fp32)
    assert (rows["a convolution returns"] == "float16") == (half_model or bool(properties.patch_torch_functions))
    assert (rows["the optimizer updates"] == "float16") == (half_model and not properties.master_weights)
    assert rows["the loss"] == "float32"
    assert (rows["loss scale"] == "dynamic") == (properties.loss_scale == "dynamic")


def test_the_picture_says_what_differs_from_float32() -> None:
    assert repr(level_picture("O0")) == "O0: the baseline"
    assert "weights of BatchNorm: float16" in repr(level_picture("O3"))
    assert "weights of BatchNorm" not in repr(level_picture("O2"))
    shown = level_picture("O2")._repr_html_()
    assert "masters" in shown
    assert "<svg" in shown


def test_activations_are_halved_and_weights_are_cheaper_at_o3_only() -> None:
    counted = memory_of_levels()
    base = counted["O0"]
    assert base.activations is not None
    for level in ("O1", "O2", "O3"):
        found = counted[level]
        assert found.activations is not None
        assert 0.45 < found.activations / base.activations < 0.55
        weights = found.parameters + found.masters + found.weight_casts
        assert (weights < base.parameters) == (level == "O3")


def test_an_override_is_refused_where_initialize_raises() -> None:
    answers = overrides().answers
    assert answers["master_weights"] == {"O0": "no use", "O1": "refused", "O2": "accepted", "O3": "accepted"}
    assert answers["patch_torch_functions"]["O1"] == "accepted"
    assert set(answers["loss_scale"].values()) == {"accepted"}
    assert "refused" in repr(overrides())
    assert "<table" in overrides()._repr_html_()
    assert list(answers) == list(OVERRIDES)


def test_a_step_is_timed_at_every_level() -> None:
    seconds = seconds_per_step(width=16, batch=8, rounds=1)
    assert list(seconds) == list(LEVELS)
    assert min(seconds.values()) > 0


@pytest.mark.parametrize(("task", "rung"), [("pressure", "O1 with 128"), ("small-targets", "O1 dynamic")])
def test_each_task_of_the_ladder_stops_at_its_own_rung(task: str, rung: str) -> None:
    assert climb(task).recommended.name == rung


def test_a_task_that_bears_half_stops_at_the_first_rung() -> None:
    assert climb("digits", steps=30).recommended.name == "O2 with 128"


def test_a_score_is_that_of_held_out_data() -> None:
    assert score_after(25, opt_level="O0") > score_after(25, opt_level="O0", lr=1e-9)


def test_the_dtypes_of_an_answer_are_compared_with_those_that_are_seen() -> None:
    assert check_dtypes(RIGHT_DTYPES).right
    assert "O2, weights of BatchNorm" in repr(check_dtypes({**RIGHT_DTYPES, "O2": ("float16",) * 3}))
    assert "lacks 'O3'" in repr(check_dtypes({"O1": RIGHT_DTYPES["O1"], "O2": RIGHT_DTYPES["O2"]}))
    assert "Not answered yet" in repr(check_dtypes({"O1": (..., ..., ...)}))  # type: ignore[dict-item]
    spelled = {level: tuple(getattr(torch, dtype) for dtype in row) for level, row in RIGHT_DTYPES.items()}
    assert check_dtypes(spelled).right
    assert check_dtypes({"O1": ["float"] * 3, "O2": ("half", "fp32", "torch.float"), "O3": ("torch.half",) * 3}).right
    assert "O1, weights of a convolution: it is not float16" in repr(
        check_dtypes({**RIGHT_DTYPES, "O1": ("half",) * 3})
    )
    assert "answer['O1'][0] = 'hlaf' is not a dtype" in repr(check_dtypes({**RIGHT_DTYPES, "O1": ("hlaf",) * 3}))
    assert "answer['O3'] = None is not 3 values" in repr(check_dtypes({**RIGHT_DTYPES, "O3": None}))  # type: ignore[dict-item]
    assert "has the key 'O4'" in repr(check_dtypes({**RIGHT_DTYPES, "O4": ("half",) * 3}))


def test_three_overrides_make_o3_the_same_as_o2() -> None:
    assert check_o3_as_o2({"keep_batchnorm_fp32": True, "master_weights": True, "loss_scale": "dynamic"}).right
    assert "loss_scale is 1.0" in repr(check_o3_as_o2({"keep_batchnorm_fp32": True, "master_weights": True}))
    assert "keep_batchnorm_fp32 is False" in repr(check_o3_as_o2({"master_weights": True}))
    assert "'O2' is not a dict" in repr(check_o3_as_o2("O2"))  # type: ignore[arg-type]
    assert "O3 refuses {'patch_torch_functions': True}" in repr(check_o3_as_o2({"patch_torch_functions": True}))
    assert "O3 refuses {'keep_batchnorm_fp32': None" not in repr(check_o3_as_o2({"keep_batchnorm_fp32": "yes"}))
    assert "'lr' is no property" in repr(check_o3_as_o2({"lr": 0.1}))


def test_one_override_mends_the_run_with_a_small_learning_rate() -> None:
    assert check_one_override({"master_weights": True}).right
    assert "too few" in repr(check_one_override({"loss_scale": "dynamic"}))
    assert "exactly one" in repr(check_one_override({"master_weights": True, "loss_scale": 128.0}))
    assert "True is not a dict" in repr(check_one_override(True))  # type: ignore[arg-type]
    assert "no property" in repr(check_one_override({"lr": 0.1}))
    for refused in ({"loss_scale": "x"}, {"loss_scale": -1}, {"keep_batchnorm_fp32": "maybe"}):
        assert f"O3 refuses {refused}: " in repr(check_one_override(refused))
    assert "another level" in repr(check_one_override({"cast_model_type": torch.float32}))


@pytest.mark.parametrize("check", [check_dtypes, check_o3_as_o2, check_one_override])
def test_an_exercise_without_an_answer_says_so(check: object) -> None:
    assert "Not answered yet" in repr(check(...))  # type: ignore[operator]
