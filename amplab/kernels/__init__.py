"""Fused operators, each with its PyTorch reference; `builder` compiles the C++ and CUDA kernels."""

from amplab.kernels.adaptive_steps import adadelta_, adagrad_, rmsprop_
from amplab.kernels.builder import BuildReport, ensure, report
from amplab.kernels.dispatch_casts import DispatchCasts
from amplab.kernels.gradient_places import GradientPlaces, Whereabouts
from amplab.kernels.layerwise_steps import lamb_, novograd_
from amplab.kernels.list_checks import is_refusal, refusal_naming
from amplab.kernels.steps import adam_, sgd_
from amplab.kernels.tensor_stats import StatsTable, TensorStats, tensor_stats
from amplab.kernels.tensor_table import ParameterList, TensorTable
from amplab.kernels.unscale import unscale_, unscale_add, unscale_copy, unscaled_norm
from amplab.kernels.update_scale import update_scale_

__all__ = [
    "BuildReport",
    "DispatchCasts",
    "GradientPlaces",
    "ParameterList",
    "StatsTable",
    "TensorStats",
    "TensorTable",
    "Whereabouts",
    "adadelta_",
    "adagrad_",
    "adam_",
    "ensure",
    "lamb_",
    "novograd_",
    "is_refusal",
    "refusal_naming",
    "report",
    "rmsprop_",
    "sgd_",
    "tensor_stats",
    "unscale_",
    "unscale_add",
    "unscale_copy",
    "unscaled_norm",
    "update_scale_",
]
