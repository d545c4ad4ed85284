"""What scripts import from ``apex.amp.amp``, or by ``from apex.amp import amp``: the functions, and `init`."""

from amplab.amp.apex.amp_state import init
from amplab.amp.apex.function_casts import float_function, half_function, promote_function
from amplab.amp.apex.functions import (
    initialize,
    load_state_dict,
    master_params,
    register_float_function,
    register_half_function,
    register_promote_function,
    scale_loss,
    state_dict,
)
from amplab.policies import disable_casts

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
