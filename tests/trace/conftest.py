"""Small models of every shape that a trace has to follow, each with a loss on a batch of its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Scenario = tuple[nn.Module, Callable[[], Tensor]]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.25)
        self.fc = nn.Linear(64, 4)

    def forward(self, x):
        hidden = F.max_pool2d(torch.relu(self.bn(self.conv(x))), 2)
        return {"logits": self.fc(self.drop(hidden.flatten(1)))}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        queries = x[None]  # (1, batch, 8)
        mixed, _ = self.attend(queries, queries, queries, need_weights=False)
        scored = F.scaled_dot_product_attention(mixed, mixed, mixed)
        return self.norm(queries + scored)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.lstm(x[:, None])[0][:, -1])


class Tied(nn.Module):
    """One Linear under two names and called twice, and an embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first
        self.embed = nn.Embedding(4, 8)
        self.head = nn.Linear(8, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        tokens = torch.arange(len(x)) % 4
        return self.head(self.second(torch.tanh(self.first(x + self.embed(tokens)))))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Custom(nn.Module):
    """An autograd.Function, a no_grad section and writing into a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        hidden = Square.apply(self.fc(x))
        with torch.no_grad():
            largest = hidden.abs().amax() + 1
        hidden = hidden / largest
        canvas = torch.zeros_like(hidden)
        canvas[:, :4] = hidden[:, 4:]
        return self.head(canvas + hidden)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return self.head(checkpoint(self.block, self.fc(x), use_reentrant=self.use_reentrant))


MODELS = {
    "mlp": Mlp,
    "cnn": Cnn,
    "attention": Attention,
    "recurrent": Recurrent,
    "tied": Tied,
    "custom": Custom,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(use_reentrant=True),
}


def scenario_of(name: str, dtype: torch.dtype = torch.float32) -> Scenario:
    """A model of MODELS and a function that gives its loss; equal for equal arguments."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 1, 8, 8, generator=generator) if name == "cnn" else torch.randn(6, 8, generator=generator)
    y = torch.randint(0, 4, (6,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]().to(dtype)

    def loss() -> Tensor:
        out = model(x.to(dtype))
        return F.cross_entropy(out["logits"] if isinstance(out, dict) else out, y)

    return model, loss


@pytest.fixture
def scenario() -> Callable[..., Scenario]:
    """`scenario_of`: a fresh model and its loss by name."""
    return scenario_of


@pytest.fixture(params=list(MODELS))
def every_model(request) -> str:
    """The name of each model in turn."""
    return request.param
