"""Optimizers that scripts import from ``apex.optimizers``, those of Ascend's apex, and LARC.

Each has the arguments, defaults and errors of its namesake, and unscales, skips and steps in one pass of the kernels.
If ``torch.optim`` has the same rule, checkpoints are interchangeable.
"""

from amplab.optimizers.fused_adadelta import FusedAdadelta
from amplab.optimizers.fused_adagrad import FusedAdagrad
from amplab.optimizers.fused_adam import FusedAdam, FusedAdamW
from amplab.optimizers.fused_adamp import FusedAdamP
from amplab.optimizers.fused_bert_adam import FusedBertAdam
from amplab.optimizers.fused_lamb import FusedLAMB, FusedMixedPrecisionLamb
from amplab.optimizers.fused_novograd import FusedNovoGrad
from amplab.optimizers.fused_optimizer import FusedOptimizer
from amplab.optimizers.fused_rmsprop import FusedRMSprop, FusedRMSpropTF
from amplab.optimizers.fused_sgd import FusedSGD
from amplab.optimizers.larc import LARC
from amplab.optimizers.npu_names import (
    Lamb,
    NpuFusedAdadelta,
    NpuFusedAdam,
    NpuFusedAdamP,
    NpuFusedAdamW,
    NpuFusedBertAdam,
    NpuFusedLamb,
    NpuFusedRMSprop,
    NpuFusedRMSpropTF,
    NpuFusedSGD,
)
from amplab.optimizers.parameter_groups import merge_groups

__all__ = [
    "LARC",
    "FusedAdadelta",
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamP",
    "FusedAdamW",
    "FusedBertAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedOptimizer",
    "FusedRMSprop",
    "FusedRMSpropTF",
    "FusedSGD",
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
    "merge_groups",
]
