"""Update the loss scale on the device: growth, backoff, hysteresis and bounds, without a sync.

    found_inf:  growth_tracker = 0;  hysteresis_tracker -= 1
                if hysteresis_tracker <= 0:  scale = max(floor, round(scale * backoff_factor))
    clean:      growth_tracker += 1
                if growth_tracker >= growth_interval:
                    grown = min(ceiling, round(scale * growth_factor))
                    scale = grown if it is finite;  growth_tracker = 0
                hysteresis_tracker = hysteresis

The product is computed in float64 and rounded to the scale's dtype. The schema and the PyTorch reference are here;
``update_scale.cpp`` and ``update_scale.cu`` hold the kernels. The rules that give the constants are in
`amplab.scalers`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from amplab.kernels import builder
from amplab.kernels.list_checks import check_present
from amplab.kernels.operators import define_operator

__all__ = ["update_scale_", "update_scale__reference"]

_SCHEMA = (
    "(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!)? hysteresis_tracker, Tensor found_inf, "
    "float growth_factor, float backoff_factor, int growth_interval, int hysteresis, float floor, float ceiling, "
    "bool divides=False, bool keeps_finite=True, bool refills_at_growth=False) -> ()"
)


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor | None,
    found_inf: Tensor,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
    floor: float = 0.0,
    ceiling: float = math.inf,
    *,
    divides: bool = False,
    keeps_finite: bool = True,
    refills_at_growth: bool = False,
) -> None:
    """Back off if ``found_inf`` is not 0, else count and grow; everything in place, all on one device.

    Without bounds and with ``hysteresis_tracker=None`` this is torch's update; with a tracker, apex's. (Both compare
    the count with ``==``: with a loaded count above the interval, the scale never grows there. Here it grows at the
    next clean step.)

    Args:
        scale: one element, float32 or float64; the loss scale.
        growth_tracker: one element, int32; clean steps since the scale last moved or overflowed.
        hysteresis_tracker: one element, int32; overflows still tolerated, plus one; None to back off at each.
        found_inf: one element, float32; 0.0 for finite gradients.
        growth_factor: multiplies the scale after ``growth_interval`` clean steps.
        backoff_factor: multiplies the scale at an overflow.
        growth_interval: clean steps before the scale grows, >= 1.
        hysteresis: the value to which the tracker is reset, >= 1.
        floor: backing off goes no lower; 0.0 for no floor.
        ceiling: growing goes no higher; inf for no ceiling.
        divides: divide by ``backoff_factor`` instead, as jmp does.
        keeps_finite: drop growth that is not finite.
        refills_at_growth: reset the tracker only if the scale would grow, as Megatron does, not at every clean step.

    Raises:
        RuntimeError: a tensor of another dtype, size or device; an interval or a hysteresis below 1.
        ValueError: a factor that is not finite and > 0, or a floor above the ceiling.

    Sync: none.

    Reference: ``torch._amp_update_scale_``; apex ``amp_C.update_scale_hysteresis``.

    >>> scale, clean_steps, patience = torch.tensor(1024.0), torch.tensor(0, dtype=torch.int32), torch.tensor(2).int()
    >>> for found_inf in (torch.ones(1), torch.ones(1), torch.zeros(1)):
    ...     update_scale_(scale, clean_steps, patience, found_inf, hysteresis=2)
    ...     scale.item(), clean_steps.item(), patience.item()
    (1024.0, 0, 1)
    (512.0, 0, 0)
    (512.0, 1, 2)
    """
    _check_numbers(growth_factor, backoff_factor, floor, ceiling)
    builder.settle()
    _UPDATE(
        scale,
        growth_tracker,
        hysteresis_tracker,
        found_inf,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        floor,
        ceiling,
        divides,
        keeps_finite,
        refills_at_growth,
    )


def update_scale__reference(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor | None,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    floor: float,
    ceiling: float,
    divides: bool = False,
    keeps_finite: bool = True,
    refills_at_growth: bool = False,
) -> None:
    """PyTorch reference of `update_scale_`; calls torch's own operator if that is the same rule. Sync: none."""
    _check_arguments(scale, growth_tracker, hysteresis_tracker, found_inf, growth_interval, hysteresis)
    named = {"scale": scale, "growth_tracker": growth_tracker, "hysteresis_tracker": hysteresis_tracker}
    given = {**named, "found_inf": found_inf}.items()
    check_present((name, tensor) for name, tensor in given if tensor is not None)
    plain = keeps_finite and not divides and floor == 0.0 and ceiling == math.inf and growth_interval < 2**31
    if plain and hysteresis_tracker is None and scale.dtype == torch.float32:
        growth_tracker.clamp_max_(growth_interval - 1)  # torch's operator never grows from above it
        torch._amp_update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)
        return
    bad = found_inf.reshape(scale.shape) != 0
    clean_steps = growth_tracker.reshape(scale.shape) + 1
    grows = (clean_steps >= growth_interval) & ~bad
    backs_off = bad
    if hysteresis_tracker is not None:
        hysteresis_tracker.sub_(bad.reshape(hysteresis_tracker.shape).int())
        backs_off = bad & (hysteresis_tracker.reshape(scale.shape) <= 0)
        refills = grows if refills_at_growth else ~bad
        hysteresis_tracker.masked_fill_(refills.reshape(hysteresis_tracker.shape), hysteresis)
    exact = scale.double()
    backed_off = exact / backoff_factor if divides else exact * backoff_factor
    backed_off = backed_off.to(scale.dtype).clamp_min_(floor)
    grown = (exact * growth_factor).to(scale.dtype).clamp_max_(ceiling)
    if keeps_finite:
        grown = torch.where(grown.isfinite(), grown, scale)
    scale.copy_(torch.where(backs_off, backed_off, torch.where(grows, grown, scale)))
    growth_tracker.copy_(clean_steps.masked_fill_(bad | grows, 0).reshape(growth_tracker.shape))


