"""Lesson 09, several models, losses and optimizers: a GAN on the digits, who is skipped, and the exercises' checks."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from amplab.amp import Session
from amplab.display.html import page
from amplab.display.numbers import power
from amplab.display.table import Table
from amplab.lab import load_task
from amplab.lab.tasks.gan import Discriminator, GanBatch, Generator
from amplab.lessons.exercises import exercise
from amplab.lessons.forms import keys_fault
from amplab.views import Choice, Explorable

__all__ = [
    "LOSSES",
    "Gan",
    "Images",
    "Iteration",
    "batch",
    "check_generator_step",
    "check_num_losses",
    "check_skipped",
    "grad_norm",
    "judged",
    "new_gan",
    "one_iteration",
    "skip_explorer",
    "train_gan",
]

LOSSES = ("discriminator, real", "discriminator, fake", "generator")
"""The three losses, in the order of their ``loss_id``."""

OPTIMIZER_OF = (0, 0, 1)
"""The optimizer of each loss: 0 is the discriminator's, 1 the generator's."""

_OWNERS = ("discriminator", "generator")

OVERFLOWING = 2.0**30
"""Multiplies a loss so that its gradients leave the range of half at every scale from 2^0 on."""

Gan = tuple[list[nn.Module], list[Optimizer]]


def new_gan(seed: int = 0) -> Gan:
    """Return [discriminator, generator] and the Adam of each; the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models: list[nn.Module] = [Discriminator(16), Generator(16)]
    return models, [Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999)) for model in models]


def batch(step: int) -> GanBatch:
    """Return 64 images of digits and the noise for 64 images, always the same for a step."""
    found: GanBatch = load_task("gan", 0).batch(step, 64)
    return found


