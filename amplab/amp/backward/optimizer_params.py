"""Replace the parameters of an optimizer during training, and move their state.

    optimizer.param_groups   old -> new, in place in each group's list
    optimizer.state          the key old -> new; floating-point entries are cast to the new parameter's dtype
    other attributes         old -> new in lists, tuples, dicts and sets, also of an optimizer that it wraps

Step counts and other zero-dimensional tensors keep their dtype, as in ``Optimizer.load_state_dict``.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.backward.optimizer_attributes import containers_in, optimizers_in, replace_in
from amplab.optimizers import FusedOptimizer
from amplab.policies import cast_tree

__all__ = ["cast_state", "follow_model", "master_params", "params_of", "replace_params"]


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield every parameter of every group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield the parameters that ``optimizer`` steps.

    Raises:
        TypeError: it has no ``param_groups``.
    """
    try:
        groups = optimizer.param_groups  # apex accepts any object with param_groups
    except AttributeError:
        groups = None
    if not isinstance(groups, list):
        raise TypeError(
            f"master_params got an object of type {type(optimizer).__name__}: expected an optimizer that "
            "amp.initialize returned."
        )
    return params_of(optimizer)


def replace_params(optimizer: Optimizer, replacement: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter of ``optimizer`` by ``replacement(param)``, wherever `containers_in` finds it.

    Lists are edited in place, since some optimizers (LBFGS) keep a reference to those of their groups.
    A second call finishes what an interrupt has left.
    """
    pairs = [(old, replacement(old)) for old in params_of(optimizer)]
    by_id = {id(old): new for old, new in pairs if new is not old}
    if not by_id:
        return
    optimizers = optimizers_in(optimizer)
    lists = [group["params"] for each in reversed(optimizers) for group in getattr(each, "param_groups", ())]
    of_groups = {id(params) for params in lists}
    for container in containers_in(optimizer):
        if id(container) not in of_groups:
            replace_in(container, by_id)
    for each in optimizers:
        for new in by_id.values():
            cast_state(each, new)
    for params in lists:  # last: a parameter that no group of `optimizer` has is not looked for
        replace_in(params, by_id)


def cast_state(optimizer: Optimizer, param: Tensor) -> None:
    """Cast the floating-point state of ``param`` to its dtype."""
    if param in optimizer.state:
        state = optimizer.state[param]
        for name, value in state.items():
            state[name] = value if name == "step" or _is_number(value) else cast_tree(value, param.dtype)


def follow_model(optimizer: Optimizer, param: Tensor, master: Tensor) -> None:
    """Move ``master``, its gradient and its state to the device of ``param``, for example after ``model.cuda()``.

    Raises:
        RuntimeError: ``param`` is no longer half.
    """
    if not param.is_floating_point() or param.dtype == master.dtype:
        raise RuntimeError(
            f"A half parameter of shape {tuple(param.shape)} was changed to {param.dtype} after amp.initialize, for "
            "example by model.float() or model.to(dtype). Do not change dtypes; call amp.initialize again for another "
            "level."
        )
    grad, master.grad = master.grad, None
    master.data = master.data.to(param.device)
    master.grad = None if grad is None else grad.to(param.device)
    state = optimizer.state.get(master, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and (name != "step" or _counts_on_device(optimizer, master)):
            state[name] = value.to(param.device)


def _counts_on_device(optimizer: Optimizer, param: Tensor) -> bool:
    """Return whether the count of steps of ``param`` is where it is, as ``Optimizer.load_state_dict`` decides."""
    group = next(group for group in optimizer.param_groups if any(each is param for each in group["params"]))
    return isinstance(optimizer, FusedOptimizer) or bool(group.get("capturable") or group.get("fused"))


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0
