"""What a policy can ask of one op: the eight kinds of cast, in the field's words.

Which op has which kind is data, in the tables; how a kind is carried out is in `casting_steps`.
"""

from __future__ import annotations

import enum

__all__ = ["CastPolicy"]


class CastPolicy(enum.Enum):
    """How the floating tensors among an op's arguments are cast before the op runs.

    float64 is never narrowed by any of them: an op that gets a float64 tensor runs as it would
    in the float32 model (its 16-bit arguments become float32, the rest is torch's own rule).
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Every float32 and 16-bit argument is cast to the policy's compute dtype."""

    FP32 = "fp32"
    """Every 16-bit argument is cast to float32."""

    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """The arguments stay; the op is told `dtype=torch.float32` unless the caller chose a dtype."""

    PROMOTE = "promote"
    """Where floating dtypes differ, every argument is cast to the widest of them."""

    SEQUENCE_PROMOTE = "sequence_promote"
    """As PROMOTE, over the elements of a list or tuple argument."""

    MATCH_SELF = "match_self"
    """An in-place op: the other arguments are cast to the dtype of the tensor written to."""

    BANNED = "banned"
    """The op refuses 16-bit arguments with an error that says what to do instead."""

    FALL_THROUGH = "fall_through"
    """The op runs in the dtype it gets; ops inside it follow their own rows."""
