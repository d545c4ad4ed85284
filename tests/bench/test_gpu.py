"""The GPU's benchmark without a GPU: its rows, its JSON, its checks; no figure appears that was not measured."""

import dataclasses
import json
import re

import pytest
import torch

from amplab import kernels
from amplab.bench import Contestant, Goal, Row, gpu, gpu_checks
from amplab.bench.gpu import measure_case, unmeasured
from amplab.bench.gpu_cases import FULL, SMALL, GpuCase, gpu_cases
from amplab.bench.gpu_checks import Check, run_checks, run_step_checks
from amplab.bench.interleaved import quartiles
from amplab.cli import main as amplab

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def case(**goals):
    goals = goals or {"torch": 2.0, "copy": 0.9}
    sides = {"amplab": Contestant(lambda: None), **{name: Contestant(lambda: None) for name in goals}}
    return GpuCase("a", {name: Goal("at least", goal) for name, goal in goals.items()}, False, 8, lambda device: sides)


@WITHOUT_GPU
@pytest.mark.parametrize("start", [gpu.main, lambda words: amplab(["bench", "gpu", *words])])
def test_without_a_gpu_one_sentence_and_no_file(capsys, tmp_path, start):
    before = sorted(gpu.RESULTS.iterdir())
    assert start(["--json", str(tmp_path / "figures.json")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(
        r"amplab bench gpu: no CUDA device found, so nothing was measured; `python -m [^`]*` checks [^.]*\.\n",
        printed.err,
    )
    assert list(tmp_path.iterdir()) == []
    assert sorted(gpu.RESULTS.iterdir()) == before


def test_the_cpu_checks_and_rehearses_and_has_no_figures(capsys):
    assert gpu.main(["--device", "cpu", "--small"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("not measured") == len([row for case in gpu_cases(SMALL) for row in case.goals])
    assert "66 of 66 checks passed" in printed
    assert not re.search(r"\b(met|missed)\b", printed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu"], "add --small"),
        (["--device", "cpu", "--small", "--json", "nvidia-h200.json"], "figures are only written for a GPU"),
    ],
)
def test_the_cpu_is_refused_a_file_of_figures(capsys, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    assert gpu.main(words) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_rows_are_those_that_are_published():
    cases = gpu_cases(FULL)
    goals = [(each.name, against, goal.value) for each in cases for against, goal in each.goals.items()]
    assert len({(name, against) for name, against, _ in goals}) == len(goals) == 17
    bandwidth = [goal for _, against, goal in goals if against.startswith("copy_")]
    assert bandwidth == [0.92] * 6
    assert [goal for _, against, goal in goals if against == "torch's operator"] == [1.0, 1.3, 1.3] * 2
    assert [goal for *_, goal in goals[12:]] == [3.0, 3.0, 2.5, 1.0, 1.0]
    assert sum(torch.Size(shape).numel() for shape in FULL.lists["1 B in 400 tensors"]) == 10**9
    assert [each.whole_call for each in cases] == [False] * 6 + [True] * 5


def test_sides_take_turns_and_each_round_has_its_ratio():
    log = []
    names = {"amplab": 1.0, "torch": 3.0, "copy": 0.5}
    sides = {name: Contestant(lambda: None, prepare=lambda: None) for name in names}
    by_side = {id(side): name for name, side in sides.items()}

    def clock(side, *, whole_call):
        log.append(by_side[id(side)])
        return names[log[-1]]

    goals = {"torch": Goal("at least", 2.0), "copy": Goal("at least", 0.92)}
    rows = measure_case(GpuCase("a", goals, True, 0, lambda device: sides), clock, 3, device="cpu")
    assert log[-9:] == ["amplab", "torch", "copy", "torch", "copy", "amplab", "copy", "amplab", "torch"]
    assert [(row.against, row.ratio, row.spread, row.met) for row in rows] == [
        ("torch", 3.0, (3.0, 3.0), True),
        ("copy", 0.5, (0.5, 0.5), False),
    ]
    assert rows[0].details == {"ours_ms": 1.0, "theirs_ms": 3.0, "rounds": 3, "timed": "whole call"}


def test_too_little_memory_is_no_figure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**40))
    goal = {"torch": Goal("at least", 2.0)}
    (row,) = measure_case(GpuCase("a", goal, False, 3 * 2**30, pytest.fail), pytest.fail, 3)
    assert row.ratio is None
    assert row.details == {"why": "needs 3 GiB of device memory, 1 are free"}


def test_json_and_table_say_what_was_not_measured():
    goal = Goal("at least", 0.92)
    rows = [Row("a", "b", goal, 0.95, (0.94, 0.96), {"ours_ms": 1.0}), *unmeasured(case(torch=2.0), "no memory")]
    checks = [Check("unscale_", 3), Check("unscale_add", 2, "list 1: tensor 0")]
    text, written = gpu.report(rows, checks, {"device": "Abacus"})
    whole = json.loads(written)
    assert whole["machine"] == {"device": "Abacus"}
    assert [(row["ratio"], row["met"], row["goal"]) for row in whole["rows"]] == [
        (0.95, True, "≥ 0.92"),
        (None, None, "≥ 2"),
    ]
    assert whole["rows"][1]["details"] == {"why": "no memory"}
    assert whole["checks"][1]["failure"] == "list 1: tensor 0"
    lines = text.splitlines()
    assert lines[0] == "what  against  ratio         quartiles  goal"
    assert lines[2:4] == [
        "a     b        0.95          0.94–0.96  ≥ 0.92  met",
        "a     torch    not measured             ≥ 2",
    ]
    assert "1 of 1 goals met" in text
    assert lines[-2:] == ["1 of 2 checks passed.", "unscale_add: list 1: tensor 0"]


def test_what_is_recorded_was_measured_on_a_named_device(tmp_path):
    for name, each in gpu.recorded_results().items():
        assert name
        assert {"device", "driver", "torch", "cuda", "date"} <= set(each["machine"])
        assert all(check["failure"] == "" for check in each["checks"])
    assert gpu.recorded_results(tmp_path) == {}
    (tmp_path / "abacus.json").write_text(gpu.report([], [], {"device": "Abacus"})[1])
    assert set(gpu.recorded_results(tmp_path)) == {"Abacus"}


def leave_the_last(inputs, outputs, found_inf, inv_scale, **findings):
    kernels.unscale_copy(inputs, [y.clone() for y in outputs], found_inf, inv_scale, **findings)
    shorter = ([x[:-1] for x in inputs], [y[:-1] for y in outputs])
    kernels.unscale_copy(*shorter, found_inf, inv_scale)


def write_next_to(inputs, outputs, found_inf, inv_scale, **findings):
    kernels.unscale_copy(inputs, outputs, found_inf, inv_scale, **findings)
    first = outputs[0]
    first.as_strided((1,), (1,), first.storage_offset() + first.numel()).zero_()


def round_otherwise(inputs, outputs, found_inf, inv_scale, **findings):
    kernels.unscale_copy(inputs, outputs, found_inf, inv_scale, **findings)
    outputs[-1][0] = torch.nextafter(outputs[-1][0], torch.tensor(0.0, dtype=outputs[-1].dtype))


def miss_what_is_bad(inputs, outputs, found_inf, inv_scale, **findings):
    kernels.unscale_copy(inputs, outputs, torch.zeros(1), inv_scale, **findings)


def miss_a_norm(inputs, outputs, found_inf, inv_scale, **findings):
    kernels.unscale_copy(inputs, outputs, found_inf, inv_scale, **{**findings, "norms": None})


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (leave_the_last, "elements differ from float64"),
        (write_next_to, "memory next to it was written"),
        (round_otherwise, "1 of "),
        (miss_what_is_bad, "found_inf 0.0"),
        (miss_a_norm, "norms: "),
    ],
)
def test_a_broken_kernel_is_caught(monkeypatch, broken, said):
    monkeypatch.setattr(gpu_checks, "unscale_copy", broken)
    checks = run_checks("cpu", lists=4, largest=50)
    failed = [check for check in checks if check.failure]
    assert {check.name.split()[0] for check in failed} == {"unscale_copy"}
    assert len(failed) >= 8
    assert any(said in check.failure for check in failed)


