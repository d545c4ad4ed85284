"""The optimizers of Ascend's apex: their names, signatures and defaults.

Each is one of amplab's optimizers. They work without ``amp.initialize`` and at every opt_level. They have no flat
buffers: a parameter or a gradient may be replaced at any time.
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
from amplab.optimizers.group_settings import REQUIRED

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

_MAX_WEIGHT_NORM = 10.0


class NpuFusedSGD(FusedSGD):
    """`FusedSGD` with the arguments of ``torch.optim.SGD``. Reference: Ascend apex ``NpuFusedSGD``."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = REQUIRED,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, set_grad_none=True)


class NpuFusedAdam(FusedAdam):
    """`FusedAdam` with the arguments of ``torch.optim.Adam``: weight decay is added to the gradient.

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
    """`FusedAdam` with the arguments of ``torch.optim.AdamW``: weight decay is decoupled.

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
    """`FusedBertAdam`. Reference: Ascend apex ``NpuFusedBertAdam``, which ignores ``max_grad_norm`` and clips to 1."""


class NpuFusedAdadelta(FusedAdadelta):
    """`FusedAdadelta`. Reference: Ascend apex ``NpuFusedAdadelta``."""


class NpuFusedRMSprop(FusedRMSprop):
    """`FusedRMSprop`. Reference: Ascend apex ``NpuFusedRMSprop``."""


class NpuFusedRMSpropTF(FusedRMSpropTF):
    """`FusedRMSpropTF`, whose mean of squares starts at 0. Reference: Ascend apex ``NpuFusedRMSpropTF``."""


class NpuFusedLamb(FusedLAMB):
    """LAMB without bias correction, with weight norms bounded by 10, which adapts every tensor.

    Args:
        params: as `FusedLAMB`.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: weight decay factor; added to the update.
        adam: use 1 for every ratio.
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
        super().__init__(*first, max_grad_norm=max_grad_norm, use_nvlamb=True, max_weight_norm=_MAX_WEIGHT_NORM)
        self._add_defaults({"adam": bool(adam)}, max_grad_norm)

    def _adapts(self, group: dict[str, Any]) -> bool:
        return not group["adam"]


class Lamb(NpuFusedLamb):
    """`NpuFusedLamb` that never clips the norm of the gradients.

    Reference: Ascend apex ``Lamb``, which also keeps norms and ratios in its state.
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
