"""The state of the random number generators of a training run, as plain values.

    {"torch": uint8 tensor, "cuda": [uint8 tensor of each device], "python": (3, (…), None), "numpy": {…}}

Only global generators are included. Save the states of other generators (``torch.Generator``,
``numpy.random.Generator``, ``random.Random``) in the ``extra`` of a run state.
"""

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["capture_rng", "restore_rng", "rng_problems"]

_NUMPY_GENERATOR = "MT19937"


def capture_rng() -> dict[str, Any]:
    """Return the state of the global generators of torch (CPU, and CUDA if it is initialized), random and numpy.

    Raises:
        ValueError: numpy's global generator is not its default kind.

    Sync: one for each CUDA device in use.
    """
    return {
        "torch": torch.get_rng_state(),
        # Reading the state would initialize CUDA. Before that no random number has been drawn.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": _numpy_state(),
    }


def rng_problems(saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reason why `restore_rng` could not load ``saved``, found with temporary generators."""
    try:
        torch.Generator().set_state(saved["torch"])
        random.Random().setstate(saved["python"])
        np.random.RandomState().set_state(_numpy_tuple(saved["numpy"]))
        sizes = [state.numel() for state in saved["cuda"]]
        fits = len(set(sizes)) < 2 and all(state.dtype == torch.uint8 for state in saved["cuda"])
        fits = fits and _is_normal(saved["python"][2]) and _is_normal(saved["numpy"]["gauss"])
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        yield f"the saved random states cannot be loaded ({reason}); expected those of capture_rng"
        return
    if not fits:
        yield (
            "the saved random states cannot be loaded; expected those of capture_rng: uint8 tensors of one size for "
            "all CUDA devices, and finite numbers that random and numpy keep for the next call"
        )


def _is_normal(kept: Any) -> bool:
    """Return whether a value is one that a generator keeps of a pair of normal numbers, or None."""
    return kept is None or (isinstance(kept, float) and math.isfinite(kept))


def restore_rng(saved: dict[str, Any]) -> None:
    """Restore the result of `capture_rng` in the global generators. States of missing CUDA devices are ignored.

    Sync: none.
    """
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    np.random.set_state(_numpy_tuple(saved["numpy"]))
    here = torch.cuda.device_count() if saved["cuda"] else 0
    for device, state in enumerate(saved["cuda"][:here]):
        torch.cuda.set_rng_state(state, device)


def _numpy_state() -> dict[str, Any]:
    """Return numpy's state. Its 624 words are in a tensor, since ``weights_only=True`` cannot load an array."""
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != _NUMPY_GENERATOR:
        raise ValueError(
            f"numpy.random uses {state['bit_generator']}: expected {_NUMPY_GENERATOR}, the default; restore it with "
            "numpy.random.set_bit_generator(numpy.random.MT19937())."
        )
    words = torch.from_numpy(state["state"]["key"].astype(np.int64))
    position, has_gauss, gauss = int(state["state"]["pos"]), int(state["has_gauss"]), float(state["gauss"])
    return {"words": words, "position": position, "has_gauss": has_gauss, "gauss": gauss}


def _numpy_tuple(saved: dict[str, Any]) -> tuple[str, np.ndarray, int, int, float]:
    """Return the arguments of numpy.random.set_state. Raises: ValueError, numbers that are out of numpy's range."""
    words, position = saved["words"].numpy(), saved["position"]
    in_range = words.dtype == np.int64 and words.size > 0 and words.min() >= 0 and words.max() < 2**32
    if not in_range or not 0 <= position <= words.size:
        raise ValueError(f"position {position!r}: expected it among the words, int64 numbers from 0 to 2^32 - 1")
    return _NUMPY_GENERATOR, words.astype(np.uint32), position, saved["has_gauss"], saved["gauss"]
