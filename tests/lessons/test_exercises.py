"""Checks of exercises: verdicts on answers, and the file of the progress."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from course import unheard

from amplab.lessons.exercises import NOT_ANSWERED, Exercise, exercise
from amplab.lessons.forms import DTYPES, in_form, keys_fault, shown
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


@pytest.mark.parametrize(
    "answer", [17, 17.0, torch.tensor(17), torch.tensor(17.0), np.float32(17), np.int64(17), np.array(17)]
)
@pytest.mark.parametrize("form", [int, float])
def test_a_number_is_a_number_whatever_holds_it(form: type, answer: object) -> None:
    def check(answer):
        return None if (answer, type(answer) in (int, float)) == (17, True) else f"{answer!r}"

    check.__annotations__["answer"] = form
    assert exercise("98-4")(check)(answer).right


@pytest.mark.parametrize("name", ["half", "fp16", "float16", "torch.half", " torch.float16", torch.half])
def test_a_dtype_has_its_usual_names(name: object) -> None:
    assert in_form([name], Sequence[torch.dtype]) == [torch.float16]


def test_the_names_of_dtypes_are_those_of_torch() -> None:
    for name, dtype in DTYPES.items():
        assert getattr(torch, name, dtype) is dtype


def test_an_answer_of_another_form_is_told_how_to_write_it() -> None:
    @exercise("98-5")
    def check(answer: Mapping[str, float]) -> str | None:
        """Ask for a dict.

        Form:
            write a dict of numbers,
            such as dict(a=1).

        Right:
            So it is.
        """
        return keys_fault(answer, ("a", "b"))

    how = "write a dict of numbers, such as dict(a=1)."
    assert repr(check([1])) == f"Not yet: [1] is not a dict: {how}"
    assert repr(check({"a": "1"})) == f"Not yet: answer['a'] = '1' is not a number: {how}"
    assert repr(check({"a": 1})) == "Not yet: the answer lacks 'b': the keys are 'a', 'b'."
    assert repr(check({"a": 1, "b": 2, 3: 4})) == "Not yet: the answer has the key 3, which is none of 'a', 'b'."
    assert repr(check({"a": 1, "b": 2})) == "Right. So it is."


def test_a_call_without_an_answer_is_told_the_call() -> None:
    assert repr(check_half()) == "Not yet: it needs other arguments; call it as check_half(answer, other)."  # type: ignore[call-arg]


def test_what_a_function_of_the_reader_raises_is_said_to_be_its_error() -> None:
    @exercise("98-6")
    def check(answer: Callable[[float], float]) -> str | None:
        return None if answer(0.0) == 1 else "no"

    assert repr(check(lambda x: 1 / x)) == "Not yet: your function raised ZeroDivisionError: float division by zero."
    assert check(math.cos).right
    with pytest.raises(KeyboardInterrupt):
        check(interrupted)


def interrupted(_: float) -> float:
    raise KeyboardInterrupt


def test_a_long_answer_is_shown_in_one_line() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ValueError

    assert shown(Broken()) == "<Broken>"
    assert shown(10**5000) == "<int>"
    assert len(shown(torch.nn.Sequential(*[torch.nn.Linear(2, 2)] * 50))) == 100
    assert "\n" not in shown(torch.ones(3, 3))


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
        (int, None, "None is not a whole number"),
        (int, 2.5, "2.5 is not a whole number"),
        (float, True, "True is not a number"),
        (float, math.nan, "nan is not a finite number"),
        (float, 10**400, "is not a finite number"),
        (float, torch.ones(2), "tensor([1., 1.]) is not a number"),
        (float, torch.tensor(True), "tensor(True) is not a number"),
        (dict[str, int], {"a": "2"}, "answer['a'] = '2' is not a whole number"),
        (dict[str, tuple[float, float]], {"a": (1, None)}, "answer['a'][1] = None is not a number"),
        (Mapping[str, torch.dtype], {"a": "hlaf"}, "answer['a'] = 'hlaf' is not a dtype"),
        (list[dict[str, float]], [{"a": 1}, 2], "answer[1] = 2 is not a dict"),
        (Sequence[str], {"a"}, "{'a'} is not a list"),
        (Collection[str], "a", "'a' is not a list or a set"),
        (Iterable[str], torch.tensor(1.0), "tensor(1.) is not a list or a set"),
        (str | Iterable[str], 3, "3 is not a string or a list or a set"),
        (str | Iterable[str], [3], "answer[0] = 3 is not a string"),
        (type[int], 3, "3 is not a subclass of int"),
        (type[int], str, "<class 'str'> is not a subclass of int"),
        (Path, "a", "'a' is not a Path"),
        (dict[str, int], [1], "[1] is not a dict"),
        (Mapping[str, int], "a", "'a' is not a dict"),
        (tuple[int, int], (1, 2, 3), "(1, 2, 3) is not 2 values in parentheses"),
        (list[str], 3, "3 is not a list"),
        (Callable[[int], int], 3, "3 is not a function"),
        (float, 2, "the check raised TypeError"),
        (Callable[[int], int], len, "the check raised TypeError"),
        (str, 3, "3 is not a string"),
        (None, None, "the check raised TypeError"),
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


def test_a_link_stays_and_its_target_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also before the target is there, and if it is damaged."""
    path, target = tmp_path / "progress.json", tmp_path / "drive" / "mine.json"
    target.parent.mkdir()
    path.symlink_to(target)
    monkeypatch.setenv(PROGRESS, str(path))
    record_right("98-1")
    record_right("98-2")
    target.write_text("damaged")
    with pytest.warns(UserWarning, match="it is kept as mine.json.damaged"):
        record_right("98-3")
    assert path.readlink() == target
    assert list(read_progress(target)) == list(read_progress(path)) == ["98-3"]
    assert sorted(each.name for each in target.parent.iterdir()) == ["mine.json", "mine.json.damaged"]


