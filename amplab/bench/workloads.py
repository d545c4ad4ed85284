"""The workloads: four models with their training step, and lists of gradients.

=================  =========================================================================
MLP 512            64-512-512-512-10, batch 64
tiny MLP           64-32-10, batch 32: very little arithmetic, so that overhead dominates
small CNN          two convolutions of 16 and 32 channels with BatchNorm on 8 × 8 pixels, batch 64
small transformer  4 layers of width 128, 4 heads, 64 tokens of a vocabulary of 256, batch 8
ResNet50 list      the 161 parameters of ResNet50, 25.6 M elements
=================  =========================================================================
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "Workload",
    "grads_of",
    "mlp_512",
    "random_tensors",
    "resnet50_shapes",
    "small_cnn",
    "small_transformer",
    "tiny_mlp",
]

_TOKENS, _VOCABULARY = 64, 256


@dataclass(frozen=True)
class Workload:
    """A model, an optimizer and one batch to train on repeatedly.

    Attributes:
        model: in float32.
        optimizer: SGD, which adds little time.
        inputs: the inputs of the batch.
        labels: class indices, one for each row of the model's output.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    labels: Tensor

    def loss(self) -> Tensor:
        """One forward; cross entropy, a scalar."""
        return F.cross_entropy(self.model(self.inputs).flatten(0, -2), self.labels)

    def step(self, casting: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext) -> None:
        """One training step: forward and loss under ``casting()``, backward, optimizer."""
        with casting():
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class _Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        # Dropout draws random numbers, which would add the same time to both sides and blur the ratio.
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``(batch, 64)`` int64 to logits ``(batch, 64, 256)``."""
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits


def mlp_512() -> Workload:
    """Four linear layers, three of them 512 wide."""
    layers = [nn.Linear(64, 512), nn.ReLU(), *(nn.Linear(512, 512), nn.ReLU()) * 2, nn.Linear(512, 10)]
    return _classifier(nn.Sequential(*layers), batch=64)


def tiny_mlp() -> Workload:
    """Two small linear layers."""
    return _classifier(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), batch=32)


def small_cnn(batch: int = 64) -> Workload:
    """Two convolutions with BatchNorm, and a linear classifier."""
    torch.manual_seed(0)
    blocks = (
        layer
        for channels, out in ((1, 16), (16, 32))
        for layer in (nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2))
    )
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 2 * 2, 10))
    return _workload(model, torch.randn(batch, 1, 8, 8), torch.randint(0, 10, (batch,)))


def small_transformer(width: int = 128, layers: int = 4, batch: int = 8) -> Workload:
    """A transformer encoder that labels every token."""
    torch.manual_seed(0)
    model = _Transformer(width, layers)
    tokens = torch.randint(0, _VOCABULARY, (batch, _TOKENS))
    return _workload(model, tokens, tokens.flatten().roll(1))


def resnet50_shapes() -> Iterator[tuple[int, ...]]:
    """Yield the shapes of ResNet50's parameters, in order.

    Reference: ``torchvision.models.resnet50``.
    """
    yield from ((64, 3, 7, 7), (64,), (64,))
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, size in ((width, channels, 1), (width, width, 3), (4 * width, width, 1)):
                yield from ((out, into, size, size), (out,), (out,))
            if block == 0:
                yield from ((4 * width, channels, 1, 1), (4 * width,), (4 * width,))
            channels = 4 * width
    yield from ((1000, 2048), (1000,))


def random_tensors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return normally distributed tensors, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def grads_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that are not None."""
    return [param.grad for param in params if param.grad is not None]


def _classifier(model: nn.Module, *, batch: int) -> Workload:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return _workload(model, torch.randn(batch, 64), torch.randint(0, 10, (batch,)))


def _workload(model: nn.Module, inputs: Tensor, labels: Tensor) -> Workload:
    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.01), inputs, labels)
