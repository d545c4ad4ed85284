"""The table of properties, every refusal of an override, and the advice about overrides."""

import pytest
import torch

from amplab.amp import OPT_LEVELS, OptProperties, explain_override
from amplab.amp.apex.opt_levels import opt_level_named
from amplab.amp.arguments import scale_value

LEVELS = ("O0", "O1", "O2", "O3")


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", (True, "O0", torch.float32, False, None, False, 1.0)),
        ("O1", (True, "O1", None, True, None, None, "dynamic")),
        ("O2", (True, "O2", torch.float16, False, True, True, "dynamic")),
        ("O3", (True, "O3", torch.float16, False, False, False, 1.0)),
    ],
)
def test_defaults_of_the_level(level, expected):
    assert OPT_LEVELS[level].properties == OptProperties(*expected)


def test_everything_is_off_without_a_level():
    assert OptProperties() == OptProperties(False, None, None, False, None, None, 1.0)


def test_levels_explain_themselves_in_one_line():
    assert list(OPT_LEVELS) == list(LEVELS)
    for level in OPT_LEVELS.values():
        assert level.explanation.endswith(".")
        assert "\n" not in level.explanation


@pytest.mark.parametrize("name", ["O4", "00", "o1", "", 1, None, ["O1"]])
def test_other_levels_are_refused(name):
    with pytest.raises(RuntimeError) as refusal:
        opt_level_named(name)
    assert str(refusal.value) == (
        f"Unexpected optimization level {name}. Options are 'O0', 'O1', 'O2', 'O3'.  "
        "Note that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero."
    )


ACCEPTED = [
    *((level, "cast_model_type", False, False) for level in LEVELS),
    *((level, "cast_model_type", torch.float32, torch.float32) for level in LEVELS),
    *((level, "cast_model_type", torch.bfloat16, torch.bfloat16) for level in ("O0", "O2", "O3")),
    ("O1", "patch_torch_functions", False, False),
    ("O1", "patch_torch_functions", True, True),
    ("O2", "patch_torch_functions", False, False),
    *((level, "keep_batchnorm_fp32", "True", True) for level in ("O0", "O2", "O3")),
    *((level, "keep_batchnorm_fp32", "False", False) for level in ("O0", "O2", "O3")),
    *((level, "keep_batchnorm_fp32", True, True) for level in ("O0", "O2", "O3")),
    *((level, "master_weights", value, value) for level in ("O0", "O2", "O3") for value in (True, False)),
    *((level, "loss_scale", "dynamic", "dynamic") for level in LEVELS),
    *((level, "loss_scale", "128.0", 128.0) for level in LEVELS),
    ("O2", "loss_scale", 3, 3.0),
]


@pytest.mark.parametrize(("level", "name", "value", "taken"), ACCEPTED)
def test_override_is_taken(level, name, value, taken):
    properties = OPT_LEVELS[level].properties.with_overrides(**{name: value})
    assert getattr(properties, name) == taken
    assert type(getattr(properties, name)) is type(taken)


@pytest.mark.parametrize("level", LEVELS)
def test_none_overrides_nothing(level):
    properties = OPT_LEVELS[level].properties
    assert properties.with_overrides(cast_model_type=None, master_weights=None, loss_scale=None) == properties


KEEP_BN = "keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, found keep_batchnorm_fp32={}"
O1_CAST = (
    "O1 inserts casts around Torch functions rather than model weights, so with O1, the model weights themselves "
    "should remain FP32. If you wish to cast the model to a different type, use opt_level='O2' or 'O3'. "
    "cast_model_type was {}"
)
O1_MASTERS = "It doesn't make sense to use master_weights with O1. With O1, your model weights themselves should"
PATCH = "Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'."
O1_KEEP_BN = "so keep_batchnorm_fp32 should be None. keep_batchnorm_fp32 was {}"

REFUSED = [
    *(("O1", "cast_model_type", dtype, RuntimeError, O1_CAST) for dtype in (torch.float16, torch.bfloat16, True)),
    ("O2", "cast_model_type", "half", TypeError, "cast_model_type='half': expected a torch.dtype"),
    ("O3", "cast_model_type", torch.float64, ValueError, "cast_model_type=torch.float64: expected torch.float16"),
    ("O0", "cast_model_type", torch.int8, ValueError, "cast_model_type=torch.int8: expected torch.float16"),
    *((level, "patch_torch_functions", True, RuntimeError, PATCH) for level in ("O0", "O2", "O3")),
    *(("O1", "keep_batchnorm_fp32", value, RuntimeError, O1_KEEP_BN) for value in (True, False, "False")),
    *(("O2", "keep_batchnorm_fp32", value, AssertionError, KEEP_BN) for value in ("yes", 1, torch.float32)),
    *(("O1", "master_weights", value, RuntimeError, O1_MASTERS) for value in (True, False)),
    ("O1", "loss_scale", "foo", ValueError, "loss_scale='foo': expected \"dynamic\" or a number > 0"),
    ("O1", "loss_scale", [1], ValueError, 'loss_scale=[1]: expected "dynamic" or a number > 0'),
    *(("O2", "loss_scale", value, ValueError, 'loss_scale={!r}: expected "dynamic" or a') for value in (True, False)),
    *(
        ("O1", "loss_scale", value, ValueError, "loss_scale={!r}: expected a finite number > 0")
        for value in (0, -1.0, float("inf"), float("nan"), "-8")
    ),
]


@pytest.mark.parametrize(("level", "name", "value", "error", "message"), REFUSED)
def test_override_is_refused(level, name, value, error, message):
    with pytest.raises(error) as refusal:
        OPT_LEVELS[level].properties.with_overrides(**{name: value})
    assert message.format(value) in str(refusal.value)


def test_unknown_property_is_refused():
    with pytest.raises(TypeError, match=r"'keep_bn' is not .* enabled, opt_level, "):
        OptProperties().with_overrides(keep_bn=True)


def test_advice_covers_what_is_refused_at_each_level():
    refused = {(level, name) for level, name, _, error, _ in REFUSED if error is RuntimeError}
    assert refused <= {(level, name) for level in LEVELS for name in FIELDS if explain_override(level, name)}


FIELDS = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")


@pytest.mark.parametrize("level", LEVELS)
def test_loss_scale_makes_sense_everywhere(level):
    assert explain_override(level, "loss_scale") is None


@pytest.mark.parametrize(
    ("level", "name", "said"),
    [
        ("O0", "master_weights", "At O0 the weights are float32"),
        ("O1", "keep_batchnorm_fp32", "BatchNorm's weights and statistics stay float32"),
        ("O2", "master_weights", None),
        ("O3", "master_weights", None),
        ("O2", "keep_batchnorm_fp32", None),
        ("O3", "patch_torch_functions", "O1 casts around functions"),
    ],
)
def test_advice(level, name, said):
    advice = explain_override(level, name)
    assert advice is None if said is None else said in advice


def test_advice_about_nothing_is_refused():
    with pytest.raises(ValueError, match=r"'opt_level' is not .* one of cast_"):
        explain_override("O1", "opt_level")


def test_scale_value_names_its_argument():
    assert scale_value("init_scale", "1024") == 1024.0
    with pytest.raises(ValueError, match=r"^init_scale=0: expected a finite number > 0"):
        scale_value("init_scale", 0)
