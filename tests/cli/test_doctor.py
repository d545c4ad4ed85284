"""`amplab doctor` on a run log and on a step: it prints the findings, and its status says whether one is harmful."""

import textwrap

import pytest

from amplab.cli import main
from amplab.lab import ExperimentConfig, Trainer

STEP = """
import torch
from torch import nn
class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 16)
    def forward(self, x):
        return (self.q(x) @ x.T * 60000).softmax(-1) @ x
def sick():
    torch.manual_seed(0)
    model = Logits().half()
    return model, lambda: model(torch.ones(4, 16).half()).float().square().mean()
def healthy():
    model = nn.Linear(8, 8)
    return {"model": model, "loss_fn": lambda: model(torch.ones(8, 8)).square().mean()}
def odd():
    return 3
"""


def test_a_step_of_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "my_step_for_the_doctor.py"
    file.write_text(textwrap.dedent(STEP), encoding="utf-8")
    assert main(["doctor", f"{file}:sick"]) == 1
    assert "overflow" in capsys.readouterr().out
    assert main(["doctor", f"{file}:healthy"]) == 0
    assert main(["doctor", f"{file}:odd"]) == 2
    assert "odd() returned int: expected (model, loss_fn)" in capsys.readouterr().err


def test_a_run_log(tmp_path, capsys):
    trainer = Trainer(ExperimentConfig(hidden=16, init_scale=2.0**20, growth_interval=3), log=tmp_path)
    trainer.run(60)
    trainer.stop()
    trainer.wait()
    assert main(["doctor", str(trainer.log_path)]) == 1
    assert "window-too-short" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["nothing.jsonl", "nothing.py:f", "f", "nothing.py"])
def test_what_is_not_there_is_refused(target, capsys):
    assert main(["doctor", target]) == 2
    assert "amplab doctor: " in capsys.readouterr().err
