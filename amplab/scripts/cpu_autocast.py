"""``torch.autocast("cuda")`` on CPU tensors: torch keeps its flags, and `amplab.autocast` casts with the lists of CUDA.

torch's autocast for CUDA ignores CPU tensors, so that nothing is cast twice, and ``is_autocast_enabled()``, nested
regions and checkpoint's recomputation read torch's own flags. (Its autocast for the CPU has other lists, and its half
kernels are many times slower than float32 on most CPUs.) A region that is created inside a compiled function is torch's
for the CPU: torch.compile enters it itself.
"""

import functools
from typing import Any

import torch
import torch.utils.checkpoint

from amplab.amp.pytorch.autocast import autocast, is_autocast_enabled
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies import TORCH_CUDA, PrecisionPolicy
from amplab.scripts.redirection import Redirection

__all__ = ["redirect_autocast"]

REGION, ENTERED = "amplab_region", "amplab_entered"  # in the __dict__ of torch's instance


def redirect_autocast(redirection: Redirection) -> None:
    """Make regions of torch's autocast for CUDA cast CPU tensors, and ``custom_fwd`` cast its inputs."""
    owner = torch.autocast
    own_init, own_enter, own_exit = owner.__init__, owner.__enter__, owner.__exit__

    @functools.wraps(own_init)
    def init(self: torch.autocast, *args: Any, **kwargs: Any) -> None:
        if torch._guards.TracingContext.try_get() is not None:
            own_init(self, **_traced(args, kwargs, redirection))
            return
        own_init(self, *args, **kwargs)
        if self.device == "cuda":
            redirection.tell("autocast for cuda is amplab.autocast on the CPU, with the lists of CUDA")
            vars(self)[REGION] = _region(self.fast_dtype, enabled=self._enabled, cache_enabled=self._cache_enabled)

    @functools.wraps(own_enter)
    def __enter__(self: torch.autocast) -> Any:  # its name tells `policies.casting.torch_regions` what enters
        region = vars(self).get(REGION)
        if region is None:
            return own_enter(self)  # type: ignore[no-untyped-call]
        # A disabled region ends the casts of a region around it, not those of amp.initialize, which CUDA would keep.
        casts = region.enabled or torch.is_autocast_enabled("cuda")
        own_enter(self)  # type: ignore[no-untyped-call]
        vars(self).setdefault(ENTERED, []).append(casts)
        if casts:
            region.__enter__()
        return self

    @functools.wraps(own_exit)
    def leave(self: torch.autocast, *error: Any) -> Any:
        try:
            if vars(self).get(ENTERED) and vars(self)[ENTERED].pop():
                vars(self)[REGION].__exit__(*error)
        finally:
            result = own_exit(self, *error)
        return result

    redirection.replace(owner, "__init__", init)
    redirection.replace(owner, "__enter__", __enter__)
    redirection.replace(owner, "__exit__", leave)
    redirection.adapt(autocast, "__init__", _on_cpu)
    # When checkpoint recomputes CPU tensors, it restores the autocast of this device.
    redirection.replace(torch.utils.checkpoint.DefaultDeviceType, "_default_device_type", "cuda")
    own_cast = torch.amp.autocast_mode._cast
    redirection.replace(
        torch.amp.autocast_mode,
        "_cast",
        lambda value, device_type, dtype: own_cast(value, "cpu" if device_type == "cuda" else device_type, dtype),
    )


def _traced(args: tuple[Any, ...], kwargs: dict[str, Any], redirection: Redirection) -> dict[str, Any]:
    """Return the arguments of torch's autocast for the CPU: dynamo enters regions itself, and can enter no others."""
    named = _named(args, kwargs)
    if named.get("device_type") == "cuda":
        redirection.tell("autocast for cuda in a compiled function is torch's autocast for the CPU, with other lists")
        named |= {"device_type": "cpu", "dtype": named.get("dtype") or torch.get_autocast_dtype("cuda")}
    return named


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(("device_type", "dtype", "enabled", "cache_enabled"), args, strict=False)) | kwargs


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `amplab.autocast` for the CPU if they are for CUDA, whose default dtype is another."""
    named = _named(args[1:], kwargs)
    if named.get("device_type") != "cuda":
        return args, kwargs
    if named.get("dtype") is None and named.get("policy") is None and not is_autocast_enabled("cpu"):
        named["dtype"] = torch.get_autocast_dtype("cuda")
    return args[:1], {**named, "device_type": "cpu"}


def _region(dtype: torch.dtype, *, enabled: bool, cache_enabled: bool) -> autocast:
    casts = enabled and dtype in LOW_PRECISION_DTYPES
    policy = _policy(dtype if casts else torch.float16)
    return autocast("cpu", enabled=casts, cache_enabled=cache_enabled, policy=policy)


@functools.cache
def _policy(dtype: torch.dtype) -> PrecisionPolicy:
    """Return the lists of CUDA with ``dtype``: one object for each dtype, since engines are looked up by identity."""
    return PrecisionPolicy(table=TORCH_CUDA, compute_dtype=dtype)
