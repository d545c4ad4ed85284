"""A list of tensors that the kernels were given once: a step passes a number, and no objects are taken apart.

    remember_tensors(Tensor[] tensors, int[] objects) -> int  a table on the kernels' side
    unscale_remembered_(int table, …) -> int                  as `unscale_`, of the tensors or of their gradients
    clip_remembered_(int table, …) -> int                     grad <- grad * min(1, max_norm / (norm + 1e-6))

The table holds no address of memory. Each call reads where a tensor lies now, so one that was resized, or given other
storage, is met where it is. Where the kernels are built, for tensors that all are on the CPU or on one CUDA device,
strided, without gaps and share no memory: whatever else there is, is refused before anything is written, for `unscale_`
to do or to name.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amplab.kernels import build

__all__ = ["Remembered"]

_REFUSED, _CHANGED = -1, -2
_HERE = torch.empty(0)  # chooses the CPU's kernel, which forgets every table
_FOUND = "Tensor(b!)? norm=None, Tensor(c!)? norms=None, Tensor(d!)? first_bad=None"

_SCHEMAS = {
    "remember_tensors": "(Tensor[] tensors, int[] objects) -> int",
    "forget_tensors": "(int table, Tensor here) -> ()",
    "unscale_remembered_": "(int table, Tensor(a!) found_inf, Tensor inv_scale, bool gradients, bool allow_half, *, "
    f"{_FOUND}) -> int",
    "clip_remembered_": "(int table, Tensor(a!) norm, float max_norm) -> int",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"amplab::{_name}", _schema)
_OPS = torch.ops.amplab


class Remembered:
    """Tensors known to the kernels.

    Args:
        tensors: kept alive as long as this object is; each listed once.
        hold: let the kernels hold them, too. `torch.utils.swap_tensors`, and so ``module.to()`` where it swaps, then
            refuses them; otherwise each call looks whether it has exchanged one.
    """

    def __init__(self, tensors: Sequence[Tensor], *, hold: bool) -> None:
        self._tensors, self._hold = tuple(tensors), hold
        self._table = 0
        self._forget: weakref.finalize | None = None
        self._device = _common_device(tensors)

    @property
    def device(self) -> torch.device | None:
        """Where the kernels work on the tensors; None where they do not."""
        return self._device

    def unscale_(
        self,
        found_inf: Tensor,
        inv_scale: Tensor,
        *,
        gradients: bool,
        allow_half: bool = True,
        **receivers: Tensor | None,
    ) -> int | None:
        """Unscale the tensors, or their gradients.

        Args:
            found_inf: as `unscale_`.
            inv_scale: as `unscale_`.
            gradients: work on what is in ``.grad`` now; its place is that of its tensor.
            allow_half: take float16.
            receivers: norm, norms and first_bad, as `unscale_`.

        Returns:
            How many there were; None where this is not for the kernel, and nothing was written.

        Sync: none.
        """
        if not (self._takes(found_inf) and self._takes(inv_scale)):
            return None
        unscale = _OPS.unscale_remembered_.default
        return self._call(lambda table: unscale(table, found_inf, inv_scale, gradients, allow_half, **receivers))

    def clip_grads_(self, norm: Tensor, max_norm: float) -> int | None:
        """Scale float32 gradients down until their 2-norm, all together, is at most ``max_norm``.

        Args:
            norm: ``()`` float32; receives the norm before.
            max_norm: > 0.

        Returns:
            As `unscale_`.

        Sync: none.
        """
        if not self._takes(norm):
            return None
        return self._call(lambda table: _OPS.clip_remembered_.default(table, norm, float(max_norm)))

    def _takes(self, scalar: Tensor) -> bool:
        """Whether the kernels read or write a single float32 there."""
        return scalar.device == self._device and scalar.dtype is torch.float32 and scalar.numel() == 1

    def _call(self, operator: Callable[[int], int]) -> int | None:
        """Call with the table, and once more where it was out of date."""
        if not self._is_known():
            return None
        count = operator(self._table)
        if count == _CHANGED and self._hand_over():
            count = operator(self._table)
        return None if count in (_REFUSED, _CHANGED) else count

    def _is_known(self) -> bool:
        """Hand the tensors over, once the kernels are built."""
        build.settle()
        return self._table != 0 or self._hand_over()

    def _hand_over(self) -> bool:
        if build.report().status != "built":
            return False
        objects = [] if self._hold else [id(tensor) for tensor in self._tensors]  # where they are
        try:
            with torch.no_grad():
                table = _OPS.remember_tensors.default(list(self._tensors), objects)
        except NotImplementedError:  # built this moment, and to be loaded by the next call; or built without CUDA
            return False
        if self._forget is not None:
            self._forget()
        self._table = table
        self._forget = weakref.finalize(self, _OPS.forget_tensors.default, table, _HERE)
        self._forget.atexit = False
        return True


def _common_device(tensors: Sequence[Tensor]) -> torch.device | None:
    """The one device of all tensors, where kernels are built for it; None for subclasses, which may be anything."""
    devices = {tensor.device for tensor in tensors}
    device = devices.pop() if len(devices) == 1 else torch.device("meta")
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
    return device if plain and device.type in ("cpu", "cuda") else None
