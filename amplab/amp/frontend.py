"""What scripts import from ``apex.amp.frontend``: the same functions, the levels, and the state called `_amp_state`."""

from amplab.amp.apex.amp_state import amp_state as _amp_state
from amplab.amp.apex.functions import initialize, load_state_dict, state_dict
from amplab.amp.apex.opt_levels import OPT_LEVELS as opt_levels
from amplab.amp.apex.opt_levels import OptProperties as Properties

__all__ = ["Properties", "_amp_state", "initialize", "load_state_dict", "opt_levels", "state_dict"]
