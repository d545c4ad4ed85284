"""One forward of a step that runs again: how it began, and its batch and code as they were then.

A tool runs a step several times. Each time begins as the step of the loop did, and nothing of it is seen by the loop.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from amplab.amp import is_autocast_enabled
from amplab.lab.batches import copied
from amplab.lab.kept_attributes import KeptAttributes
from amplab.lab.step_code import CodeBefore
from amplab.policies.casting.function_modes import without_function_modes
from amplab.policies.nested_tensors import tensors_in
from amplab.trace.handed_step import Loss
from amplab.trace.random_states import HostStates
from amplab.trace.tensor_copies import write_value

__all__ = ["BegunForward", "ForwardAgain", "in_autocast", "unseen", "versions_of", "with_own_containers"]


class BegunForward(NamedTuple):
    """How one forward began.

    Attributes:
        batch: The batch, with containers of its own.
        versions: Of its tensors: what was written to since then is known by these.
        weights: The versions of the model's parameters.
        random: The states of torch's generators.
        code: What its code kept.
    """

    batch: Any
    versions: list[int]
    weights: list[int]
    random: list[Tensor]
    code: CodeBefore

    @property
    def is_written(self) -> bool:
        """Whether a tensor of the batch was written to."""
        return versions_of(self.batch) != self.versions


@dataclass(eq=False)
class ForwardAgain:
    """One batch that runs again, several times: each time begins as the step did.

    Attributes:
        begun: How it began.
        now: What its code keeps now, to begin from if no more is known.
        batch: A copy of its batch.
        host: The present random states of Python and NumPy.
        in_autocast: Whether the first forward was in an autocast region; None before that.
        loss: That of the first time; None before that.
        draws: Whether the first time has drawn from Python's or NumPy's global generators.
    """

    begun: BegunForward
    now: KeptAttributes
    batch: Any = None
    in_autocast: bool | None = None
    loss: Tensor | None = None
    draws: bool = False
    host: HostStates = field(default_factory=HostStates)
    _written: list[int] = field(default_factory=list)
    _is_of_loss: bool = False

    def __post_init__(self) -> None:
        self.batch = copied(with_own_containers(self.begun.batch))
        self._written = versions_of(self.batch)

    def begin(self) -> None:
        """Let code and batch be as they were."""
        with unseen(), torch.no_grad():
            for kept in (self.now, self.begun.code.kept):
                if kept is not None:
                    kept.restore()
            if versions_of(self.batch) != self._written:
                for one, given in zip(tensors_in(self.batch), tensors_in(self.begun.batch), strict=True):
                    write_value(one, given)

    def beginning_again(self, step: Loss) -> Loss:
        """Return a step that begins as the loop's, with containers of its own."""

        @functools.wraps(step)
        def again(*given: Any) -> Any:
            self.begin()
            return self._see(step(*(with_own_containers(each) if each is self.batch else each for each in given)))

        return again

    def seeing_loss(self, loss: Loss) -> Loss:
        """Return a loss that is noted; its step begins with the forward."""
        self._is_of_loss = True

        @functools.wraps(loss)
        def again(*given: Any) -> Any:
            return self._see(loss(*given))

        return again

    def see_forward(self, model: nn.Module, _args: object) -> None:
        """A forward begins, and with it the step if there is only a loss."""
        if self.in_autocast is None:
            self.in_autocast = in_autocast(model)
        if self._is_of_loss:
            self.begin()

    def _see(self, loss: Any) -> Any:
        """Note a loss, and what code has changed since its step began."""
        if self.loss is None and isinstance(loss, Tensor):
            self.loss, self.draws = loss, not (self.begun.code.host or self.host).are_present
            with unseen():
                self.now.look()  # before a tool restores the attributes of modules
        return loss


@contextmanager
def unseen() -> Iterator[None]:
    """Run a block whose ops are none of the step that a tool follows."""
    with without_function_modes(), _disable_current_modes():
        yield


def with_own_containers(value: Any) -> Any:
    """Return a structure with the same tensors in containers of its own: a step may take a label out of its batch."""
    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        for key, each in value.items():
            result[key] = with_own_containers(each)
        return result
    if type(value) is list:
        return [*map(with_own_containers, value)]
    if isinstance(value, tuple):
        make = getattr(type(value), "_make", tuple)
        return make(map(with_own_containers, value)) if type(value) is tuple or make is not tuple else value
    return value


def versions_of(batch: Any) -> list[int]:
    """Return the versions of the tensors of a batch, which count the writes to them."""
    return [0 if each.is_inference() else each._version for each in tensors_in(batch)]


def in_autocast(model: nn.Module) -> bool:
    """Return whether this thread is in an autocast region of the model's device."""
    device = next((each.device.type for each in model.parameters()), "cpu")
    return torch.is_autocast_enabled(device) or is_autocast_enabled(device)  # torch's regions, or amplab's
