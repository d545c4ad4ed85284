"""Charts of the lessons: places of lines and bars, their text, and what they say of values that are not finite."""

import base64
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from html_outline import outline

from amplab.display.charts import bar_chart, exponent_chart, line_chart, scale_drawing
from amplab.display.palette import PALETTE
from amplab.formats import BFLOAT16, FLOAT8_E4M3, FLOAT16, exponent_histogram

EVIL = '<b a="x">'


def curves_of(chart) -> list[list[tuple[float, float]]]:
    return curves_in(chart.drawing)


def curves_in(drawing: str) -> list[list[tuple[float, float]]]:
    lines = re.findall(r'<polyline points="([^"]*)"', drawing)
    return [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]


def texts_of(chart) -> list[str]:
    return re.findall(r">([^<>]+)</text>", chart.drawing)


def bars_of(chart) -> list[float]:
    return [float(wide) for wide in re.findall(r'<rect [^>]*width="([\d.]+)" height="22"', chart.drawing)]


# ---- lines --------------------------------------------------------------------------------------


def test_a_curve_goes_up_where_its_values_do() -> None:
    (curve,) = curves_of(line_chart({"loss": [1.0, 3.0, 2.0]}))
    (x0, y0), (x1, y1), (x2, y2) = curve
    assert x0 < x1 < x2
    assert y1 < y2 < y0  # downwards in SVG
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.1)


def test_a_value_that_is_not_finite_is_a_gap_and_a_mark() -> None:
    chart = line_chart({"loss": [1.0, 2.0, math.inf, math.nan, 3.0, 2.0]})
    assert [len(curve) for curve in curves_of(chart)] == [2, 2]
    assert chart.drawing.count("not finite</title>") == 2
    assert repr(chart) == "value over step 0 to 5: loss 1 -> 2 (2 not finite)"


def test_a_single_value_is_visible() -> None:
    (curve,) = curves_of(line_chart({"loss": [1.0]}))
    assert len(set(curve)) == 2


def test_nothing_finite_is_drawn_without_an_error() -> None:
    assert curves_of(line_chart({"loss": [math.nan, math.inf]})) == []


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    (curve,) = curves_of(line_chart({"loss": [float(step) for step in range(5000)]}))
    assert len(curve) <= 402
    assert (curve[0][0], curve[-1][0]) == (52.0, 752.0)


def test_a_logarithmic_axis_is_even_in_powers() -> None:
    (curve,) = curves_of(line_chart({"scale": [1.0, 16.0, 256.0]}, log_y=True, holds=False))
    assert curve[0][1] - curve[1][1] == pytest.approx(curve[1][1] - curve[2][1], abs=0.11)
    assert "2⁸" in outline(line_chart({"scale": [1.0, 256.0]}, log_y=True).drawing).text
    assert "0.001" in outline(line_chart({"loss": [3e-4, 12.0]}, log_y=True).drawing).text
    assert curves_of(line_chart({"loss": [0.0, -1.0]}, log_y=True)) == []


def test_powers_of_two_are_stairs_and_other_values_are_joined():
    (stairs,) = curves_of(line_chart({"scale": [4.0, 8.0, 8.0, 2.0]}, log_y=True))
    assert [round(at) for at, _ in stairs] == [52, 285, 285, 752, 752]
    assert stairs[0][1] == stairs[1][1] > stairs[2][1] == stairs[3][1] < stairs[4][1]
    assert len(curves_of(line_chart({"scale": [4.0, 8.0, 9.0]}, log_y=True))[0]) == 3


def test_a_constant_has_ticks_on_both_sides():
    assert {"2¹⁵", "2¹⁶", "2¹⁷"} <= set(texts_of(line_chart({"scale": [2.0**16] * 3}, log_y=True)))


def test_the_peaks_of_a_long_curve_are_drawn():
    values = [1.0] * 5000
    values[1234], values[4321] = 9.0, -9.0
    (curve,) = curves_of(line_chart({"loss": values}))
    assert len(curve) <= 402
    assert len({height for _, height in curve}) == 3


