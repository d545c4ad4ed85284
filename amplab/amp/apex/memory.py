"""Count the bytes that models and optimizers hold, by what they are for."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.amp.apex.hooked_optimizer import HookedOptimizer
from amplab.amp.backward.optimizer_params import params_of
from amplab.amp.backward.records import MemoryUse
from amplab.policies.nested_tensors import tensors_in

__all__ = ["memory_use"]


def memory_use(models: Iterable[nn.Module], optimizers: Iterable[tuple[Optimizer, HookedOptimizer]]) -> MemoryUse:
    """Return the bytes of everything that belongs to ``models`` and ``optimizers``; shared tensors count once.

    Sync: none.
    """
    optimizers = list(optimizers)
    owned = [param for optimizer, _ in optimizers for param in params_of(optimizer)]
    masters = [pair.master for _, hooked in optimizers for pair in hooked.masters.pairs]
    params = [param for model in models for param in model.parameters()]
    is_master = {id(master) for master in masters}
    params += [param for param in owned if id(param) not in is_master]
    grads = [param.grad for param in [*params, *masters] if param.grad is not None]
    buffers = [buffer for _, hooked in optimizers for buffer in hooked.buffers]
    return MemoryUse(
        parameters=_bytes(params),
        gradients=_bytes(grads),
        masters=_bytes(masters),
        optimizer_state=_bytes(tensor for optimizer, _ in optimizers for tensor in tensors_in(optimizer.state)),
        gradient_buffers=_bytes(buffers) - _bytes(_inside(grads, buffers)),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(_tensor_bytes(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _tensor_bytes(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce()
        return tensor.indices().nbytes + tensor.values().nbytes
    return tensor.nbytes


def _inside(grads: Iterable[Tensor], buffers: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that lie in one of the buffers."""
    memory = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    dense = [grad for grad in grads if grad.layout == torch.strided]
    return [grad for grad in dense if grad.untyped_storage().data_ptr() in memory]
