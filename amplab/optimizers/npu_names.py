"""The optimizers of Ascend's apex, by their names, with their signatures and the defaults of their code.

Each is one of amplab's, its arguments in their order. They need no ``amp.initialize``, work at every opt_level, and
have no flat buffers: a parameter or a gradient may be replaced at any time.
"""

from typing import Any

from torch import Tensor

from amplab.optimizers.fused_adadelta import FusedAdadelta
from amplab.optimizers.fused_adam import FusedAdam
from amplab.optimizers.fused_adamp import FusedAdamP
from amplab.optimizers.fused_bert_adam import FusedBertAdam
from amplab.optimizers.fused_lamb import FusedLAMB
from amplab.optimizers.fused_rmsprop import FusedRMSprop, FusedRMSpropTF
from amplab.optimizers.fused_sgd import FusedSGD

__all__ = [
    "Lamb",
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
]

_LONGEST_WEIGHT = 10.0  # where the norm of a weight stops to count


class NpuFusedSGD(FusedSGD):
    """`FusedSGD` with the arguments of ``torch.optim.SGD``. Reference: Ascend apex ``NpuFusedSGD``."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, set_grad_none=True)


class NpuFusedAdam(FusedAdam):
    """`FusedAdam` with the arguments of ``torch.optim.Adam``: the decay goes through the gradient.

    Raises:
        RuntimeError: ``amsgrad=True``.

    Reference: Ascend apex ``NpuFusedAdam``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr, True, betas, eps, False, weight_decay, amsgrad)


class NpuFusedAdamW(FusedAdam):
    """`FusedAdam` with the arguments of ``torch.optim.AdamW``: the decay beside the moments.

    Raises:
        RuntimeError: ``amsgrad=True``.

    Reference: Ascend apex ``NpuFusedAdamW``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr, True, betas, eps, True, weight_decay, amsgrad)


class NpuFusedAdamP(FusedAdamP):
    """`FusedAdamP`. Reference: Ascend apex ``NpuFusedAdamP``."""


class NpuFusedBertAdam(FusedBertAdam):
    """`FusedBertAdam`. Reference: Ascend apex ``NpuFusedBertAdam``, which clips to 1 whatever ``max_grad_norm`` is."""


class NpuFusedAdadelta(FusedAdadelta):
    """`FusedAdadelta`. Reference: Ascend apex ``NpuFusedAdadelta``."""


class NpuFusedRMSprop(FusedRMSprop):
    """`FusedRMSprop`. Reference: Ascend apex ``NpuFusedRMSprop``."""


class NpuFusedRMSpropTF(FusedRMSpropTF):
    """`FusedRMSpropTF`, its mean of squares from 0 on. Reference: Ascend apex ``NpuFusedRMSpropTF``."""


class NpuFusedLamb(FusedLAMB):
    """LAMB without bias correction, its weights' norms counted up to 10, every tensor adapted.

    Args:
        params: as `FusedLAMB`.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: its factor; added to the step.
        adam: take 1 for every ratio.
        use_global_grad_norm: clip the norm of all gradients to 1.

    Raises:
        ValueError: a number out of its range.

    Reference: Ascend apex ``NpuFusedLamb``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
    ) -> None:
        max_grad_norm = 1.0 if use_global_grad_norm else 0.0
        first = (params, lr, False, betas, eps, weight_decay)
        super().__init__(*first, max_grad_norm=max_grad_norm, use_nvlamb=True, max_weight_norm=_LONGEST_WEIGHT)
        self._add_defaults({"adam": bool(adam)}, max_grad_norm)

    def _adapts(self, group: dict[str, Any]) -> bool:
        return not group["adam"]


class Lamb(NpuFusedLamb):
    """`NpuFusedLamb` without the clipping.

    Reference: Ascend apex ``Lamb``, which keeps norms and ratios in its state, too.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, adam)
