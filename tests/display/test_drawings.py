"""Staircases of a loss scale, and the small line of a loss."""

import base64
import math
import re

from html_outline import outline

from amplab.display.drawings import loss_drawing, scale_drawing

EVIL = '<b a="x">'


def heights(svg: str) -> list[list[float]]:
    lines = re.findall(r'<polyline points="([^"]*)"', svg)
    return [[float(point.split(",")[1]) for point in line.split()] for line in lines]


def test_a_curve_is_a_staircase_and_higher_is_larger():
    (curve,) = heights(scale_drawing({"recorded": [4.0, 4.0, 8.0, 2.0]}))
    first, corner, up, over, down, end = curve
    assert (first, up, down) == (corner, over, end)
    assert up < first < down  # downwards in SVG


def test_curves_that_are_the_same_are_drawn_once_and_all_named():
    drawn = scale_drawing({"recorded": [2.0, 4.0], "a": [1.0, 1.0], "b": [1.0, 1.0], "c": [2.0, 2.0]})
    assert len(heights(drawn)) == 3
    assert "recorded" in outline(drawn).words
    assert "a, b" in outline(drawn).words


def test_a_page_without_svg_shows_a_picture_with_the_names():
    drawn = scale_drawing({"recorded": [2.0, 4.0], "a": [1.0, 1.0]})
    without_svg = re.sub(r'<div class="drawn".*?</div>', "", drawn)
    picture = base64.b64decode(re.search(r"base64,([^\"]*)", without_svg)[1]).decode()
    assert outline(without_svg).words == ""
    assert ">recorded<" in picture
    assert ">a<" in picture


def test_names_are_escaped_and_scales_that_are_none_left_out():
    read = outline(scale_drawing({EVIL: [2.0, math.inf, 0.0, math.nan, 4.0]}))
    assert "b" not in read.counts
    assert EVIL in read.text
    assert scale_drawing({"a": [0.0, math.inf]}) == ""


def test_every_user_defined_rule_has_a_color():
    strokes = re.findall(r"<polyline.*?style=\"stroke:(.*?)\"", scale_drawing({str(k): [2.0**k] for k in range(20)}))
    assert len(strokes) == 20
    assert all(stroke.startswith("var(--amp-curve-") for stroke in strokes)


def test_losses_are_drawn_on_the_axis_of_all():
    (reference, own) = heights(loss_drawing([4.0, 3.0], [[4.0, 3.0], [2.0, 1.0]]))
    assert max(own) < min(reference)
    assert outline(loss_drawing([4.0, 3.0], [[4.0, 3.0]])).named("svg")[0]["aria-label"] == "loss from 4 to 3"


def test_a_loss_that_stops_being_finite_ends_in_a_cross():
    runs = [[2.0, 1.5, math.nan, math.nan], [2.0, 1.0, 0.5, 0.2]]
    assert "<path" in loss_drawing(runs[0], runs)
    assert "<path" not in loss_drawing(runs[1], runs)
    assert len(heights(loss_drawing(runs[0], runs))[1]) == 2
    assert "<path" in loss_drawing([math.inf], [[math.inf], [1.0]])
    assert loss_drawing([], [[], [1.0]]) == loss_drawing([math.nan], [[math.nan]]) == "–"
