"""The injector interrupts where CPython handles signals, everywhere there, and nowhere else."""

import contextlib
import importlib.util

import pytest
from interrupts import interrupted, interrupted_everywhere

SOURCE = """
import contextlib

done = []


class Block:
    def __enter__(self):
        done.append("enter")

    def __exit__(self, *error):
        done.append("exit")


@contextlib.contextmanager
def nested():
    with Block():
        yield


def failing():
    with contextlib.suppress(ValueError), nested():
        raise ValueError


def returning():
    with Block():
        return len(done)


def step():
    with Block():
        done.append("body")
    for number in range(3):
        done.append(number)


def swallowing():
    with contextlib.suppress(KeyboardInterrupt):
        step()
"""


@pytest.fixture
def written(tmp_path):
    """A module in a folder of its own; `done` holds what its step has done."""
    path = tmp_path / "written.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("written", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_effect_of_a_step_is_the_last_one_of_some_interrupted_step(written, tmp_path):
    ends = []
    for interrupt in interrupted_everywhere(written.step, folders=[str(tmp_path)]):
        assert interrupt.escaped
        ends.append(tuple(written.done))
        written.done.clear()
    whole = ("enter", "body", "exit", 0, 1, 2)
    assert set(ends) == {whole[:length] for length in range(7)} | {("enter", "exit")}
    assert tuple(written.done) == whole  # the step that was not interrupted


@pytest.mark.parametrize("step", ["step", "failing", "returning"])
def test_no_interrupt_comes_between_the_end_of_a_block_and_its_exit(written, tmp_path, step):
    for interrupt in interrupted_everywhere(getattr(written, step), folders=[str(tmp_path)]):
        entered, left = written.done.count("enter"), written.done.count("exit")
        begun_to_leave = "__exit__" in interrupt.where or "__enter__" in interrupt.where
        assert entered == left or begun_to_leave, interrupt
        written.done.clear()


def test_an_interrupt_that_the_step_swallows_is_told_from_one_that_escapes(written, tmp_path):
    assert not interrupted(written.swallowing, 5, folders=[str(tmp_path)]).escaped
    assert interrupted(written.step, 5, folders=[str(tmp_path)]).escaped


def test_functions_choose_what_is_interrupted(written, tmp_path):
    found = list(interrupted_everywhere(written.step, folders=[str(tmp_path)], functions=["__exit__"]))
    assert found
    assert all("__exit__" in interrupt.where for interrupt in found)


def test_other_files_are_not_interrupted(written):
    assert interrupted(written.step, 1) is None


def test_a_step_without_an_end_is_reported(written, tmp_path):
    points = interrupted_everywhere(written.step, folders=[str(tmp_path)], most=5)
    with contextlib.suppress(StopIteration), pytest.raises(AssertionError, match="has not ended"):
        for _ in points:
            pass
