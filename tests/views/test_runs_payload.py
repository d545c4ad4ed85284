"""The tab of runs: a person reads which run failed and how each differs, and the charts get their lines."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from amplab.diagnose import twin
from amplab.display.numbers import size
from amplab.lab import ExperimentConfig, Failed, Trainer, run_status
from amplab.lab.run_status import Measured
from amplab.lab.tasks import task_choice
from amplab.views import Dashboard
from amplab.views.tabs.runs_payload import overlays, runs_payload, styles, twin_payload


@pytest.fixture
def lab(trainer: Trainer, wire: list[dict]):
    made = Dashboard(trainer)
    tell(made._presenter.parts.live, type="hello", view="a")
    made._presenter.parts.panels.tab = "runs"
    yield made
    made.close()


def tell(part, **message: object) -> None:
    """Deliver a message as the page sends it."""
    part._handle_custom_msg(message, [])


def rows(trainer: Trainer) -> dict[str, dict]:
    shown = runs_payload(trainer)
    assert json.loads(json.dumps(shown)) == shown
    return {row["name"]: row for row in shown["rows"]}


def test_a_run_that_was_reset_is_a_row_and_a_gray_line(trainer: Trainer) -> None:
    trainer.change(lr=0.5)
    losses = trainer.run(30).column("loss")
    trainer.reset()
    trainer.change(lr=0.1)
    trainer.wait()
    kept = rows(trainer)["Run 1"]
    assert kept["differs"] == "lr 0.5"
    assert (kept["steps"], kept["skipped"], kept["outcome"]) == ("30", "0", "")
    assert kept["held_out"].endswith("%")
    assert rows(trainer)["Run 2"]["steps"] == "0"
    ((line, drawn),) = overlays(trainer.kept.runs, trainer.config.task)
    assert line["name"] == "Run 1"
    assert line["color"] == "curve-7"
    assert line["dash"]
    np.testing.assert_array_equal(drawn[:, 1], losses)


def test_a_run_of_another_task_is_a_row_but_no_line_behind_the_present_one(trainer: Trainer) -> None:
    trainer.run(5)
    trainer.reset(trainer.config.changed(task="small-targets"))
    trainer.wait()
    assert overlays(trainer.kept.runs, trainer.config.task) == []
    assert "Run 1" in rows(trainer)
    trainer.run(5)
    trainer.reset(trainer.config.changed(task="digits"))
    trainer.wait()
    assert [line["name"] for line, _ in overlays(trainer.kept.runs, trainer.config.task)] == ["Run 1"]


def test_one_reads_which_run_failed_and_why(trainer: Trainer) -> None:
    good = trainer.config
    hot = good.changed(lr=1e9)
    lost = good.changed(opt_level="O3", loss_scale=2.0**-126)
    blown = good.changed(opt_level="O3", loss_scale=2.0**40)
    trainer.compare([good, hot, lost, blown], steps=60)
    trainer.wait()
    trainer.compare([good], steps=3)
    trainer.wait()
    shown = runs_payload(trainer)
    outcomes = [row["outcome"] for row in shown["rows"] if row["number"] is not None]
    assert outcomes[0] == outcomes[4] == ""
    assert outcomes[1].startswith("skipped ") or "finite" in outcomes[1]
    assert outcomes[2] == "did not learn"
    assert "not finite from step" in outcomes[3]
    assert "Failed: O1 (2)" in shown["summary"]
    assert "Best held-out score: O1" in shown["summary"]


def test_the_table_and_the_status_line_agree_on_what_was_learned(trainer: Trainer) -> None:
    small_updates = ExperimentConfig(task="digits-16", opt_level="O3", loss_scale=128.0, lr=2e-5)
    trainer.compare([small_updates, small_updates.changed(opt_level="O0", loss_scale=None)], steps=300)
    trainer.wait()
    outcomes = {row["name"]: row["outcome"] for row in runs_payload(trainer)["rows"]}
    assert outcomes["O3"] == "did not learn"
    assert outcomes["O0"] == ""
    assert "Failed: O3 (did not learn)." in runs_payload(trainer)["summary"]
    measured = Measured(task_choice("digits-16"))
    o3, o0 = trainer.kept.runs
    assert run_status(o3.history, measured=measured).text.startswith("Not learning: ")
    assert run_status(o0.history, measured=measured).text.startswith("Learning slowly: ")


def test_runs_too_short_to_tell_are_not_said_to_have_learned(trainer: Trainer) -> None:
    trainer.compare([trainer.config, trainer.config.changed(opt_level="O0")], steps=3)
    trainer.wait()
    assert "Cannot be told yet whether it learned: O1, O0." in runs_payload(trainer)["summary"]


def test_a_run_that_ends_in_an_injected_skip_has_not_failed(trainer: Trainer) -> None:
    trainer.run(100)
    trainer.inject("nan")
    assert math.isnan(trainer.run(1).last.loss)
    trainer.reset()
    trainer.wait()
    kept = rows(trainer)["Run 1"]
    assert kept["outcome"] == ""
    assert float(kept["loss"]) < 1
    assert "Failed" not in runs_payload(trainer)["summary"]


def test_lines_differ_in_more_than_color(trainer: Trainer) -> None:
    trainer.compare(steps=1)
    for _ in range(2):
        trainer.run(1)
        trainer.reset()
    trainer.wait()
    drawn = list(styles(trainer.kept.runs).values())
    assert len(drawn) <= 6
    assert len({style.dash for style in drawn}) == len(drawn)


def test_bytes_are_told_by_kind(trainer: Trainer) -> None:
    trainer.compare([trainer.config.changed(opt_level=level) for level in ("O0", "O2")], steps=3)
    trainer.wait()
    single, master = rows(trainer)["O0"], rows(trainer)["O2"]
    assert master["masters"] == single["parameters"] == "5.93 kB"
    assert single["masters"] == "0 B"
    assert master["parameters"] == "2.96 kB"
    assert single["activations"] != "–"


def test_the_twin_names_the_layer_in_which_two_precisions_part() -> None:
    torch.manual_seed(0)

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) * 2.0**-20)  # float16 loses what is below 2^-24

    report = twin(Small(), torch.randn(4, 8), "O0", "O3", steps=2, loss=lambda out: out.square().mean())
    shown = twin_payload(report, "O3", 120)
    assert json.loads(json.dumps(shown)) == shown
    assert "O3 and float32 part in " in shown["sentence"]
    assert "from step 120" in shown["sentence"]
    (parted,) = [row["layer"] for row in shown["rows"] if row["is_parted"]]
    assert parted in shown["sentence"]
    assert {row["layer"] for row in shown["rows"]} == {"first", "second", "the model"}


def test_the_page_compares_stops_and_keeps_what_was_trained(lab: Dashboard, wire: list[dict], until) -> None:
    panels = lab._presenter.parts.panels
    tell(panels, tab="runs", type="compare", steps=100_000)
    until(lambda: (panels.shown("runs").get("progress") or {}).get("share", 0) > 0)
    assert "O0, run 1 of " in panels.shown("runs")["progress"]["text"]
    tell(panels, tab="runs", type="stop")
    until(lambda: panels.shown("runs")["progress"] is None)
    names = [row["name"] for row in panels.shown("runs")["rows"]]
    assert names == ["Run 1", "O0"]
    until(lambda: lines(wire) == ["O0"])
    until(lambda: panels.shown("runs")["rows"][0]["activations"] != "–")
    tell(panels, tab="runs", type="rename", number=1, name="float32")
    until(lambda: lines(wire) == ["float32"])
    tell(panels, tab="runs", type="show", number=1, shown=False)
    until(lambda: lines(wire) == [])
    tell(panels, tab="runs", type="compare", steps=0)
    until(lambda: panels.shown("runs")["is_refusal"])
    assert panels.shown("runs")["summary"] == "Steps: 0 is not allowed; enter a whole number from 1 to 100,000."
    tell(panels, tab="runs", type="compare", steps=None)
    empty = "Steps: no number was entered; enter a whole number from 1 to 100,000."
    until(lambda: panels.shown("runs")["summary"] == empty)
    tell(panels, tab="runs", type="compare", steps="not a number")
    until(lambda: panels.shown("runs")["summary"].startswith("Steps: not a number is not allowed; "))
    tell(panels, tab="runs", type="remove", number=1)
    until(lambda: len(panels.shown("runs")["rows"]) == 1)
    tell(lab._presenter.parts.controls, type="undo")
    until(lambda: len(panels.shown("runs")["rows"]) == 2)


def lines(wire: list[dict]) -> list[str] | None:
    """Return the names of the overlays that the page was last sent."""
    sent = [each["data"]["content"] for each in wire if each["data"].get("method") == "custom"]
    overlaid = [content["overlays"] for content in sent if content.get("kind") == "overlays"]
    return [line["name"] for line in overlaid[-1]] if overlaid else None


def test_the_setting_of_a_kept_run_is_restored_in_place_or_by_a_reset(lab: Dashboard, until) -> None:
    trainer, panels = lab.trainer, lab._presenter.parts.panels
    trainer.change(opt_level="O2", lr=0.5)
    trainer.run(3)
    trainer.reset(ExperimentConfig(hidden=16))
    trainer.run(3)
    tell(panels, tab="runs", type="restore", number=1)
    until(lambda: trainer.config == ExperimentConfig(hidden=16, opt_level="O2", lr=0.5))
    assert len(trainer.history) == 3
    trainer.reset(ExperimentConfig(hidden=8))
    tell(panels, tab="runs", type="restore", number=1)
    until(lambda: trainer.config == ExperimentConfig(hidden=16, opt_level="O2", lr=0.5))
    tell(panels, tab="runs", type="continue", number=1)
    until(lambda: len(trainer.history) == 3 and trainer.present_name == "Run 1")


def test_a_model_whose_step_is_refused_has_no_bytes_of_the_one_before(lab: Dashboard, until) -> None:
    trainer, panels, failures = lab.trainer, lab._presenter.parts.panels, []

    def present() -> dict:
        return panels.shown("runs").get("rows", [{"activations": "–"}])[0]

    until(lambda: present()["activations"] != "–")
    trainer.subscribe(lambda event: failures.append(event.text) if isinstance(event, Failed) else None)
    trainer.reset(ExperimentConfig(task="even-bce", model="even-mlp"))  # of a loss that O1 refuses
    until(lambda: any("activations failed" in text for text in failures))
    until(lambda: present()["parameters"] == size(trainer.memory().parameters))
    until(lambda: present()["activations"] == "–")
    trainer.reset(ExperimentConfig(task="even-bce", model="even-mlp", opt_level="O0"))
    until(lambda: present()["activations"] != "–")


def test_the_twin_of_the_page(lab: Dashboard, until) -> None:
    panels = lab._presenter.parts.panels
    lab.run(steps=5)
    tell(panels, tab="runs", type="twin")
    until(lambda: (panels.shown("runs").get("twin") or {}).get("rows"))
    assert "O1 and float32 agree" in panels.shown("runs")["twin"]["sentence"]
    assert not math.isnan(lab.trainer.history.last.loss)
