"""The tab of the loss scale: the scale grows when the page says so, the other rules are those of `replay`."""

import json
import time

import numpy as np
import pytest
import torch

import amplab
from amplab.display.numbers import count, power
from amplab.lab import ExperimentConfig, History, Trainer
from amplab.scalers import PUBLISHED_RULES, DynamicScale
from amplab.views import Dashboard
from amplab.views.tabs.scale_payload import OWN, FollowedScale, dynamics, own_rule, what_if_payload

SMALL = ExperimentConfig(hidden=16, growth_interval=7)


CHANGES = {
    "nothing": [20],
    "a shorter window": [45, {"growth_interval": 20}],
    "a window of half the count": [40, {"growth_interval": 20}],
    "a longer window": [40, {"growth_interval": 100}],
    "a static scale before": [{"loss_scale": 2.0**16}, 30, {"loss_scale": "dynamic"}],
    "a dynamic scale at a level that has a static one": [30, {"opt_level": "O3"}, {"loss_scale": "dynamic"}],
    "a level without a scale before": [{"opt_level": "O0"}, 30, {"opt_level": "O1"}],
    "a level without a scale in between": [30, {"opt_level": "autocast-bf16"}, 20, {"opt_level": "O1"}],
    "another level": [30, {"opt_level": "O2"}],
    "another level that casts otherwise": [30, {"opt_level": "autocast-fp16"}],
    "another first scale": [30, {"init_scale": 2.0**15}],
    "another floor": [30, {"min_loss_scale": 2.0**10}],
    "a higher ceiling": [{"max_loss_scale": 2.0**16}, 70, {"max_loss_scale": 2.0**24}],
    "an overflow": [30, "overflow", 5],
    "another rate and optimizer": [30, {"lr": 0.05}, {"optimizer": "adam"}, 3],
}
"""What is done to a run: steps, changes of its setting, faults."""


def growth_of(trainer: Trainer) -> dict:
    return dynamics(trainer.history, trainer.config, trainer.loss_scale, trainer.scale_growth)["growth"]


def steps_until_it_doubles(trainer: Trainer, most: int = 200) -> int:
    """Train until the scale is twice what it is now; return the number of steps."""
    scale = trainer.loss_scale
    for step in range(1, most):
        trainer.run(1)
        assert trainer.loss_scale >= scale, "an overflow"
        if trainer.loss_scale == 2 * scale:
            return step
    raise AssertionError(f"it did not grow in {most} steps")


@pytest.mark.parametrize("done", CHANGES.values(), ids=CHANGES)
def test_the_scale_doubles_after_the_steps_that_are_told(done: list) -> None:
    trainer = Trainer(ExperimentConfig(hidden=16))
    for what in done:
        if isinstance(what, int):
            trainer.run(what)
        elif isinstance(what, str):
            trainer.inject(what)
        else:
            trainer.change(**what)
    trainer.wait()
    told, scale = growth_of(trainer), trainer.loss_scale
    left = steps_until_it_doubles(trainer)
    grown, steps = power(2 * scale, raised=True), count(left, "more step")
    assert told["text"] == f"Grows to {grown} after {steps} without an overflow."
    assert told["interval"] - told["counted"] == left
    trainer.stop()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_lowest_of_several_scales_doubles_after_the_steps_that_are_told(accumulate: int) -> None:
    """Two of the three losses share an optimizer: each of their backwards counts, also those of one step."""
    trainer = Trainer(
        ExperimentConfig(task="gan", model="dcgan", hidden=4, batch_size=16, growth_interval=21, accumulate=accumulate)
    )
    trainer.run(4)
    trainer.inject("overflow")  # in the first loss
    trainer.run(6)
    told = growth_of(trainer)
    left = steps_until_it_doubles(trainer)
    assert f"after {count(left, 'more step')}" in told["text"]
    assert told["interval"] - told["counted"] == left
    trainer.stop()


def test_a_static_scale_and_a_ceiling_say_so() -> None:
    trainer = Trainer(SMALL.changed(loss_scale=128.0))
    trainer.run(2)
    assert "static, 2⁷" in growth_of(trainer)["text"]
    trainer = Trainer(SMALL.changed(max_loss_scale=2.0**16))
    trainer.run(9)
    growth = growth_of(trainer)
    assert "ceiling, 2¹⁶" in growth["text"]
    assert growth["counted"] == 2


def test_memory_is_shown_by_kind_and_rates_do_not_show_a_pause(record) -> None:
    trainer = Trainer(SMALL)
    trainer.run(30)
    trainer.change(opt_level="O2")
    trainer.run(5)
    payload = dynamics(trainer.history, trainer.config, trainer.loss_scale, trainer.scale_growth)
    json.dumps(payload)
    kinds = {kind["name"]: kind["values"] for kind in payload["memory"]["kinds"]}
    assert kinds["masters"][0] == 0 < kinds["masters"][-1]
    assert sum(values[-1] for values in kinds.values()) == trainer.memory().total
    history = History()
    for step in range(400):  # a pause of 60 s in the middle
        history.append(record(step, seconds=0.01 * step + 60.0 * (step >= 200)))
    rates = dynamics(history, SMALL, 1.0, None)["rate"]["values"]
    assert rates == pytest.approx([100.0] * len(rates), rel=1e-3)


@pytest.fixture(scope="module")
def run() -> History:
    trainer = Trainer(SMALL)
    trainer.run(60)
    trainer.inject("overflow")
    trainer.run(60)
    return trainer.history


