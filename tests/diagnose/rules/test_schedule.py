"""A schedule that moves before its optimizer, or while that is held back, is a note; a loop that asks has none."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

import amplab
from amplab.amp import Session
from amplab.diagnose import doctor
from amplab.diagnose.remedies.api_styles import Api, api_style_of
from amplab.diagnose.rules.schedule import schedule_findings
from amplab.diagnose.train_step.rehearse_loop import rehearse_loop
from amplab.diagnose.train_step.schedules import schedulers_of

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")
SIZES_AND_SEEDS = [(8, 0), (8, 1), (40, 2), (40, 3)]
SCALERS = {"torch": torch.amp.GradScaler, "amplab": amplab.GradScaler}


def loop(size, seed, kind, *, scale=1024.0, order="after", asks=False):
    """Model, optimizer, scaler, scheduler and the step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    scaler, x = SCALERS[kind]("cpu", init_scale=scale), torch.randn(16, size)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x).float() - 3).square().mean()
        scaler.scale(loss).backward()
        if order == "before":
            scheduler.step()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if order == "after" and not (asks and scaler.get_scale() < before):
            scheduler.step()

    return model, optimizer, scaler, scheduler, step


def found(model, optimizer, scaler, step, stateful=()):
    seen = schedule_findings(
        rehearse_loop(model, step, [optimizer], scaler=scaler, stateful=stateful), Api(api_style_of(scaler))
    )
    assert all(each.severity == "note" for each in seen)
    return [each.name for each in seen]


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize("scale", [1024.0, 2.0**22])  # a step that is taken, and one that overflows by itself
@pytest.mark.parametrize(
    ("order", "asks", "expected"),
    [
        ("after", False, ["scheduler-counts-skips"]),
        ("after", True, []),
        ("before", False, ["scheduler-before-step", "scheduler-counts-skips"]),
        ("never", False, []),
    ],
)
def test_what_a_schedule_does(kind, size, seed, scale, order, asks, expected):
    model, optimizer, scaler, scheduler, step = loop(size, seed, kind, scale=scale, order=order, asks=asks)
    assert found(model, optimizer, scaler, step) == expected
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0.001)
    assert scaler.get_scale() == scale


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
def test_under_apex(asks, level, size, seed, capsys):
    model, optimizer, _, scheduler, _ = loop(size, seed, "torch")
    session = Session()
    session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", dynamic_init_scale=16.0, verbosity=1)
    x = torch.randn(16, size)
    capsys.readouterr()

    def step():
        optimizer.zero_grad()
        with session.casting(), session.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        if not asks or session.last_step(optimizer).stepped:
            scheduler.step()

    before = [each.detach().clone() for each in model.parameters()]
    try:
        assert found(model, optimizer, session, step) == ([] if asks else ["scheduler-counts-skips"])
        assert session.loss_scale() == 16.0
        assert all(map(torch.equal, before, model.parameters()))
        assert "overflow" not in capsys.readouterr().out
    finally:
        session.reset()


@pytest.mark.parametrize("kind", ["step", "cosine", "one cycle", "sequential"])
def test_schedulers_of_torch_are_seen_and_put_back(kind):
    model, optimizer, scaler, _, _ = loop(8, 0, "torch")
    made = {
        "step": lambda: StepLR(optimizer, 1, gamma=0.5),
        "cosine": lambda: CosineAnnealingLR(optimizer, 10),
        "one cycle": lambda: OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
        "sequential": lambda: SequentialLR(optimizer, [StepLR(optimizer, 1), CosineAnnealingLR(optimizer, 9)], [3]),
    }[kind]()
    rate = optimizer.param_groups[0]["lr"]

    def step():
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        made.step()

    for _ in range(2):
        assert found(model, optimizer, scaler, step) == ["scheduler-counts-skips"]
        assert (made.last_epoch, optimizer.param_groups[0]["lr"]) == (0, rate)


@pytest.mark.parametrize("amp", [None, "disabled", "static", "not asked"])
def test_where_nothing_is_ever_skipped_nothing_is_counted(amp):
    model, optimizer, _, scheduler, _ = loop(8, 0, "torch")
    scaler = None if amp is None else torch.amp.GradScaler("cpu", enabled=amp == "not asked")
    session = Session()
    if amp == "static":
        session.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)

    def step():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).sum()
        if amp == "static":
            with session.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            loss.backward()
        optimizer.step()
        scheduler.step()

    try:
        assert found(model, optimizer, session if amp == "static" else scaler, step) == []
    finally:
        session.reset()


def test_the_doctor_says_it_in_the_words_of_the_scaler():
    for kind, words in (("torch", "scaler.get_scale() >= scale"), ("amplab", "scaler.last_step.stepped")):
        model, optimizer, scaler, _, step = loop(8, 0, kind)
        (note,) = doctor(model, train_step=step, optimizer=optimizer, scaler=scaler)
        assert (note.name, words in note.remedy) == ("scheduler-counts-skips", True)


class Trainer:
    def __init__(self, scheduler):
        self.parts = {"schedulers": [scheduler]}

    def step(self):
        return self.parts


def test_schedulers_are_found_where_the_code_names_them():
    _, optimizer, _, scheduler, step = loop(8, 0, "torch")
    bundle = SimpleNamespace(scheduler=scheduler)
    trainer = Trainer(scheduler)
    for reaches in (step, lambda: [step()], partial(step), lambda: bundle, trainer.step, lambda: trainer):
        assert schedulers_of(reaches) == [scheduler]
    assert schedulers_of(lambda: None) == []
    assert schedulers_of(lambda: None, [scheduler, optimizer]) == [scheduler]
    plateau = ReduceLROnPlateau(optimizer)
    assert schedulers_of(lambda: plateau) == []
