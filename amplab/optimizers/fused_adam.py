"""apex's FusedAdam: AdamW with the defaults and the refusals of apex."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["FusedAdam"]


class FusedAdam(torch.optim.AdamW):
    """Adam with decoupled weight decay; torch's own arithmetic, on any device.

    ::

        m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
        p <- p - lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay p),   c = 1 - beta^step

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        bias_correction: False is refused; torch always corrects.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        adam_w_mode: False, which adds the decay to the gradient, is refused.
        weight_decay: its factor.
        amsgrad: refused, as in apex.
        set_grad_none: what `zero_grad` leaves: None, or zeros.
        capturable: as in torch.
        master_weights: True is refused; ``amp.initialize`` with O2 makes masters.

    Raises:
        RuntimeError: an argument that has no counterpart here.

    Reference: apex ``FusedAdam``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant; use torch.optim.Adam(amsgrad=True).")
        if not bias_correction:
            raise RuntimeError(
                "FusedAdam got bias_correction=False: expected True, since torch's Adam always corrects."
            )
        if master_weights:
            raise RuntimeError(
                "FusedAdam got master_weights=True: expected False; use amp.initialize with O2 for masters."
            )
        if not adam_w_mode:
            raise RuntimeError("FusedAdam got adam_w_mode=False: expected True; use torch.optim.Adam.")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, capturable=capturable)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: to None or zeros as ``set_grad_none`` says, unless told here."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, **old: Any) -> Any:
        """Step once.

        Raises:
            RuntimeError: arguments of the years before ``amp.initialize``.
        """
        if any(value is not None for value in old.values()):
            raise RuntimeError(
                f"FusedAdam.step got {', '.join(old)}: expected a closure or nothing; gradients are unscaled by "
                "amp.scale_loss."
            )
        return super().step(closure)
