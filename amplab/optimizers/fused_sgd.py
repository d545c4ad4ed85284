"""apex's FusedSGD: SGD with the defaults and the refusals of apex."""

from typing import Any

import torch

__all__ = ["FusedSGD"]


class FusedSGD(torch.optim.SGD):
    """SGD with momentum; torch's own arithmetic, on any device.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        momentum: its factor.
        dampening: of the momentum.
        weight_decay: added to the gradient, times the weight.
        nesterov: look ahead.
        wd_after_momentum: True is refused.
        materialize_master_grads: accepted; masters always get gradients, so that they can be clipped.
        set_grad_none: what `zero_grad` leaves: None, or zeros.

    Raises:
        RuntimeError: ``wd_after_momentum=True``.

    Reference: apex ``FusedSGD``.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        del materialize_master_grads
        if wd_after_momentum:
            raise RuntimeError(
                "FusedSGD got wd_after_momentum=True: expected False, since torch decays before momentum."
            )
        super().__init__(
            params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: to None or zeros as ``set_grad_none`` says, unless told here."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
