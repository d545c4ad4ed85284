"""amplab: a lab for automatic mixed precision, on a library that works without it.

The rooms, in reading order; each imports only those before it, and each is loaded when it is first touched, so that
``import amplab`` costs nothing::

    formats   what a number is: formats as data, bits, rounding, exponent histograms
    display   how things are shown outside of widgets: numbers, tables, HTML, drawings, colors
    kernels   fused operations with their references
    policies  which operation runs in which dtype, and why
    scalers   how the loss scale moves
    optimizers FusedAdam, FusedSGD and LARC, as scripts import them from apex
    parallel  DistributedDataParallel and its kind under apex's names; so normalization and multi_tensor_apply
    amp       the faces of apex (initialize, scale_loss, …) and of PyTorch (autocast, GradScaler, checkpoint)
    fp16_utils half precision by hand: FP16_Optimizer and what came before amp
    trace     what happened in one step: every operation with its dtypes and the reason; xray of any model
    diagnose  what is the matter: the first op to leave its range, findings about a model, its loop and the machine
    lab       experiments: tasks, models, a trainer, the run log
    views     the widgets of the lab (imported by name: they need the extra ``lab``)
    bench     measurements that you can repeat
    launch    JupyterLab, opened on one notebook
    scripts   runs scripts that import apex, unchanged
    cli       the ``amplab`` command
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amplab.amp import (
        GradScaler,
        autocast,
        checkpoint,
        custom_bwd,
        custom_fwd,
        get_autocast_dtype,
        is_autocast_enabled,
    )
    from amplab.diagnose import doctor
    from amplab.diagnose.first_nonfinite import first_nonfinite
    from amplab.diagnose.ladder import ladder
    from amplab.diagnose.twin import twin
    from amplab.lab.watch import watch
    from amplab.policies import cpu_half
    from amplab.scripts import as_apex
    from amplab.trace.gradient_range import gradient_range
    from amplab.trace.xray import xray

    from . import (
        amp,
        bench,
        diagnose,
        formats,
        fp16_utils,
        kernels,
        lab,
        multi_tensor_apply,
        normalization,
        optimizers,
        parallel,
        policies,
        scalers,
        trace,
    )

__version__ = "0.1.0"

__all__ = [
    "formats", "kernels", "policies", "scalers", "optimizers", "parallel", "normalization", "multi_tensor_apply",
    "amp", "fp16_utils", "trace", "diagnose", "lab", "bench",
    "GradScaler", "as_apex", "autocast", "checkpoint", "cpu_half", "custom_bwd", "custom_fwd", "doctor",
    "first_nonfinite", "get_autocast_dtype", "gradient_range", "is_autocast_enabled", "ladder", "twin", "watch", "xray",
]  # fmt: skip

_HOMES = {
    "GradScaler": "amp",
    "as_apex": "scripts",
    "autocast": "amp",
    "checkpoint": "amp",
    "cpu_half": "policies",
    "custom_bwd": "amp",
    "custom_fwd": "amp",
    "doctor": "diagnose",
    "first_nonfinite": "diagnose",
    "get_autocast_dtype": "amp",
    "gradient_range": "trace",
    "is_autocast_enabled": "amp",
    "ladder": "diagnose",
    "twin": "diagnose",
    "watch": "lab",
    "xray": "trace",
}
"""The names that `amplab` itself exports, and the room of each."""


def __getattr__(name: str) -> ModuleType | object:
    """Import a room, or what comes from one, at its first use (PEP 562)."""
    if name in _HOMES:
        found: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        return found
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'amplab' has no attribute {name!r}: there are {', '.join(__all__)}.")


def __dir__() -> list[str]:
    """List the rooms that are not loaded yet, too."""
    return sorted({*globals(), *__all__})
