"""Suite "xray": one step under `xray`, with and without statistics, against the same step alone.

A step is a forward and a backward. The goals with statistics hold for the built `tensor_stats` kernel; the PyTorch
reference takes several times as long.
"""

import contextlib
from collections.abc import Callable
from functools import partial

from amplab.bench.interleaved import Case, Contestant, Pair
from amplab.bench.rows import Goal
from amplab.bench.workloads import Workload, mlp_512, small_cnn, small_transformer, tiny_mlp
from amplab.policies import CastingEngine
from amplab.trace import xray

__all__ = ["xray_cases"]

_GOALS, _TINY_GOALS = (3.0, 4.0), (7.0, 10.0)  # without statistics, with them


def xray_cases(width: int = 128, layers: int = 4) -> list[Case]:
    """Return the cases of ``amplab bench xray``.

    Args:
        width: width of the small transformer.
        layers: layers of the small transformer.
    """

    def transformer() -> Workload:
        return small_transformer(width, layers)

    rows = (
        ("MLP 512", mlp_512, _GOALS, False),
        ("tiny MLP", tiny_mlp, _TINY_GOALS, False),
        ("small CNN", small_cnn, _GOALS, False),
        ("small transformer", transformer, _GOALS, False),
        ("small transformer at O1", transformer, _GOALS, True),
    )
    return [
        Case(f"{name}, {what}", "the step itself", Goal("at most", goal), partial(_against_the_step, make, half, stats))
        for name, make, goals, half in rows
        for goal, what, stats in zip(goals, ("X-ray", "X-ray with statistics"), (False, True), strict=True)
    ]


def _against_the_step(make: Callable[[], Workload], half: bool, stats: bool) -> Pair:
    seen, unseen = make(), make()
    casting = CastingEngine().active if half else contextlib.nullcontext

    def step() -> None:
        with casting():
            unseen.loss().backward()
        unseen.model.zero_grad()

    def look() -> None:
        with casting():
            xray(seen.model, step=seen.loss, stats=stats)

    with casting():
        ops = len(xray(seen.model, step=seen.loss).trace)
    return Pair(Contestant(look), Contestant(step), {"ops": ops})
