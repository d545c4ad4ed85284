"""ExperimentConfig: its string both ways, its sentences, its changes."""

import re
from enum import Enum, IntEnum, StrEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amplab.amp import explain_override
from amplab.lab import FIELDS, LEVELS, LIVE_FIELDS, OVERRIDES, ExperimentConfig
from amplab.lab.config_field import Change, SettingRefused, spell
from amplab.lab.levels import why_no_override

SCALES = st.integers(-126, 127).map(lambda power: 2.0**power) | st.floats(1e-6, 1e30)


@st.composite
def configs(draw: st.DrawFn) -> ExperimentConfig:
    level = draw(st.sampled_from(list(LEVELS)))
    floor, init, ceiling = sorted(draw(st.tuples(SCALES, SCALES, SCALES)))
    growth = {
        "init_scale": init,
        "growth_interval": draw(st.integers(1, 10**9)),
        "min_loss_scale": draw(st.none() | st.just(floor)),
        "max_loss_scale": ceiling,
    }
    loss_scale = draw(st.none() | st.just("dynamic") | SCALES)
    flags = {
        name: None if why_no_override(level, name) else draw(st.none() | st.booleans())
        for name in ("keep_batchnorm_fp32", "master_weights")
    }
    return ExperimentConfig(
        model=draw(st.sampled_from(["mlp", "cnn"])),
        hidden=draw(st.integers(1, 8192)),
        opt_level=level,
        optimizer=draw(st.sampled_from(["sgd", "adam", "adamw"])),
        lr=draw(st.none() | st.floats(1e-9, 10)),
        momentum=draw(st.floats(0, 0.999)),
        batch_size=draw(st.integers(1, 65536)),
        seed=draw(st.integers(0, 2**63 - 1)),
        loss_scale=loss_scale,
        **(growth if loss_scale in (None, "dynamic") else {}),
        **flags,
    )


@given(configs())
def test_string_reads_back_as_the_same_config(config):
    assert ExperimentConfig.parse(str(config)) == config
    assert "\n" not in str(config)


class Loud:
    """What no string of a config may hold."""

    def __repr__(self):
        return "<loud>"

    __str__ = __repr__


class LoudInt(Loud, int):
    pass


class LoudFloat(Loud, float):
    pass


class LoudStr(Loud, str):
    pass


def disguises(value: object) -> list[object]:
    """Return values of subclasses of the type of one, as NumPy, enums and one's own code have them, that equal it."""
    match value:
        case bool() | None:
            return [value]
        case int():
            return [LoudInt(value), IntEnum("Named", {"member": value}).member]
        case float():
            return [np.float64(value), LoudFloat(value), Enum("Named", {"member": value}, type=float).member]
    named = [Enum("Named", {"member": value}, type=str).member, StrEnum("Named", {"member": value}).member]
    return [np.str_(value), LoudStr(value), *named]


@given(configs(), st.data())
def test_values_of_subclasses_are_kept_as_the_plain_values(config, data):
    values = {name: getattr(config, name) for name in FIELDS}
    given = {name: data.draw(st.sampled_from(disguises(value)), name) for name, value in values.items()}
    made = ExperimentConfig(**given)
    for each in (made, ExperimentConfig().changed(**given)):
        assert each == config
        assert str(each) == str(config)
        assert ExperimentConfig.parse(str(each)) == config
        assert {type(getattr(each, name)) for name in FIELDS} <= {str, int, float, bool, type(None)}
    if config.lr is not None:
        assert str(ExperimentConfig().with_rate(given["lr"])) == str(ExperimentConfig().with_rate(config.lr))


@pytest.mark.parametrize("name", FIELDS)
def test_the_default_of_each_field_may_come_as_a_value_of_a_subclass(name):
    default = getattr(ExperimentConfig(), name)
    chosen = {"lr": 1, "loss_scale": "dynamic", "float32_ops": "linear", "float32_modules": "0"}.get(name, default)
    for each in disguises(chosen):
        config = ExperimentConfig(**{name: each})
        assert config == ExperimentConfig.parse(str(config)) == ExperimentConfig(**{name: chosen})
        assert repr(config) == repr(ExperimentConfig(**{name: chosen}))


def test_a_whole_number_of_a_number_field_is_kept_as_a_float():
    config = ExperimentConfig(lr=1, init_scale=2**70 + 1, max_loss_scale=2**71)
    assert str(config) == "amplab/1 task=digits model=mlp opt_level=O1 lr=1 init_scale=2**70 max_loss_scale=2**71"
    assert type(config.lr) is float


