"""Healthy loops as people write them, each with something in it that a hasty rule takes for a fault."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from patients import gaussian
from precisions import Precision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["RECIPES", "Recipe"]


@dataclass
class Recipe:
    """What learns, from what; `step` is the loop's body, the plain one where none is given."""

    model: nn.Module
    batch: Callable[[int], tuple]
    loss: Callable[..., Tensor]
    optimizers: list = field(default_factory=list)
    step: Callable[["Recipe", Precision, tuple], Tensor] | None = None
    schedulers: list = field(default_factory=list)

    def run(self, precision: Precision, batch: tuple) -> Tensor:
        """One iteration; the loss, not scaled."""
        with precision.around():
            return (self.step or plain)(self, precision, batch)


def plain(recipe: Recipe, precision: Precision, batch: tuple, *, max_norm: float | None = None) -> Tensor:
    """The loop of the documentation."""
    (optimizer,) = recipe.optimizers
    optimizer.zero_grad()
    with precision.region():
        loss = recipe.loss(*batch)
    precision.backward(loss, optimizer)
    if max_norm is not None:
        nn.utils.clip_grad_norm_(precision.unscaled(optimizer), max_norm)
    precision.step(optimizer)
    precision.update()
    for scheduler in recipe.schedulers:
        scheduler.step()
    return loss.detach()


def adamw(model: nn.Module, **options) -> list:
    return [torch.optim.AdamW(model.parameters(), lr=1e-3, **options)]


