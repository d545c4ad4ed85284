"""What an optimizer refers to in its attributes: optimizers that it wraps, and containers of parameters.

An optimizer may keep its parameters beside its groups, as in ``self.params = list(params)``: whoever replaces them in
the groups replaces them there, too. Objects of other classes are left alone, since they may belong to somebody else, as
a model does.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["containers_in", "objects_with", "optimizers_in", "replace_in"]

_CONTAINERS = (list, tuple, dict, set, deque)


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return ``optimizer``, and those in its attributes and their containers, each once."""
    return [value for _, value in _walk("", optimizer) if isinstance(value, Optimizer)]


def containers_in(optimizer: Optimizer) -> list[Any]:
    """Return the attributes of `optimizers_in` as dicts, and each list, dict, set and deque in them, each once."""
    found = [value for _, value in _walk("", optimizer) if not isinstance(value, tuple)]
    return [vars(value) if isinstance(value, Optimizer) else value for value in found if _holds(value)]


def objects_with(optimizer: Optimizer, tensors: Collection[Tensor]) -> Iterator[tuple[str, object]]:
    """Yield each object of another class that has one of ``tensors`` in its attributes, with the name that it has.

    A module is not looked at: its parameters are the model's.
    """
    wanted = {id(tensor) for tensor in tensors}
    for name, value in _walk(type(optimizer).__name__, optimizer):
        if not _holds(value) and not isinstance(value, nn.Module):
            inside = [each for _, kept in _walk("", vars(value)) if _holds(kept) for _, each in _children("", kept)]
            if any(id(each) in wanted for each in inside):
                yield name, value


def replace_in(container: Any, by_id: Mapping[int, Tensor]) -> None:
    """Replace tensors in a list, deque, set or dict, in its keys, too, and in tuples there.

    A second call finishes what an interrupt has left.

    Args:
        container: changed in place.
        by_id: the new tensor, by the id of the old one.
    """
    if isinstance(container, set):
        for old in [each for each in container if id(each) in by_id]:
            container.add(by_id[id(old)])
            container.discard(old)
        return
    if isinstance(container, dict):
        for old in [key for key in container if id(key) in by_id]:
            container[by_id[id(old)]] = container[old]
            del container[old]
    for place, old in list(container.items() if isinstance(container, dict) else enumerate(container)):
        new = _replaced(old, by_id)
        if new is not old:
            container[place] = new


def _replaced(value: Any, by_id: Mapping[int, Tensor]) -> Any:
    if not isinstance(value, tuple):
        return by_id.get(id(value), value)
    each = [_replaced(old, by_id) for old in value]
    if all(new is old for new, old in zip(each, value, strict=True)):
        return value
    return type(value)._make(each) if hasattr(value, "_make") else tuple(each)


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each optimizer, container and other object with attributes, with its name; objects are not entered."""
    waiting, seen = [(name, value)], set()
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen or isinstance(value, (Tensor, type)):
            continue
        seen.add(id(value))
        if _holds(value):
            yield name, value
            waiting += reversed(list(_children(name, value)))
        elif getattr(value, "__dict__", None):
            yield name, value


def _holds(value: Any) -> bool:
    return isinstance(value, (Optimizer, *_CONTAINERS))


def _children(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Optimizer):
        yield from ((f"{name}.{attribute}", each) for attribute, each in vars(value).items())
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]" if isinstance(key, (str, int)) else name, each) for key, each in value.items())
    else:
        yield from ((f"{name}[{place}]", each) for place, each in enumerate(value))
