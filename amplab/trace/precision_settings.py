"""The precision of an X-rayed step: an opt_level, a policy, autocast, or what is already in force.

At the end of the block everything is undone, including changes to weights.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from amplab import amp
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies import CastingEngine, PrecisionPolicy, disable_casts, thread_engines
from amplab.trace.as_found import Undo
from amplab.trace.handed_step import ModelGroup
from amplab.trace.untouched import untouched

__all__ = ["PrecisionSetting", "precision_setting"]

_REGION = ("device_type", "dtype", "enabled", "cache_enabled", "policy")


@dataclass(frozen=True)
class PrecisionSetting:
    """A precision that a step can run in.

    Attributes:
        name: a description, e.g. `O1`.
        casting: makes the context for forward and backward.
        around_loss: makes the context for forward and loss only, as for autocast.
        loss_scale: the loss scale that belongs to it.
    """

    name: str
    casting: Callable[[], AbstractContextManager[object]]
    around_loss: Callable[[], AbstractContextManager[object]]
    loss_scale: float


@contextmanager
def precision_setting(
    model: nn.Module, *, opt_level: str | None, policy: PrecisionPolicy | str | None, autocast: Any
) -> Iterator[PrecisionSetting]:
    """Put `model` into the requested precision for the length of the block.

    Args:
        model: in float32 and not initialized if `opt_level` or `policy` is given.
        opt_level, policy, autocast: see `xray`.

    Raises:
        ValueError: for contradicting arguments, or if a precision is already in force.
        TypeError: for an argument of another type.
    """
    if autocast is not None and (opt_level is not None or policy is not None):
        raise ValueError(
            "got autocast= and also opt_level= or policy=: expected one of them; to use a policy under autocast, pass "
            "autocast=dict(policy=...)."
        )
    if autocast is not None:
        yield _under_autocast(model, autocast)
    elif opt_level is None and policy is None:
        yield _as_it_is(model)
    else:
        _refuse_what_is_in_force()
        with _initialized(model, opt_level, _parsed(policy)) as setting:
            yield setting


def _as_it_is(model: nn.Module) -> PrecisionSetting:
    session = amp.default_session()
    if session.opt_level is not None and (session.engine in thread_engines() or _has_low_precision_weights(model)):
        return PrecisionSetting(f"{session.opt_level}, as initialized", nullcontext, nullcontext, session.loss_scale())
    return PrecisionSetting(" ".join(["as it is", *_regions_in_force(model)]), nullcontext, nullcontext, 1.0)


def _regions_in_force(model: nn.Module) -> Iterator[str]:
    """Describe the casts in force around the call."""
    engines = [engine for engine in thread_engines() if isinstance(engine, CastingEngine)]
    device = _device_type(model)
    if engines:
        yield f"under casts in force, {engines[-1].policy}"
    elif device != "meta" and torch.is_autocast_enabled(device):
        dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        yield f"under torch.autocast in force, {dtype} on {device}"


def _has_low_precision_weights(model: nn.Module) -> bool:
    return any(parameter.dtype in LOW_PRECISION_DTYPES for parameter in model.parameters())


def _under_autocast(model: nn.Module, settings: Any) -> PrecisionSetting:
    if isinstance(settings, torch.autocast | amp.autocast):
        return PrecisionSetting(_words(settings), nullcontext, lambda: settings, 1.0)
    if not isinstance(settings, Mapping):
        raise TypeError(
            f"autocast={settings!r}: expected the arguments of torch.autocast as a dict, such as "
            "dict(dtype=torch.float16), or an instance of torch.autocast or amplab.autocast."
        )
    region = _region({"device_type": _device_type(model), **settings})
    return PrecisionSetting(_words(region), nullcontext, lambda: region, 1.0)


def _region(settings: dict[str, Any]) -> torch.autocast | amp.autocast:
    unknown = [name for name in settings if name not in _REGION]
    if unknown:
        raise TypeError(f"autocast=dict({unknown[0]}=...): expected only {', '.join(_REGION)}.")
    dtype = settings.get("dtype")
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"autocast=dict(dtype={dtype!r}): expected a torch.dtype, such as torch.bfloat16.")
    if "policy" in settings:
        return amp.autocast(**settings)
    try:
        return torch.autocast(**settings)
    except RuntimeError as refusal:
        device = settings["device_type"]
        raise ValueError(
            f"autocast=dict(device_type={device!r}): expected a device that torch.autocast supports, such as 'cpu'; "
            f"torch reports: {str(refusal).splitlines()[0]}"
        ) from refusal


def _words(region: torch.autocast | amp.autocast) -> str:
    if isinstance(region, amp.autocast):
        return f"amplab.autocast, {region.policy}"
    if not region._enabled:  # torch disables it for a dtype or a device that it does not support
        return "torch.autocast, disabled"
    return f"torch.autocast, {str(region.fast_dtype).removeprefix('torch.')} on {region.device}"


def _device_type(model: nn.Module) -> str:
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def _parsed(policy: Any) -> PrecisionPolicy | None:
    if policy is None or isinstance(policy, PrecisionPolicy):
        return policy
    if isinstance(policy, str):
        return PrecisionPolicy.parse(policy)
    raise TypeError(f"policy={policy!r}: expected a PrecisionPolicy or its string form, e.g. 'apex/float16'.")


def _refuse_what_is_in_force() -> None:
    if thread_engines() or torch._C._is_any_autocast_enabled():
        raise ValueError(
            "opt_level or policy while casts are already in force: expected a model that is not initialized, and no "
            "autocast around the call; omit both to run the model in the precision in force, or call amp.reset() first."
        )


def _models(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that a session can initialize: those of a group, without parallel wrappers."""
    for each in model.children() if isinstance(model, ModelGroup) else (model,):
        yield each.module if isinstance(each, nn.DataParallel | nn.parallel.DistributedDataParallel) else each


@contextmanager
def _initialized(model: nn.Module, opt_level: str | None, policy: PrecisionPolicy | None) -> Iterator[PrecisionSetting]:
    level = "O1" if opt_level is None else opt_level
    session = amp.Session()
    # session.reset alone would leave weights rounded to 16 bits
    with untouched(model) if level in ("O2", "O3") else nullcontext(), Undo() as undo:
        undo.add(session.reset)
        session.initialize(list(_models(model)), opt_level=level, verbosity=0, policy=policy)
        name = " with ".join(filter(None, (opt_level, f"the policy {policy}" if policy is not None else "")))
        if level == "O0" and policy is None:
            yield PrecisionSetting(name, disable_casts, nullcontext, session.loss_scale())
        else:
            half = policy is None or policy.tensor_dtype is torch.float16
            yield PrecisionSetting(name, session.casting, nullcontext, session.loss_scale() if half else 1.0)
