"""Unscale and clip the gradients of parameters that a kernel was given once, without a Python object for each.

A gradient fresh from backward has no Python object, and making one costs more than unscaling a thousand elements.
How parameters are handed over is in ``remembered.py``; a list of tensors themselves is a `TensorTable`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from amplab.kernels.remembered import Remembered

__all__ = ["ParameterList"]


class ParameterList:
    """A list of parameters, known to the kernels.

    On the CPU alone, where the kernels are built. Everywhere else, and for gradients that are sparse, expanded or
    elsewhere, both methods say so, and `unscale_` is what to call.

    Args:
        parameters: kept alive as long as this object is; each listed once.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([2.0, 4.0])
    >>> parameters = ParameterList([weight])
    >>> parameters.unscale_grads_(torch.zeros(()), torch.tensor(0.5)) in (1, None)
    True
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._remembered = Remembered(parameters, hold=False)

    @property
    def device(self) -> torch.device | None:
        """Where the kernels find gradients; None where they do not."""
        return self._remembered.device

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
            found_inf: ``()`` or ``(1,)`` float32 on `device`; 1.0 where a gradient or its product is inf or NaN.
            inv_scale: ``()`` or ``(1,)`` float32 on `device`.
            allow_half: take float16 gradients.
            norm: as `unscale_`, of all gradients that are there.
            norms: as `unscale_`, one for each parameter; 0.0 where it has no gradient.
            first_bad: as `unscale_`; an index among the parameters.

        Returns:
            How many gradients there were; None where this is not for the kernel, and nothing was written.

        Sync: none.
        """
        return self._remembered.unscale_(
            found_inf,
            inv_scale,
            gradients=True,
            allow_half=allow_half,
            norm=norm,
            norms=norms,
            first_bad=first_bad,
        )

    def clip_grads_(self, norm: Tensor, max_norm: float) -> int | None:
        """Scale float32 gradients down until their 2-norm, all together, is at most ``max_norm``.

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
            raise ValueError(f"max_norm={max_norm}: expected a number > 0, such as 1.0; do not call it not to clip.")
        return self._remembered.clip_grads_(norm, max_norm)
