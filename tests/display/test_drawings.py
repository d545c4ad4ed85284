"""The small line of a loss."""

import math
import re

from html_outline import outline

from amplab.display.drawings import loss_drawing


def heights(svg: str) -> list[list[float]]:
    lines = re.findall(r'<polyline points="([^"]*)"', svg)
    return [[float(point.split(",")[1]) for point in line.split()] for line in lines]


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
