"""Models, losses, optimizers and data of one's own that keep more than weights, as people have them."""

import copy
import dataclasses
import random
import types
from collections import defaultdict, deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, TensorDataset

torch.manual_seed(0)
X, Y = torch.randn(64, 16), torch.randint(0, 4, (64,))
BATCHES = [*zip(X.split(16), Y.split(16), strict=True)]


class Centered(nn.Module):
    """A loss that keeps a running mean in a buffer, and its calls in an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.calls = 0

    def forward(self, output, labels):
        self.calls += 1
        loss = F.cross_entropy(output - self.center, labels) / self.calls
        self.center.mul_(0.5).add_(output.detach().float().mean(0), alpha=0.5)
        return loss


class Recurrent(nn.Module):
    """Carries what it has seen from batch to batch, and grows a buffer from nothing."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.count = nn.Linear(16, 4), None, 0
        self.register_buffer("mean", None)
        self.register_buffer("bank", torch.zeros(0, 16))

    def forward(self, x):
        self.seen = x if self.seen is None else 0.5 * self.seen.detach() + 0.5 * x  # with a graph, as a hidden state
        self.mean = x.mean(0) if self.mean is None else 0.5 * self.mean + 0.5 * x.mean(0)
        self.bank = torch.cat([self.bank, x[:1]])
        self.count += 1
        return self.linear(x + self.seen + self.mean + self.bank.mean(0)) / self.count


class EpochSeed:
    """The usual way: a seed for each epoch."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        order = np.random.default_rng(17 + self.epoch).permutation(64)
        self.epoch += 1
        return ((X[order[start : start + 16]], Y[order[start : start + 16]]) for start in range(0, 64, 16))


class Shuffling:
    """Shuffles a list of its own in place, and reads it batch by batch."""

    def __init__(self):
        self.order = list(range(64))

    def __iter__(self):
        random.shuffle(self.order)
        for start in range(0, 64, 16):
            here = self.order[start : start + 16]
            yield X[here], Y[here]


class Curriculum(Sampler):
    def __init__(self, source):
        self.source, self.epoch = source, 0

    def __len__(self):
        return 64

    def __iter__(self):
        self.epoch += 1
        drawn = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch))
        return iter(sorted(drawn.tolist()[: 32 + 16 * self.epoch]))


def curriculum():
    data = TensorDataset(X, Y)
    return DataLoader(data, 16, sampler=Curriculum(data))


class Lookahead(torch.optim.SGD):
    """Has its slow weights and its count in attributes."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.count, self.slow = 0, None

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        params = self.param_groups[0]["params"]
        self.count += 1
        self.slow = self.slow or [param.clone() for param in params]
        if self.count % 3 == 0:
            for param, slow in zip(params, self.slow, strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)


def warmed_up(weights):
    optimizer, steps = torch.optim.SGD(weights, lr=0.1), 0

    def warm_up(*_):
        nonlocal steps
        steps += 1
        optimizer.param_groups[0]["lr"] = 0.1 * min(1, steps / 10)

    optimizer.register_step_pre_hook(warm_up)
    return optimizer


class Clip:
    """Clips by a running norm."""

    average = None

    def __call__(self, optimizer, *_):
        params = optimizer.param_groups[0]["params"]
        norm = float(torch.nn.utils.get_total_norm([param.grad for param in params]))
        self.average = norm if self.average is None else 0.9 * self.average + 0.1 * norm
        torch.nn.utils.clip_grad_norm_(params, 0.9 * self.average)


def clipped(weights):
    optimizer = torch.optim.SGD(weights, lr=0.1)
    optimizer.register_step_pre_hook(Clip())
    return optimizer


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.1)


class Baseline(nn.Module):
    """Subtracts averages that begin as a number, and as an empty list, and are tensors later."""

    def __init__(self):
        super().__init__()
        self.linear, self.average, self.memory = nn.Linear(16, 4), 0.0, []

    def forward(self, x):
        out = self.linear(x)
        mean = out.detach().float().mean(0, keepdim=True)
        self.average = 0.9 * self.average + 0.1 * mean
        self.memory = torch.cat([self.memory, mean])[-5:] if len(self.memory) else mean
        return out - self.average - self.memory.mean(0)


