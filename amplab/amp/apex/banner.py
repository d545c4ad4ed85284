"""The lines that `initialize` prints, identical to those of NVIDIA apex.

They are printed at verbosity 1 and above, in distributed training on rank 0 only.
"""

import torch

from amplab.amp.apex.opt_levels import OptLevel, OptProperties

__all__ = ["banner", "is_first_rank"]


def banner(level: OptLevel, properties: OptProperties) -> str:
    """Return the text about a level, its properties, and the properties after the user's overrides."""
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
    """Return whether this process is rank 0, or there is no process group."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
