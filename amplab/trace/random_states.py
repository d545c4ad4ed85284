"""Put the random states back: those of Python, numpy's global generator, torch, torch's devices, and given ones."""

import ctypes
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

__all__ = ["puts_back", "random_states_kept", "seed_all"]

_MT19937_BYTES = 624 * 4 + 4  # numpy's struct of it: the words, and the place among them


@contextmanager
def random_states_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Run a block and set the random states as they were before it, also after an exception.

    Args:
        devices: those of torch whose states count beside the CPU's.

    Sync: none.
    """
    python, torchs, numpys, words = (
        random.getstate(),
        torch.get_rng_state(),
        np.random.get_state(False),
        _numpys_words(),
    )
    others = sorted((device for device in devices if device.type not in ("cpu", "meta")), key=str)
    states = [(device, torch.get_device_module(device).get_rng_state(*_which(device))) for device in others]
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torchs)
        # Setting it takes a third of a tiny net's step. Where no word was drawn, a spare normal value may have been.
        if words is None or words != _numpys_words() or numpys["has_gauss"]:
            np.random.set_state(numpys)
        for device, state in states:
            torch.get_device_module(device).set_rng_state(state, *_which(device))


def seed_all(seed: int) -> None:
    """Seed Python, torch with its devices, and numpy's global generator where it is of the kind that takes a seed.

    Sync: none.

    >>> seed_all(3); a = random.random(), np.random.rand(), torch.rand(()).item()
    >>> seed_all(3); a == (random.random(), np.random.rand(), torch.rand(()).item())
    True
    """
    torch.manual_seed(seed)
    random.seed(seed)
    if _numpys_words() is not None:
        np.random.seed(seed % 2**32)  # it takes no more


def puts_back(values: Iterable[Any]) -> tuple[Callable[[], object], ...]:
    """Return what sets the generators among `values` to the states that they have now, a function for each.

    Sync: none; one for a generator of a device.

    >>> own = torch.Generator().manual_seed(1)
    >>> (undo,) = puts_back((own, 3.0))
    >>> first = torch.rand((), generator=own); _ = undo()
    >>> bool(torch.rand((), generator=own) == first)
    True
    """
    return tuple(_undo(value) for value in values if isinstance(value, _GENERATORS))


_GENERATORS = torch.Generator, random.Random, np.random.Generator


def _undo(generator: Any) -> Callable[[], object]:
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)


def _numpys_words() -> bytes | None:
    """The memory of numpy's global generator; None where it is not the one that numpy begins with."""
    generator = np.random.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """What tells a device module whose random state is meant; MPS has one device and takes no argument."""
    return () if device.type == "mps" else (device,)
