"""Data parallel training over combined gradients, in place of DistributedDataParallel.

CombinedDDP(models)       the same model on every rank; parameters and buffers <- those of rank 0
.register(model)          before each forward in training: buffers <- those of rank 0
.reducer()                averages the gradients of one optimizer (``combined_reducer.py``)
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from amplab.parallel.agreement import explained_absence, first_rank, refuse_disagreement, refuse_other_call
from amplab.parallel.combined_reducer import CombinedReducer
from amplab.parallel.distributed import flat_dist_call
from amplab.parallel.ranks import is_alone

__all__ = ["CombinedDDP"]


class CombinedDDP:
    """The models of one ``amp.initialize(..., combine_ddp=True)``.

    Args:
        models: the same on all ranks except for values of parameters and buffers, which become those of the first rank.
        replica_count: the number of buckets to cut each flat buffer into; see `bucket_ends`.
        settings: what else must be equal on all ranks: values as text, by name.
        group: the ranks; None for all.

    The ranks compare the models and the settings here, and in each `scale_loss` what may have changed since. The page
    of this folder, ``README.md``, lists what they compare and what they do not notice.

    Raises:
        RuntimeError: no process group, or models or settings that differ between ranks.

    Sync: waits for every rank.

    A copy of a model, by deepcopy or pickle, is one of a single process: no optimizer of `initialize` trains it.

    Reference: ``combine_ddp`` of Ascend's apex, which broadcasts parameters only.
    """

    _is_original = False

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        replica_count: int = 4,
        settings: Mapping[str, str] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "combine_ddp=True without a process group: call torch.distributed.init_process_group before "
                "amp.initialize, and start the script with torchrun."
            )
        self._is_original = True
        self._replica_count, self._group = replica_count, group
        self._reducers: weakref.WeakSet[CombinedReducer] = weakref.WeakSet()
        self._numbers = weakref.WeakKeyDictionary({model: index for index, model in enumerate(models)})
        self._are_several = len(models) > 1
        prefixes = [f"models[{index}]." if len(models) > 1 else "" for index in range(len(models))]
        named = [
            (prefix + name, tensor)
            for prefix, model in zip(prefixes, models, strict=True)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        ]
        common = {**(settings or {}), "ddp_replica_count": str(replica_count)}
        refuse_disagreement("models", named, group, settings=common)
        self._names = WeakTensorKeyDictionary({tensor: name for name, tensor in named})
        self._broadcast([tensor for _, tensor in named])

    def __getstate__(self) -> dict[str, Any]:
        """Return what the hooks of a copied model need: nothing."""
        return {}

    def reducer(self) -> CombinedReducer:
        """Return a reducer for the gradients of one optimizer."""
        reducer = CombinedReducer(
            self._replica_count,
            group=self._group,
            name=self._names.get,
            awaiting=lambda: [each for each in self._reducers if each.is_awaiting],
        )
        self._reducers.add(reducer)
        return reducer

    def register(self, model: nn.Module) -> list[Any]:
        """Broadcast the buffers of ``model`` before each forward in training, as DistributedDataParallel does.

        With several models ranks first compare which one runs, since gloo aborts a process that receives buffers of
        another size.

        Returns:
            The handles of the hooks.
        """
        return [model.register_forward_pre_hook(self._before_forward)]

    def _before_forward(self, model: nn.Module, _inputs: Any) -> None:
        if not (self._is_original and model.training and torch.is_grad_enabled()):
            return
        if nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None:
            raise RuntimeError(
                "DistributedDataParallel around a model of amp.initialize(combine_ddp=True): both average the "
                "gradients; call the model itself, or leave combine_ddp out."
            )
        buffers = list(model.buffers())
        if is_alone() or not buffers:
            return
        if self._are_several:
            refuse_other_call(f"a forward of models[{self._numbers.get(model)}]", self._group, buffers[0].device)
        with explained_absence("send the buffers of rank 0"):
            self._broadcast(buffers)

    def _broadcast(self, tensors: list[Tensor]) -> None:
        # By .data, since the backward of an earlier forward may hold a buffer; in training it does not read its values.
        flat_dist_call([tensor.data for tensor in tensors], dist.broadcast, (first_rank(self._group), self._group))