def step_twice(*lists, **numbers):
    kernels.adam_(*lists, **numbers)
    kernels.adam_(*lists, **numbers)


def forget_the_overflow(*lists, found_inf, **numbers):
    kernels.adam_(*lists, **numbers)


def leave_the_copies(*lists, **numbers):
    kernels.adam_(*lists[:-1], **numbers)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (forget_the_overflow, "wrote something although found_inf was 1"),
        (leave_the_copies, "not the parameter, rounded"),
        (step_twice, "from float64"),
    ],
)
def test_a_broken_step_is_caught(monkeypatch, broken, said):
    def on_one_device(*lists, **numbers):
        # The side in float64 is the one that is right; a check in float32 alone sees the broken step.
        right = lists[0][0].dtype == torch.float64
        (kernels.adam_ if right else broken)(*lists, **numbers)

    rules = gpu_checks.RULES
    monkeypatch.setitem(rules, "adam_", dataclasses.replace(rules["adam_"], step=on_one_device))
    failed = [check for check in run_step_checks("cpu", lists=2, largest=50) if check.failure]
    assert {check.name.split()[0] for check in failed} == {"adam_"}
    assert all("float32" in check.name for check in failed)
    assert said in " ".join(check.failure for check in failed)


def test_quartiles():
    assert quartiles([2.0]) == (2.0, 2.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