# A transformer with masks of -inf and rows of padding


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * size, size))

    def forward(self, x, hidden):  # (batch, steps, size), (steps, steps)
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        x = x + self.out(scores.softmax(-1) @ v)
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """Tokens in, logits out by the same weights; token 0 is padding."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, size, padding_idx=0)
        self.blocks = nn.ModuleList(Block(size) for _ in range(2))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, hidden)
        return self.head(self.norm(x))


def tokens(seed: int, *, steps: int = 12) -> Callable[[int], tuple[Tensor]]:
    def batch(step: int) -> tuple[Tensor]:
        drawn = torch.randint(1, 64, (6, steps), generator=torch.Generator().manual_seed(100 * seed + step))
        drawn[:3, steps // 2 :] = 0
        drawn[5] = 0  # nothing but padding
        return (drawn,)

    return batch


def next_token(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten(), ignore_index=0)


def transformer(size: int, seed: int) -> Recipe:
    """With weight tying, warm-up and clipping."""
    model = Decoder(size)
    optimizers = adamw(model)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: min(1, (step + 1) / 4))]
    return Recipe(model, tokens(seed), next_token(model), optimizers, clipped(1.0), schedulers)


def clipped(max_norm: float) -> Callable:
    return lambda *given: plain(*given, max_norm=max_norm)


# A residual network with BatchNorm


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [[nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)] for _ in range(2)]
        self.body = nn.Sequential(*layers[0], nn.ReLU(), *layers[1])

    def forward(self, x):
        return F.relu(x + self.body(x))


def resnet(size: int, seed: int) -> Recipe:
    width = size // 2
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), Residual(width), nn.MaxPool2d(2), Residual(width),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )  # fmt: skip
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)]

    def loss(x):
        return F.cross_entropy(model(x), (x.flatten(1).mean(1) * 40).long().clamp(-4, 5) + 4, label_smoothing=0.1)

    return Recipe(model, gaussian(size, seed, 8, 3, 12, 12), loss, optimizers)


# Recurrent


class Recurrent(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, size, padding_idx=0)
        self.lstm = nn.LSTM(size, size, num_layers=2, batch_first=True)
        self.head = nn.Linear(size, 64)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0])


def lstm(size: int, seed: int) -> Recipe:
    model = Recurrent(size)
    return Recipe(model, tokens(seed), next_token(model), adamw(model), clipped(0.25))


# Two that play against each other


def gan(size: int, seed: int) -> Recipe:
    generator = nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size))
    judge = nn.Sequential(nn.Linear(size, 2 * size), nn.LeakyReLU(0.2), nn.Linear(2 * size, 1))
    model = nn.ModuleDict({"generator": generator, "judge": judge})
    optimizers = [torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in (generator, judge)]

    def fool(x):
        out = judge(generator(x.flip(1)))
        return F.binary_cross_entropy_with_logits(out, torch.ones_like(out))

    def step(recipe, precision, batch):
        (x,) = batch
        of_generator, of_judge = recipe.optimizers
        of_judge.zero_grad()
        with precision.region():
            real, fake = judge(x), judge(generator(x.flip(1)).detach())
            lost = F.softplus(-real).mean() + F.softplus(fake).mean()
        precision.backward(lost, of_judge)
        precision.step(of_judge)
        of_generator.zero_grad()
        with precision.region():
            loss = fool(x)
        precision.backward(loss, of_generator)
        precision.step(of_generator)
        precision.update()
        return loss.detach()

    return Recipe(model, gaussian(size, seed), fool, optimizers, step)


# exp and logarithms that are in order


class Variational(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 8))
        self.decode = nn.Sequential(nn.Linear(4, size), nn.Tanh(), nn.Linear(size, size))

    def forward(self, x):
        mean, logvar = self.encode(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        divergence = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(-1).mean()
        return self.decode(code), divergence


def vae(size: int, seed: int) -> Recipe:
    model = Variational(size)

    def loss(x):
        out, divergence = model(x)
        return F.mse_loss(out.float(), x) + 1e-3 * divergence

    return Recipe(model, gaussian(size, seed, 32, size), loss, adamw(model))


class Contrastive(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
        self.log_temperature = nn.Parameter(torch.tensor(-2.6))

    def forward(self, x):
        code = F.normalize(self.body(x), dim=-1)
        logits = code @ code.mT * torch.exp(-self.log_temperature)
        return logits.masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)


def contrastive(size: int, seed: int) -> Recipe:
    """Rows n and n + half are two views of the same."""
    model = Contrastive(size)
    normal = gaussian(size, seed, 16, size)

    def views(step):
        (x,) = normal(step)
        return (torch.cat([x, x + 0.1 * x.roll(1)]),)

    return Recipe(model, views, lambda x: F.cross_entropy(model(x), torch.arange(32).roll(16)), adamw(model))


# Loops that do more than one backward, or something between backward and step


def network(size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.LayerNorm(2 * size), nn.Linear(2 * size, 1))


def learns_mean(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: F.mse_loss(model(x).float().flatten(), x.mean(1))


def accumulates(size: int, seed: int) -> Recipe:
    def step(recipe, precision, batch):
        (optimizer,) = recipe.optimizers
        optimizer.zero_grad()
        for place, part in enumerate(batch[0].chunk(4)):
            with precision.region():
                loss = recipe.loss(part) / 4
            precision.backward(loss, optimizer, last=place == 3)
        nn.utils.clip_grad_norm_(precision.unscaled(optimizer), 0.5)
        precision.step(optimizer)
        precision.update()
        return loss.detach()

    model = network(size)
    return Recipe(model, gaussian(size, seed, 16, size), learns_mean(model), adamw(model), step)


def accumulates_unscaled(size: int, seed: int) -> Recipe:
    """Each backward unscales its own, as scale_loss does unless told otherwise."""

    def step(recipe, precision, batch):
        (optimizer,) = recipe.optimizers
        optimizer.zero_grad()
        for part in batch[0].chunk(4):
            with precision.region():
                loss = recipe.loss(part) / 4
            precision.backward(loss, optimizer)
        precision.step(optimizer)
        precision.update()
        return loss.detach()

    model = network(size)
    return Recipe(model, gaussian(size, seed, 16, size), learns_mean(model), adamw(model), step)


def averages(size: int, seed: int) -> Recipe:
    """An exponential moving average of the weights, and a schedule."""
    model = network(size)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]
    average = [each.detach().clone() for each in model.parameters()]

    def step(*given):
        loss = plain(*given)
        for mean, now in zip(average, model.parameters(), strict=True):
            mean.lerp_(now.detach().float(), 0.1)
        return loss

    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 100)]
    return Recipe(model, gaussian(size, seed), learns_mean(model), optimizers, step, schedulers)


# Modules that are frozen, not always used, or computed twice


def fine_tunes(size: int, seed: int) -> Recipe:
    model = nn.Sequential(network(size)[:3].requires_grad_(False), nn.Linear(2 * size, 1))
    optimizers = [torch.optim.AdamW(model[1].parameters(), lr=1e-2)]
    return Recipe(model, gaussian(size, seed), learns_mean(model), optimizers)


class Mixture(nn.Module):
    """Each row goes to one expert; experts that no row chose do nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(size, 8)
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(8))
        self.head = nn.Linear(size, 1)

    def forward(self, x):
        chances, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, (expert(x[rows]) * chances[rows, None]).to(out.dtype))
        return self.head(out)


def mixture(size: int, seed: int) -> Recipe:
    model = Mixture(size)
    return Recipe(model, gaussian(size, seed, 6, size), learns_mean(model), adamw(model))


class Checkpointed(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(size, size), nn.Dropout(0.1), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(size, 1)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def checkpointed(size: int, seed: int) -> Recipe:
    model = Checkpointed(size)
    return Recipe(model, gaussian(size, seed), learns_mean(model), adamw(model))


def clips_values(size: int, seed: int) -> Recipe:
    def step(recipe, precision, batch):
        (optimizer,) = recipe.optimizers
        optimizer.zero_grad()
        with precision.region():
            loss = recipe.loss(*batch)
        precision.backward(loss, optimizer)
        nn.utils.clip_grad_value_(precision.unscaled(optimizer), 0.02)
        precision.step(optimizer)
        precision.update()
        return loss.detach()

    model = network(size)
    return Recipe(model, gaussian(size, seed), learns_mean(model), adamw(model), step)


RECIPES = {
    "transformer": transformer,
    "resnet": resnet,
    "lstm": lstm,
    "gan": gan,
    "vae": vae,
    "contrastive": contrastive,
    "accumulates": accumulates,
    "accumulates unscaled": accumulates_unscaled,
    "averages": averages,
    "fine-tunes": fine_tunes,
    "mixture of experts": mixture,
    "checkpointed": checkpointed,
    "clips values": clips_values,
}
