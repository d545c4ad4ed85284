"""The data, the model and the checks of lesson 15: a translator whose score falls under O1.

    word (batch, letters) ── embedding ── LSTM ── project ── memory ─┐
    letters before        ── embedding ── LSTM ── state ── attention ┴─ linear ── letters of the word backwards

`Attention` fails in half: its eps is 0 there. It is written as people write it, and the lesson finds out why.
"""

import codecs
import contextlib
import io
import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from amplab import amp
from amplab.amp import Session
from amplab.display.numbers import power
from amplab.formats import ExponentHistogram, exponent_histogram
from amplab.lessons.exercises import exercise
from amplab.lessons.forms import keys_fault
from amplab.policies import PrecisionPolicy

__all__ = [
    "CHANGES",
    "TOOLS",
    "Attention",
    "Batch",
    "Translator",
    "batches",
    "check_remedies",
    "check_smallest_eps",
    "check_tools",
    "denominators",
    "is_a_remedy",
    "loss_of",
    "score",
    "translator",
    "words",
]

Batch = tuple[Tensor, Tensor, Tensor]
LETTERS = "_^abcdefghijklmnopqrstuvwxyz"  # padding, begin


@cache
def words() -> tuple[str, ...]:
    """Return the words of two to nine letters of the Zen of Python (PEP 20), each once, in order."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this  # prints itself
    found = re.findall(r"[a-z]{2,9}", codecs.decode(this.s, "rot13").lower())
    return tuple(dict.fromkeys(found))


def batches(count: int, size: int = 32, seed: int = 0) -> list[Batch]:
    """Return (words (size, longest), lengths (size,), words backwards (size, longest)), padded with 0."""
    coded = [torch.tensor([LETTERS.index(letter) for letter in word]) for word in words()]
    random = torch.Generator().manual_seed(seed)
    drawn = (torch.randint(len(coded), (size,), generator=random).tolist() for _ in range(count))
    return [_batch([coded[place] for place in places]) for places in drawn]


def _batch(chosen: list[Tensor]) -> Batch:
    lengths = torch.tensor([len(word) for word in chosen])
    forwards, backwards = chosen, [word.flip(0) for word in chosen]
    return pad_sequence(forwards, batch_first=True), lengths, pad_sequence(backwards, batch_first=True)


class Attention(nn.Module):
    """Dot-product attention over a memory that is scaled, by hand, to a largest value of 1 in each position."""

    def __init__(self, width: int, eps: float = 1e-8) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.eps = eps

    def forward(self, state: Tensor, memory: Tensor, padded: Tensor) -> Tensor:
        """Return what `state` reads from `memory`; see `Translator`."""
        scaled = memory / (memory.abs().amax(-1, keepdim=True) + self.eps)
        scores = self.query(state) @ scaled.mT
        weights: Tensor = scores.masked_fill(padded[:, None], -1e4).softmax(-1)
        return weights @ memory


class Translator(nn.Module):
    """Reads a word, writes it backwards.

    Args:
        attention: `attention(state, memory, padded)` returns what `state` (batch, steps, width) reads from `memory`
            (batch, letters, width), which is 0 where `padded` (batch, letters).
        width: of the embedding and of both LSTMs.
    """

    def __init__(self, attention: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width, padding_idx=0)
        self.reader = nn.LSTM(width, width, batch_first=True)
        self.writer = nn.LSTM(width, width, batch_first=True)
        self.project = nn.Linear(width, width)
        self.attention = attention
        self.out = nn.Linear(2 * width, len(LETTERS))

    def memory(self, word: Tensor, lengths: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the memory (batch, letters, width), 0 at padding, and the last state of the reader."""
        packed = pack_padded_sequence(self.letters(word), lengths, batch_first=True, enforce_sorted=False)
        read, state = self.reader(packed)
        memory, _ = pad_packed_sequence(read, batch_first=True)
        return self.project(memory) * (word != 0)[..., None], state

    def forward(self, word: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Return logits (batch, letters, 28), each letter written knowing the ones before it."""
        memory, state = self.memory(word, lengths)
        before = F.pad(target[:, :-1], (1, 0), value=1)
        written, _ = self.writer(self.letters(before), state)
        logits: Tensor = self.out(torch.cat([written, self.attention(written, memory, word == 0)], -1))
        return logits


def translator(attention: Callable[[int], nn.Module], width: int = 32) -> tuple[Translator, torch.optim.Adam]:
    """Return a translator and its optimizer, always from the same weights.

    Args:
        attention: makes the attention, from its width.
        width: of the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Translator(attention(width), width)
    return model, torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-7)  # 1e-8, the default, is 0 in half


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of a letter."""
    logits = model(*batch)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[2].flatten(), ignore_index=0)


@torch.no_grad()
def score(model: nn.Module) -> float:
    """Return the share of letters that are right, in six batches that training does not use."""
    held = batches(6, seed=1)
    right = [(model(*batch).argmax(-1) == batch[2])[batch[2] != 0] for batch in held]
    return torch.cat(right).float().mean().item()


def denominators(eps: float) -> ExponentHistogram:
    """Return the histogram of what the attention divides by, `largest |memory| + eps`, in one batch in float32."""
    model, _ = translator(Attention)
    word, lengths, _ = batches(1)[0]
    with torch.no_grad(), amp.disable_casts():  # of a session of the notebook
        memory, _ = model.memory(word, lengths)
    return exponent_histogram(memory.abs().amax(-1) + eps)


# Exercises

_IN_FLOAT32 = PrecisionPolicy(module_rules={"attention": "float32"})

CHANGES: dict[str, tuple[float, dict[str, object]]] = {
    "loss_scale=1.0": (1e-8, {"opt_level": "O1", "loss_scale": 1.0}),
    "min_loss_scale=1.0": (1e-8, {"opt_level": "O1", "min_loss_scale": 1.0}),
    "opt_level O2": (1e-8, {"opt_level": "O2"}),
    "bfloat16": (1e-8, {"opt_level": "O1", "policy": PrecisionPolicy.parse("apex/bfloat16")}),
    "eps=1e-4": (1e-4, {"opt_level": "O1"}),
    "attention in float32": (1e-8, {"opt_level": "O1", "policy": _IN_FLOAT32}),
}
"""A change -> the attention's eps, and the arguments of `amp.initialize`."""


