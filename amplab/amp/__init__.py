"""Mixed precision under the names of NVIDIA apex (``apex.amp``) and of PyTorch (``torch.amp``).

apex        OPT_LEVELS, Session (one experiment), and the functions of apex, which use one session for the program
pytorch     autocast, GradScaler, custom_fwd and custom_bwd, checkpoint
backward    the gradients around one backward of a scaled loss, for both
run_state   save_run_state and load_run_state: save and load a whole run in one file
"""

from amplab.amp.apex.amp_state import amp_state as _amp_state
from amplab.amp.apex.functions import (
    clip_grad_norm_,
    combined_grads,
    default_session,
    initialize,
    last_step,
    load_state_dict,
    loss_scale,
    master_params,
    memory,
    register_float_function,
    register_half_function,
    register_promote_function,
    reset,
    scale_loss,
    scaled_grad,
    state_dict,
    subscribe,
)
from amplab.amp.apex.loss_scaling import LossScaleCollapse
from amplab.amp.apex.module_paths import frontend
from amplab.amp.apex.old_interface import init
from amplab.amp.apex.opt_levels import OPT_LEVELS, OptLevel, OptProperties, explain_override
from amplab.amp.apex.registered_functions import float_function, half_function, promote_function
from amplab.amp.apex.session import Session
from amplab.amp.backward.records import MemoryUse, ScaledLoss, ScaleRecord, StepOutcome
from amplab.amp.pytorch.autocast import autocast, get_autocast_dtype, is_autocast_enabled
from amplab.amp.pytorch.checkpoint import checkpoint
from amplab.amp.pytorch.custom_function import custom_bwd, custom_fwd
from amplab.amp.pytorch.grad_scaler import GradScaler
from amplab.amp.run_state.file_format import RunStateError
from amplab.amp.run_state.save_and_load import RunState, load_run_state, save_run_state
from amplab.policies import disable_casts

__all__ = [
    "_amp_state",
    "OPT_LEVELS",
    "GradScaler",
    "LossScaleCollapse",
    "MemoryUse",
    "OptLevel",
    "OptProperties",
    "RunState",
    "RunStateError",
    "ScaleRecord",
    "ScaledLoss",
    "Session",
    "StepOutcome",
    "autocast",
    "checkpoint",
    "clip_grad_norm_",
    "combined_grads",
    "custom_bwd",
    "custom_fwd",
    "default_session",
    "disable_casts",
    "explain_override",
    "float_function",
    "frontend",
    "half_function",
    "init",
    "get_autocast_dtype",
    "initialize",
    "is_autocast_enabled",
    "last_step",
    "load_run_state",
    "load_state_dict",
    "loss_scale",
    "master_params",
    "memory",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "reset",
    "save_run_state",
    "scale_loss",
    "scaled_grad",
    "state_dict",
    "subscribe",
]
