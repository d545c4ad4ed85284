"""A translator of words, small and real: an LSTM reads a word, another with attention writes it backwards.

The words are those of this repository's licence. The memory that attention looks at is scaled to a largest value of 1,
by hand, with an eps of 1e-8; padded positions are zero and masked afterwards. In float32 that is sound.
"""

import re
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

__all__ = ["Translator", "batches", "loss_of", "words"]

LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"
LETTERS = "_^abcdefghijklmnopqrstuvwxyz"  # padding, begin


def words() -> list[str]:
    """Return the licence's words of two to nine letters, each once, in order."""
    found = re.findall(r"[a-z]{2,9}", LICENCE.read_text(encoding="utf-8").lower())
    return list(dict.fromkeys(found))


def batches(count: int, size: int = 32, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return (words (size, longest), lengths (size,), words backwards (size, longest)), padded with 0."""
    coded = [torch.tensor([LETTERS.index(letter) for letter in word]) for word in words()]
    random = torch.Generator().manual_seed(seed)
    drawn = (torch.randint(len(coded), (size,), generator=random).tolist() for _ in range(count))
    return [_batch([coded[place] for place in places]) for places in drawn]


def _batch(chosen: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.tensor([len(word) for word in chosen])
    forwards, backwards = chosen, [word.flip(0) for word in chosen]
    return pad_sequence(forwards, batch_first=True), lengths, pad_sequence(backwards, batch_first=True)


class Attention(nn.Module):
    """Dot-product attention over a memory that is scaled to a largest value of 1 in each position."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.eps = eps

    def forward(self, state: Tensor, memory: Tensor, padded: Tensor) -> Tensor:
        """Return what `state` (batch, steps, width) reads from `memory` (batch, letters, width)."""
        scaled = memory / (memory.abs().amax(-1, keepdim=True) + self.eps)
        scaled = scaled.masked_fill(padded[..., None], 0.0)
        scores = self.query(state) @ scaled.transpose(1, 2)  # (batch, steps, letters)
        return scores.masked_fill(padded[:, None], -1e4).softmax(-1) @ memory


class Translator(nn.Module):
    """Letters in, letters out."""

    def __init__(self, width: int = 48, eps: float = 1e-8) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width, padding_idx=0)
        self.reader = nn.LSTM(width, width, batch_first=True)
        self.writer = nn.LSTM(width, width, batch_first=True)
        self.project = nn.Linear(width, width)
        self.attention = Attention(width, eps)
        self.out = nn.Linear(2 * width, len(LETTERS))

    def forward(self, word: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Return logits (batch, letters, 28), each letter written knowing the ones before it."""
        packed = pack_padded_sequence(self.letters(word), lengths, batch_first=True, enforce_sorted=False)
        read, state = self.reader(packed)
        padded = word == 0
        memory, _ = pad_packed_sequence(read, batch_first=True)
        memory = self.project(memory) * ~padded[..., None]
        before = F.pad(target[:, :-1], (1, 0), value=1)
        written, _ = self.writer(self.letters(before), state)
        return self.out(torch.cat([written, self.attention(written, memory, padded)], -1))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the cross entropy of a letter."""
    logits = model(*batch)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[2].flatten(), ignore_index=0)
