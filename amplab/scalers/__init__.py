"""How the loss scale moves, how it is taken out of gradients again, and the masters that gradients go to."""

from amplab.scalers.master_weights import MasterPair, MasterWeights
from amplab.scalers.rules import APEX_DYNAMIC, TORCH_DYNAMIC, DynamicScale, ScaleRule, ScaleState, StaticScale
from amplab.scalers.unscaler import Unscaler, inverse_scale

__all__ = [
    "APEX_DYNAMIC",
    "TORCH_DYNAMIC",
    "DynamicScale",
    "MasterPair",
    "MasterWeights",
    "ScaleRule",
    "ScaleState",
    "StaticScale",
    "Unscaler",
    "inverse_scale",
]