def test_each_rule_has_the_skips_and_the_lost_steps_of_the_replay(run: History) -> None:
    own = DynamicScale(init_scale=2.0**20, growth_interval=5, backoff_factor=0.25)
    runs = {each["name"]: each for each in what_if_payload(run, own)["runs"]}
    assert list(runs) == ["recorded", OWN, *PUBLISHED_RULES]
    for name, rule in {OWN: own, **PUBLISHED_RULES}.items():
        expected = run.replay(rule)
        row = expected.row()
        assert (runs[name]["skipped"], runs[name]["lost"]) == (row["skips"], row["steps lost"])
        assert runs[name]["skips"] == list(expected.skips)
        drawn = dict(runs[name]["corners"])
        assert all(2.0 ** drawn[step] == expected.scales[step] for step in drawn)
    assert runs["recorded"]["skips"] == [record.step for record in run.skips()]


def test_your_rule_has_the_bounds_of_the_present_setting(wire: list[dict], until) -> None:
    """Also after a live change of them; the oracle is a replay of a rule with these bounds."""
    setting = ExperimentConfig(hidden=16, init_scale=2.0**4, growth_interval=5, max_loss_scale=2.0**6)
    trainer = Trainer(setting)
    lab = Dashboard(trainer)
    panels = lab._presenter.parts.panels
    lab._presenter.parts.live._handle_custom_msg({"type": "hello", "view": "a"}, [])
    panels.tab = "scale"
    panels._handle_custom_msg({"tab": "scale", "type": "view", "view": "whatif"}, [])
    history = trainer.run(40)

    def last_scale() -> str | None:
        shown = panels.shown("scale")
        return next((run["last"] for run in shown.get("runs", ()) if run["name"] == OWN), None)

    for ceiling in (2.0**6, 2.0**8, 2.0**5):
        trainer.change(max_loss_scale=ceiling)
        bounded = DynamicScale(init_scale=2.0**4, growth_interval=5, ceiling=ceiling)
        expected = power(history.replay(bounded).scales[-1], raised=True)
        until(lambda expected=expected: last_scale() == expected)
    lab.close()
    trainer.stop()


def test_a_rule_that_the_record_does_not_decide_is_shown_as_a_guess() -> None:
    """A NaN is skipped under every scale; the record only says that its gradients were not finite."""
    history = Trainer(SMALL).run(10)
    assert all(each["doubt"] is None for each in what_if_payload(history, DynamicScale(init_scale=2.0**15))["runs"])
    trainer = Trainer(SMALL)
    trainer.run(10)
    trainer.inject("nan")
    history = trainer.run(11)
    own = DynamicScale(init_scale=2.0**15)
    payload = what_if_payload(history, own)
    runs = {each["name"]: each for each in payload["runs"]}
    assert (runs[OWN]["skipped"], runs["recorded"]["doubt"]) == ("0", None)
    assert "a guess from step 10 on" in str(history.replay(own))
    doubt = "a guess from step 10 on: the recorded gradients were inf or NaN, so their size is not in the record"
    assert runs[OWN]["doubt"] == doubt
    assert f"0 skipped, steps lost −1; {doubt}. ≈ marks what is a guess." in payload["words"]


def test_the_last_scale_of_each_rule_is_the_one_that_the_next_step_would_use() -> None:
    trainer = Trainer(SMALL)
    trainer.inject("overflow")
    history = trainer.run(1)  # the scale fell after its only step
    runs = {each["name"]: each for each in what_if_payload(history, DynamicScale(init_scale=2.0**10))["runs"]}
    assert trainer.loss_scale == 2.0**15
    assert runs["recorded"]["last"] == "2¹⁵"
    assert runs[OWN]["last"] == "2⁹"
    trainer.stop()


def test_a_run_of_20000_steps_is_replayed_without_holding_up_the_view(record) -> None:
    history = History()
    exponents = np.floor(np.random.default_rng(0).normal(-4, 1, 20_000))
    for step, exponent in enumerate(exponents):
        history.append(record(step, grad_exponent=float(exponent)))
    taken = []
    for _ in range(3):  # the machine may be busy
        began = time.thread_time()
        payload = what_if_payload(history, DynamicScale(growth_interval=50))
        taken.append(time.thread_time() - began)
    assert min(taken) < 0.1
    assert len(json.dumps(payload)) < 100_000


@pytest.mark.parametrize(
    ("rule", "said"), [({"init": 99}, "init 2"), ({"window": 0.5}, "window 0.5"), ({"backoff": 1.5}, "backoff 1.5")]
)
def test_a_rule_that_cannot_be_is_refused_by_its_label(rule, said) -> None:
    with pytest.raises(ValueError, match=said):
        own_rule(SMALL, **{"init": 16, "window": 50, "backoff": 0.5, **rule})


def test_an_empty_run_has_a_payload() -> None:
    json.dumps([dynamics(History(), SMALL, 1.0, None), what_if_payload(History(), DynamicScale())])


@pytest.mark.parametrize("make_scaler", [torch.amp.GradScaler, amplab.GradScaler])
def test_the_largest_scale_of_float32_does_not_grow(make_scaler):
    """Gradients of 0 bring the scale there; torch keeps it where twice of it is inf."""
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make_scaler("cpu", growth_interval=1)
    with amplab.watch(model, optimizer, scaler=scaler) as watch:
        for _ in range(115):
            optimizer.zero_grad()
            scaler.scale(watch.loss(0 * model(torch.ones(2, 2)).sum())).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == watch.history.record(113).loss_scale == 2.0**127
    setting = FollowedScale(True, watch.growth_interval, 2.0**16)
    growth = dynamics(watch.history, setting, scaler.get_scale(), watch.scale_growth)["growth"]
    assert growth["text"].startswith("The scale, 2¹²⁷, does not grow: float32 has no larger one")
