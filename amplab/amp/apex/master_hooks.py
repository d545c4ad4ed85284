"""Hooks of a half model for its master weights: state_dict holds their float32 values, forward uses all their steps.

    model.state_dict()       the masters' values; any other half tensor as float32
    model.load_state_dict()  float32 values go to the masters unrounded, rounded to the model
    model(inputs)            first rounds the masters to the model if an interrupt has left that out of the last step

A checkpoint of model, optimizer and amp state therefore resumes bitwise. Every submodule has the hooks, since
old scripts save ``model.encoder.state_dict()`` too.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies.casting.hook_scopes import no_graph_of_its_own
from amplab.scalers import MasterWeights

__all__ = ["MasterHooks"]


class MasterHooks:
    """The hooks of one model.

    Args:
        masters: the master weights of each optimizer that steps this model's parameters; may be empty.
    """

    def __init__(self, masters: Sequence[MasterWeights] = ()) -> None:
        self._masters = tuple(masters)

    def register(self, model: nn.Module) -> list[RemovableHandle]:
        """Register the hooks on ``model``, those of state_dict also on each of its submodules."""
        handles: list[RemovableHandle] = [model.register_forward_pre_hook(self.before_forward, prepend=True)]
        for module in model.modules():
            handles += [
                # A partial, since torch marks the hook with an attribute and bound methods take none.
                module.register_state_dict_post_hook(functools.partial(self.after_save)),
                module.register_load_state_dict_pre_hook(self.before_load),
                module.register_load_state_dict_post_hook(self.after_load),
            ]
        return handles

    @no_graph_of_its_own
    def before_forward(self, _module: nn.Module, _args: object) -> None:
        """Finish a step that was interrupted. Sync: none."""
        for masters in self._masters:
            masters.catch_up()

    def after_save(self, module: nn.Module, saved: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """Replace this module's own half tensors in ``saved`` by their float32 values."""
        for masters in self._masters:
            masters.follow_edits(module.parameters(recurse=False))
        for name, tensor in _own_tensors(module):
            if prefix + name in saved and tensor.dtype in LOW_PRECISION_DTYPES:
                values = self._master_of(tensor)
                if not any(masters.are_ahead for masters in self._masters):
                    values = _with_values_of(tensor, values)
                # Only keep_vars=True returns a Parameter.
                wanted = values if isinstance(saved[prefix + name], Parameter) else values.detach()
                saved[prefix + name] = wanted.float()

    @torch.no_grad()
    def before_load(self, module: nn.Module, saved: dict[str, Any], prefix: str, metadata: Any, *_rest: Any) -> None:
        """Copy loaded values to the masters before the model rounds them.

        Raises:
            RuntimeError: ``assign=True``, which would replace the parameters that the optimizer steps.
        """
        if metadata.get("assign_to_params_buffers", False):
            raise RuntimeError(
                "load_state_dict(assign=True) on a model that amp.initialize has cast: the optimizer would "
                "continue to step the old parameters; load without assign, or load before amp.initialize."
            )
        for name, master in self._own_masters(module):
            values = saved.get(prefix + name)
            if isinstance(values, Tensor) and values.shape == master.shape:
                master.copy_(values)

    @torch.no_grad()
    def after_load(self, module: nn.Module, _incompatible_keys: Any) -> None:
        """Copy the model's values to every master that does not round to them, for example after other hooks."""
        for name, master in self._own_masters(module):
            param = module.get_parameter(name)
            if not torch.equal(master.to(param.dtype), param):
                master.copy_(param)
        for masters in self._masters:
            masters.watch_model(module.parameters(recurse=False))

    def _own_masters(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            master = self._master_of(param)
            if master is not param:
                yield name, master

    def _master_of(self, tensor: Tensor) -> Tensor:
        owners = (masters.of(tensor) for masters in self._masters)
        return next((master for master in owners if master is not tensor), tensor)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A copied or unpickled model has other parameters: it saves its own values, as float32.
        return MasterHooks, ()


@torch.no_grad()
def _with_values_of(tensor: Tensor, master: Tensor) -> Tensor:
    """Return the master, with the elements of the model where those are others, as of an average that is swapped in."""
    if tensor.shape != master.shape or tensor is master:
        return master
    is_other = master.to(tensor.device, tensor.dtype) != tensor
    if not is_other.any():
        return master
    return torch.where(is_other, tensor.to(master.dtype), master.to(tensor.device))


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