def test_a_curve_that_turns_often_is_thin():
    def width_of(values: list[float]) -> float:
        return float(re.search(r'<polyline [^>]*stroke-width="([\d.]+)"', line_chart({"a": values}).drawing)[1])

    assert width_of([1.0, 2.0] * 150) == 1
    assert width_of([float(step) for step in range(300)]) == width_of([1.0, 2.0, 1.0]) == 2.5


def test_the_legend_says_what_the_triangles_are_and_whose():
    broken = {"2^0": [2.0, 1.0], "2^24": [2.0, math.nan]}
    assert "not finite: 2^24" in texts_of(line_chart(broken, y_label="loss"))
    assert "not finite" in texts_of(line_chart({"loss": [1.0, math.inf]}, y_label="loss"))
    assert "not finite" not in outline(line_chart({"loss": [1.0, 2.0]}, y_label="loss").drawing).text


def test_a_word_that_repeats_is_written_once():
    chart = line_chart({"loss": [3.0] * 9}, marks={1: "skipped", 4: "skipped", 7: "end"})
    assert chart.drawing.count('stroke-dasharray="2 3"') == 3
    assert [word for word in texts_of(chart) if word in ("skipped", "end")] == ["skipped", "end"]


def test_marks_are_lines_with_words() -> None:
    drawing = line_chart({"loss": [3.0, 2.0, 1.0]}, marks={1: "skipped", 2: "end", 7: "outside"}).drawing
    assert drawing.count('stroke-dasharray="2 3"') >= 2
    assert "skipped" in outline(drawing).words
    assert "outside" not in drawing


def test_places_across_can_be_given() -> None:
    (curve,) = curves_of(line_chart({"error": [1.0, 2.0, 3.0]}, x=[0.0, 1.0, 4.0]))
    assert curve[1][0] - curve[0][0] == pytest.approx((curve[2][0] - curve[0][0]) / 4, abs=0.1)
    with pytest.raises(ValueError, match="2 values"):
        line_chart({"error": [1.0, 2.0, 3.0]}, x=[0.0, 1.0])


@pytest.mark.parametrize("curves", [{}, {"loss": []}])
def test_no_curve_is_refused(curves) -> None:
    with pytest.raises(ValueError, match="curves="):
        line_chart(curves)


def test_several_curves_have_a_legend_and_names_are_escaped() -> None:
    read = outline(
        line_chart({EVIL: [1.0, 2.0], "b": [2.0, 1.0]}, x_label=EVIL, y_label=EVIL, marks={0: EVIL})._repr_html_()
    )
    assert "b" not in read.counts
    assert "a=" in read.text
    assert len(read.named("polyline")) == 2  # and two lines in the legend


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.126, "0.13"), (2.0**-10, "2^-10"), (65536.0, "2^16"), (1234.0, "1,234"), (123.4, "120"), (0.25, "0.25"),
     (math.nan, "NaN"), (-math.inf, "-inf"), (1.96e-8, "2e-08"), (0.0, "0"), (-1.26, "-1.3")],
)  # fmt: skip
def test_numbers_in_the_text_have_two_digits(value: float, text: str) -> None:
    assert repr(bar_chart({"a": value})) == f"a {text}"


# ---- loss scales under several rules ------------------------------------------------------------


def test_a_curve_is_a_staircase_and_higher_is_larger():
    (curve,) = curves_in(scale_drawing({"recorded": [4.0, 4.0, 8.0, 2.0]}))
    first, corner, up, over, down = (height for _, height in curve)
    assert (first, up) == (corner, over)
    assert up < first < down  # downwards in SVG


def test_curves_that_are_the_same_are_drawn_once_and_all_named():
    drawn = scale_drawing({"recorded": [2.0, 4.0], "a": [1.0, 1.0], "b": [1.0, 1.0], "c": [2.0, 2.0]})
    assert len(curves_in(drawn)) == 3
    assert "recorded" in outline(drawn).words
    assert "a, b" in outline(drawn).words


