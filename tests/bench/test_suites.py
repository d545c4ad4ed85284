"""The suites on small tensors: every case becomes a row; the progress line, and the facts of the machine."""

import io
import json
from datetime import datetime

import pytest
import torch

from amplab import kernels
from amplab.bench import Goal, Row, machine_facts, run_cases, run_suite
from amplab.bench.casting import casting_cases
from amplab.bench.diagnose import diagnose_cases
from amplab.bench.kernels import kernel_cases
from amplab.bench.scaler import Gradients, iteration, scaler_cases, torch_scaler
from amplab.bench.suites import SUITES, Progress
from amplab.bench.xray import xray_cases

SMALL = {
    "scaler": lambda: scaler_cases(many=4, few=3, elements=5),
    "casting": lambda: casting_cases(width=8, layers=1),
    "xray": lambda: xray_cases(width=8, layers=1),
    "diagnose": lambda: diagnose_cases(width=8, layers=1),
    "kernels": lambda: kernel_cases(large=64, many=4, elements=5, model=((3, 2), (7,))),
}


@pytest.mark.parametrize("suite", SUITES)
def test_every_case_becomes_a_row(suite):
    stream = io.StringIO()
    cases = SMALL[suite]()
    results = run_cases(suite, cases, rounds=1, stream=stream)
    assert [row.name for row in results.rows] == [case.name for case in cases]
    assert len({row.name for row in results.rows}) == len(cases)
    for row, case in zip(results.rows, cases, strict=True):
        assert row.ratio > 0
        assert row.met == case.goal.met_by(row.ratio)
    assert stream.getvalue().count("\n") == len(cases)


def test_goals_are_those_that_are_published():
    goals = {suite: [str(case.goal) for case in make()] for suite, make in SUITES.items()}
    assert goals == {
        "scaler": ["≥ 3", "≥ 3", "≥ 5", "≤ 1.1", "≤ 1.1", "≤ 1", "≤ 0.8", "≤ 1.1"],
        "casting": ["≤ 1.08", "≤ 1.08", "≤ 1.25", "≤ 1.05", "≤ 1.05", "≤ 1.06", "≤ 1.5"],
        "kernels": [
            *["≥ 0.93", "≥ 0.93", "≥ 2", "≥ 1.6", "≥ 4", "≥ 1.8", "≥ 3", "≥ 10"],
            *["≥ 1.5", "≥ 2", "≥ 1.8", "≥ 1", "≥ 1"],  # optimizers
            *["≥ 1"] * 5,  # the other rules
            *["≥ 0.5", "≥ 0.5", "≥ 1.5", "≥ 3", "≥ 3"],  # statistics and scale
        ],
        "xray": ["≤ 3", "≤ 4", "≤ 7", "≤ 10", "≤ 3", "≤ 4", "≤ 3", "≤ 4", "≤ 3", "≤ 4"],
        "diagnose": ["≤ 1.03", "≤ 1.03", "≤ 1.03", "≤ 1.03", "≤ 10", "≤ 10", "≤ 10"],
    }
    assert Goal("at least", 3.0) in [case.goal for case in SUITES["scaler"]()]


def test_the_step_that_is_explained_overflows_by_its_scale_alone():
    explained = [case.make() for case in SMALL["diagnose"]() if case.name.startswith("first_nonfinite")]
    assert [pair.details["cause"] for pair in explained] == ["scale"] * 3


@pytest.mark.parametrize("fresh", [True, False])
def test_gradients_are_refilled(fresh):
    gradients = Gradients(3, 4, fresh=fresh)
    tensors = [param.grad for param in gradients.params]
    scaled = [each.clone() for each in tensors]
    torchs = iteration(torch_scaler(), gradients, lambda scaler: scaler.unscale_(gradients.optimizer))
    for _ in range(2):
        torchs.prepare()
        torchs.run()
        for param, values in zip(gradients.params, scaled, strict=True):
            assert torch.equal(param.grad, values / 65536.0)
    gradients.refill()
    for param, values, tensor in zip(gradients.params, scaled, tensors, strict=True):
        assert torch.equal(param.grad, values)
        assert (param.grad is tensor) != fresh


def test_an_unknown_suite_is_refused():
    with pytest.raises(ValueError, match="suite='dance'"):
        run_suite("dance")


ROW = Row("a", "b", Goal("at least", 3.0), 2.0, (1.9, 2.1))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def follow(stream):
    progress = Progress(2, 5, stream)
    progress.begin(0, "a")
    progress.round(1)
    progress.end(ROW)
    return stream.getvalue()


def test_a_file_gets_finished_rows():
    assert follow(io.StringIO()) == "1/2 a: 2.00 (≥ 3)\n"


def test_a_terminal_sees_the_rounds():
    clear = "\r\x1b[K"
    assert follow(Terminal()) == f"{clear}1/2 a …{clear}1/2 a: round 1 of 5{clear}1/2 a: 2.00 (≥ 3)\n"


def test_facts_fit_into_json_and_are_those_of_this_machine():
    facts = json.loads(json.dumps(machine_facts(), allow_nan=False))
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == 1
    assert facts["kernels"] == kernels.report().status
    assert facts["cpu"]
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(facts["date"])).total_seconds()) < 600
