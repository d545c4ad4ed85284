"""FP16_Optimizer: an optimizer with float32 masters and a loss scale, from before ``amp.initialize``.

    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
    optimizer.zero_grad();  optimizer.backward(loss);  optimizer.step()

If float16 weights are written before the first backward, by an initializer or DistributedDataParallel, the masters
follow. The masters are `amplab.scalers.MasterWeights`, the scale is that of `loss_scaler`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.apex.iteration_state import keep_of, use
from amplab.amp.backward.gradients import SetAside, add_unscaled, set_aside
from amplab.amp.backward.optimizer_params import params_of, replace_params
from amplab.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from amplab.kernels.operators import without_gradients
from amplab.scalers import MasterWeights, Unscaler

__all__ = ["FP16_Optimizer"]


class FP16_Optimizer:
    """Steps float32 masters of 16-bit parameters with gradients of a scaled loss.

    Args:
        init_optimizer: any optimizer; its parameters are replaced by the masters.
        static_loss_scale: the scale, unless ``dynamic_loss_scale``.
        dynamic_loss_scale: back off at overflows, and skip their steps.
        dynamic_loss_args: arguments of `DynamicLossScaler`.
        verbose: print a line for each skipped step.

    Reference: apex ``fp16_utils.FP16_Optimizer``. Gradients of float32 parameters accumulate over several
    backwards like those of 16-bit ones; apex unscales them again at each.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    >>> optimizer = FP16_Optimizer(torch.optim.SGD([weight], lr=2**-13), static_loss_scale=128.0)
    >>> optimizer.backward(weight.sum())
    >>> optimizer.step()
    >>> weight.tolist(), optimizer.param_groups[0]["params"][0].tolist()
    ([1.0, 1.0], [0.9998779296875, 0.9998779296875])
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.overflow = False
        self.first_closure_call_this_step = True
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler = (
            DynamicLossScaler(**(dynamic_loss_args or {})) if dynamic_loss_scale else LossScaler(static_loss_scale)
        )
        self._masters = MasterWeights()
        replace_params(init_optimizer, lambda param: self._masters.add_pairs([param])[0])
        masters = {id(pair.master) for pair in self._masters.pairs}
        self._own = [param for param in params_of(init_optimizer) if id(param) not in masters]
        self._masters.watch_model()
        self._unscaler = Unscaler()
        self._aside: list[SetAside] | None = None
        keep_of(self, overflow=False, _aside=None)
        keep_of(self._masters, "_watched", user=self, _are_ahead=False, _step=None)
        keep_of(self.loss_scaler, *vars(self.loss_scaler), user=self)

    def pending_gradients(self) -> list[Tensor]:
        """Return the masters; see `keep_of`."""
        return [pair.master for pair in self._masters.pairs]

    def __getstate__(self) -> Any:
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss."""
        return self.loss_scaler.loss_scale

    @property
    def state(self) -> Any:
        """The state of the inner optimizer."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the inner optimizer: masters, and float32 parameters."""
        return self.optimizer.param_groups

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of masters and model, to zeros or to None."""
        self._masters.catch_up()
        self._aside = None
        for param in [*params_of(self.optimizer), *(pair.model for pair in self._masters.pairs)]:
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad = torch.zeros_like(param.grad)

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run backward from ``loss`` times the scale; gradients of several calls accumulate.

        Args:
            loss: a scalar.
            update_master_grads: unscale into the masters now; False: call `update_master_grads` later.
            retain_graph: as in torch.

        Sync: one with a dynamic scale.
        """
        self._follow_edits()
        if self._aside is None:
            self._aside = set_aside(self._own)
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @without_gradients
    def update_master_grads(self) -> None:
        """Unscale the model's gradients into the masters. Sync: one with a dynamic scale."""
        aside, self._aside = self._aside or [], None
        found_inf = add_unscaled(self._own, aside, self.loss_scale, self._unscaler, None)
        found_inf = self._masters.unscale_grads(self.loss_scale, found_inf=found_inf)
        # A gradient that is added to one that was not finite before is not finite.
        before = self.overflow and not all(grad.isfinite().all() for _, grad in aside)
        self.overflow = self.dynamic_loss_scale and (bool(found_inf) or before)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | float:
        """Clip the gradients of the masters; return their norm, or -1 after an overflow."""
        if self.overflow:
            return -1
        return torch.nn.utils.clip_grad_norm_(list(params_of(self.optimizer)), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the gradients of the masters, a list for each group; None after an overflow."""
        if self.overflow:
            return None
        return [[param.grad for param in group["params"]] for group in self.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and round the masters into the model; after an overflow, change nothing.

        Args:
            closure: calls ``optimizer.backward(loss)`` and returns the loss; only with a static scale.

        Raises:
            TypeError: a closure with a dynamic scale.
        """
        if closure is not None and self.dynamic_loss_scale:
            raise TypeError("Using step with a closure does not support dynamic loss scaling; use a static_loss_scale.")
        self._follow_edits()
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            if self.verbose:
                print(  # noqa: T201  the line that apex prints
                    f"Gradient overflow.  Skipping step, reducing loss scale to {self.loss_scale}"
                )
            return None
        self._masters.begin_step()
        result = self.optimizer.step() if closure is None else self.optimizer.step(self._refreshing(closure))
        self._masters.copy_to_model()
        return result

    def _refreshing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Round the masters into the model before each call of ``closure``; some optimizers call it several times."""

        def run() -> Any:
            with torch.no_grad():
                self._masters.copy_to_model()
            with torch.enable_grad():
                return closure()

        return run

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to resume, including the masters."""
        self._masters.follow_edits()
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[param.detach() for param in group] for group in self._masters_by_group()],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; training continues bitwise.

        Raises:
            ValueError: masters of other shapes.
        """
        saved, own = state_dict["fp32_from_fp16"], self._masters_by_group()
        if [[each.shape for each in group] for group in saved] != [[each.shape for each in group] for group in own]:
            raise ValueError("fp32_from_fp16: expected masters with the shapes of this model; load its own checkpoint.")
        self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for group, values in zip(own, saved, strict=True):
            for param, value in zip(group, values, strict=True):
                param.copy_(value)
        self._masters.copy_to_model()
        self._masters.watch_model()

    def _follow_edits(self) -> None:
        """Copy edits of the model since the start or `load_state_dict` to the masters; ignore later edits."""
        use(self)
        self._masters.catch_up()
        self._masters.follow_edits()
        self._masters.stop_watching()

    def _masters_by_group(self) -> list[list[Tensor]]:
        masters = {id(pair.master) for pair in self._masters.pairs}
        return [[param for param in group["params"] if id(param) in masters] for group in self.param_groups]
