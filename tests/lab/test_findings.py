"""What the rules read of a run: the losses that it has, who scaled them, and what skipped steps left."""

import math

import pytest
import torch
from torch import nn

import amplab
from amplab.diagnose import Finding
from amplab.lab import ExperimentConfig, Trainer, load_run, watch
from amplab.lab.findings import observed_run, with_explained


def test_a_missing_loss_is_not_a_loss_of_nan():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(tell):
        optimizer.zero_grad()
        loss = tell(model(torch.ones(4, 2)).square().mean())
        loss.backward()
        optimizer.step()
        return loss

    with watch(model, optimizer) as untold:
        for _ in range(6):
            step(lambda loss: loss)
    assert [each.name for each in untold.findings()] == ["loss-missing"]
    with watch(model, optimizer) as late:  # each is told when its step is over, and goes with the next
        for _ in range(6):
            late.loss(step(lambda loss: loss))
    assert not late.findings()
    with watch(model, optimizer) as told:
        step(told.loss)
        step(lambda loss: told.loss(loss * math.nan))
    (found,) = told.findings()
    assert (found.name, found.evidence["first_step"], told.observation.scaling) == ("nonfinite-loss", 1, "none")
    assert "amp." not in found.remedy.replace("amplab.", "")


def test_statistics_that_a_skipped_step_has_spoilt_stay_in_sight():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = amplab.GradScaler("cpu")
    with watch(model, optimizer, scaler=scaler) as w:
        for number in range(6):
            x = torch.randn(8, 2)
            x[0, 0] = math.nan if number == 2 else 0.0
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert ("nonfinite-buffer", "0") in [(each.name, each.module) for each in w.findings().harmful]


@pytest.mark.parametrize(
    ("fields", "dynamic"),
    [
        ({"opt_level": "O0"}, False),
        ({"opt_level": "O1"}, True),
        ({"opt_level": "O3"}, False),
        ({"opt_level": "O3", "loss_scale": "dynamic"}, True),
        ({"opt_level": "O2", "loss_scale": 128}, False),
        ({"opt_level": "O2", "loss_scale": 128.0}, False),
    ],
)
def test_a_run_is_dynamic_only_where_its_scale_changes(fields, dynamic, tmp_path):
    trainer = Trainer(ExperimentConfig(hidden=16, **fields), log=tmp_path / "run.jsonl")
    trainer.run(1)
    trainer.stop()
    trainer.wait()
    assert load_run(tmp_path / "run.jsonl").config.is_dynamic == dynamic
    assert observed_run(trainer.history, trainer.config).dynamic == dynamic


@pytest.mark.parametrize("scale", [128, 128.0])
def test_nan_in_the_weights_is_blamed_on_a_static_scale(scale, tmp_path):
    trainer = Trainer(ExperimentConfig(hidden=16, opt_level="O2", loss_scale=scale), log=tmp_path / "run.jsonl")
    trainer.run(3)
    trainer.inject("overflow")
    trainer.run(6)
    trainer.stop()
    trainer.wait()
    (found,) = [each for each in load_run(tmp_path / "run.jsonl").findings() if each.name == "nonfinite-loss"]
    assert found.severity == "error"
    assert "static" in found.cause
    assert 'loss_scale="dynamic"' in found.remedy


def test_each_explanation_says_when_it_began_and_how_many_skips_it_explains():
    def explained(name, module):
        return Finding(name, "error", "Seen.", "because", "code", module=module)

    found = with_explained(
        [], [(3, explained("a", "x")), (12, explained("b", "y")), (30, explained("c", "z"))], [2, 3, 4, 10, 11, 12, 20]
    )
    told = {each.name: each.evidence for each in found}
    assert told == {
        "a": {"first_step": 2, "skips_explained": 3},
        "b": {"first_step": 10, "skips_explained": 3},
        "c": {"first_step": 30},
    }
    assert "It began in step 2 and explains 3 of 7 skipped steps." in next(iter(found.named("a"))).symptom
