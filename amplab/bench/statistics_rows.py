"""What tensor statistics cost, against the reading alone and against a single one of them by torch; the scale's update.

One pass of ``tensor_stats`` gives extremes, counts and exponents. ``amax`` reads the same memory and does hardly
anything else: nothing that looks at every element is faster.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amplab.bench.interleaved import Case, Contestant, Pair
from amplab.bench.rows import Goal
from amplab.bench.workloads import random_tensors, resnet50_shapes
from amplab.kernels import tensor_stats, update_scale_
from amplab.kernels.update_scale import update_scale__reference

__all__ = ["statistics_cases"]

Shapes = Sequence[tuple[int, ...]]


def statistics_cases(
    large: int = 2**26, many: int = 2000, elements: int = 1000, model: Shapes | None = None
) -> list[Case]:
    """Return the cases of statistics and scale in ``amplab bench kernels``.

    Args:
        large: elements of the one large tensor.
        many: how many small tensors.
        elements: of each small tensor.
        model: shapes of the list that stands for a model; ResNet50's where None.
    """
    shapes = list(resnet50_shapes()) if model is None else model
    small = [(elements,)] * many
    half = torch.float16
    return [
        Case(f"tensor_stats, {large:,} float32", "amax", Goal("at least", 0.5), lambda: _pair([(large,)], _amax)),
        Case("tensor_stats, ResNet50 float32", "amax", Goal("at least", 0.5), lambda: _pair(shapes, _amax)),
        Case("tensor_stats, ResNet50 float16", "abs().max()", Goal("at least", 1.5), lambda: _pair(shapes, _abs, half)),
        Case(
            f"tensor_stats, {many} × {elements} float32",
            "_foreach_norm(inf)",
            Goal("at least", 3.0),
            lambda: _pair(small, _norms),
        ),
        Case("update_scale_ with patience and bounds", "the same in torch", Goal("at least", 3.0), _updates),
    ]


def _amax(tensors: list[Tensor]) -> None:
    for each in tensors:
        each.amax()


def _abs(tensors: list[Tensor]) -> None:
    for each in tensors:
        each.abs().max()


def _norms(tensors: list[Tensor]) -> None:
    torch._foreach_norm(tensors, float("inf"))


def _pair(shapes: Shapes, theirs: Callable[[list[Tensor]], None], dtype: torch.dtype = torch.float32) -> Pair:
    tensors = random_tensors(shapes, dtype)
    sizes = {"tensors": len(tensors), "elements": sum(each.numel() for each in tensors)}
    return Pair(Contestant(lambda: tensor_stats(tensors)), Contestant(lambda: theirs(tensors)), sizes)


def _updates() -> Pair:
    found_inf, constants = torch.zeros(1), (2.0, 0.5, 2000, 2, 1.0, 2.0**24)
    ours, theirs = (
        (torch.tensor(2.0**16), torch.zeros((), dtype=torch.int32), torch.full((), 2, dtype=torch.int32))
        for _ in range(2)
    )
    return Pair(
        Contestant(lambda: update_scale_(*ours, found_inf, *constants)),
        Contestant(lambda: update_scale__reference(*theirs, found_inf, *constants)),
        {"tensors": 1, "elements": 1},
    )
