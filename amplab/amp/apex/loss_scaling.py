"""LossScaling: the block of `scale_loss`, and what follows from found_inf at its end.

    enter    gradients are set aside                          yields loss.float() * scale
    leave    gradients are unscaled: found_inf                `LossScaling._decide`
             the scale backs off or grows                     `LossScaler.update`
             after an overflow the next step is skipped       `HookedOptimizer.skip_next_step`
             after 20 overflows that no scale can avoid       `LossScaleCollapse`

Gradients are handled in ``backward/gradients.py`` and `hooked_optimizer`.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.apex.hooked_optimizer import HookedOptimizer
from amplab.amp.apex.hooks import Hooks
from amplab.amp.arguments import as_list
from amplab.amp.backward.gradients import ScaledBackward, bookkeeping
from amplab.amp.backward.loss_scaler import LossScaler
from amplab.amp.backward.records import ScaleRecord

__all__ = [
    "SKIPS_BEFORE_COLLAPSE",
    "CollapseWatch",
    "LossScaleCollapse",
    "LossScaling",
    "OnCollapse",
    "checked_loss",
    "checked_on_collapse",
    "explaining_backward",
    "scaled_grad",
]

SKIPS_BEFORE_COLLAPSE = 20

OnCollapse = Literal["raise", "warn"]

_NEEDS_NO_GRADIENT = "does not require grad"
_NO_SCALAR = "grad can be implicitly created only for scalar outputs"


class LossScaling:
    """The loss scalers of one `initialize`, and their effect on its optimizers.

    Args:
        hooks: the models and optimizers of the session.
        scalers: one for each ``loss_id``.
        subscribers: called with each `ScaleRecord`; the session's own list.
        on_collapse: as `CollapseWatch`.
        master_weights: whether optimizers step masters, so that gradients need work at every scale.
    """

    def __init__(
        self,
        hooks: Hooks,
        scalers: Sequence[LossScaler],
        subscribers: list[Callable[[ScaleRecord], object]],
        *,
        on_collapse: OnCollapse,
        master_weights: bool,
    ) -> None:
        self.scalers = tuple(scalers)
        self._hooks, self._subscribers, self._master_weights = hooks, subscribers, master_weights
        self._watches = [CollapseWatch(on_collapse) for _ in self.scalers]

    def scaler(self, loss_id: int) -> LossScaler:
        """Return the scaler of ``loss_id``.

        Raises:
            TypeError: not an integer.
            IndexError: no scaler has that number.
        """
        if isinstance(loss_id, bool) or not isinstance(loss_id, int):
            raise TypeError(f"loss_id={loss_id!r}: expected a whole number; they are numbered from 0.")
        if not 0 <= loss_id < len(self.scalers):
            raise IndexError(
                f"loss_id={loss_id}: there are {len(self.scalers)} loss scalers, numbered from 0; "
                "pass num_losses to amp.initialize to have more."
            )
        return self.scalers[loss_id]

    @contextlib.contextmanager
    def scaled(
        self, loss: Tensor, optimizers: Any, loss_id: int, *, delay_unscale: bool, delay_overflow_check: bool
    ) -> Iterator[Tensor]:
        """Run the block of `Session.scale_loss`, which says what the arguments mean."""
        scaler = self.scaler(loss_id)
        hooked = self._hooked(optimizers, scaler)
        scale = scaler.scale
        if scale == 1.0 and self._nothing_to_do(scaler, hooked):
            yield loss.float()
            return
        with ScaledBackward(hooked) as backward:
            yield loss.float() * scale
            if delay_unscale:
                for each, aside in backward.aside:
                    each.keep_scaled(aside, scale)
                return
            found_inf = scaler.take_unchecked()
            with bookkeeping():
                for each, aside in backward.aside:
                    found_inf = each.unscale_new(aside, scale, found_inf)
        if delay_overflow_check:
            scaler.unchecked = found_inf
        else:
            self._decide(found_inf, loss_id, scaler, hooked, loss)

    def _hooked(self, optimizers: Any, scaler: LossScaler) -> list[HookedOptimizer]:
        if optimizers is None or (isinstance(optimizers, list | tuple) and not optimizers):
            raise TypeError(
                f"scale_loss got optimizers={optimizers}: expected the optimizer, or a list of the optimizers, whose "
                "parameters this backward reaches; for the gradients of inputs alone use amp.scaled_grad."
            )
        chosen = as_list(optimizers)
        if scaler.scale == 1.0 and not (scaler.dynamic or self._master_weights):
            # Nothing is unscaled here. Scripts rely on it with optimizers of inputs, which initialize has not seen.
            chosen = [each for each in chosen if not isinstance(each, Optimizer) or self._hooks.knows(each)]
        return list(dict.fromkeys(self._hooks.hooked(each) for each in chosen))

    def _nothing_to_do(self, scaler: LossScaler, hooked: Sequence[HookedOptimizer]) -> bool:
        quiet = not (scaler.dynamic or self._subscribers)
        return quiet and all(each.passes_gradients_through for each in hooked)

    def _decide(
        self,
        found_inf: Tensor | None,
        loss_id: int,
        scaler: LossScaler,
        hooked: Sequence[HookedOptimizer],
        loss: Tensor,
    ) -> None:
        """Read ``found_inf``, move the scale, and skip the next step after an overflow. Sync: as `scale_loss`."""
        scale = scaler.scale
        found = (scaler.dynamic or bool(self._subscribers)) and found_inf is not None and bool(found_inf)
        skipped = found and scaler.dynamic
        first = self._hooks.first_nonfinite(hooked) if found else None
        scaler.update(skipped)
        record = ScaleRecord(loss_id, scale, scaler.scale, found, skipped, first, loss.detach())
        for each in hooked if skipped else ():
            each.skip_next_step(loss_id, scaler, scale, first)
        for callback in list(self._subscribers):
            callback(record)
        with bookkeeping():
            self._watches[loss_id].see(record, loss)


def scaled_grad(outputs: Tensor, inputs: Any, scale: float, **options: Any) -> tuple[Tensor | None, ...]:
    """Return ``torch.autograd.grad(outputs * scale, inputs)``, divided by ``scale`` in float32."""
    grads = torch.autograd.grad(outputs.float() * scale, inputs, **options)
    return tuple(None if grad is None else grad.float() / scale for grad in grads)


# -- the loss that scale_loss gets -------------------------------------------------------------------


def checked_loss(loss: Any) -> Tensor:
    """Return the loss. Its shape, and whether it requires a gradient, matter only to a backward from it, as in apex.

    Raises:
        TypeError: not a tensor, or a tensor of integers, booleans or complex numbers.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"scale_loss got a loss of type {type(loss).__name__}: expected the tensor to run backward from."
        )
    if not loss.is_floating_point():
        raise TypeError(
            f"scale_loss got a loss of {loss.dtype}: expected a floating-point tensor, since only those have "
            "gradients; pass the loss before it is rounded or counted, not an accuracy."
        )
    return loss


