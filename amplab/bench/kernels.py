"""What the kernels reach: against the memory's own speed, and against torch's fused operator.

``unscale_`` reads and writes every element once, as ``flat.mul_(s)`` does: no kernel can be faster than that.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from amplab.bench.interleaved import Case, Contestant, Pair
from amplab.bench.optimizer_rows import optimizer_cases
from amplab.bench.rows import Goal
from amplab.bench.scaler import scaler_against_torch
from amplab.bench.workloads import random_tensors, resnet50_shapes
from amplab.kernels import unscale_, unscale_copy

__all__ = ["kernel_cases"]

# Not 1.0, which torch's operator does not multiply by, and so near it that repeating leaves no subnormal numbers.
_INVERSE = 1.0 - 2.0**-12
_TORCHS = "torch._amp_foreach_non_finite_check_and_unscale_"

Shapes = Sequence[tuple[int, ...]]


def kernel_cases(large: int = 2**26, many: int = 2000, elements: int = 1000, model: Shapes | None = None) -> list[Case]:
    """Return the cases of ``amplab bench kernels``.

    Args:
        large: elements of the one large tensor.
        many: how many small tensors.
        elements: of each small tensor.
        model: shapes of the list that stands for a model; ResNet50's where None.
    """
    shapes = list(resnet50_shapes()) if model is None else model
    small = [(elements,)] * many
    sizes = f"{many} × {elements} float32"
    return [
        Case(f"unscale_, {large:,} float32", "mul_", Goal("at least", 0.93), lambda: _against_bound([(large,)])),
        Case("unscale_, ResNet50 float32", "flat mul_", Goal("at least", 0.93), lambda: _against_bound(shapes)),
        Case(
            "unscale_copy, ResNet50 float16 → float32",
            "_foreach_copy_ + torch's operator",
            Goal("at least", 2.0),
            lambda: _to_masters(shapes),
        ),
        Case("unscale_, ResNet50 bfloat16", _TORCHS, Goal("at least", 1.6), lambda: _in_place(shapes, torch.bfloat16)),
        Case(f"unscale_, {sizes}", _TORCHS, Goal("at least", 1.8), lambda: _in_place(small, torch.float32)),
        Case(
            f"GradScaler.unscale_, {sizes}, fresh gradients",
            "torch.amp.GradScaler.unscale_",
            Goal("at least", 3.0),
            lambda: scaler_against_torch(many, elements, fresh=True),
        ),
        *optimizer_cases(model, model),
    ]


def _scalars() -> tuple[Tensor, Tensor]:
    return torch.zeros(1), torch.tensor([_INVERSE])


def _sizes(shapes: Shapes) -> dict[str, int]:
    return {"tensors": len(shapes), "elements": sum(map(torch.Size.numel, map(torch.Size, shapes)))}


def _against_bound(shapes: Shapes) -> Pair:
    ours = random_tensors(shapes)
    flat = torch.cat([each.flatten() for each in ours])
    found_inf, inverse = _scalars()
    return Pair(
        Contestant(lambda: unscale_(ours, found_inf, inverse)),
        Contestant(lambda: flat.mul_(_INVERSE)),
        _sizes(shapes),
    )


def _in_place(shapes: Shapes, dtype: torch.dtype) -> Pair:
    ours, theirs = random_tensors(shapes, dtype), random_tensors(shapes, dtype)
    found_inf, inverse = _scalars()
    return Pair(
        Contestant(lambda: unscale_(ours, found_inf, inverse)),
        Contestant(lambda: torch._amp_foreach_non_finite_check_and_unscale_(theirs, found_inf, inverse)),
        _sizes(shapes),
    )


def _to_masters(shapes: Shapes) -> Pair:
    halves = random_tensors(shapes, torch.float16)
    ours, theirs = ([torch.empty(shape) for shape in shapes] for _ in range(2))
    for each in chain(ours, theirs):
        each.zero_()  # memory that was never written is no memory yet
    found_inf, inverse = _scalars()

    def torchs() -> None:
        torch._foreach_copy_(theirs, halves)
        torch._amp_foreach_non_finite_check_and_unscale_(theirs, found_inf, inverse)

    return Pair(Contestant(lambda: unscale_copy(halves, ours, found_inf, inverse)), Contestant(torchs), _sizes(shapes))
