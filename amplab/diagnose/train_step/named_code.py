"""The names in the code of a training step, function by function, found without running it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from amplab.trace.reached_values import reached_from

__all__ = ["clips_of_model_parameters", "leads_to", "names_of_functions"]

_CLIPS = frozenset(("clip_grad_norm_", "clip_grad_value_"))


def names_of_functions(train_step: Callable[[], Any]) -> list[frozenset[str]]:
    """The names in each function that `train_step` reaches; functions defined inside a function belong to it.

    >>> model = torch.nn.Linear(1, 1)
    >>> sorted(names_of_functions(lambda: model.zero_grad())[0])
    ['model', 'zero_grad']
    """
    functions = {id(each): each for each in reached_from(train_step) if isinstance(each, types.FunctionType)}
    return [frozenset(_names(each.__code__)) for each in functions.values() if not _is_librarys(each)]


def clips_of_model_parameters(train_step: Callable[[], Any]) -> str:
    """The clipping that a function with the name `parameters` calls; empty if any function names `master_params`."""
    functions = names_of_functions(inspect.unwrap(train_step))
    if any("master_params" in names for names in functions):
        return ""
    return next((clip for names in functions if "parameters" in names for clip in sorted(names & _CLIPS)), "")


def leads_to(train_step: Callable[[], Any], wanted: object) -> bool:
    """Whether the code of `train_step` names an object, by a variable, an attribute, or its container.

    >>> wanted = object()
    >>> leads_to(lambda: wanted, wanted), leads_to(lambda: None, wanted)
    (True, False)
    """
    step = inspect.unwrap(train_step)
    names = frozenset().union(*names_of_functions(step))
    return any(each is wanted for each in reached_from(step, names))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


def _is_librarys(function: types.FunctionType) -> bool:
    """Whether it belongs to torch or amplab, as `clip_grad_norm_` does, which names `parameters` itself."""
    return function.__code__.co_filename.startswith(_LIBRARIES)


_LIBRARIES = tuple(f"{path}/" for path in (Path(torch.__file__).parent, Path(__file__).parents[1]))
