"""The patients of lesson 16: six training runs on handwritten digits, each broken in one way, and their diagnosis.

patient(1)                  a broken run: model, optimizer, scaler, batches, loss and step
patient(1, broken=False)    the same run, mended
DIAGNOSES                   diagnosis in words -> the finding of the doctor that names it
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amplab.amp import Session
from amplab.diagnose import Findings, doctor
from amplab.lab import Watch, watch
from amplab.lab.tasks.digits import digit_images
from amplab.lessons.exercises import exercise

__all__ = [
    "DIAGNOSES",
    "Patient",
    "check_1",
    "check_2",
    "check_3",
    "check_4",
    "check_5",
    "check_6",
    "patient",
]

Batch = tuple[Tensor, Tensor]
See = Callable[[Tensor], Tensor]
Scaler = Session | torch.amp.GradScaler

DIAGNOSES = {
    "a sum overflows in forward": "reduction-overflows-half",
    "gradients are clipped while they are scaled": "clips-scaled-gradients",
    "gradients underflow": "gradients-underflow",
    "the loss scale grows too often": "window-too-short",
    "the data has an inf or NaN": "nonfinite-batch",
    "forward uses old half copies of the weights": "stale-half-weights",
    "the learning rate is too large": "diverging",
    "half weights lose small updates": "updates-rounded-away",
    "a parameter is in no optimizer": "parameter-in-no-optimizer",
    "the optimizer uses gradients that are still scaled": "stepped-with-scaled-gradients",
}


@dataclass
class Patient:
    """A training run.

    Attributes:
        model: what learns.
        optimizer: its optimizer.
        scaler: what scales the loss, a `Session` of apex's API or a GradScaler.
        loss: the mean cross entropy of a batch, before it is scaled.
        step: one whole step with a batch; it passes the loss to its second argument.
        batches: what it trains on, in order.
        levels: the largest gray level of its images.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Scaler
    loss: Callable[[Batch], Tensor]
    step: Callable[..., None]
    batches: list[Batch]
    levels: float = 1.0
    watched: Watch | None = field(default=None, repr=False)

    def run(self) -> Watch:
        """Train with every batch, and return the watch of the run. What apex prints is left out."""
        with (
            redirect_stdout(StringIO()),
            watch(self.model, self.optimizer, scaler=self.scaler) as watched,
        ):
            for batch in watched.batches(self.batches):
                self.step(batch, watched.loss)
        self.watched = watched
        return watched

    def score(self) -> float:
        """Return the share of right digits among those that no batch has."""
        images, labels = _digits(self.levels)
        with torch.no_grad(), self.casting():
            predicted = self.model(images[_TRAINED:]).argmax(1)
        return float((predicted == labels[_TRAINED:]).float().mean())

    def casting(self) -> AbstractContextManager[Any]:
        """Return the context in which the model computes outside of a step."""
        return self.scaler.casting() if isinstance(self.scaler, Session) else in_half()

    def examined(self) -> Findings:
        """Return the doctor's findings about the run and about a step with the last batch."""
        run = self.watched or self.run()
        skipped = run.history.skipped_steps()
        steps = len(run.history) // len(self.batches)  # of one batch
        batch = self.batches[skipped[-1] // steps if skipped else -1]
        with redirect_stdout(StringIO()):
            found = doctor(
                self.model,
                step=lambda: self.loss(batch),
                train_step=lambda: self.step(batch),
                optimizer=self.optimizer,
                scaler=self.scaler,
                batch=batch,
                run=run.observation,
            )
        assert isinstance(found, Findings)
        return found


_TRAINED = 1437  # of 1797 images


def _digits(levels: float = 1.0) -> Batch:
    """Return images (1797, 64) with gray levels from 0 to `levels`, and labels (1797,)."""
    images, labels = digit_images()
    return images.flatten(1) * levels, labels


def batches(count: int, levels: float = 1.0, size: int = 64) -> list[Batch]:
    """Return batches of the images that are trained on, (size, 64) and (size,), always the same ones."""
    images, labels = _digits(levels)
    drawn = torch.Generator().manual_seed(0)
    places = (torch.randint(_TRAINED, (size,), generator=drawn) for _ in range(count))
    return [(images[place].clone(), labels[place]) for place in places]


def network(*before: nn.Module) -> nn.Sequential:
    """Return a network for images (batch, 64), always with the same weights; it begins with the modules `before`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*before, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def in_half() -> torch.autocast:
    """Return a region of autocast in half."""
    return torch.autocast("cpu", dtype=torch.float16)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    with in_half():
        return F.cross_entropy(model(images).float(), labels)


def _same(loss: Tensor) -> Tensor:
    return loss


def _under_apex(model: nn.Module, rate: float, **options: Any) -> tuple[torch.optim.Optimizer, Session]:
    optimizer, session = torch.optim.SGD(model.parameters(), lr=rate), Session()
    session.initialize(model, optimizer, verbosity=0, on_collapse="warn", **options)
    return optimizer, session


# 1: the length of an image, by hand: the sum of its squares is inf in half


class UnitLength(nn.Module):
    """Gives each image the same length.

    Args:
        dtype: of the sum of squares; None for that of the image.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        """Return images (batch, 64) of length 8, so that a pixel is about 1."""
        length = images.square().sum(-1, keepdim=True, dtype=self.dtype).sqrt()
        return 8 * images / length.to(images.dtype)


def _long_images(broken: bool) -> Patient:
    model = network(UnitLength(None if broken else torch.float32))
    optimizer, session = _under_apex(model, 0.5, opt_level="O2")
    run = _apex_patient(model, optimizer, session, batches(60, levels=255.0))
    return replace(run, levels=255.0)


def _apex_patient(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session, data: list[Batch]) -> Patient:
    def loss_of(batch: Batch) -> Tensor:
        with session.casting():
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    def step(batch: Batch, see: See = _same) -> None:
        optimizer.zero_grad()
        with session.casting(), session.scale_loss(see(loss_of(batch)), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return Patient(model, optimizer, session, loss_of, step, data)


# 2: gradients are clipped before they are unscaled


def _clipped(broken: bool) -> Patient:
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), torch.amp.GradScaler("cpu")

    def step(batch: Batch, see: See = _same) -> None:
        optimizer.zero_grad()
        scaler.scale(see(_loss(model, batch))).backward()
        if not broken:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Patient(model, optimizer, scaler, partial(_loss, model), step, batches(60))


# 3: the loss has a small weight and is not scaled: the scaler is disabled


def _unscaled(broken: bool) -> Patient:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-14)
    scaler = torch.amp.GradScaler("cpu", enabled=not broken)

    def loss_of(batch: Batch) -> Tensor:
        return 2.0**-18 * _loss(model, batch)

    def step(batch: Batch, see: See = _same) -> None:
        optimizer.zero_grad()
        scaler.scale(see(loss_of(batch))).backward()
        scaler.step(optimizer)
        scaler.update()

    return Patient(model, optimizer, scaler, loss_of, step, batches(60))


