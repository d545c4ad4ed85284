"""Merge parameter groups with the same options, before an optimizer is made of them.

    [{"params": [a], "lr": 1}, {"params": [b], "lr": 2}, {"params": [c], "lr": 1}]
    ->  [{"params": [a, c], "lr": 1}, {"params": [b], "lr": 2}]

An optimizer steps group by group: one call of a kernel, or a dozen of torch's foreach calls, for each. Scripts that
make one group per parameter, to disable weight decay for some, pay this for every parameter, although two or three
groups are enough. Each parameter is stepped by the same rule as before, bit for bit.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["merge_groups"]


def merge_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return as few groups as there are different sets of options.

    Groups cannot be split again: a scheduler sees one learning rate for merged groups, and a ``state_dict`` lists the
    parameters in the new order, so that one saved from unmerged groups does not fit.

    Args:
        groups: as for an optimizer: dicts with "params", a tensor or several, and options; not modified.

    Returns:
        New dicts, in the order in which their options first occur; parameters in their order.

    Raises:
        TypeError: a group that is not a dict.
        ValueError: a group without "params".

    >>> import torch
    >>> weight, bias, scale = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    >>> groups = [{"params": [weight], "weight_decay": 0.1}, {"params": bias, "weight_decay": 0.0}]
    >>> [len(group["params"]) for group in merge_groups([*groups, {"params": scale, "weight_decay": 0.0}])]
    [1, 2]
    """
    merged: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        options, lists = _taken_apart(index, group)
        twin = next((each for each in merged if _same_options(_taken_apart(0, each), (options, lists))), None)
        if twin is None:
            merged.append({**options, **lists})
        else:
            for name, values in lists.items():
                twin[name] += values
    return merged


def _taken_apart(index: int, group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the options of a group, and the lists with an entry for each parameter."""
    if not isinstance(group, Mapping):
        raise TypeError(
            f"groups[{index}] is a {type(group).__name__}: expected a dict with 'params'; pass parameters without "
            "groups directly to the optimizer."
        )
    if "params" not in group:
        raise ValueError(f"groups[{index}] has {', '.join(map(str, group))}: expected 'params' among them; add it.")
    lists = {name: group[name] for name in ("params", "param_names") if name in group}
    lists = {name: [values] if isinstance(values, Tensor) else list(values) for name, values in lists.items()}
    return {name: value for name, value in group.items() if name not in lists}, lists


def _same_options(
    left: tuple[dict[str, Any], dict[str, list[Any]]], right: tuple[dict[str, Any], dict[str, list[Any]]]
) -> bool:
    (options, lists), (others, other_lists) = left, right
    if options.keys() != others.keys() or lists.keys() != other_lists.keys():
        return False
    return all(_same(value, others[name]) for name, value in options.items())


def _same(left: Any, right: Any) -> bool:
    """Compare two options; tensors, such as a learning rate on a device, by identity: comparing values would sync."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return left is right
    return type(left) is type(right) and bool(left == right)
