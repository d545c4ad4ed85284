"""The histogram as text: one column per power of two, moved by a scale, above the range of a format."""

import pytest
import torch

from amplab.formats import BFLOAT16, FLOAT8_E4M3, FLOAT16, FORMATS, exponent_histogram, histogram_text


def drawn(x, fmt=FLOAT16, power=0, **options):
    """The lines of the picture: bars, axis, range."""
    *bars, axis, ranges = histogram_text(exponent_histogram(x).shifted(power), fmt, **options).split("\n")
    return bars, axis, ranges


def test_the_heights_are_the_shares_of_the_fullest_column():
    x = torch.tensor([2.0**-2] * 8 + [2.0**-1] * 4 + [1.0])
    bars, _, _ = drawn(x, low=-3, high=1, height=2)
    assert bars == [" █", " ██▂"]


def test_a_column_that_is_not_empty_is_seen():
    x = torch.cat([torch.ones(100_000), torch.tensor([2.0**-20])])
    bars, _, _ = drawn(x)
    assert bars[-1].strip()[0] == "▁"


@pytest.mark.parametrize("power", [-7, 16])
def test_a_scale_moves_the_picture_and_nothing_else(power):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    still, axis, ranges = drawn(x, low=-60, high=60)
    moved, moved_axis, moved_ranges = drawn(x, power=power, low=-60, high=60)
    assert [" " * max(power, 0) + line for line in still] == [" " * max(-power, 0) + line for line in moved]
    assert (axis, ranges) == (moved_axis, moved_ranges)


def test_what_lies_beyond_the_ends_is_drawn_at_the_ends():
    bars, _, _ = drawn(torch.tensor([2.0**-100, 2.0**100]), low=-5, high=5, height=1)
    assert bars == ["█" + " " * 9 + "█"]


def test_the_axis_writes_each_exponent_at_its_column():
    _, axis, _ = drawn(torch.ones(1), low=-45, high=23)
    for exponent in range(-40, 21, 10):
        assert axis[exponent + 45 :].startswith(str(exponent))


@pytest.mark.parametrize("fmt", [FLOAT16, FLOAT8_E4M3], ids=lambda fmt: fmt.name)
def test_the_range_below_is_what_rounding_does(fmt):
    _, _, ranges = drawn(torch.ones(1), fmt)
    starts = {"zero": 0} | {name: ranges.index(f"│{name[:3]}") for name in ("subnormal", "normal", "overflow")}
    for column, exponent in enumerate(range(-45, 25)):
        middle = torch.tensor([1.5 * 2.0**exponent])  # 1.75 * 2^8 is e4m3's largest, so the middle still fits
        name = max((start, name) for name, start in starts.items() if start <= column)[1]
        rounded = fmt.round(middle).item()
        assert (rounded == 0) == (name == "zero")
        assert (not 0 <= rounded <= fmt.max or middle.item() > fmt.max) == (name == "overflow")
        assert (rounded > 0 and middle.item() < fmt.smallest_normal) == (name == "subnormal")


def test_ranges_outside_the_picture_are_omitted():
    _, _, ranges = drawn(torch.ones(1), BFLOAT16, low=-10, high=10)
    assert ranges == "normal".ljust(21, "─")


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_the_range_is_as_wide_as_the_picture(fmt):
    _, _, ranges = drawn(torch.ones(1), fmt, low=-160, high=140)
    assert len(ranges) == 301


def test_an_empty_histogram_is_an_empty_picture():
    bars, _, _ = drawn(torch.zeros(3))
    assert bars == ["", "", "", ""]


@pytest.mark.parametrize("options", [{"low": 3, "high": 2}, {"height": 0}])
def test_a_picture_without_room_is_refused(options):
    with pytest.raises(ValueError, match="low <= high and height >= 1"):
        drawn(torch.ones(1), **options)