def test_a_link_that_leads_back_to_itself_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    path.symlink_to(path)
    monkeypatch.setenv(PROGRESS, str(path))
    with pytest.warns(UserWarning, match="not noted"):
        record_right("98-1")
    assert path.is_symlink()


@pytest.mark.skipif(os.name != "posix", reason="kills a process by a signal")
def test_what_a_killed_process_has_left_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once it is old, and nothing else: not the swap file of an editor."""
    path, swap = tmp_path / "progress.json", tmp_path / ".progress.json.swp"
    code = (
        "import os, signal; from amplab.lessons.progress import record_right; "
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL); record_right('98-1')"
    )
    environment = os.environ | {PROGRESS: str(path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    swap.write_text("")
    os.utime(swap, (0, 0))
    monkeypatch.setenv(PROGRESS, str(path))
    record_right("98-1")
    assert set(tmp_path.iterdir()) == {left, swap, path}  # another process could be writing it
    os.utime(left, (0, 0))
    record_right("98-2")
    assert set(tmp_path.iterdir()) == {swap, path}


@pytest.mark.parametrize("text", ["", "[1]", "{", "3", "[" * 100_000, '{"98-9": "2000-01-01"'])
def test_a_broken_file_has_no_progress_and_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    path = tmp_path / "progress.json"
    path.write_text(text)
    assert read_progress(path) == {}
    assert read_progress(tmp_path / "absent.json") == {}
    monkeypatch.setenv(PROGRESS, str(path))
    with pytest.warns(UserWarning, match="is damaged; it is kept as progress.json.damaged"):
        record_right("98-1")
    assert list(read_progress(path)) == ["98-1"]
    assert (tmp_path / "progress.json.damaged").read_text() == text


def test_every_damaged_file_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    monkeypatch.setenv(PROGRESS, str(path))
    for text in ("{1", "{2", "{3"):
        path.write_text(text)
        with pytest.warns(UserWarning, match="is damaged"):
            record_right("98-1")
    kept = sorted(each for each in tmp_path.iterdir() if "damaged" in each.name)
    assert [each.read_text() for each in kept] == ["{1", "{2", "{3"]


@pytest.mark.skipif(os.name != "posix", reason="makes a pipe")
def test_a_pipe_in_place_of_the_file_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    os.mkfifo(path)
    assert read_progress(path) == {}
    monkeypatch.setenv(PROGRESS, str(path))
    with pytest.warns(UserWarning, match="is damaged"):
        record_right("98-1")
    assert list(read_progress(path)) == ["98-1"]


def test_a_folder_that_another_program_locks_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr("amplab.lessons.locked_folder._SECONDS", 0.1)
    monkeypatch.setenv(PROGRESS, str(tmp_path / "progress.json"))
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    with pytest.warns(UserWarning, match="another program has locked the folder; the exercise is not noted"):
        record_right("98-1")
    os.close(handle)
    record_right("98-1")
    assert list(read_progress(tmp_path / "progress.json")) == ["98-1"]


def test_a_file_that_cannot_be_read_is_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    path.mkdir()
    monkeypatch.setenv(PROGRESS, str(path))
    with pytest.warns(UserWarning, match="not noted"):
        record_right("98-1")
    assert path.is_dir()


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


@pytest.mark.skipif(os.name != "posix", reason="needs file locks")
def test_exercises_that_two_kernels_solve_at_once_are_both_noted(tmp_path):
    names = [[f"{kernel}-{number}" for number in range(100)] for kernel in (1, 2)]
    code = "import sys\nfrom amplab.lessons.progress import record_right\nfor name in sys.argv[1:]: record_right(name)"
    environment = os.environ | {PROGRESS: str(tmp_path / "progress.json")}
    kernels = [subprocess.Popen([sys.executable, "-c", code, *each], env=environment) for each in names]
    assert [each.wait(timeout=100) for each in kernels] == [0, 0]
    assert set(read_progress(tmp_path / "progress.json")) == {*names[0], *names[1]}