def judged(logits: Tensor, real: float) -> Tensor:
    """Return the loss of the discriminator's `logits` if the images are real (1.0) or fake (0.0)."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def grad_norm(model: nn.Module) -> float:
    """Return the norm of all gradients of a model."""
    found = [param.grad.flatten().double() for param in model.parameters() if param.grad is not None]
    return float(torch.cat(found).norm())


@dataclass(frozen=True)
class Images:
    """A few images, shown in one row, as a PNG; its repr is their number and size.

    Attributes:
        images: `(count, 1, height, width)` in [0, 1].
    """

    images: Tensor

    def __repr__(self) -> str:
        count, _, height, width = self.images.shape
        return f"{count} images of {height} × {width}"

    def _repr_png_(self) -> bytes:
        rows = F.pad(self.images[:, 0].float(), (1, 1, 1, 1)).unbind()  # a dark frame around each
        picture = torch.cat(rows, dim=1).repeat_interleave(6, 0).repeat_interleave(6, 1)
        return png((picture.clamp(0, 1) * 255).byte())


def png(pixels: Tensor) -> bytes:
    """Return gray pixels `(height, width)`, uint8, as a PNG file."""
    height, width = pixels.shape
    lines = b"".join(b"\0" + bytes(line.tolist()) for line in pixels)  # each line with filter 0
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits of gray

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


@dataclass(frozen=True)
class Iteration:
    """What one iteration did, of which one loss may have overflowed.

    Attributes:
        overflows: the loss whose gradients overflowed, or "none".
        stepped: for each optimizer, whether it stepped.
        scales: the scale of each loss before and after the iteration.
    """

    overflows: str
    stepped: tuple[bool, bool]
    scales: tuple[tuple[float, float], ...]

    def __repr__(self) -> str:
        """Return the result in one line."""
        done = ["steps" if stepped else "is skipped" for stepped in self.stepped]
        scales = ", ".join(f"{power(before)} → {power(after)}" for before, after in self.scales)
        return f"overflow: {self.overflows}; discriminator {done[0]}, generator {done[1]}; scales {scales}"

    def _repr_html_(self) -> str:
        lines = []
        for place, name in enumerate(LOSSES):
            before, after = (power(scale, raised=True) for scale in self.scales[place % len(self.scales)])
            scale = f"{before} → {after}" if after != before else before
            found = "inf" if name == self.overflows else "finite"
            step = "steps" if self.stepped[OPTIMIZER_OF[place]] else "is skipped"
            owner = _OWNERS[OPTIMIZER_OF[place]]
            lines.append((str(place % len(self.scales)), name, found, scale, f"{owner} {step}"))
        titles = ("loss_id", "loss", "gradients", "loss scale", "optimizer")
        skipped = {place for place, owner in enumerate(OPTIMIZER_OF) if not self.stepped[owner]}
        return page("", Table(titles, lines, caption="one iteration of a GAN", chosen=skipped).html())


@lru_cache(maxsize=32)
def one_iteration(overflows: str = "none", num_losses: int = 3) -> Iteration:
    """Run one iteration of the GAN at O1; the gradients of one of its losses overflow.

    Args:
        overflows: one of `LOSSES`, or "none".
        num_losses: 3 for a scale for each loss, 1 for one that all share.
    """
    session = Session()
    models, optimizers = session.initialize(*new_gan(), opt_level="O1", num_losses=num_losses, verbosity=0)
    try:
        before = [session.loss_scale(loss_id) for loss_id in range(num_losses)]
        boosts = [OVERFLOWING if name == overflows else 1.0 for name in LOSSES]
        _iterate(session, models, optimizers, batch(0), boosts)
        after = [session.loss_scale(loss_id) for loss_id in range(num_losses)]
        stepped = [session.last_step(optimizer).stepped for optimizer in optimizers]
    finally:
        session.reset()
    return Iteration(overflows, (stepped[0], stepped[1]), tuple(zip(before, after, strict=True)))


def _iterate(
    session: Session, models: list[nn.Module], optimizers: list[Optimizer], given: GanBatch, boosts: Sequence[float]
) -> None:
    """Train the discriminator, then the generator."""
    discriminator, generator = models
    of_discriminator, of_generator = optimizers
    count = len(session.scalers)

    def backward(place: int, loss: Tensor, optimizer: Optimizer) -> None:
        with session.scale_loss(loss * boosts[place], optimizer, loss_id=place % count) as scaled_loss:
            scaled_loss.backward()

    with session.casting():
        of_discriminator.zero_grad()
        backward(0, judged(discriminator(given.images), 1.0), of_discriminator)
        backward(1, judged(discriminator(generator(given.noise).detach()), 0.0), of_discriminator)
        of_discriminator.step()
        of_generator.zero_grad()
        backward(2, judged(discriminator(generator(given.noise)), 1.0), of_generator)
        of_generator.step()


def train_gan(num_losses: int, steps: int = 60, scale_window: int = 10) -> tuple[dict[str, list[float]], list[int]]:
    """Train the GAN at O1; return the scales of its losses over the steps, and the steps skipped by each optimizer.

    Args:
        num_losses: 3 for a scale for each loss, 1 for one that all share.
        steps: iterations.
        scale_window: clean backwards until a scale doubles; short, so that much happens in few steps.
    """
    session = Session()
    models, optimizers = session.initialize(
        *new_gan(), opt_level="O1", num_losses=num_losses, verbosity=0, scale_window=scale_window
    )
    names = LOSSES if num_losses == len(LOSSES) else ("all losses",)
    scales: dict[str, list[float]] = {name: [] for name in names}
    skipped = [0, 0]
    try:
        for step in range(steps):
            _iterate(session, models, optimizers, batch(step), (1.0, 1.0, 1.0))
            for loss_id, name in enumerate(names):
                scales[name].append(session.loss_scale(loss_id))
            for place, optimizer in enumerate(optimizers):
                skipped[place] += not session.last_step(optimizer).stepped
    finally:
        session.reset()
    return scales, skipped


def skip_explorer() -> Explorable:
    """Return one iteration of the GAN, with the loss that overflows and the number of scales to choose."""
    return Explorable(
        one_iteration,
        overflows=Choice(("none", *LOSSES), label="overflow in"),
        num_losses=Choice((3, 1), label="num_losses"),
    )


@exercise("09-1")
def check_skipped(answer: tuple[str, list[int]]) -> str | None:
    """Check who is skipped and which scales are halved if the loss "discriminator, fake" overflows; num_losses=3.

    Form:
        write a name and a list of numbers, such as ("generator", [0, 2]).

    Right:
        Only the optimizer that was passed to that scale_loss is skipped, and only the scale of loss_id 1 is halved.
    """
    who, halved = answer
    if who not in _OWNERS:
        return f"{who!r} has no optimizer here: write 'discriminator' or 'generator'."
    seen = one_iteration(LOSSES[1], 3)
    names = [name for name, stepped in zip(_OWNERS, seen.stepped, strict=True) if not stepped]
    if who not in names:
        return f"{who!r} is not skipped: its optimizer was not passed to the scale_loss with the overflow."
    ids = [loss_id for loss_id, (before, after) in enumerate(seen.scales) if after < before]
    if sorted(halved) != ids:
        return f"{halved}: with num_losses=3 only the scale of the loss that overflowed is halved; look at its loss_id."
    return None


@exercise("09-2")
def check_num_losses(answer: dict[str, int]) -> str | None:
    """Check num_losses and the loss_ids for a model with one optimizer and the losses "class" and "box".

    Form:
        write a number behind each name, such as {"num_losses": 3, "class": 1, "box": 2}.

    Right:
        Each loss has a scale of its own; one optimizer may be passed to several scale_loss.
    """
    if fault := keys_fault(answer, ("num_losses", "class", "box")):
        return fault
    if answer["num_losses"] != 2:
        return f"num_losses={answer['num_losses']}: losses are counted, not optimizers; there are two."
    ids = [answer["class"], answer["box"]]
    if ids[0] == ids[1]:
        return f"both losses have loss_id {ids[0]}: then they share a scale."
    if sorted(ids) != [0, 1]:
        wrong = next(each for each in ids if each not in (0, 1))
        return f"loss_id {wrong} does not exist: ids go from 0 to num_losses - 1, which is 1."
    return None


@exercise("09-3")
def check_generator_step(answer: Callable[..., object]) -> str | None:
    """Check a function that trains the generator and leaves no gradient on the discriminator.

    Form:
        complete my_generator_step and set answer = my_generator_step.

    Right:
        The generator learns, and the discriminator has no gradient that a later step could use.
    """
    session = Session()
    models, optimizers = session.initialize(*new_gan(), opt_level="O1", num_losses=3, verbosity=0)
    before = [param.detach().clone() for param in models[1].parameters()]
    for param in models[1].parameters():  # as after an earlier step
        param.grad = torch.ones_like(param)
    expected = _clean_gradients(*models)
    try:
        with session.casting():
            answer(*models, optimizers[1], batch(0).noise, session.scale_loss)
    finally:
        unscaled = [scaler._unskipped for scaler in session.scalers]
        session.reset()
    if (fault := _fault_of_generator(models, before, unscaled)) is not None:
        return fault
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in models[1].parameters()]
    used = torch.cat([grad.flatten() for grad in grads])
    if not torch.allclose(used, expected, rtol=0, atol=0.1):
        return "the step also used the gradients of an earlier step: call optimizer.zero_grad() first."
    if not float((used - expected).norm()) <= 0.1 * float(expected.norm()):  # NaN too
        return (
            "the gradients are not those of judged(discriminator(generator(noise)), 1.0): the generator learns to make "
            "images that the discriminator takes for real."
        )
    return None


def _clean_gradients(discriminator: nn.Module, generator: nn.Module) -> Tensor:
    """Return the gradients of the generator for the first batch, in float32; they are all far below 1."""
    loss = judged(discriminator(generator(batch(0).noise)), 1.0)
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(generator.parameters()))])


def _fault_of_generator(models: list[nn.Module], before: list[Tensor], unscaled: list[int]) -> str | None:
    """Return what is wrong after one step of the generator."""
    if all(map(torch.equal, models[1].parameters(), before)):
        return "the weights of the generator did not change: it needs backward and optimizer.step()."
    if unscaled != [0, 0, 1]:
        return f"the scalers counted {unscaled} backwards, expected [0, 0, 1]: the generator's loss has loss_id=2."
    left = [param.grad for param in models[0].parameters() if param.grad is not None]
    if any(bool(grad.any()) for grad in left):
        norm = grad_norm(models[0])
        return (
            f"the discriminator still has gradients, with a norm of {norm:.0e}: they are scaled, and its next step "
            "would use them. Set them to zero, or use discriminator.requires_grad_(False) during the backward."
        )
    if not all(param.requires_grad for param in models[0].parameters()):
        return "the discriminator would never learn again: call discriminator.requires_grad_(True) at the end."
    return None
