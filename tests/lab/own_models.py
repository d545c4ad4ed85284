"""Models, data and losses of one's own, as people have them, for the tests of `lab.open`."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from amplab.lab import Experiment, ExperimentConfig
from amplab.lab.own_task import register_own


class Block(nn.Module):
    """As a torchvision ResNet has it, with an in-place ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 3, padding=1), Block(8)
        self.dropout, self.fc = nn.Dropout(0.3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(self.block(self.stem(x)).mean((2, 3))))


class Output(dict):
    """What a transformer of Hugging Face returns: a dict with attributes."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.layer(self.words(input_ids), src_key_padding_mask=~attention_mask.bool())
        logits = self.head(hidden[:, 0])
        return Output(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru, self.out = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.gru(self.words(ids))[0]).transpose(1, 2)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(8, 16), nn.Linear(5, 16), nn.Linear(16, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.out(torch.tanh(self.left(left) + self.right(right))).squeeze(-1)


DRAWN = torch.Generator().manual_seed(0)


IMAGES = TensorDataset(torch.rand(24, 3, 6, 6, generator=DRAWN), torch.arange(24) % 4)


TEXTS = [
    {
        "input_ids": torch.randint(0, 50, (4, 6), generator=DRAWN),
        "attention_mask": torch.ones(4, 6, dtype=torch.long),
        "labels": torch.randint(0, 3, (4,), generator=DRAWN),
        "ids_of_rows": torch.arange(4),
    }
    for _ in range(3)
]


SIZES = {"left": (8,), "right": (5,), "target": ()}


TAGS = [tuple(torch.randint(0, 20, (2, 4, 5), generator=DRAWN)) for _ in range(3)]


PAIRS = [{name: torch.randn(6, *size, generator=DRAWN) for name, size in SIZES.items()} for _ in range(3)]


def loader() -> DataLoader:
    return DataLoader(IMAGES, batch_size=8, shuffle=True)


def judged(model: nn.Module, x: Tensor, target: float) -> Tensor:
    logits = model(x)
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def gan() -> dict:
    models = {"G": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), "D": nn.Linear(8, 1)}
    real = lambda models, x: judged(models["D"], x, 1.0)  # noqa: E731
    fake = lambda models, x: judged(models["D"], models["G"](torch.randn(8, 4)).detach(), 0.0)  # noqa: E731
    generate = lambda models, x: judged(models["D"], models["G"](torch.randn(8, 4)), 1.0)  # noqa: E731
    return {
        "model": models,
        "data": [torch.randn(8, 8, generator=DRAWN)],
        "step": {"D": [real, fake], "G": generate},
        "optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05),
    }


OWN = {
    "resnet": lambda: {
        "model": ResNet(),
        "data": loader(),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05),
    },
    "factory": lambda: {"model": ResNet, "data": loader, "loss": F.cross_entropy, "optimizer": torch.optim.SGD},
    "transformer": lambda: {"model": Classifier(), "data": TEXTS},
    "rnn": lambda: {
        "model": Tagger(),
        "data": TAGS,
        "step": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    },
    "two inputs": lambda: {
        "model": TwoInputs,
        "data": PAIRS,
        "step": lambda model, batch: F.mse_loss(model(batch["left"], batch["right"]), batch["target"]),
        "optimizer": lambda weights: torch.optim.AdamW(weights, lr=1e-2, eps=1e-4),
    },
    "gan": gan,
}


def registered(model, data, **parts) -> ExperimentConfig:
    return ExperimentConfig(task=register_own(model, data, **parts))


class Meter:
    """Has a state of another kind than schedules have."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        if self.state is None:
            raise ValueError("nothing was measured")
        return self.state

    def load_state_dict(self, state):
        raise AssertionError


def is_taken_back(experiment: Experiment, fails: list[int], error: type[Exception] = ZeroDivisionError) -> bool:
    """Let the next step of an experiment fail, whose loss raises where `fails` has an entry; try to take it back."""
    fails.append(1)
    with pytest.raises(error):
        experiment.step()
    return experiment.take_back()
