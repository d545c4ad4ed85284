"""Optimizers without a learning rate: one computes it in its steps, the other one has none among its options."""

import torch
from torch.optim import Optimizer


class Relative(Optimizer):
    """The groups of ``transformers.Adafactor`` with its defaults, and its relative step."""

    def __init__(self, params, lr=None):
        options = {"eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None, "weight_decay": 0.0}
        choices = {"scale_parameter": True, "relative_step": True, "warmup_init": False}
        super().__init__(params, {"lr": lr, **options, **choices})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    state["RMS"] = param.square().mean().sqrt().item()
                    param.sub_(param.grad.sign(), alpha=min(1e-2, state["step"] ** -0.5))


class Rateless(Optimizer):
    """Steps of a fixed size that halves."""

    def __init__(self, params):
        super().__init__(params, {"decay": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    size = self.state[param].setdefault("size", torch.tensor(0.01))
                    param.sub_(param.grad.sign() * size)
                    size.mul_(group["decay"])


RATELESS = [Relative, Rateless]
