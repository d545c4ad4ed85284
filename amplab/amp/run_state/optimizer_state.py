"""`load_optimizer`: load a saved optimizer without the rounding of torch.

`torch.optim.Optimizer.load_state_dict` casts all state but ``step`` to the dtype of its parameter. For parameters in 16
bits that rounds what the optimizer keeps in float32, such as the product of NAdam's momenta or the averages of ASGD.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.run_state.optimizer_checks import param_dtypes, state_dtypes
from amplab.scalers import is_sharded

__all__ = ["load_optimizer"]

_DtypeOf = Callable[[str, Tensor, Tensor], torch.dtype]


def load_optimizer(optimizer: Optimizer, entry: Mapping[str, Any]) -> None:
    """Load an `optimizer_entry`: the bits of the file, in the dtypes of the file.

    Where the parameters had other dtypes, as at another opt_level, or the file does not say which, state has the dtype
    that the optimizer makes for the parameter of now. Of a class that cannot tell, state of the parameter's shape has
    the parameter's dtype. Sync: one for each tensor that torch has rounded.
    """
    state = entry["state"]
    optimizer.load_state_dict(state)
    is_alike = entry.get("class") == type(optimizer).__name__ and entry.get("dtypes") == param_dtypes(optimizer)
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for number, param in zip(saved["params"], group["params"], strict=False):  # a hook may have loaded others
            now, exact = optimizer.state.get(param), state["state"].get(number)
            if isinstance(now, dict) and isinstance(exact, Mapping) and _differs(now, exact):
                dtype_of = _dtype_in_file if is_alike else _dtype_for(optimizer, param, saved)
                now.update({name: _restored(name, now[name], exact.get(name), param, dtype_of) for name in now})


def _differs(now: Any, exact: Any) -> bool:
    """Whether a tensor in a structure has another dtype than in the file."""
    if isinstance(now, Tensor):
        return isinstance(exact, Tensor) and now.dtype != exact.dtype
    if isinstance(now, dict):
        return isinstance(exact, Mapping) and any(_differs(value, exact.get(name)) for name, value in now.items())
    alike = type(now) in (list, tuple) and type(exact) is type(now)
    return alike and any(map(_differs, now, exact))


def _dtype_in_file(_name: str, exact: Tensor, _now: Tensor) -> torch.dtype:
    return exact.dtype


def _dtype_for(optimizer: Optimizer, param: Tensor, saved: Mapping[str, Any]) -> _DtypeOf:
    """Return what tells the dtype of the state of a parameter whose dtype was another, or is unknown."""
    made = state_dtypes(optimizer, param, {name: value for name, value in saved.items() if name != "params"})

    def dtype_of(name: str, exact: Tensor, now: Tensor) -> torch.dtype:
        if made is not None:
            return made.get(name, now.dtype)
        return now.dtype if exact.shape == param.shape else exact.dtype

    return dtype_of


def _restored(name: str, now: Any, exact: Any, param: Tensor, dtype_of: _DtypeOf) -> Any:
    """Return a value of the state with the tensors that torch has rounded as in the file."""
    if isinstance(now, Tensor):
        if not (isinstance(exact, Tensor) and now.dtype == param.dtype != exact.dtype):
            return now
        dtype = dtype_of(name, exact, now)
        return exact.to(now.device, dtype, copy=True) if dtype != now.dtype and _is_rounded(now, exact) else now
    if isinstance(now, dict) and isinstance(exact, Mapping):
        return {key: _restored(name, value, exact.get(key), param, dtype_of) for key, value in now.items()}
    if type(now) in (list, tuple) and type(exact) is type(now) and len(now) == len(exact):
        return type(now)(_restored(name, *pair, param, dtype_of) for pair in zip(now, exact, strict=True))
    return now


def _is_rounded(now: Tensor, exact: Tensor) -> bool:
    """Whether a tensor is another one in its dtype; a hook may have loaded something else. Sync: one."""
    if is_sharded(now) or is_sharded(exact) or now.shape != exact.shape:
        return False
    return torch.equal(now.nan_to_num(), exact.to(now.device, now.dtype).nan_to_num())