class Recent(nn.Module):
    """Keeps the latest few sizes, and counts what it has seen."""

    def __init__(self):
        super().__init__()
        self.linear, self.recent, self.seen = nn.Linear(16, 4), deque(maxlen=3), defaultdict(int)

    def forward(self, x):
        out = self.linear(x)
        self.recent.append(float(out.detach().abs().mean()))
        self.seen["calls"] += 1
        return out / (1 + sum(self.recent) + 1 / self.seen["calls"])


def counted_layer():
    """A model with a hook that notes its calls on the layer, and one that counts in a variable of its function."""
    model, calls = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), 0

    def note(module, _inputs, output):
        nonlocal calls
        calls += 1
        module.calls = getattr(module, "calls", 0) + 1
        return output * (1 + 1 / (module.calls + calls))

    model[0].register_forward_hook(note)
    return model


def averaged_norm(weights):
    optimizer, average = torch.optim.SGD(weights, lr=0.1), 0.0

    def clip(*_):
        nonlocal average
        grads = [weight.grad for weight in optimizer.param_groups[0]["params"]]
        average = 0.9 * average + 0.1 * torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_(1 / (1 + average))

    optimizer.register_step_pre_hook(clip)
    return optimizer


def clamped(weights):
    """Clamps the weights after each step, as WGAN does, by tensors that share their memory."""
    optimizer, values = torch.optim.SGD(weights, lr=0.5), [weight.data for weight in weights]
    optimizer.register_step_post_hook(lambda *_: [value.clamp_(-0.2, 0.2) for value in values])
    return optimizer


class OfData(torch.optim.Optimizer):
    """Writes to the memory of the weights."""

    def __init__(self, weights):
        super().__init__(weights, {"lr": 0.1})
        self.values = [weight.data for weight in self.param_groups[0]["params"]]

    def step(self, closure=None):
        for value, weight in zip(self.values, self.param_groups[0]["params"], strict=True):
            value.sub_(weight.grad, alpha=0.1)


class Layer(nn.Module):
    """Shares a dict with another layer."""

    def __init__(self, context, counts):
        super().__init__()
        self.context, self.counts, self.linear = context, counts, nn.Linear(16, 16)

    def forward(self, x):
        self.context["step"] += self.counts
        return self.linear(x) * (1 + 0.1 * self.context["step"])


class Sharing(nn.Module):
    """Layers share a dict, and a hook shares a list with the model."""

    def __init__(self):
        super().__init__()
        context, stats = {"step": 0}, []
        self.first, self.second, self.head = Layer(context, 1), Layer(context, 0), nn.Linear(16, 4)
        self.stats = stats
        self.head.register_forward_hook(lambda _module, _inputs, output: stats.append(output.detach().mean().item()))

    def forward(self, x):
        return self.head(self.second(self.first(x))) - 0.1 * sum(self.stats[-3:])


class Momentum(torch.optim.Optimizer):
    """Has its momentum in a dict by parameter, and in pairs."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        params = self.param_groups[0]["params"]
        self.velocity, self.pairs = {p: torch.zeros_like(p) for p in params}, [(p, torch.zeros_like(p)) for p in params]

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]  # masters at O2
        for param, velocity, (_, slow) in zip(params, self.velocity.values(), self.pairs, strict=True):
            velocity.mul_(0.9).add_(param.grad)
            slow.mul_(0.5).add_(velocity)
            param.sub_(slow, alpha=0.02)


class Growing(Dataset):
    """Its samples depend on how many were read."""

    def __init__(self):
        self.seen = 0

    def __len__(self):
        return 32

    def __getitem__(self, place):
        self.seen += 1
        return X[place] * (1 + 32 / (32 + self.seen)), Y[place]


class Average:
    def __init__(self):
        self.total, self.count, self.last = 0.0, 0, deque(maxlen=3)

    def add(self, value):
        self.total, self.count = self.total + value, self.count + 1
        self.last.append(value)
        return self.total / self.count


class Metered(nn.Module):
    """Counts in objects: one in an attribute, in a list, in another object, and a namespace."""

    def __init__(self):
        super().__init__()
        self.linear, self.average, self.averages = nn.Linear(16, 4), Average(), [Average(), {"no": "object"}]
        self.state = types.SimpleNamespace(calls=0, inner=Average())

    def forward(self, x):
        self.state.calls += 1
        size = float(x.detach().abs().mean()) * self.state.calls
        sizes = [each.add(size) for each in (self.average, self.averages[0], self.state.inner)]
        return self.linear(x) / sum(sizes) / len(self.average.last)


class Aliased(nn.Module):
    """Reads by one name what it writes by another."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.register_buffer("written", torch.zeros(4))
        self.register_buffer("read", self.written)

    def forward(self, x):
        self.written.add_(1)
        return self.linear(x) * (1 + self.read)


