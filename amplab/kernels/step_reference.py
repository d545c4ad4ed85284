"""The PyTorch reference of what all multi-tensor steps share: checks, arithmetic dtype, skip and copies.

    grad    <- grad * grad_factor  (* -1 to maximize)      in float32; in float64 for float64 parameters
    rule(grad, param, states, step)                        the optimizer
    written <- found_inf ? unchanged : round(new)          for params, states, steps and copies

A rule is a function of one tensor. It performs the operations of its counterpart in ``steps.h`` in the same order, so
that both give the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from amplab.kernels.list_checks import Extent, check_apart, check_present, extent_of

__all__ = ["StepLists", "StepRule", "check_step", "square_root", "step_reference"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# (grad, param, states, step) -> (param, states); step is () float64, 1 for the first, or None.
StepRule = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor | None], tuple[Tensor, Sequence[Tensor]]]


class StepLists(NamedTuple):
    """The tensors of one call.

    Args:
        params: float16, bfloat16, float32 or float64, any shapes and strides, on one device; each listed once.
        grads: as many, of the same shapes, of any of the four dtypes.
        states: one list of the same length for each state of the rule; empty lists for states that are not used.
        steps: one float32 element for each parameter, its number of steps; empty if the rule does not count.
        copies: as many tensors of any of the four dtypes, which receive the new parameters; or none.
        grad_factor: one float32 element; None for 1.
        found_inf: one float32 element: if it is not 0, nothing is written; None for 0.
        maximize: ascend instead of descend.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]
    steps: Sequence[Tensor] = ()
    copies: Sequence[Tensor] = ()
    grad_factor: Tensor | None = None
    found_inf: Tensor | None = None
    maximize: bool = False


def step_reference(lists: StepLists, rule: StepRule) -> None:
    """Step every parameter by ``rule``. Sync: none.

    Raises:
        RuntimeError: as the kernels, with the same messages.
    """
    check_step(lists)
    check_present(_named(lists))
    check_apart(_extents(lists))
    found = None if lists.found_inf is None else lists.found_inf.reshape(()) != 0
    steps, copies = lists.steps or repeat(None), lists.copies or repeat(None)
    states = list(zip(*lists.states, strict=True)) or repeat(())
    for param, grad, state, step, copy in zip(lists.params, lists.grads, states, steps, copies, strict=False):
        new_param, new_states, new_step = _stepped(lists, rule, param, grad, state, step)
        for old, new in ((param, new_param), *zip(state, new_states, strict=True), (copy, new_param), (step, new_step)):
            if old is not None and new is not None:
                old.copy_(new if found is None else torch.where(found, old, new.to(old.dtype)))


def _stepped(
    lists: StepLists, rule: StepRule, param: Tensor, grad: Tensor, state: Sequence[Tensor], step: Tensor | None
) -> tuple[Tensor, Sequence[Tensor], Tensor | None]:
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    sign = -1.0 if lists.maximize else 1.0
    factor: float | Tensor = sign if lists.grad_factor is None else lists.grad_factor.to(dtype).reshape(()) * sign
    count = None if step is None else step.reshape(()).double() + 1
    new_param, new_states = rule(grad.to(dtype) * factor, param.to(dtype), [each.to(dtype) for each in state], count)
    return new_param, new_states, None if step is None else step + 1


def square_root(x: Tensor) -> Tensor:
    """Return the root, rounded once: through float64, since ``x.sqrt()`` of float32 on the CPU is not. Sync: none."""
    return x.double().sqrt().to(x.dtype)


def check_step(lists: StepLists) -> None:
    """Raise for what the kernels refuse, with the same messages."""
    params = lists.params
    named = [("grads", lists.grads), ("copies", lists.copies), ("steps", lists.steps)]
    for name, tensors in (*named, *(("states", each) for each in lists.states)):
        if len(tensors) != len(params) and (name == "grads" or len(tensors) > 0):
            raise RuntimeError(f"{len(params)} params, {len(tensors)} {name}: expected lists of equal length.")
    for side, tensors in (("param", params), *((name[:-1], tensors) for name, tensors in _sides(lists))):
        for index, tensor in enumerate(tensors):
            _check_tensor("copy" if side == "copie" else side, index, tensor, params)
    for index, step in enumerate(lists.steps):
        if step.numel() != 1 or step.dtype != torch.float32:
            raise RuntimeError(f"step {index}: expected one float32 element.")
    for name, scalar in (("grad_factor", lists.grad_factor), ("found_inf", lists.found_inf)):
        if scalar is not None and (scalar.numel() != 1 or scalar.dtype != torch.float32):
            raise RuntimeError(f"{name}: expected one float32 element, such as torch.ones(1).")


def _named(lists: StepLists) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its name in messages."""
    for side, tensors in _by_rank(lists):
        yield from ((f"{side} {index}", tensor) for index, tensor in enumerate(tensors))
    scalars = {"grad_factor": lists.grad_factor, "found_inf": lists.found_inf}
    yield from ((name, scalar) for name, scalar in scalars.items() if scalar is not None)


def _by_rank(lists: StepLists) -> list[tuple[str, Sequence[Tensor]]]:
    written = [("state", each) for each in lists.states]
    return [("param", lists.params), *written, ("copy", lists.copies), ("step", lists.steps), ("grad", lists.grads)]


def _extents(lists: StepLists) -> Iterator[Extent]:
    """Yield the extents of all tensors with elements; only gradients are not written."""
    for rank, (side, tensors) in enumerate(_by_rank(lists)):
        for index, tensor in enumerate(tensors):
            if tensor.numel() > 0 and not tensor.is_meta:
                place = rank * len(lists.params) + index
                yield extent_of(tensor, f"{side} {index}", place, only_read=side == "grad")


def _sides(lists: StepLists) -> list[tuple[str, Sequence[Tensor]]]:
    return [("grads", lists.grads), *(("states", each) for each in lists.states), ("copies", lists.copies)]


def _check_tensor(side: str, index: int, tensor: Tensor, params: Sequence[Tensor]) -> None:
    if tensor.layout != torch.strided:
        raise RuntimeError(f"{side} {index} is not strided: sparse gradients have optimizers of their own.")
    if tensor.dtype not in _DTYPES:
        raise RuntimeError(f"{side} {index}: expected float16, bfloat16, float32 or float64.")
    if tensor.device != params[0].device:
        raise RuntimeError(f"{side} {index} is on another device than the first parameter; call once per device.")
    if tensor.shape != params[index].shape:
        raise RuntimeError(f"{side} {index}: expected the shape of its parameter.")
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    if side != "grad" and any(stride == 0 and size > 1 for stride, size in strides):
        raise RuntimeError(
            f"{side} {index} is expanded: several of its elements share one place in memory; pass a clone."
        )