def test_a_page_without_svg_shows_a_picture_with_the_names():
    drawn = scale_drawing({"recorded": [2.0, 4.0], "a": [1.0, 1.0]})
    without_svg = re.sub(r'<div class="drawn".*?</div>', "", drawn)
    picture = base64.b64decode(re.search(r"base64,([^\"]*)", without_svg)[1]).decode()
    assert outline(without_svg).words == ""
    assert ">recorded<" in picture
    assert ">a<" in picture


def test_names_of_rules_are_escaped_and_a_scale_of_zero_is_left_out():
    read = outline(scale_drawing({EVIL: [2.0, math.inf, 0.0, math.nan, 4.0]}))
    assert "b" not in read.counts
    assert EVIL in read.text
    assert curves_in(scale_drawing({"a": [0.0, math.inf]})) == []


def test_every_user_defined_rule_has_a_color():
    strokes = re.findall(r"<polyline.*?style=\"stroke:(.*?)\"", scale_drawing({str(k): [2.0**k] for k in range(20)}))
    assert len(strokes) == 20
    assert all(stroke.startswith("var(--amp-curve-") for stroke in strokes)


# ---- bars ---------------------------------------------------------------------------------------


def test_a_bar_can_be_a_part_of_a_whole_that_is_not_drawn():
    (half,) = bars_of(bar_chart({"lost": 50.0}, unit="%", whole=100))
    (full,) = bars_of(bar_chart({"lost": 50.0}, unit="%"))
    assert half == pytest.approx(full / 2, abs=0.1)


def test_bars_have_the_length_of_their_values() -> None:
    one, two, none = bars_of(bar_chart({"O0": 1.0, "O1": 0.5, "lost": 0.0}, unit="MB", label="memory"))
    assert two == pytest.approx(one / 2, abs=0.1)
    assert none == 0.0


def test_muted_bars_have_another_color() -> None:
    colors = re.findall(
        r"<rect[^>]* fill=\"(#\w+)\"", bar_chart({"before": 1.0, "after": 2.0}, muted=["before"]).drawing
    )
    assert colors[:2] == [PALETTE["curve-7"][0], PALETTE["accent"][0]]


def test_a_value_without_a_bar_has_its_text() -> None:
    chart = bar_chart({"a": math.inf, EVIL: 2.0, "c": -1.0}, unit="ms")
    assert [wide > 0 for wide in bars_of(chart)] == [False, True, False]
    assert repr(chart) == f"a inf ms, {EVIL} 2 ms, c -1 ms"
    assert "b" not in outline(chart._repr_html_()).counts
    with pytest.raises(ValueError, match="at least one"):
        bar_chart({})


# ---- exponents ----------------------------------------------------------------------------------


def test_the_shares_are_those_of_the_format() -> None:
    values = torch.tensor([2.0**-40, 2.0**-26, 2.0**-20, 2.0**-15, 1.0, 2.0, 2.0**15, 2.0**17])
    assert repr(exponent_chart(exponent_histogram(values), FLOAT16)) == (
        "float16: 25 % zero, 25 % subnormal, 38 % normal, 12 % overflow"
    )
    assert values.half().eq(0).sum() == 2
    assert values.half().isinf().sum() == 1


def test_a_shift_moves_the_bars_and_leaves_the_ranges() -> None:
    histogram = exponent_histogram(torch.tensor([2.0**-20]))

    def left_of(chart) -> float:
        return float(re.search(r'<path d="M([\d.]+)', chart.drawing)[1])

    here, there = exponent_chart(histogram, FLOAT16), exponent_chart(histogram, FLOAT16, shift=10)
    column = 744 / 69  # units in each power of two
    assert left_of(there) - left_of(here) == pytest.approx(10 * column, abs=0.2)
    assert re.findall("<rect.*?>", here.drawing) == re.findall("<rect.*?>", there.drawing)