def test_string_names_the_three_and_what_differs():
    assert str(ExperimentConfig()) == "amplab/1 task=digits model=mlp opt_level=O1"
    assert (
        str(ExperimentConfig(model="cnn", opt_level="O2", lr=0.05, init_scale=2.0**20, master_weights=False))
        == "amplab/1 task=digits model=cnn opt_level=O2 lr=0.05 init_scale=2**20 master_weights=false"
    )


def test_parse_takes_the_spellings_people_use():
    config = ExperimentConfig.parse("amplab/1  init_scale=2^20 growth_interval=1e3 min_loss_scale=none")
    assert (config.init_scale, config.growth_interval) == (2.0**20, 1000)
    assert ExperimentConfig.parse("amplab/1 loss_scale=128").loss_scale == 128
    assert config.min_loss_scale is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"task": "mnist"}, "task=mnist:"),
        ({"model": "resnet"}, "model=resnet:"),
        ({"opt_level": "O4"}, "opt_level=O4:"),
        ({"opt_level": "01"}, "opt_level=01:"),
        ({"optimizer": "lion"}, "optimizer=lion:"),
        ({"hidden": 0}, "hidden=0:"),
        ({"hidden": 12.5}, "hidden=12.5:"),
        ({"hidden": np.int64(4)}, "hidden=np.int64(4):"),
        ({"hidden": True}, "hidden=true:"),
        ({"lr": 0}, "lr=0:"),
        ({"lr": float("nan")}, "lr=nan:"),
        ({"lr": 1e39}, "lr=1e+39:"),
        ({"lr": 10**400}, f"lr=1{'0' * 39}…: expected a number > 0 and at most 2**127"),
        ({"momentum": 1.0}, "momentum=1:"),
        ({"loss_scale": -1}, "loss_scale=-1:"),
        ({"loss_scale": 0.0}, "loss_scale=0:"),
        ({"loss_scale": "big"}, "loss_scale=big:"),
        ({"loss_scale": "128"}, "loss_scale=128:"),
        ({"init_scale": float("inf")}, "init_scale=inf:"),
        ({"max_loss_scale": None}, "max_loss_scale=none:"),
        ({"growth_interval": 0}, "growth_interval=0:"),
        ({"seed": -1}, "seed=-1:"),
        ({"keep_batchnorm_fp32": "yes"}, "keep_batchnorm_fp32=yes:"),
        ({"min_loss_scale": 256.0, "max_loss_scale": 128.0}, "min_loss_scale=256: expected at most max_loss_scale=128"),
        ({"max_loss_scale": 2.0**10}, "init_scale=2**16: expected at most max_loss_scale=2**10"),
        ({"min_loss_scale": 2.0**20}, "min_loss_scale=2**20: expected at most init_scale=2**16"),
        ({"loss_scale": 128.0, "growth_interval": 20}, "growth_interval=20 with loss_scale=128: a static scale"),
    ],
)
def test_values_out_of_range_are_refused(fields, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        ExperimentConfig(**fields)


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_senseless_override_is_refused_with_the_reason_of_amp(level):
    reason = explain_override(level, "keep_batchnorm_fp32")
    if reason is None:
        ExperimentConfig(opt_level=level, keep_batchnorm_fp32=True)
        return
    with pytest.raises(ValueError, match=re.escape(f"keep_batchnorm_fp32=true with opt_level={level}: {reason}")):
        ExperimentConfig(opt_level=level, keep_batchnorm_fp32=True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "expected a config string"),
        ("task=digits", "expected a config string"),
        ("amplab/2 task=digits", "config of version 2 (amplab/2)"),
        ("amplab/1 opt_levle=O2", "did you mean opt_level?"),
        ("amplab/1 qqq=1", "qqq:"),
        ("amplab/1 O2", "'O2': expected"),
        ("amplab/1 seed=1 seed=2", "'seed=2': seed is given twice"),
        ("amplab/1 init_scale=2**2000", "init_scale=2**2000:"),
        ("amplab/1 opt_level=01", "opt_level=01:"),
        ("amplab/1 hidden=wide", "hidden=wide:"),
        ("amplab/1 opt_level=O1 master_weights=true", "master_weights=true with opt_level=O1: "),
    ],
)
def test_strings_that_parse_refuses(text, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        ExperimentConfig.parse(text)


def test_parse_takes_strings_alone():
    with pytest.raises(TypeError, match=r"^None:"):
        ExperimentConfig.parse(None)


def test_learning_rate_follows_the_optimizer_unless_given():
    assert ExperimentConfig().learning_rate == 0.1
    assert ExperimentConfig().changed(optimizer="adam").learning_rate == 0.005
    assert ExperimentConfig(lr=0.02).changed(optimizer="adam").learning_rate == 0.02


@pytest.mark.parametrize(("level", "scale"), [("O0", 1.0), ("O1", "dynamic"), ("O2", "dynamic"), ("O3", 1.0)])
def test_loss_scale_is_the_levels_unless_given(level, scale):
    config = ExperimentConfig(opt_level=level)
    assert config.effective_loss_scale == scale
    assert config.is_dynamic == (scale == "dynamic")
    assert config.changed(loss_scale=128.0).effective_loss_scale == 128.0


def test_a_new_level_drops_what_makes_no_sense_there_unless_given_with_it():
    config = ExperimentConfig(opt_level="O2", keep_batchnorm_fp32=False, loss_scale=128.0)
    changed = config.changed(opt_level="O1")
    assert changed.keep_batchnorm_fp32 is None
    assert changed.loss_scale == 128.0
    with pytest.raises(ValueError, match="keep_batchnorm_fp32=false with opt_level=O1"):
        config.changed(opt_level="O1", keep_batchnorm_fp32=False)


def test_changed_refuses_unknown_fields():
    with pytest.raises(ValueError, match=r"loss_scal: .*did you mean loss_scale"):
        ExperimentConfig().changed(loss_scal=1)


def test_every_field_is_declared_in_words():
    assert list(FIELDS) == list(ExperimentConfig.__dataclass_fields__)
    for declared in FIELDS.values():
        assert declared.label
        assert declared.help
        assert declared.read(declared.example_text.partition("|")[0]) is not None
        assert f"{declared.name}: {declared.help}" in ExperimentConfig.__doc__


def test_what_a_change_requires():
    needing = {change: [name for name, each in FIELDS.items() if each.change is change] for change in Change}
    assert needing[Change.NEW_WEIGHTS] == ["task", "model", "hidden", "seed"]
    assert needing[Change.IN_PLACE] == ["lr", "momentum", "batch_size", "accumulate"]
    assert set(LIVE_FIELDS) == set(needing[Change.IN_PLACE] + needing[Change.NEW_SESSION])
    assert set(OVERRIDES) == {"loss_scale", "keep_batchnorm_fp32", "master_weights"}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"lr": -1}, "Learning rate: -1 is not allowed; enter a number above 0."),
        ({"hidden": 0}, "Hidden: 0 is not allowed; enter a whole number from 1 to 8,192."),
        ({"growth_interval": 2.5}, "window: 2.5 is not allowed; enter a whole number from 1 to 1,000,000,000."),
        ({"init_scale": "2**2000"}, "init: 2²⁰⁰⁰ is not allowed; enter an exponent of two from −126 to 127."),
        ({"max_loss_scale": None}, "ceiling: no value was entered; enter an exponent of two from −126 to 127."),
        ({"max_loss_scale": 1024.0}, "init 2¹⁶ is above ceiling 2¹⁰; lower init or raise ceiling first."),
        ({"min_loss_scale": 2.0**20}, "floor 2²⁰ is above init 2¹⁶; lower floor or raise init first."),
        (
            {"loss_scale": 128.0, "growth_interval": 20},
            "window 20 has no effect with a static loss scale of 2⁷; choose a dynamic loss scale first.",
        ),
        ({"master_weights": True}, f"master_weights: {explain_override('O1', 'master_weights')}"),
    ],
)
def test_a_refusal_has_a_sentence_with_the_labels_that_a_person_sees(changes, shown):
    with pytest.raises(SettingRefused) as refused:
        ExperimentConfig().changed(**changes)
    assert refused.value.shown == shown


def test_a_static_scale_drops_the_settings_of_a_dynamic_one_unless_given_with_it():
    dynamic = ExperimentConfig(growth_interval=20, init_scale=2.0**10)
    assert dynamic.changed(loss_scale=128.0) == ExperimentConfig(loss_scale=128.0)
    assert dynamic.changed(opt_level="O3").changed(opt_level="O1") == dynamic
    with pytest.raises(SettingRefused):
        dynamic.changed(loss_scale=128.0, growth_interval=10)
    with pytest.raises(SettingRefused):
        dynamic.changed(loss_scale=128.0).changed(growth_interval=10)


@given(st.floats(2.0**-126, 2.0**127))
def test_spelt_scales_read_back_exactly(scale):
    assert FIELDS["init_scale"].read(spell(scale)) == scale
