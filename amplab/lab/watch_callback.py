"""A watch as a callback, for trainers with the callback interface of the transformers ``Trainer``.

    callback = amplab.lab.WatchCallback(log="runs")
    Trainer(..., callbacks=[callback]).train()
    print(callback.watch.findings())

transformers is not imported: its callback handler needs the methods, not the base class.
"""

from __future__ import annotations

import atexit
from contextlib import suppress
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.optim import Optimizer

from amplab.lab.run_log.writer import runs_elsewhere
from amplab.lab.watch import Watch, check_options, watch

__all__ = ["WatchCallback"]

_last: WeakKeyDictionary[nn.Module, ref[Watch]] = WeakKeyDictionary()
"""The last watch of each model that a callback has begun. A trainer that is interrupted does not end it."""


@atexit.register
def _end_all() -> None:
    """Record the last steps, as the program ends; not for a daemon thread that goes on to train."""
    for each in list(_last.values()):
        watch = each()
        if watch is not None and not runs_elsewhere(watch.thread):
            with suppress(Exception):  # of one watch: the others end, too
                watch.__exit__(None, None, None)


class WatchCallback:
    """Watch a training run from start to end.

    If the trainer raises, the watch ends when the next run of its model, or of this callback, starts, or the program
    ends. Since its end is not certain, it looks at no ops: findings about unscaling, clipping and lost updates need a
    ``with`` block.

    Args:
        log, every, tensorboard: see `watch`.

    Raises:
        TypeError, ValueError: an invalid option.

    Attributes:
        watch: the watch; None before training starts.
    """

    def __init__(
        self,
        *,
        log: str | PathLike[str] | None = None,
        every: int = 50,
        tensorboard: str | PathLike[str] | None = None,
    ) -> None:
        check_options(log=log, every=every, tensorboard=tensorboard)
        self._options: dict[str, Any] = {"log": log, "every": every, "tensorboard": tensorboard}
        self.watch: Watch | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Optimizer, **_: Any
    ) -> None:
        """Start a watch. For an optimizer wrapped by accelerate, watch the inner optimizer and its scaler.

        Raises:
            TypeError, ValueError: as `watch`.
        """
        del args, state, control
        if optimizer is None:
            raise TypeError(
                "optimizer=None: expected a torch.optim.Optimizer; the trainer called on_train_begin without one."
            )
        scaler = vars(optimizer).get("scaler")  # of Accelerate's wrapper
        for before in (self.watch, _last.pop(model, lambda: None)()):
            if before is not None:
                before.__exit__(None, None, None)
        self.watch = watch(model, optimizer, scaler=scaler, **self._options)
        _last[model] = ref(self.watch)
        self.watch.begin_without_block()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the watch."""
        if self.watch is not None:
            self.watch.__exit__(None, None, None)

    def _pass(self, *_: Any, **__: Any) -> None:
        """Ignore this event."""

    on_init_end = on_epoch_begin = on_epoch_end = on_step_begin = on_step_end = on_substep_end = _pass
    on_pre_optimizer_step = on_optimizer_step = on_evaluate = on_predict = on_prediction_step = _pass
    on_log = on_save = on_push_begin = _pass