@contextlib.contextmanager
def explaining_backward(loss: Tensor) -> Iterator[None]:
    """Explain a backward that fails in the block because of ``loss``; torch's own message does not name the loss.

    Raises:
        RuntimeError: the loss requires no gradient, or has several elements.
    """
    try:
        yield
    except RuntimeError as error:
        explanation = _explanation(loss, str(error))
        if explanation is None:
            raise
        raise RuntimeError(explanation) from error


def _explanation(loss: Tensor, message: str) -> str | None:
    if not loss.requires_grad and _NEEDS_NO_GRADIENT in message:
        return (
            "scale_loss got a loss that requires no gradient: expected one computed from parameters that do; look for "
            "detach(), torch.no_grad(), torch.tensor(...) around a loss, or parameters that are all frozen."
        )
    if loss.numel() != 1 and _NO_SCALAR in message:
        return (
            f"scale_loss got a loss of shape {tuple(loss.shape)}: expected one element to run backward from; call "
            "scaled_loss.mean().backward() or scaled_loss.sum().backward()."
        )
    return None


# -- a scale that no backoff can save ----------------------------------------------------------------


class LossScaleCollapse(RuntimeError):
    """Raised at the end of `scale_loss` when every recent step was skipped and no smaller scale can avoid that.

    A skip counts if the loss was not finite before scaling, or if the scale was 1 or less. It is raised after
    `SKIPS_BEFORE_COLLAPSE` of them in a row. The scale has moved and the step will be skipped, so training may go on.

    Attributes:
        record: the last of the skips, with the loss scale and the gradient that was reached first.
        skips: how many there were in a row.
        loss_was_finite: whether the last loss was finite before it was scaled.
    """

    def __init__(self, message: str, record: ScaleRecord, skips: int, *, loss_was_finite: bool) -> None:
        super().__init__(message)
        self.record, self.skips, self.loss_was_finite = record, skips, loss_was_finite

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (str(self), self.record, self.skips, self.loss_was_finite)


