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
    return {"model": model, "step": lambda: model(torch.ones(8, 8)).square().mean()}
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
    assert "odd() returned int: expected (model, step)" in capsys.readouterr().err


def test_a_run_log(tmp_path, capsys):
    trainer = Trainer(ExperimentConfig(hidden=16, init_scale=2.0**20, growth_interval=3), log=tmp_path)
    trainer.run(60)
    trainer.stop()
    trainer.wait()
    assert main(["doctor", str(trainer.log_path)]) == 1
    said = capsys.readouterr().out
    assert "window-too-short" in said
    assert ": 60 steps, " in said.splitlines()[0]
    assert "cut off" not in said
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(trainer.log_path.read_bytes()[:-40])
    main(["doctor", str(cut)])
    assert "the last line was cut off" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("target", ["nothing.jsonl", "nothing.py:f", "f", "nothing.py"])
def test_what_is_not_there_is_refused(target, capsys):
    assert main(["doctor", target]) == 2
    assert "amplab doctor: " in capsys.readouterr().err


ODD = """
from torch import nn
def many():
    return 1, 2, 3
def unknown():
    return {"model": nn.ReLU(), "loss_fn": 3}
def without():
    return {"step": list}
def swapped():
    return list, nn.ReLU()
def constant():
    return nn.ReLU(), 3
def nothing():
    return {"model": None}
number = 3
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("many", "many() returned a tuple of 3: expected (model, step), or a dict with a model."),
        ("unknown", "unknown() returned 'loss_fn': expected arguments of doctor: model, batch, loss, step"),
        ("without", "without() returned dict: expected (model, step), or a dict with a model."),
        ("swapped", "swapped(): model=type: expected a torch.nn.Module"),
        ("constant", "constant(): step=int: expected a function"),
        ("nothing", "nothing() returned no model"),
        ("nobody", "it defines no function nobody; its functions: many, unknown, without, swapped, constant, nothing."),
        ("number", "it defines no function number; its functions: many"),
    ],
)
def test_what_a_function_returns_is_refused_in_one_sentence(name, words, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / f"odd_{name}_for_the_doctor.py"
    file.write_text(ODD, encoding="utf-8")
    assert main(["doctor", f"{file}:{name}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("amplab doctor: ")
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ["step.v2.py", "step-2.py", "2 steps.py"])
def test_a_file_has_any_name(tmp_path, capsys, name):
    (tmp_path / "its_own_neighbor.py").write_text(textwrap.dedent(STEP), encoding="utf-8")
    (tmp_path / name).write_text("from its_own_neighbor import healthy", encoding="utf-8")
    assert main(["doctor", f"{tmp_path / name}:healthy"]) == 0
    assert capsys.readouterr().err == ""


def test_a_file_with_the_name_of_a_module_is_not_mistaken_for_it(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "json.py").write_text(ODD, encoding="utf-8")
    assert main(["doctor", f"{tmp_path / 'json.py'}:many"]) == 2
    assert "another module is already imported as json" in capsys.readouterr().err
