"""`define_operator`: the operators of ``torch.ops.amplab``, each with its PyTorch reference.

A module whose import Ctrl-C has ended is imported again, and defines its operators again: these replace the first ones.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["define_operator", "without_gradients"]

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARIES: dict[str, torch.library.Library] = {}  # a library that is dropped takes its operators with it


def define_operator(
    name: str,
    schema: str,
    reference: Callable[..., Any] | None = None,
    fake: Callable[..., Any] | None = None,
    vmap: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define ``amplab::name`` and return a function that calls it without gradients.

    Args:
        name: the name of the operator.
        schema: its arguments and its result.
        reference: the implementation that every device falls back to; None if the kernels alone have one.
        fake: called with fake tensors: checks the arguments and returns a fake result.
        vmap: called with batches, as `torch.library.register_vmap` says.

    Sync: none.
    """
    _LIBRARIES.pop(name, None)
    _LIBRARIES[name] = library = torch.library.Library("amplab", "FRAGMENT")
    library.define(name + schema)
    if reference is not None:
        library.impl(name, reference, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"amplab::{name}", fake, lib=library)
    if vmap is not None:
        torch.library.register_vmap(f"amplab::{name}", vmap, lib=library)
    return without_gradients(getattr(torch.ops.amplab, name).default)


def without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """As `torch.no_grad`, whose beginning and end are calls in which an interrupt would leave gradients off."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        is_enabled = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(is_enabled)

    return call
