"""StepCode: what code of one's own keeps as a step begins, so that the step can run again as it ran.

To keep all of it before each step would take longer than the step. The first step and each rerun tell what changes, and
from then on that is kept for each step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from amplab.lab.kept_attributes import KeptAttributes
from amplab.lab.own_code import named_by
from amplab.lab.own_objects import Names
from amplab.lab.own_threads import writer_beside
from amplab.lab.own_waits import awaited_by
from amplab.policies.nested_tensors import tensors_in
from amplab.trace.random_states import HostStates

__all__ = ["CannotRunAgain", "CodeBefore", "StepCode"]


class CannotRunAgain(RuntimeError):
    """A step cannot run again as the loop ran it; the message says why."""


class CodeBefore(NamedTuple):
    """What code kept as a forward began.

    Attributes:
        host: The random states of Python and NumPy; None if nothing is known to draw from them.
        kept: What code kept; None if nothing is known to change.
        known: The objects of which that is known; None for all.
    """

    host: HostStates | None = None
    kept: KeptAttributes | None = None
    known: frozenset[Any] | None = None

    def check_kept(self, now: KeptAttributes) -> None:
        """Raise CannotRunAgain if code may write to something of which no copy is kept, before the step or now."""
        if unkept := now.unkept or (self.kept is not None and self.kept.has_lost and "a large tensor"):
            raise CannotRunAgain(
                f"its code may write to {unkept}, of which no copy is kept, so that it could not be taken back. Of an "
                "array to which nothing writes, say so: array.flags.writeable = False."
            )


class StepCode:
    """Keeps what the code of steps keeps, as far as it changes.

    Args:
        model: The model.
        functions: Those that run a step again.
        keeps: False if the caller takes back what code changes; then nothing is kept.

    Attributes:
        is_taken_back: Whether all that reruns have changed was taken back.
    """

    def __init__(self, model: nn.Module, functions: Sequence[Callable[..., Any]], *, keeps: bool) -> None:
        self._model, self._functions, self._keeps = model, functions, keeps
        self._first: KeptAttributes | None = None  # as the first step began, until the second begins
        self._first_host: HostStates | None = None
        self._is_first = True
        self._changing: dict[Any, Names] = {}  # what the first step or a rerun has changed
        self._draws = False  # from Python's or NumPy's global generators
        self.is_taken_back = True

    def before(self) -> CodeBefore:
        """Return what code keeps as a forward begins. Sync: none."""
        if not self._keeps:
            return CodeBefore()
        if self._is_first:
            host, kept = HostStates(), self.now()
            self._first, self._first_host = self._first or kept, self._first_host or host
            return CodeBefore(host, kept)
        if self._first is not None and self._first_host is not None:
            self._first.look()
            self._changing |= self._first.changed
            self._draws = not self._first_host.are_present
            self._first = None
        changing = KeptAttributes.of(self._changing.values(), self._weights) if self._changing else None
        return CodeBefore(HostStates() if self._draws else None, changing, frozenset(self._changing))

    def step_ends(self) -> None:
        """A step with a forward is over."""
        self._is_first = False

    def now(self, batch: Any = ()) -> KeptAttributes:
        """Return all that code keeps, and arrays and objects of a batch, which it may change. Sync: none."""
        if not self._keeps:
            return KeptAttributes({})
        followed = named_by([*self._code(), batch], self._weights()) | {"batch": Names(self, {"batch": batch})}
        return KeptAttributes({"model": self._model}, lambda: [*self._weights(), *tensors_in(batch)], followed=followed)

    def check_is_alone(self, batches: Sequence[Any]) -> None:
        """Raise CannotRunAgain if code may wait for others, or if they may write to what it keeps. Sync: none.

        Args:
            batches: Those of the step, which may have iterators.
        """
        if awaited := awaited_by(batches):
            raise CannotRunAgain(
                f"its batch has an object of class {awaited}, which gives what it has once. Let the batch have a list "
                "of it."
            )
        if awaited := awaited_by(self._code()):
            raise CannotRunAgain(
                f"its code names an object of class {awaited}: a step that runs again could wait for it forever, or "
                "take what the next step is to get. Let step= get that as a part of the batch."
            )
        if self._keeps and (writer := writer_beside(self._code())):
            raise CannotRunAgain(
                f"{writer.who} may write to {writer.what}, which the code of the step names too: what it writes while "
                "the step runs again would be taken back. End it before, or let step= use a copy."
            )

    def take_back(self, before: KeptAttributes, *, draws: bool) -> None:
        """Let code keep what it kept before a rerun, and note what that has changed.

        Args:
            before: What `now` has returned before it.
            draws: Whether it has drawn from Python's or NumPy's global generators.
        """
        self.is_taken_back = before.restore() and self.is_taken_back
        self._changing |= before.changed
        self._draws = self._draws or draws

    def _code(self) -> list[Any]:
        return [self._model, *map(inspect.unwrap, self._functions)]

    def _weights(self) -> list[Tensor]:
        """The tensors that a tool restores itself."""
        return [*self._model.parameters(), *self._model.buffers()]
