"""Save and restore random states: those of Python, NumPy, torch and its devices, and single generators."""

import ctypes
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

import numpy as np
import torch
from torch import Tensor, nn

from amplab.trace.as_found import Undo

__all__ = [
    "GENERATORS",
    "HostStates",
    "devices_in_use",
    "generators_of",
    "is_global",
    "random_states_kept",
    "reseed",
    "restorers",
    "seed_all",
    "state_of",
]

GENERATORS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator
"""The types of single generators."""

_MT19937_BYTES = 624 * 4 + 4  # NumPy's struct: the words, and the position among them


@contextmanager
def random_states_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Run a block and restore the random states after it, also after an exception.

    Args:
        devices: devices of torch whose states are restored in addition to the CPU's.

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

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(torchs)
        # Setting the state takes a third of a tiny step. A step can use a cached normal value without drawing a word.
        if words is None or words != _numpys_words() or numpys["has_gauss"]:
            np.random.set_state(numpys)
        for device, state in states:
            torch.get_device_module(device).set_rng_state(state, *_which(device))

    with Undo() as undo:
        undo.add(restore)
        yield


class HostStates:
    """The present states of Python's and NumPy's global generators. Reading them takes some 40 µs.

    >>> states = HostStates(); first = random.random(), np.random.rand()
    >>> states.are_present, states.restore(), states.are_present
    (False, None, True)
    >>> first == (random.random(), np.random.rand())
    True
    """

    def __init__(self) -> None:
        self._python, self._numpys = random.getstate(), np.random.get_state(False)

    @property
    def are_present(self) -> bool:
        """Whether nothing was drawn since then."""
        return random.getstate() == self._python and pickle.dumps(np.random.get_state(False)) == pickle.dumps(
            self._numpys
        )

    def restore(self) -> None:
        """Set these states."""
        random.setstate(self._python)
        np.random.set_state(self._numpys)


def seed_all(seed: int, devices: Iterable[torch.device] | None = None) -> None:
    """Seed Python, torch with devices, and NumPy's global generator if that is the default one.

    Args:
        seed: the seed.
        devices: the devices of torch besides the CPU; None for all.

    Sync: none.

    >>> seed_all(3); a = random.random(), np.random.rand(), torch.rand(()).item()
    >>> seed_all(3); a == (random.random(), np.random.rand(), torch.rand(()).item())
    True
    """
    if devices is None:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    for device in devices or ():
        module = torch.get_device_module(device)
        with module.device(device) if device.type == "cuda" else nullcontext():  # MPS has one device
            module.manual_seed(seed)
    random.seed(seed)
    if _numpys_words() is not None:
        np.random.seed(seed % 2**32)  # the largest seed that it accepts


def devices_in_use() -> list[torch.device]:
    """Return the devices besides the CPU on which code may draw: the present one of CUDA, if that has begun."""
    return [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_initialized() else []


def restorers(values: Iterable[Any]) -> tuple[Callable[[], object], ...]:
    """Return a function for each generator among `values` that restores its present state.

    Sync: none; one for a generator of a device.

    >>> own = torch.Generator().manual_seed(1)
    >>> (undo,) = restorers((own, 3.0))
    >>> first = torch.rand((), generator=own); _ = undo()
    >>> bool(torch.rand((), generator=own) == first)
    True
    """
    return tuple(_undo(value) for value in values if _has_state(value))


def state_of(generator: Any) -> bytes:
    """Return the state of a generator, to compare. Sync: none; one for a generator of a device.

    >>> one, same = random.Random(1), random.Random(1)
    >>> state_of(one) == state_of(same), one.random() > 0, state_of(one) == state_of(same)
    (True, True, False)
    """
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(_bits_of(generator).state)


def _has_state(value: Any) -> bool:
    """Return whether a value is a random generator whose state can be read: not that of the system. Sync: none."""
    return isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)


def reseed(generator: Any, seed: int) -> None:
    """Seed a generator anew; the numbers that follow depend on `seed` and on its state before.

    Sync: none; one for a generator of a device.

    >>> one, same, other = (random.Random(seed) for seed in (1, 1, 2))
    >>> for each in (one, same, other):
    ...     reseed(each, 7)
    >>> one.random() == same.random() != other.random()
    True
    """
    if isinstance(generator, torch.Generator):
        drawn = torch.randint(2**62, (), generator=generator, device=generator.device)
        generator.manual_seed((int(drawn) + seed) % 2**63)
    elif isinstance(generator, random.Random):
        generator.seed((generator.getrandbits(62) + seed) % 2**63)
    elif isinstance(generator, np.random.RandomState):
        kind = getattr(np.random, generator.get_state(legacy=False)["bit_generator"])
        generator.set_state(kind((int(generator.randint(2**31)) + seed) % 2**63).state)
    else:
        bits = _bits_of(generator)
        bits.state = type(bits)((int(np.random.Generator(bits).integers(2**62)) + seed) % 2**63).state


def is_global(generator: Any) -> bool:
    """Return whether a generator is one of those that `seed_all` seeds."""
    bound = (getattr(function, "__self__", None) for function in (random.random, np.random.random))
    return any(generator is each for each in (torch.default_generator, *bound))


def _undo(generator: Any) -> Callable[[], object]:
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state(legacy=False))
    return partial(setattr, _bits_of(generator), "state", _bits_of(generator).state)


def _bits_of(generator: Any) -> Any:
    """Return what draws the bits of a generator of NumPy, which may be by itself."""
    return generator if isinstance(generator, np.random.BitGenerator) else generator.bit_generator


def _numpys_words() -> bytes | None:
    """The memory of NumPy's global generator; None if that is not the default one."""
    generator = np.random.mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """The argument that names a device; MPS has only one device and takes none."""
    return () if device.type == "mps" else (device,)


_MOST_OBJECTS = 10_000
_MOST_ELEMENTS = 64  # of a list, a tuple or a dict: a list of examples is long
_WITHOUT = (Tensor, nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, str, bytes, int, float)


def generators_of(data: Any) -> Iterator[Any]:
    """Yield the generators in the attributes of data, in those of what is there, and so on."""
    seen, waiting = set[int](), [data]
    while waiting and len(seen) < _MOST_OBJECTS:
        each = waiting.pop()
        if id(each) in seen or type(each) in ProxyTypes or isinstance(each, _WITHOUT):  # the object may be gone
            continue
        seen.add(id(each))
        if isinstance(each, GENERATORS):
            if _has_state(each) and not is_global(each):
                yield each
        elif isinstance(each, list | tuple):
            waiting += each[:_MOST_ELEMENTS]
        else:
            values = each if isinstance(each, dict) else getattr(each, "__dict__", {})
            waiting += [*values.values()][: _MOST_ELEMENTS if values is each else None]
