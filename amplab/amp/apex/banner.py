"""The lines that `initialize` prints, byte for byte those of NVIDIA apex.

Printed at verbosity 1 and above, and on rank 0 alone where a process group runs.
"""

import torch

from amplab.amp.apex.opt_levels import OptLevel, OptProperties

__all__ = ["banner", "is_first_rank"]


def banner(level: OptLevel, properties: OptProperties) -> str:
    """Return the announcement of a level and of its properties after the user's overrides."""
    return "\n".join(
        [
            f"Selected optimization level {level.brief}",
            "Defaults for this optimization level are:",
            *level.properties.lines(),
            "Processing user overrides (additional kwargs that are not None)...",
            "After processing overrides, optimization options are:",
            *properties.lines(),
        ]
    )


def is_first_rank() -> bool:
    """Return whether this process prints: rank 0, or no process group."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
