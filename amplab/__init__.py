"""amplab: a library for automatic mixed precision in PyTorch, with an interactive lab for JupyterLab.

The package is divided into rooms. A room imports only rooms listed before it. ``import amplab`` imports none of them;
each is imported at its first use::

    formats      number formats as data: float16, bfloat16, tf32, float8; bits, rounding, exponent histograms
    display      output outside of widgets: numbers as text, tables as text and HTML, small drawings, one palette
    kernels      fused unscale, norms, statistics, scale updates and optimizer steps, with their references
    policies     which operation runs in which dtype, and why: op tables, your own rules, casting engines
    scalers      how the loss scale moves: published rules and your own, replayed on a record; master weights
    optimizers   FusedSGD, FusedAdam, FusedLAMB and the rest of apex's and of Ascend's names; LARC
    parallel     DistributedDataParallel, Reducer and SyncBatchNorm under apex's names
    normalization, multi_tensor_apply   belong to parallel
    amp          the API of apex (initialize, scale_loss, ...) and of PyTorch (autocast, GradScaler, checkpoint)
    fp16_utils   half precision without amp: FP16_Optimizer and the other functions of apex from before amp
    trace        one step in detail: every operation, with the reason for its dtype; xray of any model
    diagnose     what is wrong and how to fix it: the first op that was not finite, findings with their remedy
    lab          experiments: tasks, models, a trainer, the run log; the watch around your own loop
    views        the widgets for JupyterLab, which need the extra ``lab``; import them by name
    bench        measurements that you can repeat
    launch       starts JupyterLab with one lesson
    scripts      runs scripts that import apex unchanged, with CUDA or on the CPU
    cli          the ``amplab`` command
"""

import importlib
import signal
import sys
import threading
from types import FrameType, ModuleType
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
        found: object = getattr(_imported(f"{__name__}.{_HOMES[name]}"), name)
        return found
    if name in __all__:
        return _imported(f"{__name__}.{name}")
    raise AttributeError(f"module 'amplab' has no attribute {name!r}: there are {', '.join(__all__)}.")


def _imported(room: str) -> ModuleType:
    """Import a room; Ctrl-C waits meanwhile, since Python would keep modules of which only a part has run."""
    before = signal.getsignal(signal.SIGINT)
    if room in sys.modules or threading.current_thread() is not threading.main_thread() or not callable(before):
        return importlib.import_module(room)
    come: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *given: come.append(given))
    try:
        return importlib.import_module(room)
    finally:
        signal.signal(signal.SIGINT, before)
        if come:
            before(*come[0])


def __dir__() -> list[str]:
    """List the rooms that are not loaded yet, too."""
    return sorted({*globals(), *__all__})