class Viewing(nn.Module):
    """Writes into tensors and arrays by views of them, some of which it makes only in its first step."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.total, self.counts = torch.zeros(4), np.zeros(6, np.float32)
        self.middle, self.odd, self.first = self.total[1:3], self.counts[1::2], torch.from_numpy(self.counts)[:2]
        self.bank, self.rows, self.calls = None, [], 0

    def forward(self, x):
        if self.bank is None:
            self.bank = torch.zeros(3, 4)
            self.rows = [*self.bank, self.bank[:1].expand(2, 4)]
        self.calls += 1
        self.total[0] += 1
        self.rows[self.calls % 3].add_(1)
        if self.calls > 7:  # the last one before a restart
            self.middle.mul_(1.5).add_(1)
            self.odd += 1
            self.first.add_(0.5)
        return self.linear(x) / (
            1 + self.total.sum() + float(self.counts.sum()) + self.bank.mean() + self.rows[3].sum()
        )


class Part(nn.Module):
    """Adds to a container that another module reads."""

    def __init__(self):
        super().__init__()
        self.linear, self.sizes, self.counts = nn.Linear(16, 4), [], None

    def forward(self, x):
        self.sizes.append(1.0)
        if self.counts is not None:
            self.counts["calls"] = self.counts.get("calls", 0) + 1
        return self.linear(x)


class NamedTwice(nn.Module):
    """Modules of it share a list in a dict, and a dict and a tensor that it makes only in its first step."""

    def __init__(self):
        super().__init__()
        self.part, self.counts, self.total, self.again = Part(), None, None, None
        self.sizes = {"part": self.part.sizes, "other": []}
        self.factors = np.linspace(0, 1, 1961, dtype=np.float32).reshape(37, 53).T  # columns first, for sums

    def forward(self, x):
        if self.counts is None:
            self.counts = self.part.counts = {}
            self.total = self.again = torch.zeros(())
        out = self.part(x)
        self.again += 1
        self.factors = self.factors * np.float32(1.01)
        seen = len(self.sizes["part"]) + self.counts["calls"] + float(self.total) + float(self.factors.sum())
        return out / (1 + 0.1 * seen)


@dataclasses.dataclass(slots=True)
class Slotted:
    calls: int = 0
    sizes: list = dataclasses.field(default_factory=list)


class Mixed(Slotted):
    """Has a `__dict__` beside the slots."""

    def __init__(self):
        super().__init__()
        self.more = 0


class Averaging:
    """Keeps an average of a module, as a module."""

    def __init__(self, module):
        self.module, self.updates = copy.deepcopy(module).requires_grad_(requires_grad=False), 0
        self.module.register_buffer("moved", torch.zeros(()))

    @torch.no_grad()
    def update(self, module):
        self.updates += 1
        self.module.moved += 1
        for own, theirs in zip(self.module.parameters(), module.parameters(), strict=True):
            own.mul_(0.9).add_(theirs, alpha=0.1)


class Hidden(nn.Module):
    """Counts in objects that are found less easily."""

    def __init__(self):
        super().__init__()
        self.linear, self.slotted, self.mixed = nn.Linear(16, 4), Slotted(), Mixed()
        self.deep = {"train": {"loss": Average()}, "recent": deque([[Average()]])}
        self.averaging = Averaging(self.linear)

    def forward(self, x):
        size = float(x.detach().abs().mean())
        self.slotted.calls += 1
        self.slotted.sizes.append(size)
        self.mixed.calls += 2
        self.mixed.more += 1
        if self.training:
            self.averaging.update(self.linear)
        found = self.deep["train"]["loss"].add(size) + self.deep["recent"][0][0].add(size * self.slotted.calls)
        found += sum(self.slotted.sizes) + self.mixed.calls * self.mixed.more + float(self.averaging.module.moved)
        return self.linear(x) / found + self.averaging.module(x.float()).to(x.dtype)


class Memory(deque):
    """A container of one's own, with a method that it changes."""

    def append(self, value):
        super().append(2 * value)


