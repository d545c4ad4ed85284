"""Five ways to run one loop: apex's O0, O1, O2, and torch.autocast in float16 and bfloat16, behind the same words."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.amp import Session

__all__ = ["PRECISIONS", "Precision"]

PRECISIONS = ("O0", "O1", "O2", "torch fp16", "torch bf16")


class Precision:
    """One of `PRECISIONS` for the models and the optimizers of a loop."""

    def __init__(self, name: str, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self._dtype = torch.bfloat16 if name.endswith("bf16") else torch.float16
        self.amp = None if name == "torch bf16" else torch.amp.GradScaler("cpu")
        if name.startswith("O"):
            self.amp = Session()
            self.amp.initialize(models, optimizers, opt_level=name, verbosity=0)

    def region(self) -> AbstractContextManager:
        """What forward and loss run in."""
        return nullcontext() if isinstance(self.amp, Session) else torch.autocast("cpu", dtype=self._dtype)

    @contextmanager
    def around(self) -> Iterator[None]:
        """What the whole step runs in: the casts of a session that is no thread's own."""
        with self.amp.casting() if isinstance(self.amp, Session) else nullcontext():
            yield

    def backward(self, loss: Tensor, optimizer: Optimizer, *, last: bool = True) -> None:
        """Scale the loss and run its backward; not the `last` one where more is to be accumulated."""
        if isinstance(self.amp, Session):
            with self.amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled:
                scaled.backward()
        else:
            (loss if self.amp is None else self.amp.scale(loss)).backward()

    def unscaled(self, optimizer: Optimizer) -> Iterable[Tensor]:
        """The parameters whose gradients are to be looked at or clipped before the step, unscaled."""
        if isinstance(self.amp, Session):
            return list(self.amp.master_params(optimizer))
        if self.amp is not None:
            self.amp.unscale_(optimizer)
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def step(self, optimizer: Optimizer) -> None:
        """Step, or skip the step."""
        if isinstance(self.amp, torch.amp.GradScaler):
            self.amp.step(optimizer)
        else:
            optimizer.step()

    def update(self) -> None:
        """End the iteration."""
        if isinstance(self.amp, torch.amp.GradScaler):
            self.amp.update()
