"""The models and optimizers of a session: adding its hooks, removing them, and counting bytes. Held weakly.

What the hooks do is in `forward_hooks`, `master_hooks` and `hooked_optimizer`; weights are cast in `model_weights`.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.amp.apex.before_initialize import BeforeInitialize
from amplab.amp.apex.forward_hooks import ForwardHooks
from amplab.amp.apex.hooked_optimizer import HookedOptimizer
from amplab.amp.apex.initialize_arguments import warn_of_kept_halves, warn_of_vanishing_eps
from amplab.amp.apex.level_policy import ruled_dtypes
from amplab.amp.apex.master_hooks import MasterHooks
from amplab.amp.apex.model_weights import cast_model, set_values
from amplab.amp.apex.opt_levels import OptProperties
from amplab.amp.backward.optimizer_params import cast_state, params_of
from amplab.amp.backward.records import MemoryUse
from amplab.amp.backward.seen_wrapper import SeenWrapper
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.parallel.combined_ddp import CombinedDDP
from amplab.parallel.shards import is_fully_sharded
from amplab.policies import CastingEngine, PrecisionPolicy, accept_half_input, register_module_rules
from amplab.policies.nested_tensors import tensors_in
from amplab.scalers import MasterWeights, Unscaler, local_shard

__all__ = ["HookedModel", "Hooks", "memory_use"]


class Hooks:
    """The models and optimizers that one session has changed."""

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[nn.Module, HookedModel] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, HookedOptimizer] = weakref.WeakKeyDictionary()
        self._begun: BeforeInitialize | None = None  # while `hook` runs

    def hook(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        properties: OptProperties,
        policies: Sequence[PrecisionPolicy],
        *,
        cast_model_outputs: torch.dtype | None,
        engine: CastingEngine | None,
        announce: bool,
        unscaler: Callable[[], Unscaler] = Unscaler,
        ddp: CombinedDDP | None = None,
    ) -> None:
        """Cast the models, make the masters and add the hooks that ``properties`` and ``policies`` need.

        If it fails, also by an interrupt, the models and optimizers are as before.
        """
        cast_type = properties.cast_model_type
        dtype = cast_type if isinstance(cast_type, torch.dtype) else None
        has_rules = any(policy.op_rules or policy.module_rules for policy in policies)
        forward = ForwardHooks(
            input_dtype=dtype,
            output_dtype=cast_model_outputs or (None if dtype is None else torch.float32),
            engine=engine,
            on_cpu_only=not properties.patch_torch_functions and not has_rules,
        )
        self._undo_begun()
        try:
            self._begun = begun = BeforeInitialize(models, optimizers)
            if dtype is not None:
                _cast_models(models, policies, dtype, keep_batchnorm_fp32=bool(properties.keep_batchnorm_fp32))
            uncast = begun.changed()
            for optimizer in optimizers:
                self._optimizers[optimizer] = HookedOptimizer(
                    optimizer,
                    uncast,
                    master_weights=bool(properties.master_weights),
                    casts_in_step=not properties.patch_torch_functions,
                    announce=announce,
                    unscaler=unscaler,
                    reducer=None if ddp is None else ddp.reducer(),
                )
                warn_of_vanishing_eps(optimizer)
                warn_of_kept_halves(optimizer, self._optimizers[optimizer].halves)
            for index, (model, policy) in enumerate(zip(models, policies, strict=True)):
                self._models[model] = HookedModel(
                    model,
                    forward,
                    policy,
                    weights_dtype=dtype,
                    masters=[self._optimizers[optimizer].masters for optimizer in optimizers],
                    casts_around_functions=bool(properties.patch_torch_functions),
                    prefix=f"models[{index}]." if len(models) > 1 else "",
                    ddp=ddp,
                )
            self._begun = None
        except BaseException:
            self._undo_begun()
            raise

    def _undo_begun(self) -> None:
        """Undo a call of `hook` that has not ended, and of which another interrupt has stopped the undoing."""
        try:
            self._restore_begun()
        except BaseException:  # another interrupt; finish anyway
            self._restore_begun()
            raise

    def _restore_begun(self) -> None:
        if self._begun is None:
            return
        self._begun.restore()
        for optimizer in self._begun.optimizers:
            self._optimizers.pop(optimizer, None)
        for model in self._begun.models:
            self._models.pop(model, None)
        self._begun = None

    @property
    def is_empty(self) -> bool:
        """Whether no model and no optimizer has hooks of this session."""
        return not self._models and not self._optimizers

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` was passed to `initialize`."""
        return optimizer in self._optimizers

    def hooked(self, optimizer: Any) -> HookedOptimizer:
        """Return the `HookedOptimizer` of ``optimizer``.

        Raises:
            RuntimeError: it was not passed to `initialize`.
        """
        hooked = self._optimizers.get(optimizer) if isinstance(optimizer, Optimizer) else None
        if hooked is None:
            raise RuntimeError(
                f"This {type(optimizer).__name__} was not part of amp.initialize: expected one of the "
                f"{len(self._optimizers)} optimizer(s) that were; pass it to amp.initialize together with its model."
            )
        return hooked

    def await_average(self, hooked: Sequence[HookedOptimizer]) -> bool:
        """Return whether gradients of these optimizers are not averaged yet: their model's forward was in no_sync."""
        waiting = [model for model, held in self._models.items() if not held.wrapper.averages]
        if not waiting:
            return False
        stepped = {param for each in hooked for param in each.model_params}
        return any(param in stepped for model in waiting for param in model.parameters())

    def refuse_sharded_since(self) -> None:
        """Refuse models that were sharded after `initialize`: their optimizers have parameters of no model.

        Raises:
            RuntimeError: such a model. Sync: none.
        """
        for model, held in self._models.items():
            if not held.was_sharded and is_fully_sharded(model):
                raise RuntimeError(
                    f"{type(model).__name__} was sharded after amp.initialize, which replaced the parameters that the "
                    "optimizer has: call fully_shard first, then create the optimizer, then call amp.initialize."
                )

    def first_nonfinite(self, hooked: Sequence[HookedOptimizer]) -> str | None:
        """Return the name of the parameter whose non-finite gradient the backward reached first. Sync: many."""
        for each in reversed(hooked):
            param = each.first_nonfinite()
            if param is not None:
                names = (held.name_of(model, param) for model, held in self._models.items())
                return next((name for name in names if name), "a parameter of no initialized model")
        return None

    def memory(self) -> MemoryUse:
        """Count the bytes of the models and optimizers that still exist. Sync: none."""
        return memory_use(self._models, self._optimizers.items())

    def release_all(self) -> None:
        """Remove all hooks; weights and optimizer state become float32."""
        self._undo_begun()
        self._release(list(self._models), list(self._optimizers))

    def release_connected(self, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
        """Release ``models`` and ``optimizers``, and all others that share parameters with them."""
        self._undo_begun()
        held: list[nn.Module | Optimizer] = [*self._models, *self._optimizers]
        named = [each for each in (*models, *optimizers) if isinstance(each, (nn.Module, Optimizer))]
        released: list[Any] = [each for each in named if each in held]
        touched = self._params_of(named)
        while linked := [each for each in held if each not in released and touched & self._params_of([each])]:
            released += linked
            touched |= self._params_of(linked)
        self._release(
            [each for each in released if isinstance(each, nn.Module)],
            [each for each in released if isinstance(each, Optimizer)],
        )

    def _release(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Release them and forget them last, so that the next call finishes what an interrupt has left."""
        for optimizer in optimizers:
            self._optimizers[optimizer].release()
        restored: set[Tensor] = set()
        for model in models:
            restored |= self._models[model].release(model)
        for optimizer in optimizers:
            for param in params_of(optimizer):
                if param in restored:
                    cast_state(optimizer, param)
        for optimizer in optimizers:
            del self._optimizers[optimizer]
        for model in models:
            del self._models[model]

    def _params_of(self, owners: Sequence[nn.Module | Optimizer]) -> set[Tensor]:
        params: set[Tensor] = set()
        for owner in owners:
            if isinstance(owner, nn.Module):
                params.update(owner.parameters())
            else:
                hooked = self._optimizers.get(owner)
                params.update(params_of(owner) if hooked is None else hooked.model_params)
        return params


class HookedModel:
    """The hooks of a session on one model. It does not hold the model.

    Args:
        model: a model whose weights have been cast.
        forward: casts its inputs and outputs.
        policy: the policy with its module rules.
        weights_dtype: dtype that its weights were cast to; None if they were not.
        masters: the masters of every optimizer of the same call.
        casts_around_functions: whether ops inside its forward are cast (O1), so that half inputs meet float32 weights.
        prefix: of its parameters' names, to distinguish several models.
        ddp: averages gradients over ranks; None for one process, and under DistributedDataParallel.

    Attributes:
        wrapper: whether a DistributedDataParallel around the model averages its gradients.
        was_sharded: whether ``fully_shard`` was called on it before the hooks were added.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: ForwardHooks,
        policy: PrecisionPolicy,
        *,
        weights_dtype: torch.dtype | None,
        masters: Sequence[MasterWeights],
        casts_around_functions: bool,
        prefix: str,
        ddp: CombinedDDP | None = None,
    ) -> None:
        self._half = weights_dtype in LOW_PRECISION_DTYPES
        self._masters = tuple(masters)
        self._prefix = prefix
        self._cast_back: set[Tensor] = set()
        self.was_sharded = is_fully_sharded(model)
        self._forward = forward
        self.wrapper = SeenWrapper()
        self._handles: list[Any] = [*self.wrapper.register(model), *forward.register(model)]
        self._handles += register_module_rules(model, policy, weights_dtype=weights_dtype if self._half else None)
        if self._half:
            self._handles += MasterHooks(masters).register(model)
        if casts_around_functions or policy.module_rules or policy.op_rules:
            self._handles += accept_half_input(model)
        if ddp is not None:
            self._handles += ddp.register(model)

    def name_of(self, model: nn.Module, param: Tensor) -> str | None:
        """Return the name of ``param`` in ``model``; None if it is not one of its parameters."""
        names = (name for name, own in model.named_parameters() if own is param)
        name = next(names, None)
        return None if name is None else self._prefix + name

    def release(self, model: nn.Module) -> set[Tensor]:
        """Remove the hooks; half weights become float32, with the values of their masters if they have any.

        A second call finishes what an interrupt has left.

        Returns:
            The parameters that were cast back, also those of earlier calls.
        """
        self._forward.leave()
        for handle in self._handles:
            handle.remove()
        if not self._half:
            return set()
        restored = {pair.model: pair.master for masters in self._masters for pair in masters.pairs}
        self._cast_back.update(param for param in model.parameters() if param.dtype != torch.float32)
        for param in model.parameters():
            if param.dtype in LOW_PRECISION_DTYPES and param in restored:  # its optimizer no longer exists
                set_values(param, restored[param].data)
        cast_model(model, torch.float32)
        return self._cast_back


def _cast_models(
    models: Sequence[nn.Module],
    policies: Sequence[PrecisionPolicy],
    dtype: torch.dtype,
    *,
    keep_batchnorm_fp32: bool,
) -> None:
    for model, policy in zip(models, policies, strict=True):
        own_dtypes = ruled_dtypes(model, policy) if dtype in LOW_PRECISION_DTYPES else {}
        cast_model(model, dtype, keep_batchnorm_fp32=keep_batchnorm_fp32, own_dtypes=own_dtypes)


def memory_use(models: Iterable[nn.Module], optimizers: Iterable[tuple[Optimizer, HookedOptimizer]]) -> MemoryUse:
    """Return the bytes of everything that belongs to ``models`` and ``optimizers``; shared tensors count once.

    Of sharded tensors only the shards of this rank count.

    Sync: none.
    """
    optimizers = list(optimizers)
    owned = [param for optimizer, _ in optimizers for param in params_of(optimizer)]
    masters = [pair.master for _, hooked in optimizers for pair in hooked.masters.pairs]
    params: list[Tensor] = [param for model in models for param in model.parameters()]
    is_master = {id(master) for master in masters}
    params += [param for param in owned if id(param) not in is_master]
    grads = [param.grad for param in [*params, *masters] if param.grad is not None]
    buffers = [buffer for _, hooked in optimizers for buffer in (*hooked.buffers, *hooked.sent_buffers)]
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
    return local_shard(tensor).nbytes


def _inside(grads: Iterable[Tensor], buffers: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients whose memory is in one of the buffers."""
    memory = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    dense = [grad for grad in grads if grad.layout == torch.strided]
    return [grad for grad in dense if grad.untyped_storage().data_ptr() in memory]
