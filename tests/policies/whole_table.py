"""Runs one op under two regimes that should agree, and says where they do not."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from op_calls import draw
from torch import Tensor

__all__ = ["MIXTURES", "Outcome", "differences", "outcome"]

MIXTURES = ("float32", "lower", "first lower", "rest lower")
"""Which of a call's arguments are 16 bits wide."""

Outcome = str | dict[str, list[Tensor]]
"""Outputs and gradients; or why the call was refused."""


def outcome(
    op: str, mixture: str, lower: torch.dtype, regime: Callable[[], AbstractContextManager] = nullcontext, device="cpu"
) -> Outcome:
    """Call `op` in `regime` and take gradients of the sum of the squares of what is differentiable."""
    func, values = draw(op)
    leaves = [
        value.to(device, lower if _is_lower(index, mixture) else torch.float32).requires_grad_()
        for index, value in enumerate(values)
    ]
    try:
        with regime():
            result = func(*leaves)
    except (RuntimeError, ValueError) as refusal:  # NotImplementedError is a RuntimeError
        return f"refused: {refusal}"
    outputs = list(_tensors(result))
    squares = [output.abs().double().square().sum() for output in outputs if output.requires_grad]
    try:
        grads = torch.autograd.grad(sum(squares), leaves, allow_unused=True) if squares else []
    except RuntimeError:  # no derivative, or none in this dtype
        grads = []
    return {"outputs": [output.detach() for output in outputs], "gradients": [g for g in grads if g is not None]}


def differences(ours: Outcome, theirs: Outcome) -> str:
    """The first thing in which two outcomes differ; empty where they agree to the bit."""
    if isinstance(ours, str) or isinstance(theirs, str):
        both = isinstance(ours, str) and isinstance(theirs, str)
        return "" if both else ("refused" if isinstance(ours, str) else "torch refuses")
    for what in ("outputs", "gradients"):
        dtypes = [[tensor.dtype for tensor in side[what]] for side in (ours, theirs)]
        if dtypes[0] != dtypes[1]:
            return f"{what}: {dtypes[0]} is not {dtypes[1]}"
    for what in ("outputs", "gradients"):
        pairs = itertools.zip_longest(ours[what], theirs[what])
        if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
            return f"{what}: values"
    return ""


def _is_lower(index: int, mixture: str) -> bool:
    return mixture == "lower" or mixture == ("rest lower" if index else "first lower")


def _tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)
