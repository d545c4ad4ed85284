"""Runs that overflow in half and not in float32, at O1 and at O2, whose remedies are rules of a policy."""

import torch
from patients import Patient, Ward, apex, gaussian, regression
from torch import nn
from torch.nn import functional as F
from value_wards import Attends, Pool

__all__ = ["RULE_WARDS"]


class FeedForward(nn.Module):
    """Two layers, whose outputs exceed 65504, and a norm."""

    def __init__(self, size: int, factor: float) -> None:
        super().__init__()
        self.wi, self.wo, self.norm = nn.Linear(size, 4 * size), nn.Linear(4 * size, size), nn.LayerNorm(size)
        with torch.no_grad():
            self.wo.weight.mul_(factor)

    def forward(self, x):
        return self.norm(x + self.wo(F.relu(self.wi(x))))


class Transformer(nn.Module):
    def __init__(self, size: int, factor: float) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(size, size), FeedForward(size, factor), nn.Linear(size, 1)

    def forward(self, x):
        return self.head(self.block(self.embed(x)))


class Wide(nn.Module):
    """A layer whose outputs exceed 65504 and are read by another layer."""

    def __init__(self, size: int, factor: float) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, 1)
        with torch.no_grad():
            self.up.weight.mul_(factor)
            self.down.weight.div_(factor)

    def forward(self, x):
        return self.head(self.down(F.relu(self.up(x))))


class OfItself(nn.Module):
    """The product is in the model's own forward, which a rule cannot name by module."""

    def __init__(self, size: int, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) * factor**0.5)
        self.factor, self.norm, self.head = factor**0.5, nn.LayerNorm(size), nn.Linear(size, 1)

    def forward(self, x):
        return self.head(self.norm(F.linear(x * self.factor, self.weight)))


class Sums(nn.Module):
    """The sum of a large plane."""

    def __init__(self, size: int, factor: float) -> None:
        super().__init__()
        self.body, self.pool, self.norm, self.head = nn.Conv2d(1, 4, 1), Pool(True), nn.LayerNorm(4), nn.Linear(4, 1)
        with torch.no_grad():
            self.body.weight.mul_(factor**0.5)

    def forward(self, x):
        return self.head(self.norm(self.pool(self.body(x[:, None, :, None].expand(-1, 1, -1, 256)).abs())))


def ward(kind: type[nn.Module], name: str, module: str, level: str) -> Ward:
    def admit(size: int, seed: int, broken: bool) -> Patient:
        """The twin is the same run in float32."""
        if kind is Attends:
            model = Attends(size, scaled=False)
            return apex(model, regression(model), gaussian(size, seed, 2 * size, size), level=level if broken else "O0")
        model = kind(size, 2.0**18)
        rates = [{"params": each, "lr": 0.01 * each.detach().abs().mean().item()} for each in model.parameters()]
        optimizer = torch.optim.Adam(rates)
        return apex(
            model, regression(model), gaussian(size, seed), level=level if broken else "O0", optimizer=optimizer
        )

    return Ward(admit, name, module)


RULE_WARDS = {
    f"{name} at {level}": ward(kind, finding, module, level)
    for name, kind, finding, module, levels in (
        ("feed-forward", Transformer, "overflow-in-half", "block.wo", ("O1", "O2")),
        ("layer read by a layer", Wide, "overflow-in-half", "up", ("O1", "O2")),
        ("product in the model itself", OfItself, "overflow-in-half", "OfItself", ("O1", "O2")),
        ("attention", Attends, "logits-overflow-half", "attention", ("O1", "O2")),
        ("sum", Sums, "reduction-overflows-half", "pool", ("O2",)),
    )
    for level in levels
}