# 4: the loss scale begins too large and grows in every third step


def _short_window(broken: bool) -> Patient:
    model = network()
    options = {"dynamic_init_scale": 2.0**24, "scale_window": 3} if broken else {}
    optimizer, session = _under_apex(model, 0.5, opt_level="O1", **options)
    return _apex_patient(model, optimizer, session, batches(60))


# 5: one image of the data has a pixel that is inf


def _spoiled_image(broken: bool) -> Patient:
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), torch.amp.GradScaler("cpu")
    data = batches(10) * 6
    if broken:
        data[3][0][7, 12] = float("inf")  # the same batch six times

    def step(batch: Batch, see: See = _same) -> None:
        optimizer.zero_grad()
        scaler.scale(see(_loss(model, batch))).backward()
        scaler.step(optimizer)
        scaler.update()

    return Patient(model, optimizer, scaler, partial(_loss, model), step, data)


# 6: one region of autocast around several steps keeps its half copies of the weights


def _one_region(broken: bool) -> Patient:
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), torch.amp.GradScaler("cpu")

    def step(batch: Batch, see: See = _same) -> None:
        with in_half() if broken else nullcontext():
            for images, labels in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
                optimizer.zero_grad()
                scaler.scale(see(_loss(model, (images, labels)))).backward()
                scaler.step(optimizer)
                scaler.update()

    return Patient(model, optimizer, scaler, partial(_loss, model), step, batches(15, size=256))


