"""Tensor lists that the kernels receive once; each later call passes a number instead of a list of Python objects.

    list = ParameterList(params);       list.unscale_grads_(found_inf, inv_scale);  list.clip_grads_(norm, 1.0)
    flat = FlatGradients(params)
    table = TensorTable(flat.buffers);  table.unscale_(found_inf, inv_scale)        as `unscale_`

A `ParameterList` is for the gradients of parameters, which each backward creates again. Such a gradient has no Python
object yet, and making one costs more than unscaling a thousand elements. A `TensorTable` is for tensors that stay the
same objects, such as flat buffers, or gradients under ``zero_grad(set_to_none=False)``.

    make_tensor_table(Tensor[] tensors, int[] objects) -> int   a table on the kernels' side
    unscale_table_(int table, …) -> int                         as `unscale_`, for the tensors or their gradients
    clip_table_(int table, …) -> int                            grad <- grad * min(1, max_norm / (norm + 1e-6))

A table holds no memory address: each call reads where a tensor is now, so a resize or a new storage is seen. The
operators exist only where the kernels are built, and take tensors that are all on the CPU or on one CUDA device,
strided, without gaps and without shared memory. They refuse anything else before they write, and `unscale_` takes over.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amplab.kernels import builder
from amplab.kernels.operators import define_operator
from amplab.kernels.unscale import unscale_

__all__ = ["ParameterList", "TensorTable", "TensorTableHandle", "delete_unseen"]

_REFUSED, _CHANGED = -1, -2
_CPU = torch.empty(0)
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # the CPU's kernel deletes every table
_FOUND = "Tensor(b!)? norm=None, Tensor(c!)? norms=None, Tensor(d!)? first_bad=None"

_SCHEMAS = {
    "make_tensor_table": "(Tensor[] tensors, int[] objects) -> int",
    "delete_tensor_table": "(int table, Tensor here) -> ()",
    "unscale_table_": "(int table, Tensor(a!) found_inf, Tensor inv_scale, bool gradients, bool allow_half, *, "
    f"{_FOUND}) -> int",
    "clip_table_": "(int table, Tensor(a!) norm, float max_norm) -> int",
}
for _name, _schema in _SCHEMAS.items():
    define_operator(_name, _schema)
_OPS = torch.ops.amplab


class TensorTableHandle:
    """A table on the kernels' side, and the tensors in it.

    Args:
        tensors: kept alive as long as this object; each listed once.
        hold: let the kernels hold a reference, too. `torch.utils.swap_tensors`, and so ``module.to()`` if it swaps,
            then refuses the tensors; otherwise each call checks whether one was swapped.

    Attributes:
        device: the common device of the tensors; None if the kernels cannot take them.
    """

    def __init__(self, tensors: Sequence[Tensor], *, hold: bool) -> None:
        self._tensors, self._hold = tuple(tensors), hold
        self._table = 0
        self._delete: weakref.finalize[..., TensorTableHandle] | None = None
        self.device = _common_device(tensors)

    def takes(self, scalar: Tensor) -> bool:
        """Return whether the kernels can read or write this single float32."""
        return scalar.device == self.device and scalar.dtype is torch.float32 and scalar.numel() == 1

    def call(self, operator: Callable[[int], int]) -> int | None:
        """Call an operator with the table, again if a tensor was swapped.

        Returns:
            How many tensors it took; None if it refused, and nothing was written.
        """
        if not self.is_ready():
            return None
        count = operator(self._table)
        if count == _CHANGED and self._hand_over():
            count = operator(self._table)
        return None if count in (_REFUSED, _CHANGED) else count

    def is_ready(self) -> bool:
        """Return whether the kernels have the tensors; hand them over as soon as the kernels are built.

        Under a dispatch mode the answer is no: a table does not tell the mode which tensors an operator writes.
        """
        if torch._C._len_torch_dispatch_stack():
            return False
        builder.settle()
        return self._table != 0 or self._hand_over()

    def _hand_over(self) -> bool:
        if builder.report().status != "built":
            return False
        objects = [] if self._hold else [id(tensor) for tensor in self._tensors]  # their addresses
        try:
            with torch.no_grad():
                table: int = _OPS.make_tensor_table.default(list(self._tensors), objects)
        except NotImplementedError:  # just built, and loaded by the next call; or built without CUDA
            return False
        delete_old, self._table = self._delete, table
        self._delete = weakref.finalize(self, _delete_table, table)
        self._delete.atexit = False
        if delete_old is not None:
            delete_old()
        return True


def _delete_table(table: int) -> None:
    delete_unseen(_OPS.delete_tensor_table.default, table)


def delete_unseen(operator: Any, address: int) -> None:
    """Delete what is at an address, unseen by modes: the garbage collector may call this in anyone's block.

    A mode may be one of a compiler, whose tensors have no values.
    """
    operator.redispatch(_CPU_KEYS, address, _CPU)


class ParameterList:
    """Parameters whose gradients the kernels find by themselves.

    This works on the CPU, and on CUDA, where the kernels are built. Otherwise, and for gradients that are sparse,
    expanded or on another device, both methods return None; then call `unscale_`.

    Args:
        parameters: kept alive as long as this object; each listed once.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([2.0, 4.0])
    >>> parameters = ParameterList([weight])
    >>> parameters.unscale_grads_(torch.zeros(()), torch.tensor(0.5)) in (1, None)
    True
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._handle = TensorTableHandle(parameters, hold=False)

    @property
    def device(self) -> torch.device | None:
        """The table in which the kernels find gradients; None if they cannot take these parameters."""
        return self._handle.device

    def unscale_grads_(
        self,
        found_inf: Tensor,
        inv_scale: Tensor,
        *,
        allow_half: bool = True,
        norm: Tensor | None = None,
        norms: Tensor | None = None,
        first_bad: Tensor | None = None,
    ) -> int | None:
        """Multiply the gradients by ``inv_scale`` in place, as `unscale_` does.

        Args:
            found_inf: ``()`` or ``(1,)`` float32 on `device`; becomes 1.0 if a gradient or its product is inf or NaN.
            inv_scale: ``()`` or ``(1,)`` float32 on `device`.
            allow_half: take float16 gradients.
            norm: as for `unscale_`, over all gradients.
            norms: as for `unscale_`, one for each parameter; 0.0 if it has no gradient.
            first_bad: as for `unscale_`; an index of a parameter.

        Returns:
            How many gradients there were; None if the kernels cannot take them, and nothing was written.

        Sync: none.
        """
        handle = self._handle
        if not (handle.takes(found_inf) and handle.takes(inv_scale)):
            return None
        unscale = _OPS.unscale_table_.default
        return handle.call(
            lambda table: unscale(
                table, found_inf, inv_scale, True, allow_half, norm=norm, norms=norms, first_bad=first_bad
            )
        )

    def clip_grads_(self, norm: Tensor, max_norm: float) -> int | None:
        """Scale float32 gradients down until the 2-norm of all together is at most ``max_norm``.

        Args:
            norm: ``()`` float32 on `device`; receives the norm before.
            max_norm: > 0.

        Returns:
            As `unscale_grads_`.

        Raises:
            ValueError: a ``max_norm`` that is not > 0.

        Sync: none.

        Reference: ``torch.nn.utils.clip_grad_norm_``.
        """
        if not max_norm > 0.0:
            raise ValueError(
                f"max_norm={max_norm}: expected a number > 0, such as 1.0; omit the call to leave gradients unclipped."
            )
        if not self._handle.takes(norm):
            return None
        return self._handle.call(lambda table: _OPS.clip_table_.default(table, norm, float(max_norm)))


