"""Unscale and clip the gradients of parameters that a kernel was given once, without a Python object for each.

    remember_parameters(Tensor[] parameters) -> int           a list on the kernel's side
    unscale_remembered_(int list, found_inf, inv_scale)       grad <- round(grad * inv_scale), as `unscale_`
    clip_remembered_(int list, norm, max_norm)                grad <- grad * min(1, max_norm / (norm + 1e-6))

Where the kernels are built, and all parameters are on the CPU or all on one CUDA device: a gradient fresh from backward
has no Python object, and making one costs more than unscaling a thousand elements. Everywhere else, and for gradients
that are sparse, expanded or elsewhere, both methods say so and `unscale_` is what to call.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from amplab.kernels import build

__all__ = ["ParameterList"]

_REFUSED = -1
_HERE = torch.empty(0)  # chooses the CPU's kernel, which forgets every list

_SCHEMAS = {
    "remember_parameters": "(Tensor[] parameters) -> int",
    "forget_parameters": "(int list, Tensor here) -> ()",
    "unscale_remembered_": "(int list, Tensor(a!) found_inf, Tensor inv_scale, bool allow_half) -> int",
    "clip_remembered_": "(int list, Tensor(a!) norm, float max_norm) -> int",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"amplab::{_name}", _schema)
_OPS = torch.ops.amplab


class ParameterList:
    """A list of parameters, known to the kernels.

    Args:
        parameters: kept alive as long as this object is; each listed once.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([2.0, 4.0])
    >>> parameters = ParameterList([weight])
    >>> parameters.unscale_grads_(torch.zeros(()), torch.tensor(0.5)) in (1, None)
    True
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._list = 0
        self._device = _common_device(parameters)
        self._tensors: list[int] = []

    @property
    def device(self) -> torch.device | None:
        """Where the kernels find gradients; None where they do not."""
        return self._device

    def unscale_grads_(self, found_inf: Tensor, inv_scale: Tensor, *, allow_half: bool = True) -> int | None:
        """Multiply the gradients by ``inv_scale`` in place, as `unscale_` does.

        Args:
            found_inf: ``()`` or ``(1,)`` float32 on `device`; 1.0 where a gradient or its product is inf or NaN.
            inv_scale: ``()`` or ``(1,)`` float32 on `device`.
            allow_half: take float16 gradients.

        Returns:
            How many gradients there were; None where this is not for the kernel, and nothing was written.

        Sync: none.
        """
        if not (self._takes(found_inf) and self._takes(inv_scale) and self._is_known()):
            return None
        return _counted(_OPS.unscale_remembered_.default(self._list, found_inf, inv_scale, allow_half))

    def clip_grads_(self, norm: Tensor, max_norm: float) -> int | None:
        """Scale float32 gradients down until their 2-norm, all together, is at most ``max_norm``.

        Args:
            norm: ``()`` float32 on `device`; receives the norm before.
            max_norm: > 0.

        Returns:
            As `unscale_grads_`.

        Sync: none.

        Reference: ``torch.nn.utils.clip_grad_norm_``.
        """
        if not (self._takes(norm) and self._is_known()):
            return None
        return _counted(_OPS.clip_remembered_.default(self._list, norm, float(max_norm)))

    def _takes(self, scalar: Tensor) -> bool:
        return scalar.device == self._device and scalar.dtype is torch.float32 and scalar.numel() == 1

    def _is_known(self) -> bool:
        """Hand the parameters over, once the kernels are built."""
        build.settle()
        if build.report().status != "built":
            return False
        # The tensor behind each Python object: torch.utils.swap_tensors, and so module.to(), may change it.
        tensors = [parameter._cdata for parameter in self._parameters]
        return tensors == self._tensors or self._hand_over(tensors)

    def _hand_over(self, tensors: list[int]) -> bool:
        try:
            with torch.no_grad():
                self._list = _OPS.remember_parameters.default(list(self._parameters))
        except NotImplementedError:  # built this moment, and to be loaded by the next call; or built without CUDA
            return False
        self._tensors = tensors
        weakref.finalize(self, _OPS.forget_parameters.default, self._list, _HERE).atexit = False
        return True


def _common_device(parameters: Sequence[Tensor]) -> torch.device | None:
    """The one device of all parameters, where it is one that kernels are built for; None for tensor subclasses."""
    devices = {parameter.device for parameter in parameters}
    plain = all(type(parameter) in (Tensor, torch.nn.Parameter) for parameter in parameters)
    return devices.pop() if plain and len(devices) == 1 and next(iter(devices)).type in ("cpu", "cuda") else None


def _counted(gradients: int) -> int | None:
    return None if gradients == _REFUSED else gradients
