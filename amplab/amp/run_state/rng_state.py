"""The state of the random number generators of a training run, as plain values.

    {"torch": uint8 tensor, "cuda": [uint8 tensor of each device], "python": (3, (…), None), "numpy": {…}}

Only global generators are included. Save the states of other generators (``torch.Generator``,
``numpy.random.Generator``, ``random.Random``) in the ``extra`` of a run state.
"""

import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture_rng", "checked_rng", "restore_rng"]

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


def checked_rng(saved: dict[str, Any]) -> dict[str, Any]:
    """Return ``saved`` if `restore_rng` can load it, checked with temporary generators.

    Raises:
        ValueError: not a result of `capture_rng`.
    """
    try:
        torch.Generator().set_state(saved["torch"])
        random.Random().setstate(saved["python"])
        np.random.RandomState().set_state(_numpy_tuple(saved["numpy"]))
        sizes = [state.numel() for state in saved["cuda"]]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the saved random states cannot be loaded ({reason}); expected those of capture_rng"
        ) from None
    if len(set(sizes)) > 1:
        raise ValueError(f"the saved random states of the CUDA devices have {sizes} bytes; expected one size for all")
    return saved


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
    words = saved["words"].numpy().astype(np.uint32)
    return _NUMPY_GENERATOR, words, saved["position"], saved["has_gauss"], saved["gauss"]
