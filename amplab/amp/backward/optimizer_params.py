"""Change which tensors an optimizer owns, in mid-training, with its state following them.

    optimizer.param_groups   old -> new, in place in each group's list
    optimizer.state          re-keyed old -> new, floating entries cast to the new parameter's dtype

Step counts and other single numbers keep their dtype, as in ``Optimizer.load_state_dict``.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amplab.policies import cast_tree

__all__ = ["cast_state", "follow_model", "master_params", "params_of", "replace_params"]


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield every parameter of every group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield what ``optimizer`` steps, after a look at what it is.

    Raises:
        TypeError: it has no ``param_groups``.
    """
    try:
        groups = optimizer.param_groups  # apex accepts any object that has them
    except AttributeError:
        groups = None
    if not isinstance(groups, list):
        raise TypeError(
            f"master_params got an object of type {type(optimizer).__name__}: expected an optimizer; pass one of those "
            "that amp.initialize returned."
        )
    return params_of(optimizer)


def replace_params(optimizer: Optimizer, replacement: Callable[[Tensor], Tensor]) -> None:
    """Let ``optimizer`` own ``replacement(param)`` in the place of each of its parameters.

    The groups' lists are edited in place, since some optimizers (LBFGS) keep a reference to them.
    """
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            new = replacement(old)
            if new is not old:
                group["params"][index] = new
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)
                    cast_state(optimizer, new)


def cast_state(optimizer: Optimizer, param: Tensor) -> None:
    """Cast the floating state of ``param`` to its dtype."""
    if param in optimizer.state:
        state = optimizer.state[param]
        for name, value in state.items():
            state[name] = value if name == "step" or _is_number(value) else cast_tree(value, param.dtype)


def follow_model(optimizer: Optimizer, param: Tensor, master: Tensor) -> None:
    """Bring ``master``, its gradient and its state to the device that ``model.cuda()`` has moved ``param`` to.

    Raises:
        RuntimeError: ``param`` has lost its half dtype, so that the forward no longer casts for it.
    """
    if not param.is_floating_point() or param.dtype == master.dtype:
        raise RuntimeError(
            f"A half parameter of shape {tuple(param.shape)} has become {param.dtype} since amp.initialize (by "
            "model.float() or model.to(dtype)?): leave dtypes to amp.initialize, and call it again for another level."
        )
    grad, master.grad = master.grad, None
    master.data = master.data.to(param.device)
    master.grad = None if grad is None else grad.to(param.device)
    state = optimizer.state.get(master, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and not _is_number(value):
            state[name] = value.to(param.device)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0
