"""Small training runs, each broken in one known way and healthy otherwise: what a run is, and how it is made.

A ward has a function of (size, seed, broken) that makes a `Patient`. The names of wards are for people; nothing that
diagnoses is given one, nor a seed. Wards whose fault is in the values are in `value_wards.py`, those whose fault is in
the loop around the model in `loop_wards.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amplab.amp import Session
from amplab.diagnose import Observation, StepObservation

__all__ = [
    "ONCE", "SEEDS", "SIZES", "TWICE", "Patient", "Ward", "apex", "gaussian", "padded", "regression", "scale_of",
    "sizes_and_seeds", "train",
]  # fmt: skip

SIZES = (16, 40)
SEEDS = (0, 1, 2)
ONCE = ((16, 0),)
TWICE = ((16, 0), (40, 1))


def sizes_and_seeds(*given: object, short: tuple[tuple[int, int], ...] = ONCE) -> list[object]:
    """Return parameters of tests: `given`, with each size and seed; all but `short` are those of long tests."""
    pairs = [(size, seed) for size in SIZES for seed in SEEDS]
    return [pytest.param(*given, *each, marks=() if each in short else pytest.mark.long) for each in pairs]


@dataclass
class Patient:
    """A run: what learns, from what, and how one step goes."""

    model: nn.Module
    optimizers: list
    amp: object
    batch: Callable[[int], tuple]
    loss: Callable[..., Tensor]
    step: Callable[["Patient", tuple], Tensor]
    steps: int = 12
    window: int | None = None
    last: tuple = ()
    last_scale: float = 1.0
    looked_at: str = ""


@dataclass(frozen=True)
class Ward:
    """How to make a patient, and what the first finding has to say of a broken one."""

    admit: Callable[[int, int, bool], Patient]
    name: str
    module: str


def train(patient: Patient) -> Observation:
    """Run the patient's steps and write down what a log would; keep the batch of the last step that was skipped."""
    run = Observation(growth_interval=patient.window)
    for number in range(patient.steps):
        scale = scale_of(patient.amp)
        rate = patient.optimizers[0].param_groups[0]["lr"]
        before = [each.detach().clone() for each in patient.model.parameters()]
        batch = patient.batch(number)
        try:
            loss = patient.step(patient, batch)
        except RuntimeError:  # refused outright: the doctor sees the same
            patient.last = batch
            return run
        after = scale_of(patient.amp)
        skipped = after < scale
        if skipped or patient.looked_at != "skipped":
            patient.last, patient.last_scale = batch, scale
            patient.looked_at = "skipped" if skipped else "last"
        assert not skipped or all(map(unchanged, before, patient.model.parameters()))
        run = run.then(StepObservation(number, loss.item(), scale, skipped, after, learning_rate=rate))
    return run


def unchanged(before: Tensor, after: Tensor) -> bool:
    return torch.equal(before.nan_to_num(), after.nan_to_num())


def scale_of(amp) -> float:
    if amp is None:
        return 1.0
    return amp.loss_scale() if isinstance(amp, Session) else amp.get_scale()


def apex_step(patient: Patient, batch: tuple) -> Tensor:
    """The loop that the documentation of apex shows."""
    for optimizer in patient.optimizers:
        optimizer.zero_grad()
    with patient.amp.casting():
        loss = patient.loss(*batch)
        with patient.amp.scale_loss(loss, patient.optimizers) as scaled:
            scaled.backward()
    for optimizer in patient.optimizers:
        optimizer.step()
    return loss.detach()


def apex(model, loss, batch, *, level="O1", optimizer=None, step=apex_step, window=2000, **options) -> Patient:
    """A patient under a session of its own."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    session = Session()
    given = model if isinstance(model, nn.Sequential) or not isinstance(model, nn.ModuleDict) else list(model.values())
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    session.initialize(
        given, optimizers, opt_level=level, verbosity=0, scale_window=window, on_collapse="warn", **options
    )
    return Patient(model, optimizers, session, batch, loss, step, window=window)


def gaussian(size: int, seed: int, *shape: int, scale: float = 1.0) -> Callable[[int], tuple[Tensor]]:
    """Batches of normal numbers, the same for the same step."""

    def batch(step: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        return (torch.randn(*(shape or (8, size)), generator=generator) * scale,)

    return batch


def padded(normal: Callable[[int], tuple[Tensor]]) -> Callable[[int], tuple[Tensor]]:
    """The same batches with rows of zeros at their end."""

    def batch(step: int) -> tuple[Tensor]:
        (x,) = normal(step)
        return (x * (torch.arange(len(x)) < 6)[:, None],)

    return batch


def regression(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Learn the mean of each row."""
    return lambda x: F.mse_loss(model(x).float().flatten(), x.reshape(len(x), -1).mean(1))