class Tree(dict):
    """As of the settings of a run."""


class Remembering(nn.Module):
    """Keeps what it sees in containers of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.memory, self.tree, self.raw = nn.Linear(16, 4), Memory(maxlen=5), Tree(calls=0), bytearray()

    def forward(self, x):
        self.memory.append(float(x.detach().abs().mean()))
        self.tree["calls"] += 1
        self.raw.append(1)
        return self.linear(x) / (sum(self.memory) + self.tree["calls"] + len(self.raw))


class Settling(nn.Module):
    """Begins from its first batches, then freezes what it has learned, and drops what it does not need any more."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.pending, self.count = True, 0
        self.register_buffer("warm", torch.ones(8))
        self.prototypes = [nn.Parameter(torch.zeros(8), requires_grad=False)]
        self.__dict__["teacher"] = nn.Linear(8, 4)  # hidden from `parameters`
        with torch.no_grad():
            for weight in self.teacher.parameters():
                weight.fill_(0.1)

    def forward(self, x):
        if hasattr(self, "pending"):
            self.shift = float(x.mean())
            del self.pending
        self.count += 1
        if self.count == 4:
            self.norm.eval()
            self.first.requires_grad_(requires_grad=False)
            self.warm = None
        hidden = self.norm(self.first(x - self.shift))
        if self.warm is not None:
            hidden = hidden * self.warm.to(hidden.dtype)
        with torch.no_grad():
            self.prototypes[0].add_(hidden.float().mean(0))
            self.teacher.weight.mul_(0.9).add_(self.last.weight.float(), alpha=0.1)
        return self.last(hidden + 0.01 * self.prototypes[0].to(hidden.dtype)) + self.teacher(hidden.float()).to(x.dtype)


class Registering(nn.Module):
    """Registers what its first batch tells."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.mean(0).float(), persistent=False)
            self.linear.register_buffer("count", torch.tensor(1.0))
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.linear.count += 1
        return self.linear(x - self.mean.to(x.dtype)) / self.linear.count


class Ema:
    """An average of weights that the optimizer follows."""

    def __init__(self, weights):
        self.weights, self.shadow, self.updates = weights, [weight.detach().clone() for weight in weights], 0

    @torch.no_grad()
    def update(self):
        self.updates += 1
        for shadow, weight in zip(self.shadow, self.weights, strict=True):
            shadow.lerp_(weight, 1 / (1 + self.updates))
            weight.lerp_(shadow, 0.1)


class Averaged(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.ema = Ema(self.param_groups[0]["params"])

    def step(self, closure=None):
        super().step(closure)
        self.ema.weights = self.param_groups[0]["params"]  # masters at O2
        self.ema.update()


CASES = {
    "baseline": {"model": Baseline},
    "recent": {"model": Recent},
    "counted layer": {"model": counted_layer},
    "averaged norm": {"optimizer": lambda: averaged_norm},
    "clamped": {"optimizer": lambda: clamped},
    "memory": {"optimizer": lambda: OfData},
    "shared": {"model": Sharing},
    "momentum": {"optimizer": lambda: Momentum},
    "datasets": {"data": lambda: DataLoader(ConcatDataset([Growing(), Growing()]), 16)},
    "meters": {"model": Metered},
    "registering": {"model": Registering},
    "hidden": {"model": Hidden},
    "settling": {"model": Settling},
    "aliased": {"model": Aliased},
    "viewing": {"model": Viewing},
    "named twice": {"model": NamedTwice},
    "ema": {"optimizer": lambda: Averaged},
    "loss": {"loss": Centered},
    "model": {"model": Recurrent},
    "epoch": {"data": EpochSeed},
    "in place": {"data": Shuffling},
    "sampler": {"data": curriculum},
    "lookahead": {"optimizer": lambda: lambda weights: Lookahead(weights, lr=0.1)},
    "hook": {"optimizer": lambda: warmed_up},
    "object": {"optimizer": lambda: clipped},
}
