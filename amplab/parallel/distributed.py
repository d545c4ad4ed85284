"""apex's DistributedDataParallel and Reducer, over ``torch.distributed``.

gradient <- sum over processes (gradient / predivide) * (predivide / world_size if gradient_average else 1)
"""

import atexit
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

# Before any process group exists: its functions take the group of that moment as a default argument. If DDP's
# constructor imports it, they keep the group and its threads past destroy_process_group, and a process may abort as
# it ends.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from amplab.parallel.ranks import is_alone

__all__ = ["DistributedDataParallel", "Reducer", "apply_flat_dist_call", "flat_dist_call"]


_WRAPPERS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with apex's arguments. Wrap the model after ``amp.initialize``.

    Args:
        module: on the device of this process.
        message_size: elements of a bucket, counted as float32; a bucket has at least 1 MiB.
        delay_allreduce: some parameters may get no gradient in a backward. (apex then sends all at its end; here those
            that have arrived are sent meanwhile.)
        shared_param, allreduce_trigger_params, allreduce_communicators, gradient_average_split_factor: not supported.
        retain_allreduce_buffers: must be False.
        allreduce_always_fp32: send 16-bit gradients as float32.
        num_allreduce_streams: ignored; torch chooses its streams.
        gradient_average: compute the mean over the processes; False: the sum divided by gradient_predivide_factor.
        gradient_predivide_factor: divide by it before the sum, and by the rest of ``world_size`` after it.
        prof: ignored; torch marks its ranges itself.
        arguments_of_torch: refused, such as ``process_group`` and ``device_ids``.

    Raises:
        ValueError: an argument that is not supported; a factor that is not positive.
        TypeError: an argument that apex does not have.

    Reference: apex ``DistributedDataParallel``. As in apex, buffers are broadcast once, here, and not at every
    forward.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        **arguments_of_torch: Any,
    ) -> None:
        del num_allreduce_streams, prof
        if arguments_of_torch:
            raise TypeError(
                f"amplab.parallel.DistributedDataParallel got {', '.join(arguments_of_torch)}: expected the arguments "
                "of apex's, which uses all ranks and the device that the module is on; for others use "
                "torch.nn.parallel.DistributedDataParallel, with which amplab works as well."
            )
        _refuse("shared_param", shared_param, "delay_allreduce=True, for parameters that get gradients twice or never")
        _refuse("allreduce_trigger_params", allreduce_trigger_params, "message_size, to choose when gradients are sent")
        _refuse("retain_allreduce_buffers", retain_allreduce_buffers or None, "the parameters' own .grad")
        _refuse("allreduce_communicators", allreduce_communicators, "torch.distributed's default group")
        _refuse("gradient_average_split_factor", gradient_average_split_factor, "gradient_predivide_factor")
        if not (math.isfinite(gradient_predivide_factor) and gradient_predivide_factor > 0):
            raise ValueError(
                f"gradient_predivide_factor={gradient_predivide_factor}: expected a finite number > 0; it divides the "
                "gradients before the sum."
            )
        super().__init__(
            module,
            bucket_cap_mb=max(1, round(message_size * 4 / 2**20)),
            find_unused_parameters=delay_allreduce,
        )
        # Only now: the constructor broadcasts buffers once, as apex's does, and warns of this argument.
        self.broadcast_buffers = False
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            after = gradient_predivide_factor / dist.get_world_size() if gradient_average else 1.0
            options = (gradient_predivide_factor, after, allreduce_always_fp32)
            self.register_comm_hook(options, _allreduce)
        _WRAPPERS.add(self)

    def disable_allreduce(self) -> None:
        """Leave the gradients of the following backwards on this rank, to accumulate: ``no_sync`` until enabled."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Average again: the next backward averages what was accumulated, too."""
        self.require_backward_grad_sync = True

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        """Accept SyncBatchNorm on the CPU, which amplab's supports; torch's own raises in its forward."""


@atexit.register
def _free_groups() -> None:
    """Free the process groups of the wrappers that still exist when the program ends, such as global variables.

    Gloo's threads would outlive Python otherwise, and may abort the process. Groups of other backends stay.
    """
    groups = []
    for wrapper in list(_WRAPPERS):
        group = wrapper.__dict__.pop("process_group", None)
        for name in ("reducer", "logger"):
            wrapper.__dict__.pop(name, None)
        groups.append(group)
    if not groups:
        return
    for group in groups:
        with suppress(ValueError, RuntimeError, AssertionError):  # the program has destroyed it
            if dist.is_initialized() and dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)
    del groups
    gc.collect()


class Reducer:
    """Average gradients over all processes at each call of `reduce`.

    Args:
        module_or_grads_list: a module, whose parameters are broadcast from the first process, or a list of tensors.

    Reference: apex ``Reducer``.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        if isinstance(module_or_grads_list, nn.Module):
            self.module: nn.Module | None = module_or_grads_list
            self.grads: list[Tensor] = []
            flat_dist_call([param.data for param in module_or_grads_list.parameters()], dist.broadcast, (0,))
        else:
            self.module = None
            self.grads = list(module_or_grads_list)

    def reduce(self) -> None:
        """Average the gradients of the module, or the tensors, in place: one all_reduce for each dtype and device.

        A parameter that has a gradient on some processes only counts as 0 on the others. Sync: one for a module, since
        the processes exchange which parameters have a gradient.
        """
        if is_alone():
            return
        grads = self.grads
        if self.module is not None:
            _add_missing_gradients(list(self.module.parameters()))
            grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        flat_dist_call(grads, dist.all_reduce)


def _add_missing_gradients(params: list[nn.Parameter]) -> None:
    """Give each parameter that has a gradient on another process one of zeros."""
    if not params:
        return
    exist = torch.tensor([param.grad is not None for param in params], dtype=torch.uint8, device=params[0].device)
    dist.all_reduce(exist, dist.ReduceOp.MAX)
    for param, exists in zip(params, exist.tolist(), strict=True):
        if exists and param.grad is None:
            param.grad = torch.zeros_like(param)


@torch.no_grad()
def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Apply a function of ``torch.distributed`` to many tensors in place, with one call for each dtype and device.

    Args:
        tensors: dense, of any shape and dtype.
        call: for example ``dist.broadcast``; after ``dist.all_reduce`` the sum is divided by the number of processes.
        extra_args: further arguments of ``call``.

    Reference: ``apex.parallel.distributed.flat_dist_call``.
    """
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for bucket in buckets.values():
        apply_flat_dist_call(bucket, call, extra_args)


@torch.no_grad()
def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Do `flat_dist_call` for tensors of one dtype and device."""
    flat = _flatten_dense_tensors(list(bucket))
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat = flat / dist.get_world_size() if flat.is_floating_point() else flat // dist.get_world_size()
    for tensor, synced in zip(bucket, _unflatten_dense_tensors(flat, list(bucket)), strict=True):
        tensor.copy_(synced)


def _allreduce(
    options: tuple[float, float, bool],
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch checks this annotation; mypy does not find the name
) -> torch.futures.Future[Tensor]:
    before, after, always_fp32 = options
    own = bucket.buffer()
    sent = own.float() if always_fp32 else own
    future = dist.all_reduce(sent.div_(before), async_op=True).get_future()
    averaged: torch.futures.Future[Tensor] = future.then(lambda done: own.copy_(done.value()[0].mul_(after)))
    return averaged


def _refuse(name: str, value: Any, instead: str) -> None:
    if value is not None:
        raise ValueError(
            f"DistributedDataParallel got {name}={value!r}: not supported; leave it out and use {instead}."
        )
