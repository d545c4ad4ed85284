"""Runs in which an op meets a point at which it, or its slope, is infinite, or that is outside of its domain.

`Odd.forward` of each ward has the broken line and that of its healthy twin. Tests paste a printed remedy over the
broken line, so each is a statement of its own.
"""

import torch
from patients import Patient, Ward, apex, gaussian, regression
from torch import nn
from torch.nn import functional as F

__all__ = ["SINGULAR_WARDS"]


class Odd(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken


def around(odd: Odd, size: int, seed: int, *, std: float, level: str = "O2", rate: float = 0.01) -> Patient:
    """A layer of outputs of about `std`, the odd module, and a head."""
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    nn.init.normal_(model[0].weight, std=std * size**-0.5)
    model.add_module("odd", odd)
    model.add_module("head", nn.Linear(size, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return apex(model, regression(model), gaussian(size, seed, 32, size), level=level, optimizer=optimizer)


class ClampedAtanh(Odd):
    """A bound that is 1 in half."""

    def forward(self, x):
        x = torch.tanh(x)
        if not self.broken:
            return torch.atanh(x.clamp(-0.999, 0.999))
        return torch.atanh(x.clamp(-1 + 1e-6, 1 - 1e-6))


class ScaledAtanh(Odd):
    """A factor that is 1 in half."""

    def forward(self, x):
        x = F.hardtanh(x)
        if not self.broken:
            return torch.atanh(0.999 * x)
        return torch.atanh((1 - 1e-6) * x)


class ArcOfTanh(Odd):
    """tanh is 1 in half from 4.5 on."""

    def forward(self, x):
        if not self.broken:
            return torch.acos(torch.tanh(x.float()).clamp(-1 + 1e-6, 1 - 1e-6)).to(x.dtype)
        squashed = torch.tanh(x)
        return torch.acos(squashed)


class LogOfRest(Odd):
    """1 - sigmoid is 0 in half from 8.3 on."""

    def forward(self, x):
        if not self.broken:
            return F.logsigmoid(-x)
        p = torch.sigmoid(x)
        return torch.log1p(-p)


class LogOfDifference(Odd):
    def forward(self, x):
        if not self.broken:
            return F.logsigmoid(-x)
        return torch.log(1 - torch.sigmoid(x))


class LogitWithEps(Odd):
    """1 - eps is 1 in half."""

    def forward(self, x):
        p = x.clamp(0, 1)
        if not self.broken:
            return torch.logit(p, eps=1e-3)
        return torch.logit(p, eps=1e-6)


class ArcCosine(Odd):
    """The cosine of a vector with itself is 1, and its angle has no slope there, in every dtype."""

    def forward(self, x):
        turned = x.roll(1, 0)
        turned[0] = x[0]
        cosine = F.cosine_similarity(x, turned, dim=-1)
        if not self.broken:
            return x * torch.acos(cosine.float().clamp(-1 + 1e-6, 1 - 1e-6)).to(x.dtype)[:, None]
        angle = torch.acos(cosine.clamp(-1, 1))
        return x * angle[:, None]


class RootOfZero(Odd):
    """A norm by hand, of a row of zeros."""

    def forward(self, x):
        x = torch.cat([x[:-2], 0 * x[-2:]])
        squares = x.square().sum(-1, keepdim=True)
        if not self.broken:
            return x / (1 + torch.sqrt(squares + 1e-6))
        return x / (1 + torch.sqrt(squares))


class LogOfSurvivors(Odd):
    """log1p of -1, which a hardtanh reaches: infinite, not too large."""

    def forward(self, x):
        x = F.hardtanh(x)
        if not self.broken:
            return torch.log1p(x.clamp_min(-0.9995))
        return torch.log1p(x)


class SumAtanh(Odd):
    """A sum that is 1 in half; the product before it is 0.5, in float32 too."""

    def forward(self, x):
        x = torch.sigmoid(4 * x)
        if not self.broken:
            return torch.atanh(x * 0.5 + 0.499)
        return torch.atanh(x * 0.5 + 0.4999)


class ArcOfSum(Odd):
    """A sum that is 1 in half, of zeros."""

    def forward(self, x):
        if not self.broken:
            return x * torch.acos(x * 0 + 0.999)
        return x * torch.acos(x * 0 + 0.9999)


def ward(odd: type[Odd], name: str, **given) -> Ward:
    return Ward(lambda size, seed, broken: around(odd(broken), size, seed, **given), name, "odd")


SINGULAR_WARDS = {
    "bound that is 1 in half": ward(ClampedAtanh, "infinite-value", std=4.0),
    "factor that is 1 in half": ward(ScaledAtanh, "infinite-value", std=1.0),
    "arc of a tanh": ward(ArcOfTanh, "gradient-undefined", std=2.5),
    "log1p of a sigmoid": ward(LogOfRest, "infinite-value", std=5.0, rate=1e-3),
    "log of 1 - sigmoid": ward(LogOfDifference, "log-of-zero", std=5.0, rate=1e-3),
    "eps of a logit": ward(LogitWithEps, "infinite-value", std=0.5, rate=1e-3),
    "arc of a cosine": ward(ArcCosine, "gradient-undefined", std=1.0, level="O1"),
    "root of zero": ward(RootOfZero, "gradient-undefined", std=1.0, level="O1"),
    "sum that is 1 in half": ward(SumAtanh, "infinite-value", std=4.0),
    "arc of a sum": ward(ArcOfSum, "gradient-undefined", std=1.0),
    "log1p of -1": ward(LogOfSurvivors, "infinite-value", std=1.0),
}
