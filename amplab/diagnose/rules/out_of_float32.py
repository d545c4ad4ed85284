"""Why a value left float32, and what mends it: no scale and no format does, so it is the weights, the batch or the op.

nothing to compute    a mean over no elements
large weights         earlier steps have made them so: the learning rate
a large batch         numbers that nobody has brought to a common size
the op                exp of 89 is larger than any number of float32
"""

from __future__ import annotations

from amplab.diagnose.first_nonfinite import FirstNonfinite
from amplab.diagnose.observed_step.dataflow import short_name
from amplab.diagnose.observed_step.tensor_summary import TensorSummary

__all__ = ["why_out_of_float32"]

LARGE = 1e3
"""Weights from which on earlier steps are to blame, and a batch that was not normalized: both are about 1 as a rule."""

_LIMITS = {"exp": 88.72, "expm1": 88.72, "exp2": 128.0, "sinh": 89.42, "cosh": 89.42}
_POWERS = ("pow", "square", "mul", "prod", "cumprod")
_SMALLER_RATE = "for group in optimizer.param_groups: group['lr'] /= 10  # from the last good checkpoint, and clip"


def why_out_of_float32(found: FirstNonfinite) -> tuple[str, str]:
    """Return cause and remedy, one or two sentences and code, for a value that float32 does not hold either."""
    op, name = found.record.op, short_name(found.record)
    if found.output.nans and not found.output.infs:
        cause = f"{op} is not defined for what it read, such as a mean over no elements; no range was left."
        return cause, "value = x.mean() if x.numel() else x.sum()  # where a selection may be empty"
    weights, batch = _largest(found, "parameter"), _largest(found, "batch")
    if weights > LARGE:
        cause = f"Neither the scale nor the format does it: weights have grown to {weights:.4g} in the steps before."
        return cause, _SMALLER_RATE
    if name in _LIMITS and found.phase == "forward":
        return _exponential(found, _LIMITS[name], weights)
    if batch > LARGE:
        cause = f"Neither the scale nor the format does it: the batch holds numbers up to {batch:.4g}."
        return cause, "x = (x - x.mean(0)) / x.std(0).clamp_min(1e-5)  # of the training data, once, in the loader"
    if name in _POWERS and found.phase == "forward":
        cause = f"{op} leaves float32, which ends at 3.4e+38; the weights are in order, up to {weights:.4g}."
        return cause, f"y = {op}(x.clamp(-1e6, 1e6))  # or divide by the largest first: x / x.abs().amax()"
    cause = "Neither the scale nor the format does it: the values themselves have grown out of range."
    return cause, _SMALLER_RATE


def _exponential(found: FirstNonfinite, limit: float, weights: float) -> tuple[str, str]:
    op = found.record.op
    cause = (
        f"{op} of more than {limit:g} is larger than 3.4e+38, float32's last number: no format and no scale mends it."
    )
    cause += f" The weights are in order, up to {weights:.4g}." if weights else ""
    later = [short_name(record) for record in found.chain[1:]]
    if "log1p" in later:
        return cause, "y = F.softplus(x)  # log(1 + exp(x)), without forming exp(x)"
    if "log" in later:
        return cause, "y = torch.logsumexp(x, dim=-1)  # F.softplus(x) for log(1 + exp(x)): neither forms exp(x)"
    if "div" in later and op == "exp":
        return cause, "y = torch.softmax(x, dim=-1)  # or torch.exp(x - x.amax(-1, keepdim=True)): a ratio is the same"
    return (
        cause,
        f"y = {op}(x.clamp(max={limit * 0.9:.0f}))  # torch.exp(x - x.amax(-1, keepdim=True)) where a ratio follows",
    )


def _largest(found: FirstNonfinite, kind: str) -> float:
    return max((_size(value.summary) for value in found.step.values if value.kind == kind), default=0.0)


def _size(statistics: TensorSummary) -> float:
    return statistics.absmax if statistics.is_finite else 0.0
