"""The tab that walks through a step: true pictures, true sentences, and a step that the page requests."""

import json
import math

import numpy as np
import pytest
import torch

from amplab.formats import FLOAT16, FORMATS
from amplab.lab import Experiment, ExperimentConfig, StagesReady, StepStages, Trainer, snapshot
from amplab.views.tabs.step_through import StepThroughTab
from amplab.views.tabs.step_through_payload import HIGH, LOW, Chosen, picture, step_through_payload

NAMES = ["cast", "forward", "scale", "backward", "unscale", "clip", "step", "update"]


def recorded(*, inject: str | None = None, before: int = 3, **changes: object) -> StepStages:
    """A step of a small experiment, perhaps with a fault."""
    experiment = Experiment(ExperimentConfig(hidden=16, **changes))
    for _ in range(before):
        experiment.step()
    if inject:
        experiment.inject(inject)
    return experiment.step_in_stages()[1]


def walk(**how: object) -> dict[str, dict]:
    """The stages of such a step by name; the whole payload must be JSON."""
    shown = step_through_payload(recorded(**how), Chosen())
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    stages = {stage["name"]: stage for stage in shown["stages"]}
    assert list(stages) == NAMES
    return stages


# Pictures


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [1.5, -0.1, 2.0**-24, 65504.0, 0.0, -0.0, math.inf, math.nan, 1e-40])
def test_the_bits_are_those_of_the_element_in_memory(dtype, value):
    taken = snapshot("x", torch.tensor([3.0, value], dtype=dtype))
    drawn = picture(taken, 1)["bits"]
    pattern = int(drawn["sign"] + drawn["exponent"] + drawn["fraction"], 2)
    fmt = FORMATS[str(dtype).removeprefix("torch.")]
    size, np_type = (4, np.uint32) if dtype is torch.float32 else (2, np.uint16)
    memory = torch.tensor([value], dtype=dtype).view(torch.uint8).numpy().tobytes()
    assert pattern == int(np.frombuffer(memory, np_type)[0])
    assert len(memory) == size
    assert drawn["kind"] == fmt.kind(pattern)


def test_the_histogram_counts_every_element_in_its_power_of_two():
    values = torch.tensor([0.75, 1.0, 1.5, 2.0**-50, 2.0**30, 0.0, math.inf, math.nan])
    shares = picture(snapshot("x", values), 0)["shares"]
    assert len(shares) == HIGH - LOW + 1
    expected = {-1: 20.0, 0: 40.0, LOW: 20.0, HIGH: 20.0}
    assert {LOW + index: share for index, share in enumerate(shares) if share} == expected


def test_the_figures_are_those_of_the_magnitudes():
    drawn = picture(snapshot("x", torch.tensor([[-4.0, 0.5], [0.0, 1.5]])), 0)
    assert drawn["figures"] == [["min", "0.5"], ["mean", "1.5"], ["max", "4"], ["zeros", "25 %"]]
    assert (drawn["shape"], drawn["place"], drawn["value"]) == ("2 × 2", "[0, 0]", "-4")
    broken = picture(snapshot("x", torch.tensor([1.0, math.nan, math.inf])), 1)
    assert broken["figures"][-1] == ["inf, NaN", "2"]
    assert broken["exponent"] is None


def test_the_loss_times_a_power_of_two_changes_exponent_bits_alone():
    stage = walk(opt_level="O1")["scale"]
    assert stage["after"]["bits"]["fraction"] == stage["before"]["bits"]["fraction"]
    assert stage["after"]["bits"]["changed"]
    assert all(1 <= position <= 8 for position in stage["after"]["bits"]["changed"])
    before, after = (int(stage[side]["bits"]["exponent"], 2) for side in ("before", "after"))
    assert after - before == 16
    assert "Only its exponent bits change." in stage["sentence"]


def test_a_cast_cuts_thirteen_fraction_bits():
    stage = walk(opt_level="O1")["cast"]
    assert (stage["before"]["dtype"], stage["after"]["dtype"]) == ("float32", "float16")
    assert stage["before"]["bits"]["cut"] == 13
    assert stage["before"]["place"] == stage["after"]["place"]