class CollapseWatch:
    """Count the skips of one loss scaler that no smaller scale would have avoided.

    Args:
        on_collapse: "raise" `LossScaleCollapse`, or "warn" once until the next clean backward.
    """

    def __init__(self, on_collapse: OnCollapse) -> None:
        self._on_collapse = on_collapse
        self._skips = 0

    def see(self, record: ScaleRecord, loss: Tensor) -> None:
        """Count one backward.

        Args:
            record: its result.
            loss: the loss before scaling, any shape.

        Raises:
            LossScaleCollapse: after `SKIPS_BEFORE_COLLAPSE` skips.

        Sync: one after a skip, else none.
        """
        if not record.skipped:
            self._skips = 0
            return
        finite = bool(loss.detach().isfinite().all())
        self._skips = 0 if finite and record.loss_scale > 1.0 else self._skips + 1
        if self._skips < SKIPS_BEFORE_COLLAPSE:
            return
        collapse = LossScaleCollapse(_message(record, self._skips, finite), record, self._skips, loss_was_finite=finite)
        if self._on_collapse == "raise":
            raise collapse
        if self._skips == SKIPS_BEFORE_COLLAPSE:
            warnings.warn(str(collapse), stacklevel=7)  # the line of the block of scale_loss


def checked_on_collapse(value: str) -> OnCollapse:
    """Return ``value``.

    Raises:
        ValueError: neither "raise" nor "warn".
    """
    if value == "raise":
        return "raise"
    if value == "warn":
        return "warn"
    raise ValueError(
        f'on_collapse={value!r}: expected "raise" (LossScaleCollapse) or "warn"; use "warn" to go on after a collapse.'
    )


def _message(record: ScaleRecord, skips: int, finite: bool) -> str:
    cause = (
        f"gradients are not finite at a loss scale of {record.loss_scale}, where scaling makes nothing larger"
        if finite
        else "the loss is not finite before it is scaled"
    )
    first = record.first_nonfinite or "none of these optimizers' parameters"
    return (
        f"Loss scaler {record.loss_id} has skipped {skips} steps in a row, and further backoff cannot help: {cause}; "
        f"the first non-finite gradient in the backward is that of {first}. The loss scale is now "
        f"{record.next_loss_scale}. Look for inf or NaN in the batch, the weights and the forward, lower the learning "
        'rate, or pass on_collapse="warn" to amp.initialize to continue.'
    )


def _unpickled(message: str, record: ScaleRecord, skips: int, loss_was_finite: bool) -> LossScaleCollapse:
    return LossScaleCollapse(message, record, skips, loss_was_finite=loss_was_finite)
