"""HeldGradients: whether the parameters of a loop have gradients, and get some: it tells which losses are in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from amplab.amp.backward.gradients import SetAside
from amplab.amp.backward.optimizer_params import params_of
from amplab.lab.forward_again import unseen
from amplab.scalers import is_sharded

__all__ = ["HeldGradients"]

_FEW = 4096  # elements; these gradients are read first


class HeldGradients:
    """Tells whether the parameters of a loop have gradients.

    FSDP keeps gradients elsewhere until it reduces them: those of sharded parameters count as present.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self._nodes: dict[Tensor, Node] = {}  # which add to the gradients
        self._reached: Tensor | None = None  # a parameter of the last backward

    def any(self) -> bool:
        """Return whether a parameter of the model or of an optimizer has one. Sync: none."""
        params = chain(*map(params_of, self._optimizers), self._model.parameters())
        return any(each.grad is not None or is_sharded(each) for each in params)

    def of_first(self, aside: Iterable[SetAside] = ()) -> bool:
        """Return whether the next step of the first optimizer has gradients so far.

        Those of its parameters, and of those of the model that no optimizer has, as it may have copies. Zeros
        are none: ``zero_grad(set_to_none=False)`` leaves them. On devices, and in bfloat16, they count as present.

        Args:
            aside: those that a backward has set aside.

        Sync: none.
        """
        before, waiting = {id(param): grad for param, grad in aside}, []
        for param in self._params_of_first():
            grad = before.get(id(param), param.grad)
            if is_sharded(param) or (grad is not None and not grad.is_cpu):
                return True
            if grad is not None and grad.numel() > _FEW:
                waiting.append(grad)
            elif grad is not None and _has_values(grad):
                return True
        return any(map(_has_values, waiting))

    def accumulates(self) -> bool:
        """Return whether the backward whose hook calls may add to gradients, as that of `torch.autograd.grad` does not.

        Sync: none.
        """
        first = (self._reached,) if self._reached is not None else ()
        for param in chain(first, self._params_of_first()):
            try:
                if torch._C._will_engine_execute_node(self._node_of(param)):
                    self._reached = param
                    return True
            except RuntimeError as error:
                if "autograd.grad()" in str(error):
                    return False
        return True  # of another optimizer, or inside of a node, as that of a checkpoint

    def _node_of(self, param: Tensor) -> Node:
        if param not in self._nodes:
            self._nodes[param] = torch.autograd.graph.get_gradient_edge(param).node
        return self._nodes[param]

    def _params_of_first(self) -> Iterator[Tensor]:
        yield from params_of(self._optimizers[0])
        stepped = {id(each) for optimizer in self._optimizers for each in params_of(optimizer)}
        yield from (each for each in self._model.parameters() if id(each) not in stepped)


def _has_values(grad: Tensor) -> bool:
    """Whether an element is not zero, also if NumPy cannot read it. No op of torch that a look would see."""
    if grad.layout is torch.sparse_coo:
        with unseen():  # and without NumPy: a storage that it has read cannot grow, as the next backward needs
            return bool(grad._values().any())
    if grad.layout is not torch.strided:
        return True
    try:
        return bool(grad.numpy().any())
    except (TypeError, RuntimeError):  # bfloat16, a gradient with a graph
        return True
