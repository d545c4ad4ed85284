"""Suite "kernels": each against memory bandwidth, torch's fused operators, and plain Python.

``unscale_`` reads and writes every element once, as ``flat.mul_(s)`` over as many bytes does: no kernel is faster than
that. Plain Python is ``isfinite().all()`` and ``mul_`` for each tensor. Gradients are those of parameters, as in a
training step. One pass of ``tensor_stats`` computes extremes, counts and exponents; ``amax`` reads the same memory and
does little else.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from amplab.bench.interleaved import Case, Contestant, Pair
from amplab.bench.optimizers import optimizer_cases, rule_cases
from amplab.bench.rows import Goal
from amplab.bench.workloads import grads_of, random_tensors, resnet50_shapes
from amplab.kernels import ParameterList, TensorTable, tensor_stats, unscale_, unscale_copy, update_scale_
from amplab.kernels.update_scale import update_scale__reference

__all__ = ["kernel_cases"]

# Not 1.0, by which torch's operator does not multiply; so close to 1 that repetition makes no subnormal numbers.
_INVERSE = 1.0 - 2.0**-12
_TORCHS = "torch._amp_foreach_non_finite_check_and_unscale_"

Shapes = Sequence[tuple[int, ...]]


def kernel_cases(large: int = 2**26, many: int = 2000, elements: int = 1000, model: Shapes | None = None) -> list[Case]:
    """Return the cases of ``amplab bench kernels``.

    Args:
        large: elements of the one large tensor.
        many: the number of small tensors.
        elements: elements of each small tensor.
        model: shapes of the parameters of a model; None for ResNet50.
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
        Case("unscale and norm, ResNet50 float32", clip, Goal("at least", 3.0), lambda: _with_norm(shapes)),
        Case(f"unscale and norm, {len(few)} × {elements}", clip, Goal("at least", 10.0), lambda: _with_norm(few)),
        *optimizer_cases(model, model),
        *rule_cases(model),
        *_statistics_cases(large, many, elements, shapes),
    ]


def _scalars() -> tuple[Tensor, Tensor]:
    return torch.zeros(1), torch.tensor([_INVERSE])


def _sizes(shapes: Shapes) -> dict[str, int]:
    return {"tensors": len(shapes), "elements": _elements(shapes)}


def _elements(shapes: Shapes) -> int:
    return sum(map(torch.Size.numel, map(torch.Size, shapes)))


def _on_parameters(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return parameters with random gradients."""
    params = [nn.Parameter(each) for each in random_tensors(shapes, dtype)]
    for param, grad in zip(params, random_tensors(shapes, dtype), strict=True):
        param.grad = grad
    return params


def _extra(tensors: list[Tensor]) -> dict[str, Contestant]:
    """Return plain Python on the same tensors, and a read and write of as many contiguous bytes."""
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
    """Use the same memory for both sides if there is one tensor: some addresses are faster than others."""
    ours = random_tensors(shapes)
    flat = ours[0] if len(ours) == 1 else torch.cat([each.flatten() for each in ours])
    found_inf, inverse = _scalars()
    return Pair(
        Contestant(lambda: unscale_(ours, found_inf, inverse)),
        Contestant(lambda: flat.mul_(_INVERSE)),
        _sizes(shapes),
        {"python": _extra(ours)["python"]},
    )


def _in_place(shapes: Shapes, dtype: torch.dtype = torch.float32, *, table: bool = False) -> Pair:
    """Use one list for both sides, so that neither has the faster addresses."""
    params = _on_parameters(shapes, dtype)
    tensors = grads_of(params)
    found_inf, inverse = _scalars()
    prepared = TensorTable(tensors)
    ours = prepared.unscale_ if table else partial(unscale_, tensors)
    return Pair(
        Contestant(lambda: ours(found_inf, inverse)),
        Contestant(lambda: torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse)),
        _sizes(shapes),
        _extra(tensors),
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
    """Clip nothing: then amplab only computes the norm, and torch also multiplies by 1."""
    params = _on_parameters(shapes)
    known, norm = ParameterList(params), torch.zeros(())
    found_inf, inverse = _scalars()

    def ours() -> None:
        if known.unscale_grads_(found_inf, inverse, norm=norm) is None:
            unscale_(grads_of(params), found_inf, inverse, norm=norm)

    def torchs() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads_of(params), found_inf, inverse)
        nn.utils.clip_grad_norm_(params, 1e9)

    return Pair(Contestant(ours), Contestant(torchs), _sizes(shapes), {"bound": _extra(grads_of(params))["bound"]})


def _statistics_cases(large: int, many: int, elements: int, shapes: Shapes) -> list[Case]:
    small = [(elements,)] * many
    return [
        Case(f"tensor_stats, {large:,} float32", "amax", Goal("at least", 0.5), lambda: _statistics([(large,)], _amax)),
        Case("tensor_stats, ResNet50 float32", "amax", Goal("at least", 0.5), lambda: _statistics(shapes, _amax)),
        Case(
            "tensor_stats, ResNet50 float16",
            "abs().max()",
            Goal("at least", 1.5),
            lambda: _statistics(shapes, _abs, torch.float16),
        ),
        Case(
            f"tensor_stats, {many} × {elements} float32",
            "_foreach_norm(inf)",
            Goal("at least", 3.0),
            lambda: _statistics(small, _norms),
        ),
        Case("update_scale_ with hysteresis and bounds", "the same in torch", Goal("at least", 3.0), _updates),
    ]


def _amax(tensors: list[Tensor]) -> None:
    for each in tensors:
        each.amax()


def _abs(tensors: list[Tensor]) -> None:
    for each in tensors:
        each.abs().max()


def _norms(tensors: list[Tensor]) -> None:
    torch._foreach_norm(tensors, float("inf"))


def _statistics(shapes: Shapes, theirs: Callable[[list[Tensor]], None], dtype: torch.dtype = torch.float32) -> Pair:
    tensors = random_tensors(shapes, dtype)
    sizes = {"tensors": len(tensors), "elements": sum(each.numel() for each in tensors)}
    return Pair(Contestant(lambda: tensor_stats(tensors)), Contestant(lambda: theirs(tensors)), sizes)


def _updates() -> Pair:
    found_inf = torch.zeros(1)
    ours, theirs = (
        (torch.tensor(2.0**16), torch.zeros((), dtype=torch.int32), torch.full((), 2, dtype=torch.int32))
        for _ in range(2)
    )
    return Pair(
        Contestant(lambda: update_scale_(*ours, found_inf, 2.0, 0.5, 2000, 2, 1.0, 2.0**24)),
        Contestant(lambda: update_scale__reference(*theirs, found_inf, 2.0, 0.5, 2000, 2, 1.0, 2.0**24)),
        {"tensors": 1, "elements": 1},
    )
