"""Checks of exercises: verdicts on answers, and the file of the progress."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from course import unheard

from amplab.lessons.exercises import NOT_ANSWERED, Exercise, exercise
from amplab.lessons.progress import PROGRESS, read_progress, record_right


@exercise("98-1")
def check_half(answer: float, *, other: object = None) -> str | None:
    """Ask for one half.

    Right:
        Half of 1 is 0.5,
        exactly.

    Args:
        answer: a number.
    """
    return None if answer == 0.5 else f"{answer / 1} is not half of 1."


def test_a_right_answer_is_told_why() -> None:
    verdict = check_half(0.5)
    assert (repr(verdict), verdict.right) == ("Right. Half of 1 is 0.5, exactly.", True)


def test_a_wrong_answer_is_told_what_is_wrong() -> None:
    verdict = check_half(2)
    assert (repr(verdict), verdict.right) == ("Not yet: 2.0 is not half of 1.", False)


@pytest.mark.parametrize("answer", [..., (..., 1), [1, ...], {"a": [...]}])
def test_an_open_answer_is_not_wrong(answer: object) -> None:
    assert (repr(check_half(answer)), check_half(answer).right) == (NOT_ANSWERED, False)
    assert repr(check_half(0.5, other=answer)) == NOT_ANSWERED


def test_an_answer_that_the_check_cannot_use_gets_a_verdict() -> None:
    assert repr(check_half("0.5")).startswith("Not yet: '0.5' is not a number")
    assert repr(of_form(float)(0.5)).startswith("Not yet: with this answer the check raised TypeError: ")


def test_a_check_keeps_its_name_and_docstring() -> None:
    assert (check_half.name, check_half.__name__) == ("98-1", "check_half")
    assert check_half.__doc__.startswith("Ask for one half.")


@pytest.mark.parametrize("name", ["3-1", "03", "03-x", "03-10"])
def test_a_name_in_another_form_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        exercise(name)(lambda answer: None)


def test_without_a_reason_right_is_the_whole_verdict() -> None:
    assert repr(exercise("98-2")(lambda answer: None)(1)) == "Right."


def of_form(form: object) -> Exercise:
    """Return an exercise whose check needs an answer of a form."""

    def check(answer: Any) -> str | None:
        return f"{answer['a'] + answer[0] + answer(1) + 1 + list(answer)} is wrong"

    check.__annotations__["answer"] = form
    return exercise("98-3")(check)


@pytest.mark.parametrize(
    ("form", "answer", "expected"),
    [
        (float, "2", "'2' is not a number"),
        (int, None, "None is not a number"),
        (dict[str, int], [1], "[1] is not a dict"),
        (Mapping[str, int], "a", "'a' is not a dict"),
        (tuple[int, int], (1, 2, 3), "(1, 2, 3) is not 2 values in parentheses"),
        (list[str], 3, "3 is not a list"),
        (Callable[[int], int], 3, "3 is not a function"),
        (float, 2, "the check raised TypeError"),
        (Callable[[int], int], len, "the check raised TypeError"),
        (str, 3, "the check raised TypeError"),
    ],
)
def test_an_answer_of_another_form_is_told_the_form(form: object, answer: object, expected: str) -> None:
    verdict = of_form(form)(answer)
    assert not verdict.right
    assert expected in repr(verdict)


# ---- progress -----------------------------------------------------------------------------------


def test_nothing_is_recorded_without_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(PROGRESS, raising=False)
    monkeypatch.chdir(tmp_path)
    check_half(0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_right_answer_is_recorded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    monkeypatch.setenv(PROGRESS, str(path))
    check_half(2)
    check_half(...)
    assert not path.exists()
    check_half(0.5)
    path.write_text(json.dumps({**read_progress(path), "98-1": "2000-01-01", "97-3": "2000-01-02"}))
    check_half(0.5)
    assert read_progress(path) == {"98-1": "2000-01-01", "97-3": "2000-01-02"}
    exercise("98-2")(lambda answer: None)(1)
    assert list(read_progress(path)) == ["97-3", "98-1", "98-2"]
    assert [each.name for each in tmp_path.iterdir()] == ["progress.json"]


@pytest.mark.parametrize("text", ["", "[1]", "{", "3"])
def test_a_broken_file_has_no_progress(tmp_path: Path, text: str) -> None:
    (tmp_path / "progress.json").write_text(text)
    assert read_progress(tmp_path / "progress.json") == {}
    assert read_progress(tmp_path / "absent.json") == {}


def test_a_file_that_cannot_be_written_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PROGRESS, str(tmp_path / "absent" / "progress.json"))
    with pytest.warns(UserWarning, match="not noted"):
        verdict = check_half(0.5)
    assert verdict.right


def test_a_write_that_fails_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    path.write_text('{"98-9": "2000-01-01"}')
    monkeypatch.setenv(PROGRESS, str(path))

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.replace", full)
    with pytest.warns(UserWarning, match="the disk is full"):
        record_right("98-1")
    assert read_progress(path) == {"98-9": "2000-01-01"}
    assert [each.name for each in tmp_path.iterdir()] == ["progress.json"]


# ---- what the tests of a lesson must hear -------------------------------------------------------


def test_the_tests_of_a_lesson_are_asked_for_each_verdict() -> None:
    right, wrong, still_open = check_half(0.5), check_half(1), check_half(...)
    assert unheard(["98-1"], [("98-1", right), ("98-1", wrong), ("98-1", still_open)]) == []
    assert unheard(["98-1"], [("98-1", right), ("98-2", wrong)]) == ["98-1: no open answer", "98-1: no wrong answer"]
    assert len(unheard(["98-1", "98-2"], [])) == 6
