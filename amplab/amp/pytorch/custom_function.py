"""custom_fwd and custom_bwd: decorators that choose the precision of an autograd function under autocast.

    class Product(torch.autograd.Function):
        @staticmethod
        @amplab.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, a, b): ...

        @staticmethod
        @amplab.custom_bwd(device_type="cuda")
        def backward(ctx, grad): ...

Both support the autocast of amplab and that of torch: under either they act as torch's decorators do under torch's.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amplab.amp.pytorch.autocast import autocast, is_autocast_enabled, named_by_a_string
from amplab.policies import CastingState, casting_state

__all__ = ["custom_bwd", "custom_fwd"]


def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable[..., Any]:
    """Decorate the ``forward`` of a `torch.autograd.Function`.

    Under autocast, ``cast_inputs`` casts its floating-point tensors to that dtype and disables autocast in its body.
    Without ``cast_inputs`` the body runs under autocast. Outside autocast the decorator has no effect.

    Args:
        fwd: ``forward``; None if the decorator is called with keywords only.
        device_type: "cuda", "cpu", …: only tensors on such a device are cast.
        cast_inputs: a floating-point dtype, for tensors in args, kwargs and containers in them. float64 is not cast.

    Raises:
        ValueError: device_type is not a string.

    Sync: none.

    Reference: torch.amp.custom_fwd
    """
    named_by_a_string(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    forward = torch.amp.custom_fwd(fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward_here(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if cast_inputs is None or not is_autocast_enabled(device_type):
            ctx.amplab_casting = _without(device_type) if cast_inputs is not None else casting_state()
            return forward(ctx, *args, **kwargs)
        args, kwargs = _cast(args, device_type, cast_inputs), _cast(kwargs, device_type, cast_inputs)
        with autocast(device_type, enabled=False):
            ctx.amplab_casting = casting_state()
            return forward(ctx, *args, **kwargs)

    return forward_here


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str) -> Callable[..., Any]:
    """Decorate the ``backward`` of a `torch.autograd.Function`: it casts as its ``forward`` did.

    Args:
        bwd: ``backward``; None if the decorator is called with keywords only.
        device_type: as for `custom_fwd`.

    Raises:
        ValueError: device_type is not a string.
        AttributeError: ``forward`` was not decorated.

    Sync: none.

    Reference: torch.amp.custom_bwd
    """
    named_by_a_string(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    backward = torch.amp.custom_bwd(bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward_here(ctx: Any, *grads: Any) -> Any:
        casting: CastingState | None = getattr(ctx, "amplab_casting", None)
        if casting is None:
            raise AttributeError(
                f"{bwd.__qualname__} is decorated with custom_bwd, but its forward is not decorated with amplab's "
                f"custom_fwd: add @amplab.custom_fwd(device_type={device_type!r}) between @staticmethod and forward."
            )
        with casting.active():
            return backward(ctx, *grads)

    return backward_here


def _without(device_type: str) -> CastingState:
    """Return the casting state of this thread without casts on ``device_type``."""
    with autocast(device_type, enabled=False):
        return casting_state()


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    # Not cast_tree: torch's decorator also casts the keys of mappings, and turns other iterables into iterators.
    if isinstance(value, Tensor):
        eligible = value.is_floating_point() and value.device.type == device_type and value.dtype is not torch.float64
        return value.to(dtype) if eligible else value
    if isinstance(value, (str, bytes, np.ndarray)) or not isinstance(value, Iterable):
        return value
    if isinstance(value, Mapping):
        return {_cast(key, device_type, dtype): _cast(item, device_type, dtype) for key, item in value.items()}
    cast = (_cast(item, device_type, dtype) for item in value)
    if isinstance(value, tuple) and type(value) is not tuple:
        return type(value)(*cast)  # a namedtuple
    return type(value)(cast) if isinstance(value, (list, tuple)) else cast