def test_values_beyond_the_axis_are_in_its_ends() -> None:
    histogram = exponent_histogram(torch.tensor([2.0**-140, 2.0**100, 1.0]))
    chart = exponent_chart(histogram, FLOAT16)
    assert repr(chart) == "float16: 33 % zero, 0 % subnormal, 33 % normal, 33 % overflow"
    xs = [float(x) for x in re.findall(r"M([\d.]+) ", chart.drawing)]
    assert min(xs) >= 8
    assert max(xs) < 752


def test_few_are_not_none() -> None:
    histogram = exponent_histogram(torch.cat([torch.ones(999), torch.tensor([1e-30])]))
    assert repr(exponent_chart(histogram, FLOAT16)) == "float16: <1 % zero, 0 % subnormal, >99 % normal, 0 % overflow"


@pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16, FLOAT8_E4M3])
def test_each_format_has_a_chart(fmt) -> None:
    chart = exponent_chart(exponent_histogram(torch.randn(100)), fmt)
    outline(chart._repr_html_())
    assert "nan" not in chart.drawing


def test_zeros_alone_have_no_bars() -> None:
    chart = exponent_chart(exponent_histogram(torch.zeros(3)), FLOAT16, shift=4)
    assert repr(chart) == "float16, values × 2^4: only zeros"
    assert "<path" not in chart.drawing


def test_a_column_of_an_array_is_a_curve():
    values = [2.0, 1.0]
    assert str(line_chart({"loss": np.array(values)})) == str(line_chart({"loss": values}))


def test_a_page_without_style_sheets_gets_a_picture() -> None:
    html = line_chart({"O0": [1.0, 2.0], "O1": [2.0, 1.0]}, y_label="loss")._repr_html_()
    drawn, still = re.search(r'<div class="drawn" style="display:none">(<svg.*</svg>)</div><img (.*)>', html).groups()
    assert 'alt="loss over step 0 to 1: O0 1 -&gt; 2; O1 2 -&gt; 1"' in still
    source = re.search(r'src="data:image/svg\+xml;base64,([^"]*)"', still)[1]
    picture = ElementTree.fromstring(base64.b64decode(source))
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(picture.iter())) == len(list(ElementTree.fromstring(drawn).iter()))
    sheet = html.split("</style>")[0]
    assert ".drawn { display: block !important; }" in sheet
    assert ".still { display: none; }" in sheet


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 60520.0], ["0", "10,000", "20,000", "30,000", "40,000", "50,000", "60,000"]),
        ([3.311, 3.325], ["3.312", "3.314", "3.316", "3.318", "3.32", "3.322", "3.324"]),
        ([0.0, 8e-6], ["0", "2e-6", "4e-6", "6e-6", "8e-6"]),
    ],
)
def test_ticks_are_written_out_and_tell_each_other_apart(values: list[float], ticks: list[str]) -> None:
    chart = line_chart({"a": values}, x=[0, 12287], y_label="total")
    across = ["0", "2,000", "4,000", "6,000", "8,000", "10,000", "12,000"]
    assert texts_of(chart) == [*ticks, *across, "step", "total"]


@pytest.mark.parametrize(
    ("ends", "ticks"),
    [
        ((0, 3), ["0", "1", "2", "3"]),
        ((0, 1), ["0", "1"]),
        ((-28, 19), ["-20", "-10", "0", "10"]),
        ((0.5, 2.0), ["0.6", "0.8", "1", "1.2", "1.4", "1.6", "1.8", "2"]),
        ((1000, 1060), ["1,000", "1,010", "1,020", "1,030", "1,040", "1,050", "1,060"]),
    ],
)
def test_the_numbers_across_are_round_and_integers_between_integers(ends, ticks) -> None:
    words = texts_of(line_chart({"a": [1.0, 1.0]}, x=list(ends), x_label="x", y_label="y"))
    assert words[words.index("x") - len(ticks) : words.index("x")] == ticks


def test_the_last_number_across_stays_in_the_drawing() -> None:
    drawn = line_chart({"a": [1.0, 2.0]}, x=[0, 10000]).drawing
    assert re.search(r'<text x="760" text-anchor="end" y="\d+">10,000<', drawn)
