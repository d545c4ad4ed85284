"""Loss scaling: how the scale moves, unscaling of gradients, and float32 master weights.

    rule                         state              on the host                    on the device
    `DynamicScale`, `ApexScale`  `ScaleState`       `rule.next(state, found_inf)`  `RecurrentScale`: no sync
    `MegatronScale`              `HysteresisState`  the same                       `RecurrentScale`: no sync
    `DeepSpeedScale`             `HysteresisState`  the same                       `HostScale`: one sync
    your own rule                `ScaleState`       the same                       `HostScale`: one sync

`device_scale(rule, device)` makes the form for the device. `DeviceScale` is the base of both: `RecurrentScale` computes
on the device, for every `RecurrentRule`; `HostScale` computes on the host and copies the scale to the device.
"""

from amplab.scalers.combined_unscaler import CombinedUnscaler
from amplab.scalers.device_scale import DeviceScale, HostScale, RecurrentScale, device_scale
from amplab.scalers.flat_gradients import BrokenView, FlatGradients, ViewBreak, check_combined_tensors
from amplab.scalers.floored_rule import floored
from amplab.scalers.master_weights import MasterPair, MasterWeights
from amplab.scalers.published_rules import (
    PUBLISHED_RULES,
    ApexScale,
    AscendScale,
    DeepSpeedScale,
    JmpScale,
    KerasScale,
    LossScaleAtMinimumError,
    MegatronScale,
)
from amplab.scalers.recorded_overflows import Verdict, measured_overflows, overflow_limits, overflow_verdict
from amplab.scalers.replay import Replay, ReplayStep, first_doubt, replay
from amplab.scalers.rules import (
    APEX_DYNAMIC,
    TORCH_DYNAMIC,
    DynamicScale,
    HysteresisState,
    Recurrence,
    RecurrentRule,
    ScaleRule,
    ScaleState,
    StaticScale,
)
from amplab.scalers.scale_path import ScalePath, scale_path, steps_lost
from amplab.scalers.to_device import to_device
from amplab.scalers.unscaler import (
    FlatGrads,
    Unscaler,
    inverse_scale,
    is_sharded,
    local_shard,
    strided_grad,
    summed_values,
)

__all__ = [
    "APEX_DYNAMIC",
    "PUBLISHED_RULES",
    "TORCH_DYNAMIC",
    "ApexScale",
    "AscendScale",
    "HostScale",
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
    "ScalePath",
    "ScaleRule",
    "ScaleState",
    "StaticScale",
    "Unscaler",
    "Verdict",
    "ViewBreak",
    "check_combined_tensors",
    "device_scale",
    "first_doubt",
    "floored",
    "inverse_scale",
    "is_sharded",
    "local_shard",
    "measured_overflows",
    "overflow_limits",
    "overflow_verdict",
    "replay",
    "scale_path",
    "steps_lost",
    "strided_grad",
    "summed_values",
    "to_device",
]
