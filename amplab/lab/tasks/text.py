"""A task of text: predict the next character, with a transformer or an LSTM.

The text is Python's own reference, which every Python has as the topics of ``help()``: the same on every machine with
the same Python, and nothing is downloaded. A transformer has the ops that mixed precision treats with most care:
softmax and LayerNorm.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amplab.lab.models import register_model
from amplab.lab.tasks.task import Score, Task, TaskChoice, TaskLoss

__all__ = ["ALPHABET", "CONTEXT", "TEXT_CHOICE", "CharLSTM", "CharTransformer", "TextBatch", "TextTask"]

ALPHABET = "".join(map(chr, range(32, 127)))
"""The characters of the task: printable ASCII. A run of white space is one space, anything else a question mark."""

CONTEXT = 32
"""Characters of one example."""

_LENGTH = 200_000
_HELD_OUT = 40_000
_MEASURED = 128  # examples of the held-out text

PERPLEXITY = Score("perplexity", chance=float(len(ALPHABET)))
"""exp of the mean cross-entropy: as many characters seem equally likely at each place; by chance, all of them."""


class TextBatch(NamedTuple):
    """Characters `(batch, CONTEXT)` int64 and the character that follows each, of the same shape."""

    characters: Tensor
    following: Tensor


def _next_character(model: nn.Module, batch: TextBatch) -> Tensor:
    logits = model(batch.characters)  # (batch, CONTEXT, len(ALPHABET))
    return F.cross_entropy(logits.flatten(0, 1), batch.following.flatten())


@dataclass(frozen=True, eq=False)
class TextTask(Task):
    """Text to train on and text to measure perplexity on.

    Attributes:
        name: As in the config.
        text: `(characters,)` int64, places in `ALPHABET`.
        held_out: `(characters,)`, the text after it.
        seed: Seed of the places from which a batch is taken.
    """

    name: str
    text: Tensor
    held_out: Tensor
    seed: int
    losses = (TaskLoss("cross-entropy", _next_character),)
    score = PERPLEXITY

    def batch(self, step: int, batch_size: int) -> TextBatch:
        """Return the examples of a step, each from a place drawn from (seed, step)."""
        generator = torch.Generator().manual_seed(self.seed_of(step))
        starts = torch.randint(len(self.text) - CONTEXT, (batch_size, 1), generator=generator)
        return _examples(self.text, starts)

    def measure(self, model: nn.Module) -> float:
        """Return the perplexity of the held-out text. Sync: one."""
        starts = torch.arange(_MEASURED).unsqueeze(1) * CONTEXT
        batch = _examples(self.held_out, starts)
        logits = model(batch.characters).float()
        return math.exp(min(F.cross_entropy(logits.flatten(0, 1), batch.following.flatten()).item(), 700.0))


def _examples(text: Tensor, starts: Tensor) -> TextBatch:
    """Return the examples of `text` that begin at `starts` `(batch, 1)`."""
    window = text[starts + torch.arange(CONTEXT + 1)]  # (batch, CONTEXT + 1)
    return TextBatch(window[:, :-1], window[:, 1:])


@lru_cache(maxsize=1)
def _reference() -> Tensor:
    """Return the text as places in `ALPHABET`, `(_LENGTH,)` int64."""
    from pydoc_data.topics import topics

    text = re.sub(r"\s+", " ", " ".join(topics[name] for name in sorted(topics)))[:_LENGTH]
    place = {character: index for index, character in enumerate(ALPHABET)}
    return torch.tensor([place.get(character, place["?"]) for character in text])


def _load(seed: int) -> TextTask:
    text = _reference()
    return TextTask("text", text[:-_HELD_OUT], text[-_HELD_OUT:], seed)


TEXT_CHOICE = TaskChoice(
    "Python's help", _load, score=PERPLEXITY, optimizer="adam", learning_rates={"adam": 0.01, "adamw": 0.01, "sgd": 0.5}
)


class _Attention(nn.Module):
    """Causal self-attention with two heads: `(batch, length, width)` → the same shape."""

    heads = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (batch, heads, length, d)
        past = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mixed = self.weights(q @ k.transpose(-2, -1), past) @ v
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        out: Tensor = self.mix(mixed)
        return out

    def weights(self, scores: Tensor, past: Tensor) -> Tensor:
        """Return the softmax of the scores `(batch, heads, length, length)` over the places where `past` is True."""
        return F.softmax(scores.masked_fill(~past, -math.inf), dim=-1)


class _AttentionByHand(_Attention):
    """The same with a softmax written out, exp(x) / Σ exp(x): exp overflows in float16 from x = 11.09 on."""

    def weights(self, scores: Tensor, past: Tensor) -> Tensor:
        weights = torch.exp(scores) * past
        return weights / weights.sum(dim=-1, keepdim=True)


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, hidden)
        self.output = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.output(F.gelu(self.hidden(self.norm2(x))))
        return out


class CharTransformer(nn.Module):
    """Two blocks of attention and a hidden layer, a quarter as wide as the hidden layers.

    Args:
        hidden: Width of the hidden layers.
        attention: Makes the attention of a block from its width.

    Shape: characters `(batch, length)`, length at most `CONTEXT` → logits `(batch, length, len(ALPHABET))`.
    """

    def __init__(self, hidden: int, attention: type[_Attention] = _Attention) -> None:
        super().__init__()
        width = _Attention.heads * max(hidden // (4 * _Attention.heads), 1)
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Embedding(CONTEXT, width)
        self.block1 = _Block(width, hidden, attention(width))
        self.block2 = _Block(width, hidden, attention(width))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, len(ALPHABET))

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the next character at each place."""
        x = self.characters(characters) + self.places.weight[: characters.shape[1]]  # (batch, length, width)
        logits: Tensor = self.output(self.norm(self.block2(self.block1(x))))
        return logits


register_model("transformer", label="transformer", task="text", draws=False)(CharTransformer)


@register_model("handmade-softmax", label="transformer, softmax by hand", task="text", draws=False)
def _by_hand(hidden: int) -> CharTransformer:
    return CharTransformer(hidden, _AttentionByHand)


@register_model("lstm", label="LSTM", task="text", draws=False)
class CharLSTM(nn.Module):
    """One LSTM layer.

    Args:
        hidden: Width of its state.

    Shape: characters `(batch, length)` → logits `(batch, length, len(ALPHABET))`.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.output = nn.Linear(hidden, len(ALPHABET))

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the next character at each place."""
        states, _ = self.lstm(self.characters(characters))  # (batch, length, hidden)
        logits: Tensor = self.output(states)
        return logits
