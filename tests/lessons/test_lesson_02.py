"""Lesson 2: rounding in sums and in training, and the checks say what is wrong."""

import pytest
import torch

from amplab.formats import BFLOAT16, FLOAT16
from amplab.lessons import lesson_02
from amplab.lessons.exercises import NOT_ANSWERED


@pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16])
def test_stochastic_rounding_takes_one_of_the_two_neighbors_and_is_right_on_average(fmt) -> None:
    values = torch.tensor([1.0003, -0.3, 2.0**-20, 5e-8, 100.01])
    drawn = torch.Generator().manual_seed(0)
    rounded = torch.stack([lesson_02.round_stochastically(values, fmt, drawn) for _ in range(20_000)]).double()
    assert torch.equal(fmt.round(rounded), rounded)
    gap = torch.tensor([fmt.next_up(x) - fmt.next_down(x) for x in values.tolist()]).double()
    assert ((rounded - values.double()).abs() <= gap).all()
    assert ((rounded.mean(dim=0) - values.double()).abs() < 0.02 * gap).all()  # more than five standard errors


def test_numbers_of_the_format_stay() -> None:
    values = FLOAT16.round(torch.randn(1000))
    drawn = torch.Generator().manual_seed(0)
    assert torch.equal(lesson_02.round_stochastically(values, FLOAT16, drawn), values)


def test_running_sum_in_float64_is_cumsum() -> None:
    values = torch.arange(10.0)
    assert lesson_02.running_sum(values, torch.float64) == values.double().cumsum(0).tolist()


def test_share_changed_is_that_of_torch() -> None:
    weights = lesson_02.layer().weight.detach()
    half = weights.half()
    changed = ((half + 2.0**-15) != half).float().mean().item()
    assert lesson_02.share_changed(weights, 2.0**-15, FLOAT16) == pytest.approx(changed)


def test_rounded_weights_learn_less() -> None:
    float32, half = lesson_02.train(steps=20), lesson_02.train(FLOAT16.round, steps=20)
    assert float32[0] == pytest.approx(half[0], rel=1e-3)
    assert half[0] - half[-1] < 0.6 * (float32[0] - float32[-1])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (2**-12, "Right"),
        (2**-13, "a tie goes to the even one"),
        (2**-14, "too small"),
        (2**-11, "not the smallest"),
        (-1, "positive"),
        (..., NOT_ANSWERED),
    ],
)
def test_check_smallest_update(answer, said: str) -> None:
    verdict = lesson_02.check_smallest_update(answer)
    assert said in repr(verdict)
    assert verdict.right is (answer == 2**-12)


@pytest.mark.parametrize(
    ("answer", "said"), [(256, "Right"), (2048, "where half stops"), (128, "does not stop"), (..., NOT_ANSWERED)]
)
def test_check_stopped_counter(answer, said: str) -> None:
    verdict = lesson_02.check_stopped_counter(answer)
    assert said in repr(verdict)
    assert verdict.right is (answer == 256)


def mean_in(dtype: torch.dtype):
    return lambda values: torch.tensor(lesson_02.running_sum(values, dtype)[-1]).to(dtype) / len(values)


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        (mean_in(torch.float32), "Right", True),
        (torch.mean, "Right", True),
        (mean_in(torch.float16), "returns 0.5", False),
        (torch.median, "this returns 2", False),
        (lambda values: values.sum() / 0 - values.sum() / 0, "this returns nan", False),
        (lambda values: values.sum() / len(values), "returns inf", False),
        (1.0, "not a function", False),
        (..., NOT_ANSWERED, False),
    ],
)
def test_check_mean(answer, said: str, right: bool) -> None:
    verdict = lesson_02.check_mean(answer)
    assert said in repr(verdict)
    assert verdict.right is right
