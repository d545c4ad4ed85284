"""The optimizer that takes a skipped step: one with the settings of the real one, and no parameter."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from types import MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

__all__ = ["without_parameters"]

_LARGEST_COPY = 2**16
"""Elements of a tensor that may be a count or a norm; a skipped step must not take as much memory as the model."""

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def without_parameters(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose ``step`` changes nothing of ``optimizer``: no weight, no state, no count.

    torch runs ``step`` whatever a hook before it says, but with the ``self`` that the hook returns.

    What an optimizer may count in is copied: numbers, tensors of up to 2^16 elements, lists, dicts, sets and deques in
    its attributes, groups and state, and objects that hold nothing else. So are the optimizers that it wraps,
    without their hooks. What is one object in several places is one in the copy.

    What belongs to parameters is left out: lists of them and of tensors with their shapes are empty, and dicts have no
    entries for them; a place or a key still finds what is there, such as the state of the first parameter.

    Not covered, because the copy shares them: larger tensors that are elsewhere, and objects that hold anything else,
    such as a model, a schedule or a process group.
    """
    copied: Optimizer = _Copies(optimizer).of(optimizer)
    return copied


class _NoParameters(list[Tensor]):
    """An empty list in which tensors are found by their place, as for their device."""

    def __init__(self, found: list[Tensor]) -> None:
        super().__init__()
        self._found = found

    def __getitem__(self, place: Any) -> Any:
        return self._found[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._found[place] = value


class _NoEntries(defaultdict[Any, Any]):
    """A dict without the entries that belong to parameters, which are found by their key."""

    def __init__(self, real: dict[Any, Any], copies: "_Copies") -> None:
        super().__init__(getattr(real, "default_factory", None))
        self._real, self._copies = real, copies

    def __missing__(self, key: Any) -> Any:
        return self._copies.of(self._real[key]) if key in self._real else super().__missing__(key)


class _Copies:
    """The copies of what an optimizer refers to, each made once."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [group["params"] for group in optimizer.param_groups]
        self._params = {id(param) for group in groups for param in group}
        whole = [param for group in groups for param in group]
        self._shapes = [[param.shape for param in params] for params in (*groups, whole)]
        self._made: dict[int, Any] = {}  # by the id of the original, which the optimizer keeps

    def of(self, value: Any) -> Any:
        """Return the copy of ``value``, or ``value`` itself if it is shared."""
        if id(value) not in self._made:
            if isinstance(value, Optimizer):
                self._copy_optimizer(value)
            elif isinstance(value, (list, tuple, dict, set, deque)):
                self._copy_container(value)
            elif isinstance(value, MethodType) and isinstance(value.__self__, Optimizer):
                return MethodType(value.__func__, self.of(value.__self__))
            elif isinstance(value, Tensor):
                return value.detach().clone().requires_grad_(value.requires_grad) if self._counts(value) else value
            elif self._is_data(value):
                self._made[id(value)] = made = copy.copy(value)
                vars(made).update({name: self.of(each) for name, each in vars(value).items()})
            else:
                return value
        return self._made[id(value)]

    def _copy_optimizer(self, real: Optimizer) -> None:
        self._made[id(real)] = made = object.__new__(type(real))
        # An LR scheduler of torch sets an attribute `step` that steps the real one.
        vars(made).update({name: self.of(value) for name, value in vars(real).items() if name != "step"})
        vars(made).update(
            _optimizer_step_pre_hooks=OrderedDict(),  # torch runs them again for super().step()
            _optimizer_step_post_hooks=OrderedDict(),
        )
        for slot in [each for kind in type(real).__mro__ for each in vars(kind).values()]:
            if isinstance(slot, MemberDescriptorType) and hasattr(real, slot.__name__):
                slot.__set__(made, self.of(slot.__get__(real)))

    def _copy_container(self, real: Any) -> None:
        made: Any
        if isinstance(real, dict):
            kept = [key for key, value in real.items() if not (isinstance(key, Tensor) or self._has_weight(value))]
            self._made[id(real)] = made = copy.copy(real) if len(kept) == len(real) else _NoEntries(real, self)
            made.update((key, self.of(real[key])) for key in kept)
        elif isinstance(real, set):
            self._made[id(real)] = made = copy.copy(real)
            made.difference_update([each for each in real if isinstance(each, Tensor)])
        elif self._belongs_to_parameters(real):
            self._made[id(real)] = _NoParameters([self.of(value) for value in real])
        elif isinstance(real, tuple):
            made = [self.of(value) for value in real]
            self._made[id(real)] = type(real)._make(made) if hasattr(real, "_make") else tuple(made)
        else:
            self._made[id(real)] = made = copy.copy(real)
            for place, value in enumerate(real):
                made[place] = self.of(value)

    def _belongs_to_parameters(self, values: Sequence[Any]) -> bool:
        """Whether each of ``values`` is a parameter or has one, or they are tensors with the parameters' shapes."""
        if not values or hasattr(values, "_make"):
            return False
        if all(map(self._has_weight, values)):
            return True
        return all(isinstance(each, Tensor) for each in values) and [each.shape for each in values] in self._shapes

    def _has_weight(self, value: Any) -> bool:
        """Whether ``value`` is a parameter, or a tuple with one."""
        if isinstance(value, tuple):
            return any(map(self._has_weight, value))
        return isinstance(value, Parameter) or id(value) in self._params

    def _counts(self, tensor: Tensor) -> bool:
        return not self._has_weight(tensor) and tensor.numel() <= _LARGEST_COPY

    def _is_data(self, value: Any) -> bool:
        """Whether an object has attributes, and those are numbers, text, small tensors and containers of these."""
        kind = type(value)
        if isinstance(value, (type, nn.Module)) or hasattr(kind, "__del__") or not getattr(value, "__dict__", None):
            return False
        waiting: list[Any] = [vars(value)]
        seen: set[int] = set()
        while waiting:
            each = waiting.pop()
            if isinstance(each, (list, tuple, dict, set, deque)):
                if id(each) not in seen:
                    waiting += _inside(each)
                seen.add(id(each))
            elif not isinstance(each, _PLAIN) and not (isinstance(each, Tensor) and self._counts(each)):
                return False
        return True


def _inside(container: Any) -> Iterable[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else container