def _check_numbers(growth_factor: float, backoff_factor: float, floor: float, ceiling: float) -> None:
    """Raise for constants that would make the scale invalid, in both the kernel and the reference."""
    for name, factor in (("growth_factor", growth_factor), ("backoff_factor", backoff_factor)):
        if not 0.0 < factor < math.inf:
            raise ValueError(f"{name}={factor}: expected a finite number > 0, such as 2.0 to grow and 0.5 to back off.")
    if not floor <= ceiling:
        raise ValueError(f"floor={floor}, ceiling={ceiling}: expected floor <= ceiling; 0.0 and inf mean no bounds.")


def _check_arguments(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor | None,
    found_inf: Tensor,
    growth_interval: int,
    hysteresis: int,
) -> None:
    """Raise for what the kernels refuse, with the same messages."""
    if scale.numel() != 1 or scale.dtype not in (torch.float32, torch.float64):
        raise RuntimeError("scale: expected one float32 or float64 element, such as torch.tensor(65536.0).")
    if growth_tracker.numel() != 1 or growth_tracker.dtype != torch.int32:
        raise RuntimeError("growth_tracker: expected one int32 element, such as torch.zeros(1, dtype=torch.int32).")
    if hysteresis_tracker is not None and (hysteresis_tracker.numel() != 1 or hysteresis_tracker.dtype != torch.int32):
        raise RuntimeError("hysteresis_tracker: expected one int32 element, or None to back off at every overflow.")
    if found_inf.numel() != 1 or found_inf.dtype != torch.float32:
        raise RuntimeError("found_inf: expected one float32 element, such as torch.zeros(1).")
    for name, tensor in (
        ("growth_tracker", growth_tracker),
        ("hysteresis_tracker", hysteresis_tracker),
        ("found_inf", found_inf),
    ):
        if tensor is not None and tensor.device != scale.device:
            raise RuntimeError(f"{name} is on another device than scale: expected the same device for both.")
    if growth_interval < 1:
        raise RuntimeError(f"growth_interval={growth_interval}: expected at least one step.")
    if not 1 <= hysteresis < 2**31:
        raise RuntimeError(f"hysteresis={hysteresis}: expected 1, which backs off at every overflow, or more.")


def _fake(*arguments: Any) -> None:
    """Check the arguments; nothing is returned, so a fake tensor needs nothing else."""
    _check_arguments(*arguments[:4], *arguments[6:8])


_UPDATE = define_operator("update_scale_", _SCHEMA, update_scale__reference, _fake)
