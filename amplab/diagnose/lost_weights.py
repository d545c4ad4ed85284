"""Why weights hold inf or NaN, by what lets a bad step go, and what to do about it."""

from __future__ import annotations

from amplab.diagnose.faces import smaller_rate
from amplab.diagnose.first_nonfinite import FirstNonfinite
from amplab.diagnose.remedies import dynamic_scale

__all__ = ["how_weights_were_lost"]

_UNCHECKED = ": without a dynamic scale nothing holds back a step whose gradients are not finite."


def how_weights_were_lost(found: FirstNonfinite, level: str | None) -> tuple[str, str]:
    """Cause and remedy of inf in the weights: a scale that skips mends that of half, and of nothing else."""
    wrote = "An earlier step wrote it into the weights"
    if found.setting.dynamic:
        cause = f"{wrote}: the scaler looks at gradients, so it was the update itself, or a step past the scaler."
        return cause, f"{smaller_rate(found.setting.face, None)}\n# step through the scaler, never beside it"
    if any(value.statistics.is_half for value in found.step.values):
        return f"{wrote}{_UNCHECKED}", f"{dynamic_scale(level)}\n# and load the last good checkpoint"
    cause = f"{wrote}. No half is in this step, so no scale mends it: it is the data, the rate, or the slope of an op."
    return cause, _STOP_AT_THE_FIRST


_STOP_AT_THE_FIRST = (
    "# from the last good checkpoint; between backward and step, to stop at the first bad batch:\n"
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)\n"
    "# and with that batch: print(amplab.first_nonfinite(model, step=loss_of))"
)
