"""What may be asked of `autocast`: the checks of its arguments, with torch's exceptions and warnings.

What cannot be meant raises. What torch turns off with a warning (a floating dtype that no device casts to, CUDA
where there is none) is turned off with a warning here, too.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from amplab.formats import LOW_PRECISION_DTYPES

__all__ = ["checked_device_type", "checked_dtype", "enabled_here", "named_by_a_string", "refuse_uncallable"]

_MODULES_THAT_KNOW = ("cuda", "xpu", "mtia")


def named_by_a_string(device_type: Any) -> str:
    """Return ``device_type``, which is to be a string.

    Raises:
        ValueError: it is no string, such as a `torch.device`.
    """
    if not isinstance(device_type, str):
        raise ValueError(  # the type that torch raises here
            f"Expected `device_type` of type `str`, got: `{type(device_type)}`; "
            "pass the type of a device, such as 'cuda' or 'cpu' (tensor.device.type)."
        )
    return device_type


def checked_device_type(device_type: Any) -> str:
    """Return ``device_type``, without an index, if torch has autocast for such devices.

    Raises:
        ValueError: it is no string.
        RuntimeError: there is no such device, or no autocast for it.
    """
    try:
        available = torch.amp.is_autocast_available(named_by_a_string(device_type))
    except RuntimeError:
        available = False
    if not available:
        raise RuntimeError(
            f"User specified an unsupported autocast device_type '{device_type}': expected the type of a device that "
            "has autocast, such as 'cuda', 'cpu', 'xpu' or 'mps'; pass tensor.device.type of the tensors to cast."
        )
    return torch.device(device_type).type


def checked_dtype(dtype: Any) -> torch.dtype:
    """Return ``dtype`` if it is a floating one.

    Raises:
        TypeError: no dtype.
        ValueError: a dtype of integers, booleans or complex numbers.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r}: expected a torch.dtype; pass torch.bfloat16 or torch.float16.")
    if not dtype.is_floating_point:
        raise ValueError(
            f"dtype={dtype}: expected a floating dtype; pass torch.bfloat16 or torch.float16, or leave it out."
        )
    return dtype


def enabled_here(device_type: str, dtype: torch.dtype, stacklevel: int) -> bool:
    """Whether casts to ``dtype`` are possible on ``device_type``; a UserWarning says why not.

    Args:
        device_type: the type of a device that has autocast.
        dtype: a floating dtype.
        stacklevel: whose line the warning names, as in `warnings.warn` called from here.

    Raises:
        RuntimeError: bfloat16 on a CUDA device that has none.
    """
    if not _is_there(device_type):
        name = device_type.upper()
        _turned_off(
            f"autocast({device_type!r}): {name} is not available. Disabling autocast. "
            "Pass the type of the device that your tensors are on, e.g. device_type='cpu'.",
            stacklevel,
        )
        return False
    if device_type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise RuntimeError("Current CUDA Device does not support bfloat16. Please switch dtype to float16.")
    if dtype in LOW_PRECISION_DTYPES or (device_type == "cuda" and dtype is torch.float32):
        return True
    _turned_off(
        f"In {device_type.upper()} autocast, but the target dtype is not supported: {dtype}. Disabling autocast.\n"
        f"{device_type.upper()} Autocast only supports dtypes of torch.bfloat16, torch.float16 currently; pass one "
        "of these, or enabled=False.",
        stacklevel,
    )
    return False


def refuse_uncallable(func: Any) -> None:
    """Raise what `torch.autocast` raises where it is to decorate something else than a callable.

    Raises:
        TypeError: ``func`` cannot be called.
    """
    if not callable(func):
        raise TypeError(
            f"autocast()(func) requires a callable, but got {type(func).__name__}. Did you mean to use autocast as a "
            "context manager? For example:\n    with amplab.autocast(device_type=...):\n        output = model(input)"
        )


def _is_there(device_type: str) -> bool:
    if device_type in _MODULES_THAT_KNOW:
        available: Callable[[], bool] = torch.get_device_module(device_type).is_available
        return available()
    if device_type == "mps":
        return torch.backends.mps.is_available()
    return True  # cpu; and devices whose presence only their own package can tell


def _turned_off(message: str, stacklevel: int) -> None:
    warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
