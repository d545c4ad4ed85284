"""Fused operators beside their references, and the build that makes them fast."""

from amplab.kernels.build import BuildReport, ensure, report
from amplab.kernels.dispatch_casts import DispatchCasts
from amplab.kernels.parameter_list import ParameterList
from amplab.kernels.tensor_table import TensorTable
from amplab.kernels.unscale import unscale_, unscale_add, unscale_copy, unscaled_norm

__all__ = [
    "BuildReport",
    "DispatchCasts",
    "ParameterList",
    "TensorTable",
    "ensure",
    "report",
    "unscale_",
    "unscale_add",
    "unscale_copy",
    "unscaled_norm",
]
