"""The places that a flat tensor has for the gradients of parameters: found, unscaled and brought in by one kernel.

    places = GradientPlaces(params, flat, offsets, lent)
    places.unscale_(found_inf, inv_scale)      part <- round(gradient * inv_scale); the part becomes the gradient

A gradient that is in its place is unscaled there, all of them at once as one tensor; a new one is unscaled while it is
copied into its part. The operators exist only where the kernels are built, for the CPU. They refuse gradients of
another dtype, shape, device or memory order before they write, and the caller takes over.
"""

import weakref
from collections.abc import Callable, Sequence
from enum import Flag

import torch
from torch import Tensor

from amplab.kernels.operators import define_operator
from amplab.kernels.tensor_table import TensorTableHandle, delete_unseen

__all__ = ["GradientPlaces", "Whereabouts"]

_CPU = torch.empty(0)  # selects the CPU's kernel

_SCHEMAS = {
    "make_gradient_places": "(int params, int lent, int[] offsets, Tensor here) -> int",
    "delete_gradient_places": "(int places, Tensor here) -> ()",
    "find_gradients": "(int places, Tensor flat) -> int",
    "bring_in_gradients_": "(int places, Tensor(a!) flat, Tensor(b!) found_inf, Tensor inv_scale, bool moves, "
    "bool lends) -> int",
    "lend_gradients": "(int places, Tensor flat) -> int",
    "clip_gradients_": "(int places, Tensor(a!) flat, Tensor(b!) norm, float max_norm) -> int",
}
for _name, _schema in _SCHEMAS.items():
    define_operator(_name, _schema)
_OPS = torch.ops.amplab


class Whereabouts(Flag):
    """Where the gradients are: some in their places, some elsewhere, some missing."""

    KEPT = 1
    NEW = 2
    MISSING = 4


class GradientPlaces:
    """The parts of a flat tensor for the gradients of parameters.

    Args:
        params: each listed once; kept alive.
        flat: ``(elements,)``, contiguous; its storage stays the same.
        offsets: where each part begins, in elements.
        lent: the parts, in the shapes and memory formats of the parameters; they become the gradients.
    """

    def __init__(self, params: Sequence[Tensor], flat: Tensor, offsets: Sequence[int], lent: Sequence[Tensor]) -> None:
        self._listed, self._flat, self._offsets = params, flat, list(offsets)
        self._params = TensorTableHandle(params, hold=False)
        self._lent = TensorTableHandle(lent, hold=True)
        self._delete: weakref.finalize[..., GradientPlaces] | None = None
        self._tables = (0, 0)
        self._places = 0

    def lending(self, lent: Sequence[Tensor]) -> "GradientPlaces":
        """Return the same places with other tensors for the gradients. Sync: none."""
        return GradientPlaces(self._listed, self._flat, self._offsets, lent)

    def find(self) -> Whereabouts | None:
        """Return where the gradients are; None if the kernels cannot take them. Sync: none."""
        seen = self._call(lambda places: _OPS.find_gradients.default(places, self._flat))
        return None if seen is None else Whereabouts(seen)

    def unscale_(
        self, found_inf: Tensor, inv_scale: Tensor, *, moves: bool = True, lends: bool = True
    ) -> Whereabouts | None:
        """Multiply the gradients by ``inv_scale``, rounded once, into their places, which become the gradients.

        Args:
            found_inf: ``()`` or ``(1,)`` float32; becomes 1.0 if a gradient or its product is inf or NaN.
            inv_scale: ``()`` or ``(1,)`` float32.
            moves: bring new gradients in; False: if there is a new one, write nothing.
            lends: make the parts the gradients; False: every gradient becomes None, until `lend`.

        Returns:
            Where the gradients were; None if the kernels cannot take them, and nothing was written.

        Sync: none.
        """
        if not (self._params.takes(found_inf) and self._params.takes(inv_scale)):
            return None
        seen = self._call(
            lambda places: _OPS.bring_in_gradients_.default(places, self._flat, found_inf, inv_scale, moves, lends)
        )
        return None if seen is None else Whereabouts(seen)

    def lend(self) -> bool:
        """Make every part the gradient of its parameter; return whether it was done. Sync: none."""
        return self._call(lambda places: _OPS.lend_gradients.default(places, self._flat)) is not None

    def clip_(self, norm: Tensor, max_norm: float) -> bool:
        """Scale float32 gradients down, as one tensor, until their 2-norm is at most ``max_norm``.

        Args:
            norm: ``()`` float32; receives the norm before.
            max_norm: > 0.

        Returns:
            Whether it was done; False, with no gradient written, if one is not in its place, if there are other dtypes,
            if the norm is NaN, or without kernels.

        Sync: none.

        Reference: ``torch.nn.utils.clip_grad_norm_``.
        """
        if not self._params.takes(norm):
            return False
        return self._call(lambda places: _OPS.clip_gradients_.default(places, self._flat, norm, max_norm)) is not None

    def _call(self, operator: Callable[[int], int]) -> int | None:
        if self._flat.device.type != "cpu":
            return None
        return self._params.call(lambda params: operator(self._of(params)) if self._lent.is_ready() else -1)

    def _of(self, params: int) -> int:
        """Return the places of the present tables: a table is made again when one of its tensors was swapped."""
        tables = (params, self._lent.call(lambda lent: lent) or 0)
        if tables != self._tables:
            if self._delete is not None:
                self._delete()
            self._tables, self._places = tables, _OPS.make_gradient_places.default(*tables, self._offsets, _CPU)
            self._delete = weakref.finalize(self, _delete, self._places)
            self._delete.atexit = False
        return self._places


def _delete(places: int) -> None:
    delete_unseen(_OPS.delete_gradient_places.default, places)
