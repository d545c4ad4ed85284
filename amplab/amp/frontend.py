"""What scripts import from ``apex.amp.frontend``: the same functions, and the state called `_amp_state`."""

from amplab.amp.apex_face import initialize, load_state_dict, state_dict
from amplab.amp.apex_state import amp_state as _amp_state

__all__ = ["_amp_state", "initialize", "load_state_dict", "state_dict"]
