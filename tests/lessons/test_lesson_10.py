"""Accumulation in all its ways, and the checks of lesson 10."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from amplab.lessons import lesson_10

EACH, DELAYED, ZEROED = lesson_10.WAYS


def accumulation(divisor: float = 8, delayed: int = 7, batches: int = 8, *, step: bool = False) -> Callable[..., None]:
    """Return the solution of exercise 1, or one of its mistakes."""

    def accumulate(model: Any, optimizer: Any, pairs: Any, scale_loss: Any) -> None:
        for place, (images, labels) in enumerate(pairs[:batches], 1):
            loss = F.cross_entropy(model(images), labels) / divisor
            with scale_loss(loss, optimizer, delay_unscale=place <= delayed) as scaled_loss:
                scaled_loss.backward()
        if step:
            optimizer.step()

    return accumulate


def whole_batch(model, optimizer, pairs, scale_loss):
    """One backward of all images, which accumulates nothing."""
    images, labels = (torch.cat(each) for each in zip(*pairs, strict=True))
    with scale_loss(F.cross_entropy(model(images), labels), optimizer) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("way", [EACH, DELAYED])
def test_both_ways_give_the_gradients_of_the_whole_batch(level: str, way: str) -> None:
    run = lesson_10.accumulated(level, 3, way)
    assert run.difference < 5e-3
    assert run.counted == (8 if way == EACH else 1)


def test_at_o1_the_two_ways_are_equal_and_at_o2_sums_are_rounded() -> None:
    for level, equal in (("O1", True), ("O2", False)):
        each, delayed = (lesson_10.accumulated(level, 5, way) for way in (EACH, DELAYED))
        assert torch.equal(each.gradients, delayed.gradients) is equal


def test_the_traps_have_the_norms_of_the_lesson() -> None:
    undivided = lesson_10.accumulated("O1", 3, DELAYED, "not")
    assert undivided.norm / undivided.true_norm == pytest.approx(8, rel=0.01)
    zeroed = lesson_10.accumulated("O1", 3, ZEROED)
    assert zeroed.norm < 0.5 * zeroed.true_norm


def test_each_overflow_halves_the_scale_unless_unscaling_is_delayed() -> None:
    scales = [lesson_10.accumulated("O1", 3, way, boost=2.0**20).scale for way in (EACH, DELAYED)]
    assert scales == [2.0**8, 2.0**15]


def test_the_explorer_draws_every_choice() -> None:
    explorer = lesson_10.accumulation_explorer()
    for way in lesson_10.WAYS:
        explorer.set(way=way, level="O2", power=2, divide="not")
        assert "times the true norm" in repr(explorer)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (accumulation(), "Right"),
        (..., "Not answered yet"),
        (accumulation(divisor=1), "8.0 times as large"),
        (accumulation(divisor=math.nan), "differ from those of the whole batch"),
        (accumulation(step=True), "without optimizer.step()"),
        (accumulation(delayed=0), "unscaled 8 times"),
        (accumulation(delayed=8), "no gradient was unscaled"),
        (accumulation(delayed=5, batches=6), "use all eight micro-batches"),
        (whole_batch, "entered 1 times, expected 8"),
        (lambda _model: None, "your function raised TypeError"),
    ],
)
def test_check_accumulation(answer: Any, said: str) -> None:
    assert said in repr(lesson_10.check_accumulation(answer))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((250, 2000), "Right"),
        (..., "Not answered yet"),
        ((2000, 2000), "every backward counts"),
        ((125, 2000), "have 1000 backwards"),
        ((250, 250), "only the last backward"),
        (("250", "2000"), "answer[0] = '250' is not a whole number: write two numbers"),
        (250, "250 is not 2 values in parentheses"),
        (None, "None is not 2 values in parentheses"),
    ],
)
def test_check_growth(answer: Any, said: str) -> None:
    assert said in repr(lesson_10.check_growth(answer))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (2, "Right"),
        (..., "Not answered yet"),
        (4, "half as large"),
        (22, "of the epoch"),
        (5, "count the micro-batches"),
        ("2", "'2' is not a number"),
        (torch.tensor(2), "Right"),
    ],
)
def test_check_left_over(answer: Any, said: str) -> None:
    assert said in repr(lesson_10.check_left_over(answer))
