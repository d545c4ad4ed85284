"""What the kernels reach: against the memory's own speed, against torch's fused operator, and against plain Python.

``unscale_`` reads and writes every element once, as ``flat.mul_(s)`` over as many bytes does: no kernel can be faster
than that, and for a list of tensors that lie apart from each other hardly any is as fast. Plain Python is
``isfinite().all()`` and ``mul_`` for each tensor. Gradients lie on parameters, where a training step finds them.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from amplab.bench.interleaved import Case, Contestant, Pair
from amplab.bench.optimizer_rows import optimizer_cases
from amplab.bench.rows import Goal
from amplab.bench.rule_rows import rule_cases
from amplab.bench.scaler import scaler_against_torch
from amplab.bench.workloads import random_tensors, resnet50_shapes
from amplab.kernels import ParameterList, TensorTable, unscale_, unscale_copy

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
    few = [(elements,)] * max(1, many // 10)
    sizes = f"{many} × {elements} float32"
    clip = "torch's operator + clip_grad_norm_"
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
        Case(f"TensorTable.unscale_, {sizes}", _TORCHS, Goal("at least", 4.0), lambda: _in_place(small, table=True)),
        Case(f"unscale_, {sizes}", _TORCHS, Goal("at least", 1.8), lambda: _in_place(small)),
        Case(
            f"GradScaler.unscale_, {sizes}, fresh gradients",
            "torch.amp.GradScaler.unscale_",
            Goal("at least", 3.0),
            lambda: scaler_against_torch(many, elements, fresh=True),
        ),
        Case("unscale and norm, ResNet50 float32", clip, Goal("at least", 3.0), lambda: _with_norm(shapes)),
        Case(f"unscale and norm, {len(few)} × {elements}", clip, Goal("at least", 10.0), lambda: _with_norm(few)),
        *optimizer_cases(model, model),
        *rule_cases(model),
    ]


def _scalars() -> tuple[Tensor, Tensor]:
    return torch.zeros(1), torch.tensor([_INVERSE])


def _sizes(shapes: Shapes) -> dict[str, int]:
    return {"tensors": len(shapes), "elements": _elements(shapes)}


def _elements(shapes: Shapes) -> int:
    return sum(map(torch.Size.numel, map(torch.Size, shapes)))


def _on_parameters(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters that hold random gradients."""
    params = [nn.Parameter(each) for each in random_tensors(shapes, dtype)]
    for param, grad in zip(params, random_tensors(shapes, dtype), strict=True):
        param.grad = grad
    return params


def _grads(params: list[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in params]


def _beside(tensors: list[Tensor]) -> dict[str, Contestant]:
    """Plain Python on the same tensors, and the reading and writing of as many bytes in one piece."""
    size = sum(each.numel() * each.element_size() for each in tensors)
    flat = torch.ones(max(1, size // 4))

    def python() -> bool:
        finite = True
        for each in tensors:
            finite = finite and bool(each.isfinite().all())
            each.mul_(_INVERSE)
        return finite

    return {"python": Contestant(python), "bound": Contestant(lambda: flat.mul_(_INVERSE))}


def _against_bound(shapes: Shapes) -> Pair:
    """A single tensor is the bound's own memory: some places are faster than others."""
    ours = random_tensors(shapes)
    flat = ours[0] if len(ours) == 1 else torch.cat([each.flatten() for each in ours])
    found_inf, inverse = _scalars()
    return Pair(
        Contestant(lambda: unscale_(ours, found_inf, inverse)),
        Contestant(lambda: flat.mul_(_INVERSE)),
        _sizes(shapes),
        {"python": _beside(ours)["python"]},
    )


def _in_place(shapes: Shapes, dtype: torch.dtype = torch.float32, *, table: bool = False) -> Pair:
    """One list for both, so that neither has the better place in memory."""
    params = _on_parameters(shapes, dtype)
    tensors = _grads(params)
    found_inf, inverse = _scalars()
    prepared = TensorTable(tensors)
    ours = prepared.unscale_ if table else partial(unscale_, tensors)
    return Pair(
        Contestant(lambda: ours(found_inf, inverse)),
        Contestant(lambda: torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse)),
        _sizes(shapes),
        _beside(tensors),
    )


def _to_masters(shapes: Shapes) -> Pair:
    halves = random_tensors(shapes, torch.float16)
    masters = [torch.zeros(shape) for shape in shapes]
    found_inf, inverse = _scalars()
    wide, narrow = torch.zeros(_elements(shapes)), torch.ones(_elements(shapes), dtype=torch.float16)

    def torchs() -> None:
        torch._foreach_copy_(masters, halves)
        torch._amp_foreach_non_finite_check_and_unscale_(masters, found_inf, inverse)

    def python() -> None:
        for half, master in zip(halves, masters, strict=True):
            bool(half.isfinite().all())
            master.copy_(half).mul_(_INVERSE)

    return Pair(
        Contestant(lambda: unscale_copy(halves, masters, found_inf, inverse)),
        Contestant(torchs),
        _sizes(shapes),
        {"python": Contestant(python), "bound": Contestant(lambda: wide.copy_(narrow))},
    )


def _with_norm(shapes: Shapes) -> Pair:
    """Nothing is clipped: amplab then has the norm and is done, where torch multiplies by 1."""
    params = _on_parameters(shapes)
    known, norm = ParameterList(params), torch.zeros(())
    found_inf, inverse = _scalars()

    def ours() -> None:
        if known.unscale_grads_(found_inf, inverse, norm=norm) is None:
            unscale_(_grads(params), found_inf, inverse, norm=norm)

    def torchs() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(_grads(params), found_inf, inverse)
        nn.utils.clip_grad_norm_(params, 1e9)

    return Pair(Contestant(ours), Contestant(torchs), _sizes(shapes), {"bound": _beside(_grads(params))["bound"]})
