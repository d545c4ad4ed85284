"""Runs whose fault is in the values that ops receive: what half cannot hold, and what no format can."""

from collections.abc import Callable

import torch
from patients import Patient, Ward, apex, gaussian, padded, regression
from torch import nn
from torch.nn import functional as F

__all__ = ["VALUE_WARDS"]


# Attention whose logits leave half


class Attention(nn.Module):
    """One head; the query is scaled down where it should be."""

    def __init__(self, size: int, scaled: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.factor = size**-0.5 if scaled else 1.0

    def forward(self, x):  # (rows, size)
        scores = (self.query(x) * self.factor) @ self.key(x).t()  # (rows, rows)
        return F.softmax(scores, dim=-1) @ self.value(x)


class Attends(nn.Module):
    def __init__(self, size: int, scaled: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.attention = Attention(size, scaled)
        self.head = nn.Linear(size, 1)
        if not scaled:
            nn.init.normal_(self.attention.query.weight, std=12.0)
            nn.init.normal_(self.attention.key.weight, std=40.0)

    def forward(self, x):
        return self.head(self.attention(self.norm(x)))


def attention_logits(size: int, seed: int, broken: bool, level: str = "O1") -> Patient:
    model = Attends(size, not broken)
    return apex(model, regression(model), gaussian(size, seed, 2 * size, size), level=level)


# A norm by hand whose eps is 0 in half


class HandNorm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()


def vanishing_eps(size: int, seed: int, broken: bool) -> Patient:
    """Rows of padding are constant, and their variance is 0."""
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    model.add_module("norm", HandNorm(1e-8 if broken else 1e-3))
    model.add_module("head", nn.Linear(size, 1))
    return apex(model, regression(model), padded(gaussian(size, seed)), level="O2")


# The logarithm of a softmax that reached 0


class Chooses(nn.Module):
    def __init__(self, size: int, by_hand: bool) -> None:
        super().__init__()
        self.body = nn.Linear(size, size)
        self.choice = Choice(by_hand)
        nn.init.normal_(self.body.weight, std=4.0)

    def forward(self, x):
        return self.choice(self.body(x))


class Choice(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, x):
        return torch.log(torch.softmax(x, -1)) if self.by_hand else torch.log_softmax(x, -1)


def log_of_softmax(size: int, seed: int, broken: bool) -> Patient:
    model = Chooses(size, broken)
    return apex(model, lambda x: F.nll_loss(model(x).float(), x.argmax(1)), gaussian(size, seed), level="O2")


# Binary cross entropy of a sigmoid in half


class Detector(nn.Module):
    def __init__(self, size: int, squashes: bool) -> None:
        super().__init__()
        self.body = nn.Linear(size, size)
        self.out = nn.Sequential(nn.Linear(size, 1), *([nn.Sigmoid()] if squashes else []))
        nn.init.normal_(self.out[0].weight, std=10.0)

    def forward(self, x):
        return self.out(self.body(x))


def bce_of_sigmoid(size: int, seed: int, broken: bool) -> Patient:
    model = Detector(size, broken)
    criterion = F.binary_cross_entropy if broken else F.binary_cross_entropy_with_logits
    return apex(
        model, lambda x: criterion(model(x).flatten(), (x.mean(1) > 0).float()), gaussian(size, seed), level="O2"
    )


# The sum of a large plane


class Pool(nn.Module):
    def __init__(self, sums: bool) -> None:
        super().__init__()
        self.sums = sums

    def forward(self, x):
        return x.sum((2, 3)) if self.sums else x.mean((2, 3))


def sum_of_plane(size: int, seed: int, broken: bool) -> Patient:
    """A plane of 64 x 64 and more, of brightness about 40."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1))
    nn.init.constant_(model[0].weight, 1.0)
    model.add_module("pool", Pool(broken))
    model.add_module("norm", nn.LayerNorm(4))
    model.add_module("head", nn.Linear(4, 1))
    normal = gaussian(size, seed, 2, 1, 48 + size, 48 + size)

    def planes(step):
        (x,) = normal(step)
        return (x + 40,)

    return apex(model, lambda x: (model(x).float() - 1).square().mean(), planes, level="O2")


# Masks of -1e9


class Masked(nn.Module):
    """Attention over rows, of which some are padding; a mask that leaves a row nothing to look at."""

    def __init__(self, size: int, fill: float) -> None:
        super().__init__()
        self.scores = nn.Linear(size, size)
        self.masking = Masking(fill)
        self.head = nn.Linear(size, 1)

    def forward(self, x):
        kept = (x[:, :1] > -0.5).to(self.head.weight.dtype).expand(-1, x.shape[1])
        return self.head(torch.softmax(self.masking(self.scores(x), kept), -1) * x)


class Masking(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, scores, kept):
        return scores + (1 - kept) * self.fill


def large_mask(size: int, seed: int, broken: bool) -> Patient:
    model = Masked(size, -1e9 if broken else -1e4)
    return apex(model, regression(model), gaussian(size, seed), level="O2")


# One layer of four whose outputs leave half, before a norm


class FeedForward(nn.Module):
    def __init__(self, size: int, functional: bool) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.norm = nn.LayerNorm(size)
        self.functional = functional

    def forward(self, x):
        x = torch.relu(self.widen(x))
        if self.functional:
            x = F.linear(x, self.narrow.weight)
            return self.norm(x)
        return self.norm(self.narrow(x))


def large_layer(size: int, seed: int, broken: bool, level: str, functional: bool) -> Patient:
    model = nn.Sequential(nn.Linear(size, size), nn.ReLU())
    model.add_module("block", FeedForward(size, functional))
    model.add_module("head", nn.Linear(size, 1))
    if broken:
        nn.init.normal_(model.block.widen.weight, std=2.0)
        nn.init.normal_(model.block.narrow.weight, std=1e4)
    return apex(model, regression(model), gaussian(size, seed, 32, size), level=level)


def large(default: str, *, functional: bool = False) -> Callable[..., Patient]:
    def admit(size: int, seed: int, broken: bool, level: str = default) -> Patient:
        return large_layer(size, seed, broken, level, functional)

    return admit


# Two masks of the smallest number, added: a sequence that both mask completely has scores of -inf alone


class TwoMasks(nn.Module):
    """Attention within sequences of which the last is empty: padding, and another segment than that of any token."""

    def __init__(self, size: int, wide: bool, broken: bool) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(size, size), nn.Linear(size, size)
        self.wide, self.broken = wide, broken

    def forward(self, x):  # (rows, size): sequences of four rows
        x = x.unflatten(0, (-1, 4))  # (sequences, 4, size)
        scores = self.query(x) @ self.key(x).mT * x.shape[-1] ** -0.5
        if self.wide:
            scores = scores.float()
        empty = (torch.arange(len(x)) == len(x) - 1)[:, None, None].to(scores.dtype)
        least = torch.finfo(scores.dtype).min
        padding, segments = empty * least, empty * least
        if not self.broken:
            scores = scores.masked_fill(empty.bool(), least)
            return (torch.softmax(scores, -1) @ x.to(scores.dtype)).flatten(0, 1)
        scores = scores + padding + segments
        return (torch.softmax(scores, -1) @ x.to(scores.dtype)).flatten(0, 1)


def two_masks(level: str, *, wide: bool) -> Callable[[int, int, bool], Patient]:
    def admit(size: int, seed: int, broken: bool) -> Patient:
        model = nn.Sequential()
        model.add_module("attention", TwoMasks(size, wide, broken))
        model.add_module("head", nn.Linear(size, 1))
        return apex(model, regression(model), gaussian(size, seed, 32, size), level=level)

    return admit


def late_where(size: int, seed: int, broken: bool) -> Patient:
    """sqrt at 0, thrown away by a where that comes after it: forward is finite, its gradient is not."""

    class Root(nn.Module):
        def forward(self, x):
            squares = x.square()
            inside = squares if broken else torch.where(squares > 0, squares, 1.0)
            return torch.where(squares > 0, inside.sqrt(), 0.0)

    model = nn.Sequential(nn.Linear(size, size, bias=False))
    model.add_module("root", Root())
    model.add_module("head", nn.Linear(size, 1))
    return apex(model, regression(model), padded(gaussian(size, seed)))


# A norm by hand of large activations: their squares are inf, and what is divided by it is 0


class HandRms(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-4)


def large_squares(size: int, seed: int, broken: bool) -> Patient:
    model = nn.Sequential(nn.Linear(size, size), HandRms(), nn.Linear(size, 1))
    nn.init.constant_(model[0].bias, 300.0 if broken else 3.0)
    return apex(model, regression(model), gaussian(size, seed), level="O2")


# The same at O1: the squares are not the only numbers that half rounds


class HandSquare(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, x):
        x = x if self.broken else x.float()
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-4)


def products_with_itself(size: int, seed: int, broken: bool) -> Patient:
    model = nn.Sequential(nn.Linear(size, size), HandSquare(broken), nn.Linear(size, 1))
    nn.init.constant_(model[0].bias, 400.0)
    return apex(model, regression(model), gaussian(size, seed))


# A loss of sums over a plane: the doubled sum overflows, and the sum itself is close to it


class Overlap(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, logits, target):
        if not self.broken:
            logits = logits.float()
        share = torch.sigmoid(logits)
        common = torch.einsum("bhw,bhw->b", share, target) if self.broken else (share * target).sum((1, 2))
        return 1 - (2 * common / (share.float() + target).sum((1, 2))).mean()


def doubled_sum(size: int, seed: int, broken: bool) -> Patient:
    """The sums are about 220 x 220."""
    model, overlap = nn.Sequential(nn.Conv2d(1, 1, 1)), Overlap(broken)
    nn.init.constant_(model[0].bias, 4.0)
    planes = gaussian(size, seed, 2, 1, 220, 220)
    return apex(model, lambda x: overlap(model(x)[:, 0], (x[:, 0] > -2.5).float()), planes)


# The minute of the week as an input: half holds every eighth, and the phase of a sine of it is lost


class Phases(nn.Module):
    def forward(self, minutes):
        angles = minutes * torch.tensor([6.2831853 / 1440, 6.2831853 / 60]).to(minutes.dtype)
        return torch.cat([angles.sin(), angles.cos()], -1)


def minutes_of_a_week(size: int, seed: int) -> Callable[[int], tuple]:
    normal = gaussian(size, seed, 32, 1)
    return lambda step: (5040 + (normal(step)[0] * 2000).round().clamp(-5000, 5000),)


def phase_of_minutes(size: int, seed: int, broken: bool) -> Patient:
    """The twin computes the phases before the model, whose inputs O2 casts."""
    model = nn.Sequential(nn.Linear(4, size), nn.Tanh(), nn.Linear(size, 1))
    if broken:
        model = nn.Sequential(Phases(), *model)

    def loss(minutes):
        out = model(minutes if broken else Phases()(minutes)).float()
        return F.mse_loss(out, torch.sin(minutes * (6.2831853 / 60)))

    return apex(model, loss, minutes_of_a_week(size, seed), level="O2")


# Times whose differences are small


class Gaps(nn.Module):
    def forward(self, minutes):
        return (minutes - (minutes.roll(1, 0))) / 100


def gaps_between_times(size: int, seed: int, broken: bool) -> Patient:
    """The twin counts from the first time."""
    model = nn.Sequential(Gaps(), nn.Linear(1, size), nn.Tanh(), nn.Linear(size, 1))
    normal = gaussian(size, seed, 32, 1)

    def times(step):
        return ((normal(step)[0] * 10).round() + (9000 if broken else 0),)

    return apex(model, lambda x: F.mse_loss(model(x).float(), (x - x.roll(1, 0)) / 30), times, level="O2")


VALUE_WARDS = {
    "attention logits": Ward(attention_logits, "logits-overflow-half", "attention"),
    "eps": Ward(vanishing_eps, "constant-underflows-half", "norm"),
    "log of softmax": Ward(log_of_softmax, "log-of-zero", "choice"),
    "bce": Ward(bce_of_sigmoid, "bce-after-sigmoid", "out.1"),
    "sum of a plane": Ward(sum_of_plane, "reduction-overflows-half", "pool"),
    "mask": Ward(large_mask, "constant-overflows-half", "masking"),
    "large squares": Ward(large_squares, "overflow-in-half", "1"),
    "large layer, O1": Ward(large("O1"), "overflow-in-half", "block.narrow"),
    "large layer, O2": Ward(large("O2"), "overflow-in-half", "block.narrow"),
    "large product, O1": Ward(large("O1", functional=True), "overflow-in-half", "block"),
    "large product, O2": Ward(large("O2", functional=True), "overflow-in-half", "block"),
    "two masks in half": Ward(two_masks("O2", wide=False), "masks-added", "attention"),
    "two masks in float32": Ward(two_masks("O1", wide=True), "masks-added", "attention"),
    "products with itself": Ward(products_with_itself, "overflow-in-half", "1"),
    "doubled sum": Ward(doubled_sum, "overflow-in-half", ""),
    "phase of minutes": Ward(phase_of_minutes, "digits-lost-in-half", "0"),
    "gaps between times": Ward(gaps_between_times, "digits-lost-in-half", "0"),
    "late where": Ward(late_where, "gradient-undefined", "root"),
}
