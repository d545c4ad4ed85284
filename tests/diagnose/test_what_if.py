"""A recorded run under other rules, held against real runs that were trained under these rules."""

import math

import numpy as np
import pytest
import torch
from html_outline import outline

from amplab.diagnose import ScaleHistory, what_if, what_ifs
from amplab.formats import FLOAT16, exponent_histogram
from amplab.lab import ExperimentConfig, Trainer, load_run
from amplab.scalers import PUBLISHED_RULES, DynamicScale, StaticScale

STEPS = 400


def trained(tmp_path, **fields):
    trainer = Trainer(ExperimentConfig(hidden=16, **fields), log=tmp_path)
    trainer.run(STEPS)
    trainer.stop()
    trainer.wait()
    return load_run(trainer.log_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Recorded under a rule that climbs and falls often."""
    return trained(tmp_path_factory.mktemp("recorded"), growth_interval=20, seed=1)


@pytest.mark.parametrize("fields", [{"growth_interval": 10}, {"init_scale": 2.0**24, "growth_interval": 40}])
def test_a_replay_foretells_a_real_run(run, tmp_path, fields):
    """A skip moves the weights, so later steps may part: the same first skips, and as many within a few."""
    real = trained(tmp_path, seed=1, **fields).history
    rule = DynamicScale(init_scale=fields.get("init_scale", 2.0**16), growth_interval=fields["growth_interval"])
    told = run.replay(rule)
    skipped = [record.step for record in real.skips()]
    assert told.certain_until is None
    assert list(told.skips[:2]) == skipped[:2]
    assert abs(len(told.skips) - len(skipped)) <= max(2, len(skipped) // 5)
    first = skipped[0]
    assert list(told.scales[: first + 1]) == real.column("loss_scale")[: first + 1].tolist()


def test_its_own_rule_gives_the_run_itself(run):
    told = run.replay(DynamicScale(growth_interval=20))
    assert list(told.scales) == run.history.column("loss_scale").tolist()
    assert list(told.skips) == [record.step for record in run.history.skips()]
    assert told.steps_lost == 0


def test_every_published_rule_side_by_side(run):
    runs = run.replay()
    assert [each.name for each in runs] == list(PUBLISHED_RULES)
    assert runs["Megatron"].scales[0] == 2.0**32
    assert runs["torch"].scales == run.replay("TORCH").scales
    text, html = str(runs), runs._repr_html_()
    assert all(name in text and name in html for name in PUBLISHED_RULES)
    different = {tuple(each.scales) for each in runs} | {tuple(runs["torch"].record.scales)}
    assert html.count("<polyline") == len(different) < len(PUBLISHED_RULES) + 1  # what is the same is drawn once
    assert max(map(len, text.splitlines())) <= 100
    assert repr(runs).startswith("<WhatIfs: steps lost: torch ")
    outline(html)
    with pytest.raises(KeyError, match="choose from torch"):
        runs["nobody"]


def test_gradients_lost_is_counted_at_the_replayed_scale():
    """The oracle is the rounding of torch itself."""
    grads = torch.logspace(-12, 0, 4000)
    record = ScaleHistory([2.0**16] * 3, [False] * 3, [0.0] * 3, [(1, exponent_histogram(grads))])
    for scale in (1.0, 2.0**4, 2.0**12):
        lost = ((grads * scale).to(FLOAT16.torch_dtype) == 0).float().mean().item()
        assert what_if(record, StaticScale(scale)).lost_share == pytest.approx(lost, abs=1e-3)
    assert what_if(ScaleHistory([1.0], [False], [0.0]), "torch").lost_share is None


def test_where_the_record_ends_the_answer_says_so():
    record = ScaleHistory([2.0**8] * 3, [False, True, False], [-3.0, math.inf, None])
    told = what_if(record, StaticScale(2.0**4))
    assert told.certain_until == 1
    assert "not in the record" in " ".join(str(told).split())
    ended = what_if(ScaleHistory([2.0] * 4, [True] * 4, [math.inf] * 4), "DeepSpeed")
    assert (len(ended.scales) < 4) == (ended.replay.stopped is not None)


def test_steps_after_the_end_of_a_run_are_lost():
    record = ScaleHistory([1.0] * 30, [False] * 30, [40.0] * 30)
    told = what_if(record, "DeepSpeed")
    assert told.replay.stopped is not None
    assert told.steps_lost == 30


def test_a_static_scale_that_is_fatal_is_said_to_be(run, tmp_path):
    """The oracle is the run itself at that scale: its loss is NaN after the step that overflows."""
    told = run.replay(StaticScale(2.0**20))
    real = trained(tmp_path, seed=1, loss_scale=2.0**20).history
    first = real.column("first_nonfinite").tolist().index("output.bias")
    assert np.isfinite(real.column("loss")[: first + 1]).all()
    assert np.isnan(real.column("loss")[first + 1 :]).all()
    assert (told.lost_from, told.steps_lost) == (first, STEPS - first - run.history.skip_count)
    assert told.row()["inf taken"] == f"{STEPS - first}"
    assert told.row()["certain"] == "every step"
    assert f"step {first}: the gradients overflow and the step is taken" in " ".join(str(told).split())
    harmless = run.replay(StaticScale(2.0**4))
    assert (harmless.lost_from, harmless.row()["inf taken"]) == (None, "0")


def test_what_follows_a_fatal_step_is_certain():
    """A step whose size was not measured does not matter once the weights are NaN."""
    record = ScaleHistory([8.0] * 4, [False] * 4, [-3.0, 2.0, None, -3.0])
    told = what_if(record, StaticScale(2.0**16))
    assert told.replay.taken_overflows == (1, 2, 3)
    assert told.certain_until is None
    assert told.steps_lost == 3
    assert what_if(record, "torch").replay.taken_overflows == ()


@pytest.mark.parametrize(
    ("rule", "error", "sentence"),
    [
        ("nobody", ValueError, "choose from torch, apex"),
        (3, TypeError, "expected a rule"),
        (DynamicScale, TypeError, "expected a rule"),
    ],
)
def test_refusals(rule, error, sentence):
    with pytest.raises(error, match=sentence):
        what_if(ScaleHistory([1.0], [False], [0.0]), rule)


def test_a_run_without_steps_is_refused():
    with pytest.raises(ValueError, match="the record has no step"):
        what_ifs(ScaleHistory([], [], []))


RUN = ScaleHistory([8.0] * 30, [False] * 30, [-3.0] * 10 + [None] * 20)


@pytest.mark.parametrize(
    ("record", "rule", "said", "note"),
    [
        (RUN, StaticScale(8.0), "every step", None),
        (RUN, StaticScale(16.0), "the first 10", "a guess from step 10 on: the gradients were finite under a smaller"),
        (ScaleHistory([8.0], [False], [None]), StaticScale(16.0), "no step", "a guess from step 0 on: "),
    ],
)
def test_the_steps_that_the_record_determines(record, rule, said, note):
    told = what_if(record, rule)
    assert told.row()["certain"] == said
    assert len([step for step in told.replay.steps[: told.certain_until] if step.doubt]) == 0
    assert (note is None) == ("guess" not in str(told))
    assert note is None or note in " ".join(str(told).split())


@pytest.mark.parametrize(
    ("fields", "error", "sentence"),
    [
        ((None, [], []), TypeError, "scales=NoneType:"),
        (([1.0] * 3, [False], [0.0] * 3), ValueError, "scales of 3, skipped of 1, grad_exponents of 3:"),
        (([1.0], [False], ["a"]), TypeError, "grad_exponents: expected numbers"),
        (([1.0], [False], [0.0], [(0, None)]), TypeError, r"samples: expected pairs \(step, ExponentHistogram\)"),
        (([1.0], [False], [0.0], (), "half"), TypeError, "fmt='half':"),
    ],
)
def test_records_that_are_none(fields, error, sentence):
    with pytest.raises(error, match=sentence):
        ScaleHistory(*fields)


@pytest.mark.parametrize("function", [lambda given: what_if(given, "torch"), what_ifs])
def test_no_record(function):
    with pytest.raises(TypeError, match="record=NoneType"):
        function(None)


@pytest.mark.parametrize("rules", [["torch"], "torch", 3])
def test_rules_are_named(rules):
    with pytest.raises(TypeError, match=f"^rules={type(rules).__name__}"):
        what_ifs(RUN, rules)


def test_names_of_rules_columns_of_numpy_and_no_rule():
    assert [run.name for run in what_ifs(RUN, {"mine": "jmp"})] == ["mine"]
    assert len(what_ifs(RUN, {})) == 0
    columns = np.full(3, 8.0), np.zeros(3, bool), np.full(3, -3.0)
    assert what_if(ScaleHistory(*columns), StaticScale(8.0)).row()["certain"] == "every step"
    with pytest.raises(TypeError, match=r"^name=3"):
        what_if(RUN, "torch", 3)
