"""Leave a model as it was: everything that a forward and a backward write, put back.

Kept: parameters, buffers (values, also those that forward adds or rebinds), `.grad` of every leaf, `requires_grad`,
training flags, the random states of torch, its devices, Python and numpy, and whatever the optimizers have that step in
the block. Of plain Python attributes of the modules: to what they are bound, and the states of generators among them.
Not kept: what a plain attribute holds and forward changes in place (a list that grows, the elements of a tensor that is
no buffer), what lies outside of the modules, and a loss scale. torch's own modules keep no state in plain attributes,
and those that wrap a model (DDP, FSDP) set up there what is not to be set up twice: their attributes are left alone.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amplab.trace.optimizer_states import unchanged_optimizers
from amplab.trace.random_states import puts_back, random_states_kept
from amplab.trace.tensor_copies import TensorCopy

__all__ = ["ParkedGradients", "untouched"]


class ParkedGradients:
    """Gradients set aside, so that a backward starts from none and its results can be dropped.

    Hooks that wait for an accumulated gradient (an optimizer stepping inside backward) are set aside with them.
    """

    def __init__(self) -> None:
        self._parked: dict[int, tuple[Tensor, Tensor | None, dict]] = {}

    def park(self, leaves: Iterable[Tensor]) -> None:
        """Set aside the gradients of `leaves` that are not yet parked."""
        for leaf in leaves:
            if id(leaf) not in self._parked:
                hooks = leaf._post_accumulate_grad_hooks
                self._parked[id(leaf)] = (leaf, leaf.grad, dict(hooks or {}))
                leaf.grad = None
                if hooks:
                    hooks.clear()

    def park_leaves_of(self, loss: Tensor) -> None:
        """Set aside the gradients of every leaf that a backward from `loss` reaches."""
        self.park(node.variable for node in _nodes_behind(loss) if node.name() == "torch::autograd::AccumulateGrad")

    def restore(self) -> None:
        """Put every gradient and hook back."""
        for leaf, grad, hooks in self._parked.values():
            leaf.grad = grad
            if hooks:
                leaf._post_accumulate_grad_hooks.update(hooks)
        self._parked.clear()


def _nodes_behind(loss: Tensor) -> Iterator[torch.autograd.graph.Node]:
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        yield node
        found = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= found
        waiting += found


_unseen_by_engines = torch._C.DisableTorchFunction


@contextmanager
def untouched(model: nn.Module) -> Iterator[ParkedGradients]:
    """Run a block on `model` and put everything back that it changed, also after an exception.

    Gives the gradients set aside, to which the block adds the leaves that lie outside the model. Holds one copy of the
    model's parameters and buffers while the block runs.

    Sync: none.
    """
    gradients = ParkedGradients()
    with ExitStack() as undo:
        with _unseen_by_engines():
            undo.callback(gradients.restore)
            states = [_ModuleState.of(module) for module in model.modules()]
            for state in states:
                gradients.park(each for each in state.parameters.values() if each is not None and each.is_leaf)
                undo.callback(state.restore)
            devices = {copy.tensor.device for state in states for copy in state.copies}
        undo.enter_context(random_states_kept(devices))
        undo.enter_context(unchanged_optimizers())
        yield gradients


class _ModuleState(NamedTuple):
    """What one module owns itself: its parameters, buffers, training flag, and what its attributes are bound to."""

    module: nn.Module
    training: bool
    parameters: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    copies: tuple[TensorCopy, ...]
    attributes: dict[str, Any] | None
    generators: tuple[Callable[[], object], ...]

    @classmethod
    def of(cls, module: nn.Module) -> "_ModuleState":
        parameters, buffers = dict(module._parameters), dict(module._buffers)
        tensors = [tensor for tensor in (*parameters.values(), *buffers.values()) if tensor is not None]
        copies = tuple(TensorCopy.of(tensor) for tensor in tensors)
        attributes = None if type(module).__module__.startswith("torch.") else dict(vars(module))
        generators = puts_back((attributes or {}).values())
        return cls(module, module.training, parameters, buffers, copies, attributes, generators)

    def restore(self) -> None:
        self.module.training = self.training
        if self.attributes is not None:
            for name in self.attributes.keys() & self.module._modules.keys():
                del self.attributes[name]  # a part that forward makes stays, and takes its name
            _rebind(vars(self.module), self.attributes)
        for put_back in self.generators:
            put_back()
        _rebind(self.module._parameters, self.parameters)
        _rebind(self.module._buffers, self.buffers)
        with _unseen_by_engines():
            for copy in self.copies:
                copy.restore()


def _rebind(owned: dict[str, Any], before: dict[str, Any]) -> None:
    for name in owned.keys() - before.keys():
        del owned[name]
    owned.update(before)