class TensorTable:
    """A list of tensors that stay the same objects: `unscale_` with less work per call.

    Args:
        tensors: as for `unscale_`. This object holds them, and so do the kernels: `torch.utils.swap_tensors` refuses
            them.

    Raises:
        TypeError: a tensor instead of a list, or an item that is not a tensor.

    >>> import torch
    >>> grads = [torch.tensor([2.0, 4.0]), torch.tensor([8.0])]
    >>> table = TensorTable(grads)
    >>> table.unscale_(torch.zeros(1), torch.tensor([0.5]))
    >>> grads[0].tolist(), len(table)
    ([1.0, 2.0], 2)
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if isinstance(tensors, Tensor):
            raise TypeError("TensorTable got a Tensor: expected a list of tensors; pass [tensor].")
        self._tensors = list(tensors)
        for index, tensor in enumerate(self._tensors):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensors[{index}] is a {type(tensor).__name__}: expected a tensor; leave it out.")
        self._handle = TensorTableHandle(self._tensors, hold=True)

    def __len__(self) -> int:
        return len(self._tensors)

    def unscale_(
        self,
        found_inf: Tensor,
        inv_scale: Tensor,
        *,
        norm: Tensor | None = None,
        norms: Tensor | None = None,
        first_bad: Tensor | None = None,
    ) -> None:
        """Do what `unscale_` does with the list, with the same bits; with the kernels if they are built.

        Args and Raises: as for `unscale_`.

        Sync: none.
        """
        handle, unscale = self._handle, _OPS.unscale_table_.default
        count = None
        if handle.takes(found_inf) and handle.takes(inv_scale):
            count = handle.call(
                lambda table: unscale(
                    table, found_inf, inv_scale, False, True, norm=norm, norms=norms, first_bad=first_bad
                )
            )
        if count is None:
            unscale_(self._tensors, found_inf, inv_scale, norm=norm, norms=norms, first_bad=first_bad)


def _common_device(tensors: Sequence[Tensor]) -> torch.device | None:
    """Return the one device of all tensors if kernels are built for it; None for subclasses, which may override ops."""
    devices = {tensor.device for tensor in tensors}
    device = devices.pop() if len(devices) == 1 else torch.device("meta")
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
    return device if plain and device.type in ("cpu", "cuda") else None