# Sentences, against numbers that are computed here


def test_a_gradient_that_needs_the_scale_is_chosen_and_told():
    stages = recorded(inject="underflow", opt_level="O1")
    shown = step_through_payload(stages, Chosen("hidden1.weight"))
    assert shown["element"] == "rescued"
    scaled = float(stages.parameters["hidden1.weight"].computed.kept[shown["index"]])
    small = scaled / 2.0**16
    assert abs(scaled) >= 2.0**-14 > abs(small)
    sentence = shown["stages"][3]["sentence"]
    assert "× 2¹⁶ = " in sentence
    assert "a normal float16 number" in sentence
    said = "is 0." if FLOAT16.value(FLOAT16.bits(small)) == 0 else "is subnormal"
    assert said in sentence


def test_the_scales_own_largest_sentence_names_the_share_it_keeps():
    stages = recorded(inject="underflow", opt_level="O1")
    grads = stages.parameters["hidden1.weight"].computed.kept.double().abs()
    grads = grads[grads > 0]
    lost = float((grads / 2.0**16 < 2.0**-25).double().mean())
    sentence = step_through_payload(stages, Chosen("hidden1.weight"))["stages"][3]["sentence"]
    assert f"Without the scale, {100 * lost:.1f} % of the gradients here that are not 0 would become 0." in sentence


def test_an_overflow_is_followed_through_the_stages():
    stages = walk(inject="overflow", opt_level="O1")
    assert "Injected overflow" in stages["scale"]["sentence"]
    assert "are NaN" in stages["backward"]["sentence"] or "are inf" in stages["backward"]["sentence"]
    assert "found_inf = 1, and the step will be skipped" in stages["unscale"]["sentence"]
    assert stages["step"]["title"] == "Skip"
    assert stages["step"]["sentence"].startswith("Skipped, because found_inf is 1")
    assert stages["step"]["after"]["bits"]["changed"] == []
    assert "from 2¹⁶ to 2¹⁵" in stages["update"]["sentence"]
    warned = [name for name, stage in stages.items() if stage["tone"] == "warning"]
    assert warned == ["scale", "backward", "unscale", "step", "update"]


def test_the_parameter_that_overflowed_is_shown_first():
    stages = recorded(inject="overflow", opt_level="O1")
    shown = step_through_payload(stages, Chosen())
    assert shown["parameter"] == stages.record.first_nonfinite
    assert shown["element"] == "nonfinite"


def test_a_nan_in_the_batch_is_not_blamed_on_the_scale():
    stages = walk(inject="nan", opt_level="O1")
    assert "The loss is NaN before it is scaled" in stages["scale"]["sentence"]
    assert "because the loss is not finite" in stages["backward"]["sentence"]


def test_a_static_scale_takes_the_step_all_the_same():
    stages = walk(inject="overflow", opt_level="O3")
    assert "a static scale takes the step all the same" in stages["unscale"]["sentence"]
    assert "a gradient that is not finite" in stages["step"]["sentence"]
    assert "static" in stages["update"]["sentence"]


def test_o0_casts_nothing_and_scales_by_one():
    stages = walk(opt_level="O0")
    assert "Nothing is cast" in stages["cast"]["sentence"]
    assert "The loss scale is 1" in stages["scale"]["sentence"]
    assert stages["clip"]["tone"] == "idle"


def test_o3_loses_updates_below_half_of_the_spacing():
    stages = recorded(opt_level="O3", lr=1e-5, momentum=0.0)
    seen = stages.parameters["hidden1.weight"]
    has_gradient = seen.unscaled.kept != 0
    same = int(((seen.stored.kept == seen.stepped.kept) & has_gradient).sum())
    assert same > 0
    shown = step_through_payload(stages, Chosen("hidden1.weight", "median"))
    sentence = shown["stages"][6]["sentence"]
    assert f"{same:,} of {int(has_gradient.sum()):,} weights with a gradient did not change." in sentence
    if shown["stages"][6]["brief"] == "no change":
        value = seen.stored.value(shown["index"])
        assert f"{FLOAT16.ulp(value):.3g}".replace("e-0", "e-") in sentence


