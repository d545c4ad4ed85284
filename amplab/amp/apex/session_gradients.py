"""What a session does with gradients outside of `scale_loss`: differentiate, find, clip.

scaled_grad        autograd.grad through half layers
master_params      what an optimizer steps
clip_grad_norm_    the gradients of those, by their norm; in flat buffers few calls do it
combined_grads     those flat buffers, where `initialize` was called with ``combine_grad=True``
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.apex.banner import is_first_rank
from amplab.amp.apex.loss_scaling import scaled_grad
from amplab.amp.apex.session_state import SessionState
from amplab.amp.backward.clipping import clip_by_norm_
from amplab.amp.backward.gradients import bookkeeping
from amplab.amp.backward.optimizer_params import master_params
from amplab.scalers import CombinedUnscaler, Unscaler

__all__ = ["SessionGradients", "unscaler_maker"]


class SessionGradients(SessionState):
    """The gradients of one session; `Session` adds what makes them."""

    def scaled_grad(
        self, outputs: Tensor, inputs: Tensor | Sequence[Tensor], *, loss_id: int = 0, **options: Any
    ) -> tuple[Tensor | None, ...]:
        """Differentiate through half layers without losing small gradients: for penalties on gradients.

            grads = autograd.grad(outputs * loss_scale, inputs) / loss_scale

        No ``.grad`` is touched and no scale moves. A gradient that overflows is inf here, makes the penalty inf, and
        so has the step skipped by the `scale_loss` around the penalty's own backward.

        Args:
            outputs: what to differentiate, any shape where ``grad_outputs`` is given, else one element.
            inputs: with respect to what: a tensor or a sequence of them.
            loss_id: whose scale to use.
            options: those of `torch.autograd.grad`: ``grad_outputs``, ``create_graph=True`` for a penalty, ….

        Returns:
            The gradients in float32, one for each input; None where ``allow_unused`` allows it.

        Raises:
            RuntimeError: before `initialize`.
            IndexError: no such ``loss_id``.
            TypeError: ``outputs`` is no tensor.

        Sync: none.
        """
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"scaled_grad got outputs of type {type(outputs).__name__}: expected a tensor; sum several of them."
            )
        return scaled_grad(outputs, inputs, self.loss_scale(loss_id), **options)

    def master_params(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield what ``optimizer`` steps, float32 masters included: the parameters to clip. Sync: none.

        Raises:
            TypeError: what is given has no ``param_groups``.
        """
        return master_params(optimizer)

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients that ``optimizer`` is going to step with down to a norm of at most ``max_norm``.

        ::

            norm <- (sum |g|^p)^(1/p);   g <- g * min(1, max_norm / (norm + 1e-6))

        Between `scale_loss` and ``step``. With ``combine_grad=True`` norm and product are a few calls on the flat
        buffers, and the norm is summed in another order than over separate tensors: its last bits may differ.

        Args:
            optimizer: one that `initialize` was given.
            max_norm: > 0.
            norm_type: ``p`` > 0; inf for the largest magnitude.

        Returns:
            ``()``, the norm before.

        Raises:
            RuntimeError: an optimizer that was not part of `initialize`; gradients that ``delay_unscale`` left scaled.
            ValueError: a ``max_norm`` or a ``norm_type`` that is not > 0.

        Sync: none.

        Reference: ``torch.nn.utils.clip_grad_norm_``, ``clip_optimizer_grad_norm_fused`` of Ascend's apex.
        """
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
            if not value > 0:
                raise ValueError(f"{name}={value}: expected a number > 0, such as 1.0 for max_norm, 2.0 for norm_type.")
        hooked = self._hooks.hooked(optimizer)
        with bookkeeping():
            grads = hooked.flat_grads()
            return clip_by_norm_(grads.tensors, max_norm, norm_type, parts=grads.parts)

    def combined_grads(self, optimizer: Optimizer) -> tuple[Tensor, ...]:
        """Return the flat buffers that the gradients of ``optimizer`` lie in, one for each device and dtype.

        First those of the parameters that it shares with the model, then those of float32 masters. Padding, and the
        places of gradients that are None, are zero. What is written to a buffer is written to the gradients.

        Returns:
            Tensors ``(elements,)``; none before the first `scale_loss`, and without ``combine_grad=True``.

        Raises:
            RuntimeError: as `clip_grad_norm_`.

        Sync: none.

        Reference: ``optimizer.get_optimizer_combined_grads()`` of Ascend's apex.
        """
        hooked = self._hooks.hooked(optimizer)
        with bookkeeping():
            hooked.flat_grads()
        return hooked.buffers


def unscaler_maker(*, combine: bool, check: bool) -> Callable[[], Unscaler]:
    """Return what makes the unscalers of a session: with flat buffers or without, and who is told of those."""
    if not combine:
        return Unscaler
    return lambda: CombinedUnscaler(_say if check else None)


def _say(sentence: str) -> None:
    if is_first_rank():
        print(sentence)  # noqa: T201  as Ascend's apex does
