"""The cases that are measured on a GPU.

===================================================  =========================  ========
unscale float32, float16, float16 → float32          copy_ of as many bytes     ≥ 0.92
the same                                             torch's operator           ≥ 1, 1.3
the whole call of GradScaler.unscale_                torch's                    ≥ 3
unscale and clip                                     torch's two calls          ≥ 2.5
the step of FusedAdam                                torch's fused AdamW        ≥ 1
===================================================  =========================  ========

Every value is a ratio of times in one run, theirs / ours. How they are timed is in ``gpu.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from amplab.bench.interleaved import Contestant, Pair
from amplab.bench.rows import Goal
from amplab.bench.scaler import clipping_against_torch, scaler_against_torch
from amplab.bench.workloads import resnet50_shapes
from amplab.kernels import unscale_, unscale_copy
from amplab.optimizers import FusedAdam

__all__ = ["FULL", "SMALL", "GpuCase", "Sides", "Sizes", "gpu_cases"]

# Not 1.0, by which torch's operator does not multiply; so close to 1 that repetition makes no subnormal numbers.
_INVERSE = 1.0 - 2.0**-12
_ITEM_SIZE = {torch.float16: 2, torch.float32: 4}

Shapes = Sequence[tuple[int, ...]]
Sides = Mapping[str, Contestant]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the tensor lists; tests take small ones.

    Attributes:
        lists: shapes of the lists of kernels and optimizers, by name.
        calls: (tensors, elements of each) of the whole calls.
        clipped: (tensors, elements of each) of the call that clips.
    """

    lists: Mapping[str, Shapes]
    calls: Sequence[tuple[int, int]]
    clipped: tuple[int, int]


FULL = Sizes(
    {"ResNet50, 25.6 M": list(resnet50_shapes()), "1 B in 400 tensors": [(2_500_000,)] * 400},
    ((160, 160_000), (2000, 1000)),
    (160, 160_000),
)
SMALL = Sizes({"few": [(3, 5), (1030,), (1,)], "many": [(7,)] * 5}, ((3, 5), (8, 2)), (3, 5))


@dataclass(frozen=True)
class GpuCase:
    """One of amplab's operations and what it is compared with.

    Attributes:
        name: what is timed.
        goals: by the name of the other side, the bound of theirs / ours.
        whole_call: timed by the host's clock, including Python and waiting for the device; else on the device.
        needs: bytes of device memory.
        make: returns the sides on a device, ours under "amplab"; called just before they are measured.
    """

    name: str
    goals: Mapping[str, Goal]
    whole_call: bool
    needs: int
    make: Callable[[str], Sides]


def gpu_cases(sizes: Sizes = FULL) -> list[GpuCase]:
    """Return the cases in the order in which they are measured."""
    kinds = (
        ("unscale_ float32", torch.float32, torch.float32, 1.0),
        ("unscale_ float16", torch.float16, torch.float16, 1.3),
        ("unscale_copy float16 → float32", torch.float16, torch.float32, 1.3),
    )
    cases = [
        _unscale_case(f"{what}, {name}", shapes, dtype, output, faster)
        for name, shapes in sizes.lists.items()
        for what, dtype, output, faster in kinds
    ]
    for count, elements in sizes.calls:
        name = f"GradScaler.unscale_, the whole call, {count} × {elements} float32"
        pair = partial(scaler_against_torch, count, elements, fresh=True)
        cases.append(_call_case(name, "torch.amp.GradScaler.unscale_", 3.0, count * elements * 24, pair))
    count, elements = sizes.clipped
    name = f"GradScaler.unscale_and_clip_, {count} × {elements} float32"
    pair = partial(clipping_against_torch, count, elements)
    cases.append(_call_case(name, "torch's unscale_ + clip_grad_norm_", 2.5, count * elements * 24, pair))
    return [*cases, *(_adam_case(name, shapes) for name, shapes in sizes.lists.items())]


def _elements(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _random(shapes: Shapes, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, dtype=dtype, device=device, generator=generator) for shape in shapes]


def _unscale_case(name: str, shapes: Shapes, dtype: torch.dtype, output: torch.dtype, faster: float) -> GpuCase:
    moved = _elements(shapes) * (_ITEM_SIZE[dtype] + _ITEM_SIZE[output])
    goals = {"copy_ of as many bytes": Goal("at least", 0.92), "torch's operator": Goal("at least", faster)}

    def make(device: str) -> Sides:
        source, target = (torch.zeros(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
        found_inf, inverse = torch.zeros(1, device=device), torch.full((1,), _INVERSE, device=device)
        torchs = torch._amp_foreach_non_finite_check_and_unscale_
        inputs = _random(shapes, dtype, device)
        others = _random(shapes, output, device)
        if dtype == output:
            ours = partial(unscale_, inputs, found_inf, inverse)
        else:
            ours = partial(unscale_copy, inputs, _random(shapes, output, device), found_inf, inverse)

        def theirs() -> None:
            if dtype != output:
                torch._foreach_copy_(others, inputs)
            torchs(others, found_inf, inverse)

        copy, operator = goals
        return {
            "amplab": Contestant(ours),
            copy: Contestant(lambda: target.copy_(source)),
            operator: Contestant(theirs),
        }

    return GpuCase(name, goals, False, 4 * moved, make)


def _call_case(name: str, against: str, goal: float, needs: int, pair: Callable[..., Pair]) -> GpuCase:
    def make(device: str) -> Sides:
        both = pair(device=device)
        return {"amplab": both.ours, against: both.theirs}

    return GpuCase(name, {against: Goal("at least", goal)}, True, needs, make)


def _adam_case(name: str, shapes: Shapes) -> GpuCase:
    against = "torch.optim.AdamW(fused=True)"

    def make(device: str) -> Sides:
        sides = {}
        for side, kind in (("amplab", FusedAdam), (against, partial(torch.optim.AdamW, fused=True))):
            params = [torch.nn.Parameter(each) for each in _random(shapes, torch.float32, device)]
            for param in params:
                param.grad = torch.full_like(param, 1e-3)
            sides[side] = Contestant(kind(params, lr=1e-3).step)
        return sides

    return GpuCase(
        f"FusedAdam.step, {name} float32", {against: Goal("at least", 1.0)}, True, _elements(shapes) * 40, make
    )
