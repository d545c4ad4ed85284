"""What `watch` and `WatchCallback` were given, held against what they take: one sentence for each odd argument."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amplab.trace.handed_step import bound_to_batch, check_loss_function
from amplab.trace.step_checks import check_values

__all__ = ["check_options", "check_replayed", "check_watched"]


def check_watched(model: Any, optimizers: Sequence[Any]) -> None:
    """Raise unless `model` is a module that takes hooks, and `optimizers` are one or more.

    Raises:
        TypeError: something else. ValueError: the model is scripted, or on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: expected a torch.nn.Module.")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("the model is scripted and takes no hooks: expected the module that was given to torch.jit.")
    check_values(f"model={type(model).__name__}", list(model.parameters()))
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        given = ", ".join(type(each).__name__ for each in optimizers) or "an empty list"
        raise TypeError(f"optimizer={given}: expected a torch.optim.Optimizer, or a list of them.")


def check_replayed(loss: Any, step: Any) -> None:
    """Raise a TypeError unless `loss` and `step` can run a step again."""
    if step is not None:
        if loss is not None:
            raise TypeError("loss= together with step=: expected one of them; a step computes the loss itself.")
        bound_to_batch("watch", "step", step, None, (), such="lambda batch: loss_of(model, batch)")
    elif loss is not None:
        check_loss_function(loss)


def check_options(*, log: Any, every: Any, tensorboard: Any) -> None:
    """Raise for the first of `watch`'s options that is none.

    Raises:
        TypeError: one of another type. ValueError: `every` is no whole number above 0.
    """
    if log is not None and not isinstance(log, str | PathLike):
        raise TypeError(f"log={log!r}: expected a folder or a .jsonl file, or None for no log.")
    if tensorboard is not None and not isinstance(tensorboard, str | PathLike):
        raise TypeError(f"tensorboard={tensorboard!r}: expected a folder, or None for no scalars.")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r}: expected a whole number of steps > 0, such as 50.")
