"""Lesson 14: its ranks end with the call, and its checks accept the solutions and say what is wrong with others."""

import os
import subprocess
import time

import pytest
import torch

from amplab.lessons import lesson_14 as lesson

ORDER = ["backward", "average", "unscale", "clip", "step"]


def children() -> set[str]:
    """The ranks that are still children of this process."""
    command = ["ps", "-o", "pid=,args=", "--ppid", f"{os.getpid()}"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line for line in listed.stdout.splitlines() if "import _rank" in line}


def in_half(model, images):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(images)


def test_ranks_average_their_gradients_and_are_gone():
    first, second = (each["gradients"] for each in lesson.run_ranks(lesson.gradients))
    assert torch.equal(first["averaged"], second["averaged"])
    assert torch.equal((first["alone"] + second["alone"]) / 2, first["averaged"])
    assert children() == set()


def test_ranks_that_reach_the_limit_are_killed():
    began = time.monotonic()
    with pytest.raises(lesson.RankError, match=r"did not end within 0\.2 s"):
        lesson.run_ranks(lesson.gradients, limit=0.2)
    assert time.monotonic() - began < 30
    assert children() == set()


def test_a_function_of_a_notebook_is_refused():
    with pytest.raises(ValueError, match="expected a function of"):
        lesson.run_ranks(in_half)


def test_the_share_of_skipped_steps_grows_with_the_ranks():
    assert "2^-20" in repr(lesson.skipped_share(14, 20))


@pytest.mark.parametrize(
    ("check", "answer"),
    [(lesson.check_skipping_ranks, 8), (lesson.check_order, ORDER), (lesson.check_thread, in_half)],
)
def test_solutions_are_right(check, answer):
    assert str(check(answer)).startswith("Right.")
    assert "Not answered yet" in str(check(...))


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        (lesson.check_skipping_ranks, 1, "before the all-reduce"),
        (lesson.check_skipping_ranks, 4, "neither all ranks nor one"),
        (lesson.check_order, "backward", "not a list: write a list of the five words"),
        (lesson.check_order, ["backward"], "each of these once"),
        (lesson.check_order, ["step", "average", "unscale", "clip", "backward"], "first and last"),
        (lesson.check_order, ["backward", "unscale", "average", "clip", "step"], "NaN weights"),
        (lesson.check_order, ["backward", "average", "clip", "unscale", "step"], "still scaled"),
        (lesson.check_thread, 1, "not a function"),
        (lesson.check_thread, lambda model, images: None, "returns None"),
        (lesson.check_thread, lambda model, images: model(images), "torch.float32"),
        (lesson.check_thread, lambda model, images: model(images).half(), "only the result is half"),
        (lesson.check_thread, lambda model, images: images.half(), "does not call the model"),
        (lesson.check_thread, lambda model, images: model.half()(images.half()), "dtype of the weights"),
    ],
)
def test_wrong_answers_are_told_what_is_wrong(check, answer, said):
    verdict = check(answer)
    assert not verdict.right
    assert said in str(verdict)


def test_the_ranks_run_no_module_beside_the_notebook(tmp_path, monkeypatch):
    for name in ("torch", "numpy", "amplab"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('planted')")
    monkeypatch.chdir(tmp_path)
    assert len(lesson.run_ranks(lesson.gradients)) == 2
