"""What objects of one's own keep besides weights: numbers, text, tensors and lists in their attributes.

A sampler counts its epochs, an optimizer its steps, a model its calls. A run that goes on in another process builds the
objects anew; what had changed in them since they were built is in its checkpoint, and so are tensors and arrays that a
model, a loss and optimizers have made, such as random features.

    own_state(roots)           what they keep now, by where it is
    made(state)                tensors and arrays that are as they were made; `differing` are those that are others now
    changes(state, before)     what is other than before; `lost_changes` names the objects of which that is not known
    add_state(roots, changes)  set it, in another process; `set_back` sets a whole state of this process

`own_objects` finds the objects, `own_values` has the form of what they keep. A value is set by a new one in its place,
never written into.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from amplab.amp.run_state.file_format import RunStateError
from amplab.lab.own_objects import Names, holders
from amplab.lab.own_values import (
    GONE,
    PASSES_BY,
    SCALARS,
    Decoder,
    Encoder,
    UnkeptValue,
    has_tensors,
    is_gone,
    is_unkept,
    same,
    shared_in,
)

__all__ = [
    "State",
    "add_state",
    "changes",
    "differing",
    "in_another_session",
    "lost_changes",
    "made",
    "own_state",
    "set_back",
]

State = dict[str, dict[str, Any]]
"""Values by name, by the path of the object that has them."""


def own_state(roots: Mapping[str, Any], weights: Sequence[Tensor] = ()) -> State:
    """Return copies of what objects keep now, in a form that a checkpoint can hold.

    Args:
        roots: Objects and functions by name.
        weights: Tensors that are kept in another way, as is what shares memory with them.

    >>> class Order:
    ...     epoch = 0
    >>> one = Order()
    >>> one.epoch, one.order = 3, [2, 0, 1]
    >>> own_state({"data": one})
    {'data': {'epoch': 3, 'order': [2, 0, 1]}}
    """
    encoder = Encoder(weights)
    state = {path: {**encoder.values(names), **_steps_within(names)} for path, names in holders(roots)}
    encoder.share()
    return state


def changes(state: State, before: State) -> State:
    """Return the values of `state` that are not those of `before`, of objects all of whose changes can be kept.

    An object that has opened a file and notes that it has must not find the note alone.
    """
    return {path: values for path, values in _all_changes(state, before) if not any(map(is_unkept, values.values()))}


def made(state: State) -> State:
    """Return the tensors and arrays that code has made, such as random features, which it may make otherwise again."""
    found = {
        path: {name: value for name, value in values.items() if has_tensors(value)} for path, values in state.items()
    }
    return {path: values for path, values in found.items() if values}


def differing(state: State, now: State) -> State:
    """Return the values of a part of `state` that are others now, of objects and names that are there."""
    found = {
        path: {name: each for name, each in values.items() if name in now[path] and not same(each, now[path][name])}
        for path, values in state.items()
        if path in now
    }
    return {path: values for path, values in found.items() if values}


def lost_changes(state: State, before: State) -> list[str]:
    """Return the paths of the objects whose changes `changes` leaves out."""
    return [path for path, values in _all_changes(state, before) if any(map(is_unkept, values.values()))]


def add_state(
    roots: Mapping[str, Any], state: State, device: torch.device | None = None, weights: Sequence[Tensor] = ()
) -> list[str]:
    """Set what `changes` returned; return the paths of objects that are not there, or use a name for something else.

    Args:
        roots: As for `own_state`.
        state: The values, as they were read from a file.
        device: Where tensors belong; None for the CPU.
        weights: As for `own_state`; lists and dicts may name them.

    Raises:
        RunStateError: A value that `own_state` does not return.
    """
    found, decoder = dict(holders(roots)), Decoder(device, weights)
    missing = [path for path in state if path not in found]
    for path, names in found.items():
        for name, encoded in state.get(path, {}).items():
            if is_gone(encoded):
                if name in names and names.takes(name, None):
                    names.remove(name)
                continue
            value = _value_of(encoded, decoder, f"{path}.{name}")
            if isinstance(value, defaultdict):  # whose function is no value
                value.default_factory = getattr(names.get(name), "default_factory", None)
            if names.takes(name, value):
                names.set(name, value)
            elif path not in missing:
                missing.append(path)
    return missing


def set_back(roots: Mapping[str, Any], state: State, is_concerned: Callable[[Any], bool]) -> None:
    """Let objects keep what they kept as `own_state` returned a state of this process.

    Args:
        roots, state: As for `own_state`.
        is_concerned: Which objects; the others stay as they are.
    """
    concerned = {path for path, names in holders(roots) if is_concerned(names.owner)}
    add_state(roots, {path: values for path, values in changes(state, own_state(roots)).items() if path in concerned})


def _value_of(encoded: Any, decoder: Decoder, where: str) -> Any:
    try:
        return decoder.value(encoded)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        raise RunStateError(f"{where}: expected a value of an attribute ({error}).") from error


def in_another_session(state: State, now: State) -> State:
    """Return `state` with the objects of now for those that are not kept: a session has replaced weights."""
    return {
        path: {
            name: now[path][name] if is_unkept(value) and name in now.get(path, {}) else value
            for name, value in values.items()
        }
        for path, values in state.items()
    }


def _all_changes(state: State, before: State) -> Iterator[tuple[str, dict[str, Any]]]:
    found = {path: _changed(values, before.get(path, {})) for path, values in state.items()}
    shared = set[int]().union(*(shared_in(value) for new in found.values() for value in new.values()))
    for path, new in found.items():
        # What shares memory or a container with a new value is replaced with it.
        new |= {name: value for name, value in state[path].items() if shared & shared_in(value)}
        if new:
            yield path, new


def _changed(values: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    seen = {name: value for name, value in values.items() if value is not PASSES_BY}
    new = {name: value for name, value in seen.items() if name not in old or not same(value, old[name])}
    return new | dict.fromkeys(old.keys() - values.keys(), GONE)


def _steps_within(names: Names) -> dict[str, Any]:
    """Return what tells that the optimizers and schedules which an optimizer has in its attributes have made steps."""
    if not isinstance(names.owner, Optimizer):
        return {}
    found = {}
    for name in names:
        values = names[name] if type(names[name]) in (list, tuple) else [names[name]]
        inner = [each for each in values if isinstance(each, Optimizer | LRScheduler)]
        if inner:
            found[name] = UnkeptValue(type(inner[0]), [*map(_steps_of, inner)])
    return found


def _steps_of(inner: Optimizer | LRScheduler) -> Any:
    if isinstance(inner, LRScheduler):
        return repr([each for each in vars(inner).items() if type(each[1]) in SCALARS])
    return [
        each._version if isinstance(each, Tensor) and not each.is_inference() else repr(each)
        for state in inner.state.values()
        for each in (state.values() if isinstance(state, dict) else [state])
    ]
