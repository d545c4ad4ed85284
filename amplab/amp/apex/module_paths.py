"""The module paths inside ``apex.amp`` from which scripts import: ``amp.amp``, ``amp.frontend``, ``amp.scaler``.

Each becomes a module in ``sys.modules`` that holds names of this package. ``amp._amp_state`` is in `amp_state`; paths
that exist in apex and not here are listed in `amplab.scripts.apex_names`.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from amplab.amp.apex import functions
from amplab.amp.apex.amp_state import amp_state
from amplab.amp.apex.loss_scaling import LossScaler
from amplab.amp.apex.old_interface import init
from amplab.amp.apex.opt_levels import OPT_LEVELS, OptProperties
from amplab.amp.apex.registered_functions import float_function, half_function, promote_function
from amplab.policies import disable_casts

__all__ = ["frontend"]


def _module(path: str, names: dict[str, Any]) -> ModuleType:
    module = ModuleType(path, f"What scripts import from ``{path.replace('amplab', 'apex')}``.")
    vars(module).update(names, __all__=list(names), __spec__=ModuleSpec(path, None))
    sys.modules[path] = module
    return module


_FUNCTIONS = {
    name: getattr(functions, name)
    for name in (
        "initialize",
        "load_state_dict",
        "master_params",
        "register_float_function",
        "register_half_function",
        "register_promote_function",
        "scale_loss",
        "state_dict",
    )
}

frontend = _module(
    "amplab.amp.frontend",
    {
        "Properties": OptProperties,
        "_amp_state": amp_state,
        "opt_levels": OPT_LEVELS,
        **{name: _FUNCTIONS[name] for name in ("initialize", "load_state_dict", "state_dict")},
    },
)
"""``amp.frontend``."""
_module("amplab.amp.scaler", {"LossScaler": LossScaler})
_module(
    "amplab.amp.amp",
    {
        "disable_casts": disable_casts,
        "float_function": float_function,
        "half_function": half_function,
        "init": init,
        "promote_function": promote_function,
        **_FUNCTIONS,
    },
)