def test_a_master_keeps_an_update_that_the_half_copy_cannot_show():
    stages = recorded(opt_level="O2", lr=1e-6, momentum=0.0)
    seen = stages.parameters["hidden1.weight"]
    moved = (seen.stepped.kept != seen.stored.kept) & (seen.copied.kept == seen.used.kept)
    index = int(moved.nonzero()[0])
    sentence = step_through_payload(stages, Chosen("hidden1.weight", index))["stages"][6]["sentence"]
    assert "SGD moves the master by" in sentence
    assert "The master keeps the update." in sentence


def test_the_count_of_clean_steps_and_the_growth():
    assert "4 of 50 clean steps are done" in walk(opt_level="O1")["update"]["sentence"]
    grown = walk(opt_level="O1", growth_interval=4)["update"]
    assert "4 clean steps in a row: the scale grows from 2¹⁶ to 2¹⁷." in grown["sentence"]
    capped = walk(opt_level="O1", growth_interval=4, max_loss_scale=2.0**16)["update"]
    assert "its upper limit" in capped["sentence"]


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_every_parameter_of_every_model_can_be_walked_through(model, level):
    stages = recorded(opt_level=level, model=model, before=1)
    for name, seen in stages.parameters.items():
        for element in ("largest", "smallest", "median", len(seen.stored.kept) - 1):
            shown = step_through_payload(stages, Chosen(name, element))
            assert all(stage["sentence"].endswith(".") for stage in shown["stages"])
            assert shown["parameter"] == name
            assert all(stage["before"] and stage["after"] for stage in shown["stages"])


# The tab


class Desk:
    """A dashboard that keeps what is shown and selected."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.shown, self.selected = trainer, {}, None
        self.tab = StepThroughTab(self)
        trainer.subscribe(lambda event: self.tab.on_event(event) if isinstance(event, StagesReady) else None)

    def wake(self) -> None:
        """Nothing ticks here."""

    def is_shown(self, tab: str) -> bool:
        return True

    def show(self, tab: str, payload: dict) -> None:
        self.shown = payload

    def select(self, step: int | None) -> None:
        self.selected = step


def test_a_skipped_step_that_is_gone_is_a_sentence_in_the_tab(trainer):
    """As after a reset in another page, or one that came first."""
    desk = Desk(trainer)
    trainer.run(3)
    trainer.inject("overflow")
    trainer.run(1)
    assert trainer.walkable == (3,)
    trainer.reset()
    desk.tab.on_message({"type": "again", "step": 3})
    assert trainer.wait(20)
    assert trainer.failures == ()
    assert desk.shown["refusal"].startswith("Step 3 cannot run again: it is not kept any more.")


def test_the_page_takes_a_step_and_chooses_what_is_shown(trainer):
    desk = Desk(trainer)
    desk.tab.on_message({"type": "step"})
    assert trainer.wait(20)
    assert (len(trainer.history), desk.shown["step"], desk.selected) == (1, 0, 0)
    desk.tab.on_message({"type": "parameter", "name": "output.weight"})
    desk.tab.on_message({"type": "element", "value": "largest"})
    assert (desk.shown["parameter"], desk.shown["element"]) == ("output.weight", "largest")
    desk.tab.on_message({"type": "element", "value": 3.0})
    assert (desk.shown["index"], desk.shown["element"]) == (3, "picked")
    desk.tab.on_message({"type": "parameter", "name": "hidden1.bias"})
    assert desk.shown["element"] != "picked"
    desk.tab.on_message({"type": "step"})
    assert trainer.wait(20)
    assert (desk.shown["step"], desk.shown["parameter"]) == (1, "hidden1.bias")


def test_a_step_that_cannot_be_taken_is_refused_in_the_page(trainer):
    desk = Desk(trainer)
    trainer.stop()
    desk.tab.on_message({"type": "step"})
    assert "reset" in desk.shown["refusal"]
