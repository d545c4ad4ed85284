"""The optimizer that takes a skipped step: one with the settings of the real one, and no parameter."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["without_parameters"]


def without_parameters(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose ``step`` changes nothing of ``optimizer``: no weight, no state, no count.

    torch runs ``step`` whatever a hook before it says, but with the ``self`` that the hook returns.
    """
    groups = [
        {**{name: _copied(value) for name, value in group.items()}, "params": _NoParameters(group["params"])}
        for group in optimizer.param_groups
    ]
    state = {key: _copied(value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    without = object.__new__(type(optimizer))
    vars(without).update(
        vars(optimizer),
        param_groups=groups,
        state=defaultdict(dict, state),
        _optimizer_step_pre_hooks=OrderedDict(),  # torch runs them again for super().step()
        _optimizer_step_post_hooks=OrderedDict(),
    )
    return without


class _NoParameters(list[Tensor]):
    """An empty list in which the real parameters are found by their place, as for their device."""

    def __init__(self, real: Sequence[Tensor]) -> None:
        super().__init__()
        self._real = real

    def __getitem__(self, place: Any) -> Any:
        return self._real[place]


def _copied(value: Any) -> Any:
    """Return a copy of what an optimizer may count in."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value
