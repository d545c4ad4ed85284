"""LARC: a learning rate for each parameter, from the norms of its weight and its gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.optimizers.group_settings import check_settings

__all__ = ["LARC"]


class LARC(Optimizer):
    """Layer-wise adaptive rates around another optimizer.

    ::

        rate = trust_coefficient |p| / (|g| + weight_decay |p| + eps),  if |p| and |g| are not 0
        g <- (g + weight_decay p) * (min(rate / lr, 1) if clip else rate)

    then the inner optimizer steps without weight decay.

    Args:
        optimizer: the inner optimizer; its groups and state are those of this one.
        trust_coefficient: factor of a layer's own rate.
        clip: bound the rate by ``lr``; False: multiply ``lr`` by it.
        eps: added to the denominator.

    Raises:
        TypeError: not an optimizer, or a setting that is not a number.
        ValueError: a number out of its range.

    Reference: apex ``LARC``; Y. You, I. Gitman, B. Ginsburg, "Large batch training of convolutional networks", 2017.
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"LARC got a {type(optimizer).__name__}: expected an optimizer, such as torch.optim.SGD(parameters)."
            )
        check_settings("LARC", {"trust_coefficient": trust_coefficient, "eps": eps})
        self.optim = optimizer
        self.trust_coefficient, self.clip, self.eps = trust_coefficient, clip, eps
        # Groups and state are in the inner optimizer; Optimizer contributes the hooks that run around a step.
        self.__setstate__({"defaults": optimizer.defaults})

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optim", "trust_coefficient", "clip", "eps", "defaults")}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the inner optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the inner optimizer."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of the inner optimizer."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of the inner optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optim.add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # takes no closure
        """Adapt the gradients in place and step the inner optimizer. Sync: none.

        Raises:
            RuntimeError: a closure, because its gradients would not be adapted.
        """
        if closure is not None:
            raise RuntimeError("LARC.step got a closure: expected none; run backward before step().")
        decays = [group.get("weight_decay") for group in self.optim.param_groups]
        try:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                for param in group["params"]:
                    if param.grad is not None:
                        self._adapt(param, param.grad, float(group["lr"]), float(decay or 0.0))
                if decay is not None:
                    group["weight_decay"] = 0
            self.optim.step()
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay

    def _adapt(self, param: Tensor, grad: Tensor, lr: float, weight_decay: float) -> None:
        weight, length = (each.norm(dtype=torch.promote_types(each.dtype, torch.float32)) for each in (param, grad))
        rate = self.trust_coefficient * weight / (length + weight * weight_decay + self.eps)
        rate = torch.clamp(rate / lr, max=1.0) if self.clip else rate
        adapted = grad.add(param, alpha=weight_decay).mul(rate.to(grad.dtype))
        grad.copy_(torch.where((weight != 0) & (length != 0), adapted, grad))