def is_a_remedy(eps: float, **arguments: Any) -> bool:
    """Return whether four steps from the same start change the weights, and leave them finite.

    Args:
        eps: of the attention.
        arguments: of `amp.initialize`.
    """
    model, optimizer = translator(lambda width: Attention(width, eps))
    session = Session()
    session.initialize(model, optimizer, verbosity=0, on_collapse="warn", **arguments)
    before = model.out.bias.detach().clone()
    with session.casting(), contextlib.redirect_stdout(io.StringIO()):
        for batch in batches(4):
            optimizer.zero_grad()
            with session.scale_loss(loss_of(model, batch), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    finite = all(each.isfinite().all() for each in model.parameters())
    return finite and not torch.equal(before, model.out.bias)


@exercise("15-1")
def check_smallest_eps(answer: float) -> str | None:
    """The smallest power of two that works as `eps` of the attention under O1.

    Form:
        write a power of two such as 2.0**-10.

    Right:
        It is the smallest number of half above zero; everything smaller rounds to it or to zero.
    """
    if math.frexp(answer)[0] != 0.5:
        return f"{answer!r} is not a power of two; write it as 2.0**-10, for example."
    if torch.tensor(answer, dtype=torch.float16) == 0:
        return f"{power(answer)} is 0 in half, so padding is divided by 0 again. Choose a larger power."
    if is_a_remedy(answer / 2, opt_level="O1"):
        return f"{power(answer)} works, and {power(answer / 2)} works too. Choose a smaller power."
    return None if is_a_remedy(answer, opt_level="O1") else f"steps with {power(answer)} are not finite."


@exercise("15-2")
def check_remedies(answer: Collection[str]) -> str | None:
    """The changes of `CHANGES` with which the translator trains; each one is tried.

    Form:
        write the names of changes, such as {"bfloat16", "eps=1e-4"}.

    Right:
        A remedy changes the number or its format; the loss scale never was the cause.
    """
    if unknown := sorted(set(answer) - set(CHANGES)):
        return f"{unknown[0]!r} is none of the changes; they are {', '.join(CHANGES)}."
    works = {name: is_a_remedy(eps, **arguments) for name, (eps, arguments) in CHANGES.items()}
    for name in CHANGES:
        if name in answer and not works[name]:
            return f"{name} is no remedy: four steps with it leave NaN in the weights, or never change them."
        if works[name] and name not in answer:
            return f"a remedy is missing. {len([each for each in works.values() if each])} of the six changes work."
    return None


TOOLS = {
    "Which steps of the run were skipped?": "watch",
    "Which op wrote the first NaN?": "first_nonfinite",
    "In which dtype does each op run, and why?": "xray",
    "Which modules agree with float32?": "twin",
    "Which line do I change, and how?": "doctor",
}
"""A question -> the tool that answers it."""


_ANSWERS = {
    "watch": "watch records a run, step by step.",
    "first_nonfinite": "first_nonfinite follows inf and NaN in one step back to an op.",
    "xray": "xray lists the ops of one step with their dtypes.",
    "twin": "twin compares two precisions, module by module.",
    "doctor": "doctor applies all rules to a step and prints the code of a remedy.",
}


@exercise("15-3")
def check_tools(answer: Mapping[str, Any]) -> str | None:
    """The tool for each question of `TOOLS`.

    Form:
        write the name of a tool behind each question.

    Right:
        From the run to the step, from the step to the op, from the op to the line.
    """
    if fault := keys_fault(answer, TOOLS):
        return f"{fault} Keep the five questions as they are."
    for question, tool in TOOLS.items():
        given = str(getattr(answer[question], "__name__", answer[question]))
        if given != tool:
            does = _ANSWERS.get(given, "Choose one of the five tools.")
            return f"{given!r} does not answer {question!r} directly. {does}"
    return None
