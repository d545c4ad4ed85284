"""Fused operators beside their references, and the build that makes them fast."""

from amplab.kernels.build import BuildReport, ensure, report
from amplab.kernels.dispatch_casts import DispatchCasts
from amplab.kernels.parameter_list import ParameterList
from amplab.kernels.tensor_stats import StatsTable, TensorStats, tensor_stats
from amplab.kernels.unscale import unscale_, unscale_add, unscale_copy

__all__ = [
    "BuildReport",
    "DispatchCasts",
    "ParameterList",
    "StatsTable",
    "TensorStats",
    "ensure",
    "report",
    "tensor_stats",
    "unscale_",
    "unscale_add",
    "unscale_copy",
]
