"""State that ranks agree on after uneven batches.

    with Join([wrapper, JoinedState(wrapper, model, optimizer, scaler)]):
        for inputs in batches: ...        # each rank has as many as it has

A rank that runs out of batches takes no more steps, and DistributedDataParallel then gives it the parameters of the
rank that went on longest. Momenta, masters and the loss scale stay behind, so that the next step would differ between
ranks.
"""

import io
import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook

__all__ = ["HoldsState", "JoinedState", "joins_without_state"]


class HoldsState(Protocol):
    """A model, an optimizer, a GradScaler, ``amplab.amp`` or a session of it, a learning rate schedule."""

    def state_dict(self) -> Any:
        """Return what `load_state_dict` takes."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load it."""


class JoinedState(Joinable):
    """Give every rank the state of the rank that trained longest, at the end of a ``Join``.

    Args:
        wrapper: the DistributedDataParallel of the same ``Join``; the ranks and the device are its own.
        holders: what has a state, in the order in which it is loaded: the model, the optimizer, then the loss scale.

    Sync: at the end of the ``Join`` every rank waits for the others; the state travels once, through host memory.

    Reference: ``torch.distributed.algorithms.join.Joinable``.
    """

    def __init__(self, wrapper: nn.parallel.DistributedDataParallel, *holders: HoldsState) -> None:
        super().__init__()
        self._wrapper, self._holders = wrapper, holders
        _STATES.add(self)

    def join_hook(self, **_arguments: Any) -> JoinHook:
        """Return what runs at the end of the ``Join``."""
        return _TakesOver(self)

    def joins(self, wrapper: nn.parallel.DistributedDataParallel) -> bool:
        """Return whether this is part of a ``Join``, for ``wrapper``. Sync: none."""
        return self._wrapper is wrapper and self._join_config.enable

    @property
    def join_device(self) -> torch.device:
        """The device of the wrapper."""
        device: torch.device = self._wrapper.join_device
        return device

    @property
    def join_process_group(self) -> Any:
        """The ranks of the wrapper."""
        return self._wrapper.join_process_group

    def take_over(self, is_last_joiner: bool) -> None:
        """Load the state of a rank that joined last; the highest of them, as DistributedDataParallel takes."""
        group = self.join_process_group
        last = torch.tensor([dist.get_rank(group) if is_last_joiner else -1], device=self.join_device)
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=group)
        source = int(last)
        here = dist.get_rank(group) == source
        sent: list[Any] = [self._saved() if here else None]
        dist.broadcast_object_list(sent, dist.get_global_rank(group, source), group, self.join_device)
        if not here:
            states = torch.load(io.BytesIO(sent[0]), map_location="cpu", weights_only=False)
            for holder, state in zip(self._holders, states, strict=True):
                holder.load_state_dict(state)

    def _saved(self) -> bytes:
        saved = io.BytesIO()
        torch.save([holder.state_dict() for holder in self._holders], saved)
        return saved.getvalue()


_STATES: weakref.WeakSet[JoinedState] = weakref.WeakSet()


def joins_without_state(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether ``wrapper`` is part of a ``Join`` that has no `JoinedState` for it. Sync: none."""
    return wrapper._join_config.enable and not any(state.joins(wrapper) for state in _STATES)


class _TakesOver(JoinHook):
    def __init__(self, state: JoinedState) -> None:
        self._state = state

    def post_hook(self, is_last_joiner: bool) -> None:
        self._state.take_over(is_last_joiner)
