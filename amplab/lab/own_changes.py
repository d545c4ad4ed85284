"""What a run changes in code of one's own besides weights and buffers: attributes, and what it freezes or switches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.lab.compute_threads import own_number_kept
from amplab.lab.kept_attributes import KeptAttributes
from amplab.lab.own_state import (
    State,
    add_state,
    changes,
    differing,
    in_another_session,
    lost_changes,
    made,
    own_state,
)
from amplab.lab.tasks import Task
from amplab.trace.as_found import Undo

__all__ = ["OwnChanges"]


class OwnChanges:
    """What code of one's own keeps, from the beginning of a run.

    Args:
        model: That of the run, of one's own; None for one of the lab, whose code keeps nothing.
        task: That of the run.
        optimizers: Returns those of now.
        tensors: Returns the tensors that a checkpoint has by themselves: weights and buffers.
    """

    def __init__(
        self,
        model: nn.Module | None,
        task: Task,
        optimizers: Callable[[], Sequence[Optimizer]],
        tensors: Callable[[], list[Tensor]],
    ) -> None:
        self._model, self._task, self._optimizers, self._tensors = model, task, optimizers, tensors
        self._begun, self._begun_switches = self._now(), self._switches()

    def kept(self, *, is_of_step: bool = False) -> KeptAttributes:
        """Return what the code that a forward runs keeps now, to be restored."""
        roots = {} if self._model is None else {"model": self._model, **self._task.code_of_steps()}
        return KeptAttributes(roots, self._tensors, is_of_step=is_of_step)

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Run a block, after which code keeps what it kept before, such as a count of calls."""
        with own_number_kept(), Undo() as undo:
            undo.add(self.kept().restore)
            yield

    def begin_session(self) -> None:
        """Note that a session has replaced weights: what stands for these is no change of the run."""
        self._begun = in_another_session(self._begun, self._now())

    def state(self) -> tuple[dict[str, Any], list[str]]:
        """Return what `load` needs, and the names of what a file cannot hold."""
        now = self._now()
        switched = {name: on for name, on in self._switches().items() if self._begun_switches.get(name, on) != on}
        state = {"own": changes(now, self._begun), "made": made(now), "switched": switched}
        return state, lost_changes(now, self._begun)

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Take over what `state` returned for another run; return the names of objects that are not here.

        Raises:
            RunStateError: A value that `state` does not return.
        """
        device, own = next((each.device for each in self._tensors()), None), state.get("own", {})
        drawn = differing(state.get("made", {}), self._now())
        both = {path: {**drawn.get(path, {}), **own.get(path, {})} for path in {**own, **drawn}}
        missing = add_state(self._roots(), both, device, self._tensors())
        if self._model is not None:
            _switch(self._model, state.get("switched", {}))
        return missing

    def _now(self) -> State:
        return own_state(self._roots(), self._tensors())

    def _roots(self) -> dict[str, Any]:
        """The objects whose attributes a run may change, by the names under which they are saved."""
        if self._model is None:
            return {}
        optimizers = {f"optimizer {number}".removesuffix(" 0"): each for number, each in enumerate(self._optimizers())}
        return {"model": self._model, **self._task.parts_with_state(), **optimizers}

    def _switches(self) -> dict[str, bool]:
        """Return which weights require gradients and which modules are in training: a run may freeze a part."""
        if self._model is None:
            return {}
        weights = {f"weight {name}": each.requires_grad for name, each in self._model.named_parameters()}
        return weights | {f"module {name}": each.training for name, each in self._model.named_modules()}


def _switch(model: nn.Module, switched: Mapping[str, bool]) -> None:
    weights, modules = dict(model.named_parameters()), dict(model.named_modules())
    for name, on in switched.items():
        kind, _, place = name.partition(" ")
        if kind == "weight" and place in weights:
            weights[place].requires_grad_(on)
        elif kind == "module" and place in modules:
            modules[place].training = on
