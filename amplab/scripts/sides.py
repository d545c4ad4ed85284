"""Which side a tensor is on while CUDA calls run on the CPU: the host's, or that of the GPU that it stands for.

    storage.amplab_side = "cuda" or "cpu"     a mark that views, ``detach()``, ``.data`` and Parameters share
    tensor.device is STANDS_FOR[side]         devices equal to torch.device("cpu"), one for each side

A move to the other side copies, as CUDA does; a move to the same side returns the tensor itself. The
mark exists as long as the memory does. Ops are not observed, so their results have no mark: `side_of` then searches the
autograd graph for a marked leaf or a move. A result outside every graph has no known side, and each move copies it.

`cuda_on_cpu` puts these functions in place.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amplab.policies.casting.function_modes import without_function_modes

__all__ = [
    "CPU", "CUDA", "HOST", "PINNED", "STANDS_FOR", "copied", "device_of", "is_marked", "mark", "mark_storage", "moved",
    "side_of", "side_of_device", "side_of_storage",
]  # fmt: skip

CUDA, HOST = "cuda", "cpu"
CPU = torch.device("cpu")
STANDS_FOR = {CUDA: torch.device("cpu"), HOST: torch.device("cpu"), None: torch.device("cpu")}
"""The devices that ``tensor.device`` returns: equal, but ``other.to(tensor.device)`` recognizes the object."""
MARK = "amplab_side"  # an attribute of torch's storages: only they exist exactly as long as the memory
PINNED = "amplab_pinned"
SEARCHED = 1000  # nodes of the autograd graph

_storage_of = torch._C.TensorBase.untyped_storage
_own_to = torch._C.TensorBase.to


def side_of(tensor: Tensor) -> str | None:
    """Return the side of ``tensor``: `CUDA`, `HOST`, or None if it is unknown. Sync: none."""
    memory = _memory(tensor)
    side: str | None = getattr(memory, MARK, None)
    if side is None and tensor.grad_fn is not None:
        side = _side_in_graph(tensor.grad_fn)
        if side is not None:
            setattr(memory, MARK, side)
    return side


def is_marked(tensor: Tensor, name: str = MARK) -> bool:
    """Return whether the memory of ``tensor`` has the mark ``name``."""
    return hasattr(_memory(tensor), name)


def mark(tensor: Any, side: str | None, name: str = MARK) -> Any:
    """Note the side of ``tensor``, unless it has one or ``side`` is None; return ``tensor``."""
    if side is not None and isinstance(tensor, Tensor) and not torch.compiler.is_compiling():
        mark_storage(_memory(tensor), side, name)
    return tensor


def mark_storage(storage: Any, side: str | None, name: str = MARK) -> Any:
    """Note the side of ``storage``, unless it has one or ``side`` is None; return ``storage``."""
    if side is not None and getattr(storage, name, None) is None:
        setattr(storage, name, side)
    return storage


def moved(tensor: Tensor, side: str | None, **kwargs: Any) -> Tensor:
    """Do ``tensor.to(device, **kwargs)``, with a copy if ``tensor`` is not known to be on ``side``.

    The copy has the strides of ``tensor`` if it is dense, as after a copy between devices, else it is contiguous.

    Args:
        tensor: of any layout.
        side: where to; None for one that is unknown: then only a tensor that is known to be the host's is copied.
        kwargs: arguments of ``Tensor.to``.

    Sync: none.
    """
    before = side_of(tensor)
    stays = before == side if side is not None else before != HOST
    # Under a torch function mode this calls the replacement of Tensor.to again, which recognizes the device.
    kwargs = {**kwargs, "device": STANDS_FOR[side]} | ({} if stays else {"copy": True})
    result: Tensor = _own_to(tensor, **kwargs)
    if result is not tensor:
        mark(result, side)
        if result.grad_fn is not None and side is not None:
            result.grad_fn.metadata[MARK] = side  # type: ignore[index]  # torch declares a method
    return result


def copied(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``copy``, a function of a tensor that may return another one, which is then on the side of the first."""

    def copy_here(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = copy(tensor, *args, **kwargs)
        if result is not tensor and isinstance(tensor, Tensor):
            mark(result, getattr(_memory(tensor), MARK, None))
        return result

    return copy_here


def device_of(tensor: Tensor, device: torch.device) -> torch.device:
    """Return ``device``, the device of ``tensor``, as an object that also tells its side."""
    return STANDS_FOR[side_of(tensor)] if device == CPU else device


def side_of_device(value: Any) -> str | None:
    """Return the side that a device names, such as "cuda:1", 1 or ``tensor.device``; None if it is unknown."""
    if isinstance(value, torch.device):
        for side, device in STANDS_FOR.items():
            if value is device:
                return side
        value = value.type
    if isinstance(value, str):
        kind = value.partition(":")[0]
        return kind if kind in (CUDA, HOST) else None
    return CUDA if isinstance(value, int) and not isinstance(value, bool) else None


def side_of_storage(storage: Any) -> str | None:
    """Return the side of a storage, or None if it is unknown."""
    return getattr(getattr(storage, "_untyped_storage", storage), MARK, None)


def _memory(tensor: Tensor) -> Any:
    """Return what the mark of ``tensor`` is on: its storage or, for layouts without one, the tensor itself."""
    try:
        if torch._C._is_torch_function_mode_enabled():
            with without_function_modes():
                return _storage_of(tensor)
        return _storage_of(tensor)
    except (NotImplementedError, RuntimeError):  # sparse, nested, wrapped by functorch
        return tensor


def _side_in_graph(node: Any) -> str | None:
    """Return the side of the nearest leaf or move that the result of ``node`` was computed from."""
    waiting, seen = deque([node]), {node}
    while waiting and len(seen) < SEARCHED:
        node = waiting.popleft()
        kind = type(node).__name__
        side = None
        if kind == "AccumulateGrad":
            side = getattr(_memory(node.variable), MARK, None)
        elif kind == "ToCopyBackward0":
            side = node.metadata.get(MARK)
        if side is not None:
            return side  # type: ignore[no-any-return]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return None
