"""How the loss scale moves, how it is taken out of gradients again, and the masters that gradients go to."""

from amplab.scalers.combined_unscaler import CombinedUnscaler
from amplab.scalers.deepspeed_rule import DeepSpeedScale, LossScaleAtMinimumError
from amplab.scalers.device_rule import AskedScale, DeviceScale, RecurrentScale, device_scale
from amplab.scalers.flat_gradients import BrokenView, FlatGradients, ViewBreak, check_combined_tensors
from amplab.scalers.floored_rule import floored
from amplab.scalers.master_weights import MasterPair, MasterWeights
from amplab.scalers.published_rules import (
    PUBLISHED_RULES,
    ApexScale,
    AscendScale,
    JmpScale,
    KerasScale,
    MegatronScale,
)
from amplab.scalers.recurrence import Recurrence, RecurrentRule
from amplab.scalers.replay import Replay, ReplayStep, Verdict, overflow_verdict, replay
from amplab.scalers.rules import APEX_DYNAMIC, TORCH_DYNAMIC, DynamicScale, ScaleRule, StaticScale
from amplab.scalers.scale_state import HysteresisState, ScaleState
from amplab.scalers.unscaler import FlatGrads, Unscaler, inverse_scale, strided_grad

__all__ = [
    "APEX_DYNAMIC",
    "PUBLISHED_RULES",
    "TORCH_DYNAMIC",
    "ApexScale",
    "AscendScale",
    "AskedScale",
    "BrokenView",
    "CombinedUnscaler",
    "DeepSpeedScale",
    "DeviceScale",
    "DynamicScale",
    "FlatGradients",
    "FlatGrads",
    "HysteresisState",
    "JmpScale",
    "KerasScale",
    "LossScaleAtMinimumError",
    "MasterPair",
    "MasterWeights",
    "MegatronScale",
    "Recurrence",
    "RecurrentRule",
    "RecurrentScale",
    "Replay",
    "ReplayStep",
    "ScaleRule",
    "ScaleState",
    "StaticScale",
    "Unscaler",
    "Verdict",
    "ViewBreak",
    "check_combined_tensors",
    "device_scale",
    "floored",
    "inverse_scale",
    "overflow_verdict",
    "replay",
    "strided_grad",
]
