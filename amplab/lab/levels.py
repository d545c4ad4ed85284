"""The precisions of the lab: apex's levels O0 to O3, and `torch.autocast` with CUDA's op lists in float16 or bfloat16.

==============  ==============  =========================  =============
level           weights         ops                        loss scale
==============  ==============  =========================  =============
O0              float32         float32                    1
O1              float32         apex's lists, float16      dynamic
O2              float16         float16                    dynamic
O3              float16         float16                    1
autocast-fp16   float32         CUDA's lists, float16      dynamic
autocast-bf16   float32         CUDA's lists, bfloat16     1
==============  ==============  =========================  =============

The two autocast levels are O1 with another table of ops, so that one session runs all six, on any device. The op
tables are in `amplab.policies.tables`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from amplab.amp import OPT_LEVELS, explain_override
from amplab.amp.apex.opt_levels import OptProperties
from amplab.formats import BFLOAT16, FLOAT16, FLOAT32, FloatFormat
from amplab.policies import PrecisionPolicy

__all__ = ["LEVELS", "Level", "explained", "why_no_override"]


@dataclass(frozen=True)
class Level:
    """One precision that a config can name.

    Attributes:
        name: As in the config, the value of opt_level.
        label: Its name in the dashboard.
        brief: A few words on it.
        explanation: One line for a reader who does not know it.
        properties: What it sets before any override.
        opt_level: The level of the session.
        policy: The op lists of the session; None for those of the opt_level.
        range_format: The format whose range the gradients must fit.
    """

    name: str
    label: str
    brief: str
    explanation: str
    properties: OptProperties
    opt_level: str
    policy: PrecisionPolicy | None = None
    range_format: FloatFormat = FLOAT16


def _apex(name: str) -> Level:
    level = OPT_LEVELS[name]
    fits = FLOAT32 if name == "O0" else FLOAT16
    brief = level.brief.partition(":")[2].strip()
    return Level(name, name, brief, level.explanation, level.properties, name, range_format=fits)


def _autocast(name: str, explanation: str, *, dtype: torch.dtype, loss_scale: float | str, fits: FloatFormat) -> Level:
    properties = replace(OPT_LEVELS["O1"].properties, loss_scale=loss_scale)
    brief = f"torch.autocast with CUDA's op lists in {str(dtype).removeprefix('torch.')}."
    policy = PrecisionPolicy("torch_cuda", compute_dtype=dtype)
    return Level(name, name.replace("-", " "), brief, explanation, properties, "O1", policy, fits)


LEVELS: dict[str, Level] = {
    each.name: each
    for each in (
        *map(_apex, OPT_LEVELS),
        _autocast(
            "autocast-fp16",
            "PyTorch's own mixed precision: weights stay float32, each op runs as CUDA's autocast lists say.",
            dtype=torch.float16,
            loss_scale="dynamic",
            fits=FLOAT16,
        ),
        _autocast(
            "autocast-bf16",
            "The same lists in bfloat16, which has float32's range: no loss scale is needed.",
            dtype=torch.bfloat16,
            loss_scale=1.0,
            fits=BFLOAT16,
        ),
    )
}
"""Each level by the name that a config gives it."""


def explained(name: str, *, keep_batchnorm_fp32: bool | None, master_weights: bool | None) -> str:
    """Return the explanation of a level with these overrides; None for what the level prescribes.

    >>> explained("O3", keep_batchnorm_fp32=None, master_weights=True)
    'The model in float16, BatchNorm too; the optimizer steps float32 master weights.'
    """
    level = LEVELS[name]
    prescribed = level.properties
    kept = prescribed.keep_batchnorm_fp32 if keep_batchnorm_fp32 is None else keep_batchnorm_fp32
    masters = prescribed.master_weights if master_weights is None else master_weights
    is_as_prescribed = (kept, masters) == (prescribed.keep_batchnorm_fp32, prescribed.master_weights)
    if is_as_prescribed or prescribed.cast_model_type is not torch.float16:
        return level.explanation
    batchnorm = " except BatchNorm" if kept else ", BatchNorm too"
    stepped = "float32 master weights" if masters else "the float16 weights, without masters"
    return f"The model in float16{batchnorm}; the optimizer steps {stepped}."


_NO_CASTS_OF_WEIGHTS = {
    "keep_batchnorm_fp32": "BatchNorm's weights and statistics stay float32.",
    "master_weights": "With autocast the model's weights are float32 and need no masters.",
}


def why_no_override(level: str, name: str) -> str | None:
    """Return the reason why an override of the field `name` has no meaning at a level; None if it has.

    >>> why_no_override("autocast-fp16", "master_weights")
    "With autocast the model's weights are float32 and need no masters."
    """
    if LEVELS[level].policy is not None:
        return _NO_CASTS_OF_WEIGHTS.get(name)
    return explain_override(level, name)
