"""failing: run a training step with an exception in one of the places of it that can fail.

    for at in itertools.count(1):
        failure = failing(step, at)     # None: the step has fewer places
        ...                             # what must hold after a failed step; `failure` says where

A place is each op that the step dispatches, before and after it runs, also in backward and in `optimizer.step`; each
node of a graph that `compiled` runs; and each call of `place` in the code of the step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Failure", "PlantedError", "compiled", "failing", "place"]


class PlantedError(RuntimeError):
    """What a failing place raises; a RuntimeError, as running out of memory is."""


class Failure(NamedTuple):
    """A failure that a step has met: the number of the place, from 1, and its name."""

    at: int
    where: str

    def __str__(self) -> str:
        return f"after a failure in place {self.at}, {self.where}"


class _Places:
    """Counts the places that are passed, and raises in place number `at`."""

    def __init__(self, at: int) -> None:
        self.at, self.passed, self.where = at, 0, None

    def pass_(self, name: str) -> None:
        self.passed += 1
        if self.passed == self.at:
            self.where = name
            raise PlantedError(f"planted in place {self.at}, {name}")


class _FailingOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place(f"before {func}")
        result = func(*args, **(kwargs or {}))
        place(f"after {func}")
        return result


_armed: list[_Places] = []


def place(name: str) -> None:
    """A place that can fail."""
    if _armed:
        _armed[-1].pass_(name)


class _FailingNodes(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        place(f"compiled {n.op} {n.name}")
        return super().run_node(n)


def _failing_compiler(graph: fx.GraphModule, _inputs: object) -> Callable[[list[Tensor]], Any]:
    def run(inputs: list[Tensor]) -> Any:
        return _FailingNodes(graph).run(*inputs)

    run._boxed_call = True  # takes one list
    return run


_BACKEND = aot_autograd(fw_compiler=_failing_compiler, bw_compiler=_failing_compiler)


def compiled(module: nn.Module) -> nn.Module:
    """Compile with a backend whose nodes are places, in forward and backward. Earlier graphs are dropped."""
    torch._dynamo.reset()
    return torch.compile(module, backend=_BACKEND)


def failing(step: Callable[[], object], at: int, *, ops: bool = True) -> Failure | None:
    """Call `step` with a failure in place number `at`; return None if it has fewer places.

    Args:
        step: other exceptions propagate.
        at: from 1.
        ops: whether ops are places. Compiled graphs need False: Dynamo compiles nothing under a dispatch mode.
    """
    places = _Places(at)
    _armed.append(places)
    try:
        if ops:
            with _FailingOps():
                step()
        else:
            step()
    except PlantedError:
        assert places.where is not None
    finally:
        _armed.remove(places)
    return None if places.where is None else Failure(at, places.where)
