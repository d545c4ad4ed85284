"""A rule that runs a step again: whether the running statistics of a norm in 16 bits can follow its batches.

    statistics-in-half   the running mean stops before it reaches the mean of the batches

A running mean moves by ``momentum * (mean - running_mean)``. That is rounded away where it is smaller than half of the
spacing of the numbers around the mean, so the running mean stops at a distance of up to

    spacing / (2 * momentum)

from the mean. Evaluation then normalizes with a wrong mean, although training, which uses the batch, is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding
from amplab.diagnose.first_nonfinite import Setting
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.remedies.float32 import module_rule
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.trace.as_found import Undo
from amplab.trace.handed_step import HandedStep, Scaler
from amplab.trace.untouched import untouched

__all__ = ["statistics_in_half"]

_FAR = 0.25
"""In standard deviations of the batch: a mean that is wrong by less does little harm."""


def statistics_in_half(
    model: nn.Module, handed: HandedStep, setting: Setting, _step: ObservedStep, api: Api, _scaler: Scaler | None
) -> Iterator[Finding]:
    """Yield one finding, for the norm whose running mean stops furthest from the mean of this batch.

    Arguments as for `gradients_lost_downstream`. Without norms with 16-bit statistics nothing runs.
    """
    norms = {name: each for name, each in model.named_modules() if _follows_in_16_bits(each)}
    if not norms:
        return
    off: dict[str, float] = {}
    with untouched(model), Undo() as undo:
        for name, module in norms.items():
            undo.add(module.register_forward_pre_hook(partial(_measure, off, name)).remove)
        with setting.casting(), torch.no_grad():
            handed.run()
    worst = max(off, key=lambda name: off[name], default=None)
    if worst is None or off[worst] < _FAR:
        return
    norm = norms[worst]
    yield finding(
        "statistics-in-half",
        api=api,
        module=worst,
        tensor=f"{worst}.running_mean",
        evidence={"deviations": off[worst], "momentum": norm.momentum},
        dtype=str(norm.running_mean.dtype).removeprefix("torch."),
        code=_remedy(norm, worst, api),
    )


def _follows_in_16_bits(module: nn.Module) -> bool:
    return (
        isinstance(module, _BatchNorm)
        and module.training
        and bool(module.momentum)
        and isinstance(module.running_mean, Tensor)
        and module.running_mean.dtype in LOW_PRECISION_DTYPES
    )


def _measure(off: dict[str, float], name: str, norm: Any, args: tuple[Any, ...]) -> None:
    """Note how many standard deviations of its channel the running mean stops from the mean, at most. Sync: one."""
    x = args[0].detach().float().transpose(0, 1).flatten(1)  # (channels, values)
    if x.shape[1] < 2:
        return
    deviation, mean = torch.std_mean(x, dim=1)
    spacing = torch.finfo(norm.running_mean.dtype).eps * 2.0 ** mean.abs().clamp_min(2.0**-14).log2().floor()
    stops = spacing / (2 * norm.momentum) / deviation.clamp_min(1e-30)
    worst = float(torch.where(deviation > 0, stops, 0.0).max())
    off[name] = max(off.get(name, 0.0), worst if math.isfinite(worst) else 0.0)


def _remedy(norm: Any, name: str, api: Api) -> str:
    own = f"model.get_submodule({name!r}).float()"
    if api.casting is ApiStyle.HALF:
        return f"{own}  # after model.half(); pass x.float() to it, and .half() of its output on"
    if api.casting is ApiStyle.APEX_HALF and norm.affine:
        return f'model, optimizer = amp.initialize(model, optimizer, opt_level="{api.level}", keep_batchnorm_fp32=True)'
    return module_rule(name, api) or own
