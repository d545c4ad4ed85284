"""Functions given to `torch.compile` that a model calls: while ops are looked at they run as they are written.

Under a dispatch mode the compiler would trace the mode itself, and its graph would put ops in another order than
autograd's numbers; run eagerly, each op is seen where the code has it. Compiled *modules* are refused (`step_checks`).

Reference: torch.compiler.set_stance.
"""

import sys
from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["compiled_functions_eagerly"]


def compiled_functions_eagerly() -> AbstractContextManager[None]:
    """Return a context in which compiled functions run op by op; nothing is loaded where nothing is compiled."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
