"""A watch as a callback, for trainers that own the loop: transformers' ``Trainer`` and what calls back like it.

    callback = amplab.lab.WatchCallback(log="runs")
    Trainer(..., callbacks=[callback]).train()
    print(callback.watch.findings())

transformers is not needed to import this: its handler asks for methods, not for a base class.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

from torch import nn
from torch.optim import Optimizer

from amplab.lab.watch import Watch, watch
from amplab.lab.watch_arguments import check_options

__all__ = ["WatchCallback"]


class WatchCallback:
    """Watches from the begin of training to its end.

    Args:
        log, every, tensorboard: as `watch` takes them.

    Raises:
        TypeError, ValueError: one of them is none.

    Attributes:
        watch: the watch; None before training has begun.
    """

    def __init__(
        self,
        *,
        log: str | PathLike[str] | None = None,
        every: int = 50,
        tensorboard: str | PathLike[str] | None = None,
    ) -> None:
        check_options(log=log, every=every, tensorboard=tensorboard)
        self._options = {"log": log, "every": every, "tensorboard": tensorboard}
        self.watch: Watch | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Optimizer, **_: Any
    ) -> None:
        """Begin; an optimizer that accelerate has wrapped is followed inside, with the scaler it was given.

        Raises:
            TypeError, ValueError: as `watch`.
        """
        del args, state, control
        if optimizer is None:
            raise TypeError(
                "optimizer=None: expected a torch.optim.Optimizer; the trainer calls back before it has one."
            )
        inner, scaler = (vars(optimizer).get(name) for name in ("optimizer", "scaler"))
        self.watch = watch(model, inner or optimizer, scaler=scaler, **self._options)
        self.watch.__enter__()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End."""
        if self.watch is not None:
            self.watch.__exit__(None, None, None)

    def _pass(self, *_: Any, **__: Any) -> None:
        """Nothing is done at this event."""

    on_init_end = on_epoch_begin = on_epoch_end = on_step_begin = on_step_end = on_substep_end = _pass
    on_pre_optimizer_step = on_optimizer_step = on_evaluate = on_predict = on_prediction_step = _pass
    on_log = on_save = on_push_begin = _pass
