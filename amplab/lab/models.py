"""The models of the lab: small enough to train live on a CPU, with the layers that mixed precision treats differently.

`MLP` is linear layers and ReLU alone. `CNN` has convolutions and BatchNorm, which O2 keeps in float32 and O3 does not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CLASSES", "CNN", "MLP", "build_model"]

CLASSES = 10
_PIXELS = 8 * 8


class MLP(nn.Module):
    """Two hidden layers: 64 → hidden → hidden → 10.

    Args:
        hidden: Width of the hidden layers.

    Shape: images `(batch, 1, 8, 8)` → logits `(batch, 10)`.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(_PIXELS, hidden)
        self.hidden2 = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = images.flatten(1)  # (batch, 64)
        x = F.relu(self.hidden1(x))  # (batch, hidden)
        x = F.relu(self.hidden2(x))  # (batch, hidden)
        return self.output(x)  # (batch, 10)


class CNN(nn.Module):
    """Two convolutions with BatchNorm, one hidden layer.

    Args:
        hidden: Width of the hidden layer behind the convolutions, which have 8 and 16 channels.

    Shape: images `(batch, 1, 8, 8)` → logits `(batch, 10)`.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3, padding=1, stride=2, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.hidden = nn.Linear(16 * 4 * 4, hidden)
        self.output = nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = F.relu(self.norm1(self.conv1(images)))  # (batch, 8, 8, 8)
        x = F.relu(self.norm2(self.conv2(x)))  # (batch, 16, 4, 4)
        x = F.relu(self.hidden(x.flatten(1)))  # (batch, hidden)
        return self.output(x)  # (batch, 10)


_MODELS = {"mlp": MLP, "cnn": CNN}


def build_model(name: str, hidden: int, seed: int) -> nn.Module:
    """Return the model `name` in float32, its weights drawn from `seed`; the global generator is left as it was.

    Raises:
        ValueError: There is no such model.
    """
    if name not in _MODELS:
        raise ValueError(f"model={name}: expected one of {', '.join(_MODELS)}.")
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return _MODELS[name](hidden)
