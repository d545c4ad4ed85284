"""Manual mixed precision from before ``amp.initialize``: ``from apex.fp16_utils import *``.

`conversion` casts models to float16, `param_lists` has float32 copies of their parameters, and `fp16_optimizer` an
optimizer with such copies and a loss scale. New code uses `amplab.amp`.
"""

from amplab.fp16_utils.conversion import (
    BN_convert_float,
    FP16Model,
    convert_module,
    convert_network,
    network_to_half,
    tofp16,
)
from amplab.fp16_utils.fp16_optimizer import FP16_Optimizer
from amplab.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from amplab.fp16_utils.param_lists import (
    clip_grad_norm,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
    to_python_float,
)

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