_MAKERS = (_long_images, _clipped, _unscaled, _short_window, _spoiled_image, _one_region)


def patient(number: int, broken: bool = True) -> Patient:
    """Return a run of the clinic.

    Args:
        number: from 1 to 6.
        broken: as it came; False for the same run after the remedy.

    Raises:
        ValueError: there is no patient of that number.
    """
    if number not in range(1, len(_MAKERS) + 1):
        raise ValueError(f"number={number!r}: expected one from 1 to {len(_MAKERS)}.")
    return _MAKERS[number - 1](broken)


# Checks

_NEXT = {
    1: "Nothing is skipped and the loss is finite. Look at the values inside: an X-ray with stats=True counts infs.",
    2: "Nothing is skipped, and every value is finite. So look at the loop: what happens between backward and step?",
    3: "Print the loss scale of this run, and the gradients that half rounds to 0 at that scale.",
    4: "Look at the loss scale of the run, step by step: when does it fall, and when does it grow?",
    5: "Which steps are skipped? Run first_nonfinite with the batch of such a step, and read its cause.",
    6: "In float32 this learning rate is fine. Ask the doctor: its train step sees what forward reads.",
}


def _wrong(number: int, answer: str) -> str | None:
    """Return what speaks against a diagnosis, from an examination of the patient; None for the right one."""
    if answer not in DIAGNOSES:
        return f"{answer!r} is no diagnosis of the list; they are: {'; '.join(DIAGNOSES)}."
    examined = patient(number)
    try:
        names = [each.name for each in examined.examined()]
        of_run = [each.name for each in examined.watched.findings()] if examined.watched else []
    finally:
        if isinstance(examined.scaler, Session):
            examined.scaler.reset()
    if names[:1] == [DIAGNOSES[answer]]:
        return None
    if DIAGNOSES[answer] in of_run:
        return f"{answer!r} fits what the run shows, but a step shows another cause. {_NEXT[number]}"
    return f"the doctor looks for {answer!r} in this run and does not find it. {_NEXT[number]}"


@exercise("16-1")
def check_1(answer: str) -> str | None:
    """The diagnosis of patient 1.

    Form:
        write one of the ten diagnoses in quotes.

    Right:
        The sum of squares is inf in half, an image divided by inf is 0, and nothing in forward is NaN.
    """
    return _wrong(1, answer)


@exercise("16-2")
def check_2(answer: str) -> str | None:
    """The diagnosis of patient 2.

    Form:
        write one of the ten diagnoses in quotes.

    Right:
        Clipping divides by a norm that contains the loss scale; unscaling divides by the scale once more.
    """
    return _wrong(2, answer)


@exercise("16-3")
def check_3(answer: str) -> str | None:
    """The diagnosis of patient 3.

    Form:
        write one of the ten diagnoses in quotes.

    Right:
        The scaler is disabled without a GPU, and the gradients of this small loss are 0 in half.
    """
    return _wrong(3, answer)


@exercise("16-4")
def check_4(answer: str) -> str | None:
    """The diagnosis of patient 4.

    Form:
        write one of the ten diagnoses in quotes.

    Right:
        The scale grows after every third clean step, overflows and falls again.
    """
    return _wrong(4, answer)


@exercise("16-5")
def check_5(answer: str) -> str | None:
    """The diagnosis of patient 5.

    Form:
        write one of the ten diagnoses in quotes.

    Right:
        One image is damaged, and each step with its batch is skipped; mixed precision only reports it.
    """
    return _wrong(5, answer)


@exercise("16-6")
def check_6(answer: str) -> str | None:
    """The diagnosis of patient 6.

    Form:
        write one of the ten diagnoses in quotes.

    Right:
        Inside one region of autocast the half copies of the weights are cached, and steps do not renew them.
    """
    return _wrong(6, answer)
