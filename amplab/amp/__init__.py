"""The face that scripts know from NVIDIA apex: four optimization levels, loss scaling, master weights.

Reading order: OPT_LEVELS (what the levels are), Session (one experiment), then the functions of apex, which drive
one session for the whole program.
"""

from amplab.amp.apex_face import (
    default_session,
    initialize,
    last_step,
    load_state_dict,
    loss_scale,
    master_params,
    memory,
    reset,
    scale_loss,
    state_dict,
    subscribe,
)
from amplab.amp.opt_levels import OPT_LEVELS, OptLevel, OptProperties, explain_override
from amplab.amp.records import MemoryUse, ScaleRecord, StepOutcome
from amplab.amp.session import Session
from amplab.policies import disable_casts

__all__ = [
    "OPT_LEVELS",
    "MemoryUse",
    "OptLevel",
    "OptProperties",
    "ScaleRecord",
    "Session",
    "StepOutcome",
    "default_session",
    "disable_casts",
    "explain_override",
    "initialize",
    "last_step",
    "load_state_dict",
    "loss_scale",
    "master_params",
    "memory",
    "reset",
    "scale_loss",
    "state_dict",
    "subscribe",
]
