"""Lesson 1: the checks say what is wrong."""

import math

import pytest

from amplab.lessons import lesson_01
from amplab.lessons.exercises import NOT_ANSWERED


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (61440, "Right"),
        (57344, "largest number"),
        (65536, "smaller ones do too"),
        (60000, "halfway"),
        (..., NOT_ANSWERED),
    ],
)
def test_check_overflow_from(answer, said: str) -> None:
    verdict = lesson_01.check_overflow_from(answer)
    assert said in repr(verdict)
    assert verdict.right is (answer == 61440)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (["float32", "tf32", "bfloat16"], "Right"),
        (["float32", "float16"], "float16 rounds 1e-12 to zero"),
        (["float32"], "there are 3"),
        ("float32", "there are 3"),
        (["half"], "'half' is not a format"),
        (..., NOT_ANSWERED),
    ],
)
def test_check_formats_with_eps(answer, said: str) -> None:
    verdict = lesson_01.check_formats_with_eps(answer)
    assert said in repr(verdict)
    assert verdict.right is (said == "Right")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (4 / 32, "Right"),
        (4, "divide it by 32"),
        (0.25, "count inf and nan"),
        (math.nan, "nan is not a finite number"),
        (..., NOT_ANSWERED),
    ],
)
def test_check_reserved_share(answer, said: str) -> None:
    verdict = lesson_01.check_reserved_share(answer)
    assert said in repr(verdict)
    assert verdict.right is (answer == 0.125)
