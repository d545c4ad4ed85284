"""Runs of a model of one's own that go on: after a change, a pause, and in another kernel."""

import itertools
import os
import sys
import time
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from own_models import OWN, TAGS, Meter, Tagger, registered
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import amplab.lab
from amplab.lab import (
    MODELS,
    TASKS,
    Experiment,
    ExperimentConfig,
    Failed,
    Reading,
    Trainer,
    checkpoints,
    load_run,
)
from amplab.lab.own_task import forget_own
from amplab.views.notice_board import saved_offer
from amplab.views.status import Status

pytestmark = pytest.mark.usefixtures("nothing_own")


@pytest.mark.filterwarnings("ignore:Adam on half parameters")
@pytest.mark.parametrize("name", OWN)
def test_a_run_of_ones_own_model_continues_after_its_kernel_has_ended(name, tmp_path):
    config = registered(**OWN[name]())
    whole, first = Experiment(config), Experiment(config)
    for _ in range(4):
        first.step()
    first.save(tmp_path / "run.checkpoint", {})
    again, _ = Experiment.load(tmp_path / "run.checkpoint")
    losses = [whole.step().loss for _ in range(9)][4:]
    assert [again.step().loss for _ in range(5)] == losses


class Dropping(list):
    """Leaves out a batch, and its length does not know."""

    def __iter__(self):
        return (batch for number, batch in enumerate(super().__iter__()) if number != 1)


def with_generator() -> DataLoader:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(20, 8), torch.rand(20, 1))
    return DataLoader(dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("make", [with_generator, lambda: Dropping(with_generator())])
def test_data_that_are_not_repeated_by_a_seed_or_a_length_are_the_same_after_a_reset_and_a_restart(make, tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    trainer = Trainer(registered(model, make(), loss=F.mse_loss), log=tmp_path)
    trainer.run(14)
    saved = tmp_path / "copy.checkpoint"
    saved.write_bytes(trainer.log_path.with_suffix(".checkpoint").read_bytes())
    losses = trainer.run(6).column("loss").tolist()
    trainer.reset()
    assert trainer.run(20).column("loss").tolist() == losses
    trainer.stop()
    assert trainer.wait(10)
    forget_own(set())  # as another process begins
    registered(model, make(), loss=F.mse_loss)
    again, _ = Experiment.load(saved)
    assert [again.step().loss for _ in range(6)] == losses[14:]


def test_what_a_checkpoint_cannot_hold_of_a_schedule_is_told(tmp_path, listen):
    def optimizer(weights):
        stepped = torch.optim.SGD(weights, lr=0.1)
        schedule = lr_scheduler.ConstantLR(stepped)
        schedule.generator = torch.Generator()
        stepped.register_step_post_hook(lambda *_: schedule.step())
        return stepped

    trainer = Trainer(registered(Tagger(), TAGS, loss=F.cross_entropy, optimizer=optimizer), log=tmp_path)
    trainer.run(3)
    ear = listen(trainer)
    trainer.continue_saved(checkpoints._read(trainer.log_path.with_suffix(".checkpoint")))
    assert trainer.wait(10)
    assert (
        "continues, but not with what these have kept in attributes: ConstantLR.generator. A" in ear.of(Failed)[0].text
    )


class Counting(nn.Module):
    """Has a buffer that its state_dict leaves out."""

    first: Tensor | None = torch.zeros(())

    def __init__(self):
        super().__init__()
        self.tagger = Tagger()
        self.register_buffer("steps", self.first, persistent=False)

    def forward(self, ids):
        self.steps = torch.ones(()) if self.steps is None else self.steps + 1
        return self.tagger(ids) / self.steps


class Late(Counting):
    first = None


class Queue(Counting):
    """A memory bank that grows."""

    first = torch.zeros(0)

    def forward(self, ids):
        self.steps = torch.cat([self.steps, torch.ones(1)])
        return self.tagger(ids) / self.steps.sum()


@pytest.mark.parametrize("kind", [Counting, Late, Queue])
def test_a_buffer_outside_of_the_state_dict_goes_on_after_a_restart(kind, tmp_path):
    config = registered(kind, TAGS, loss=F.cross_entropy)
    whole, first = Experiment(config), Experiment(config)
    for _ in range(3):
        first.step()
    first.save(tmp_path / "run.checkpoint", {})
    again, _ = Experiment.load(tmp_path / "run.checkpoint")
    losses = [whole.step().loss for _ in range(6)]
    assert [again.step().loss for _ in range(3)] == losses[3:]


class Averaging(nn.Module):
    """Gives a buffer another dtype than it has at first, or at its level."""

    first, then, persistent = torch.int64, torch.float32, True

    def __init__(self):
        super().__init__()
        self.tagger = Tagger()
        self.register_buffer("mean", torch.zeros((), dtype=self.first), persistent=self.persistent)

    def forward(self, ids):
        output = self.tagger(ids)
        self.mean = 0.9 * self.mean + 0.1 * output.detach().to(self.then).square().mean()
        return output * (1 + self.mean).float()


@pytest.mark.parametrize("levels", [["O0"], ["O1"], ["O2"], ["O0", "O2"], ["O2", "O0"]], ids="-".join)
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("then", [torch.float32, torch.float64])
@pytest.mark.parametrize("first", [torch.int64, torch.float32])
def test_a_buffer_keeps_the_dtype_that_a_forward_has_given_it(first, then, persistent, levels, tmp_path):
    kind = type("Averaging", (Averaging,), {"first": first, "then": then, "persistent": persistent})
    experiment = Experiment(registered(kind, TAGS, loss=F.cross_entropy).changed(opt_level=levels[0]))
    for level in levels:
        if level != experiment.config.opt_level:
            experiment.switch(experiment.config.changed(opt_level=level))
        for _ in range(3):
            experiment.step()
    experiment.save(tmp_path / "run.checkpoint", {})
    again, _ = Experiment.load(tmp_path / "run.checkpoint")
    assert again.model.mean.dtype is experiment.model.mean.dtype is then
    assert torch.equal(again.model.mean, experiment.model.mean)
    assert [again.step().loss for _ in range(3)] == [experiment.step().loss for _ in range(3)]


def test_a_model_that_cannot_be_made_leaves_the_present_run_when_another_is_to_continue(tmp_path):
    fails = []

    def make():
        return Tagger() if not fails else {}["weights"]

    trainer = Trainer(registered(make, TAGS, loss=F.cross_entropy), log=tmp_path)
    trainer.run(3)
    saved = checkpoints._read(trainer.log_path.with_suffix(".checkpoint"))
    fails.append(True)
    trainer.continue_saved(saved)
    assert trainer.wait(10)
    assert any(
        "cannot continue; the run is not changed" in each.text and "KeyError" in each.text for each in trainer.failures
    )
    assert len(trainer.run(2)) == 5


class Scaled:
    """A loss that is a callable object."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, output, labels):
        return F.cross_entropy(output, labels) * self.factor


def scaled(output, labels, factor=1.0):
    return F.cross_entropy(output, labels) * factor


def closed_over(factor):
    return lambda output, labels: F.cross_entropy(output, labels) * factor


class Tempered(Tagger):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, ids):
        return super().forward(ids) / self.temperature


RATE = 0.1


def of_a_global(weights):
    return torch.optim.SGD(weights, lr=RATE)


@pytest.mark.parametrize(
    ("part", "one", "other"),
    [
        ("loss", nn.CrossEntropyLoss, lambda: nn.CrossEntropyLoss(label_smoothing=0.3)),
        ("loss", lambda: nn.CrossEntropyLoss(torch.ones(20)), lambda: nn.CrossEntropyLoss(torch.arange(20.0))),
        ("loss", lambda: Scaled(1.0), lambda: Scaled(2.0)),
        ("loss", lambda: partial(scaled, factor=1.0), lambda: partial(scaled, factor=2.0)),
        ("loss", lambda: closed_over(1.0), lambda: closed_over(2.0)),
        ("loss", lambda: scaled, lambda: F.cross_entropy),
        ("model", lambda: Tempered(1.0), lambda: Tempered(2.0)),
        ("model", lambda: Tempered(1.0), Tagger),
        ("data", lambda: TAGS, lambda: TAGS[::-1]),
        ("optimizer", lambda: of_a_global, lambda: torch.optim.SGD),
    ],
)
def test_a_part_that_is_another_has_another_digest(part, one, other):
    def digests(value):
        parts = {"model": Tagger, "data": TAGS, "loss": F.cross_entropy} | {part: value}
        return TASKS[registered(**parts).task].digests

    first = digests(one())
    assert digests(one()) == first
    assert {name for name, value in digests(other()).items() if first[name] != value} == {part}


def test_a_number_that_a_function_names_belongs_to_it(monkeypatch):
    first = TASKS[registered(Tagger, TAGS, loss=F.cross_entropy, optimizer=of_a_global).task].digests
    monkeypatch.setitem(globals(), "RATE", 0.2)
    second = TASKS[registered(Tagger, TAGS, loss=F.cross_entropy, optimizer=of_a_global).task].digests
    assert [name for name in first if first[name] != second[name]] == ["optimizer"]


def test_a_run_that_reads_a_stream_to_its_step_can_be_paused(tmp_path, listen):
    waits = [0.0]

    def stream():
        for number in itertools.count():
            time.sleep(waits[0])
            yield TAGS[number % 3]

    config = registered(Tagger(), stream, loss=F.cross_entropy)
    trainer = Trainer(config, log=tmp_path)
    trainer.run(40)
    saved = checkpoints._read(trainer.log_path.with_suffix(".checkpoint"))
    alone = Experiment(config)
    whole = [alone.step().loss for _ in range(42)]
    waits[0] = 0.2
    trainer.continue_saved(saved)
    assert trainer.wait(10)
    ear, shown = listen(trainer), []
    status = Status(trainer, lambda: None, shown.append)
    trainer.subscribe(status.on_event)
    trainer.start()
    for _ in range(100):
        status.tick()
        if len({each["text"] for each in shown if each["kind"] == "reading"}) > 1:
            break
        time.sleep(0.1)
    trainer.pause()
    assert trainer.wait(5), "5 seconds are left to read"
    first, second = ear.of(Reading)[:2]
    assert (first.step, 0 < second.left < first.left < 40) == (40, True)
    told = [each["text"] for each in shown if each["kind"] == "reading"]
    assert told[0] == f"Reading the batches before step 40. Still to be read: {first.left}."
    status.tick()
    assert shown[-1]["state"] == "Paused"
    assert (trainer.state, len(trainer.history), trainer.failures) == ("paused", 40, ())
    waits[0] = 0.0
    assert trainer.run(2).column("loss").tolist() == whole
    trainer.stop()
    assert trainer.wait(10)


def test_an_optimizer_that_has_stepped_what_is_frozen_now_is_saved(tmp_path):
    model = Tagger()
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.01)
    F.cross_entropy(model(TAGS[0][0]), TAGS[0][1]).backward()
    optimizer.step()
    model.words.requires_grad_(False)
    trainer = Trainer(registered(model, TAGS, loss=F.cross_entropy, optimizer=optimizer), log=tmp_path)
    trainer.run(3)
    assert trainer.failures == ()
    assert Experiment.load(trainer.log_path.with_suffix(".checkpoint"))[0].steps_done == 3


@pytest.mark.parametrize("state", [None, [1, 2]])
def test_what_a_hook_names_besides_a_schedule_ends_no_run(state, tmp_path):
    meter = Meter(state)

    def optimizer(weights):
        stepped = torch.optim.SGD(weights, lr=0.1)
        stepped.register_step_post_hook(lambda *_: vars(meter))
        return stepped

    trainer = Trainer(registered(Tagger(), TAGS, loss=F.cross_entropy, optimizer=optimizer), log=tmp_path)
    trainer.run(3)
    assert trainer.failures == ()
    assert Experiment.load(trainer.log_path.with_suffix(".checkpoint"))[0].steps_done == 3


class Renamed(Tagger):
    """A model with the same weights, by another name."""


def test_a_run_is_offered_under_another_name_with_the_parts_that_are_others(kernel, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["amplab.lab.open"], "runs_directory", lambda: tmp_path)
    offered = []
    monkeypatch.setattr("amplab.views.Dashboard.offer_saved", lambda _self, saved: offered.append(saved))

    def opened(model=Tagger, data=TAGS, loss=F.cross_entropy):
        dashboard = amplab.lab.open(model=model, data=data, loss=loss)
        dashboard.close()
        return dashboard.trainer

    opened()
    trainer = opened()
    trainer.stop()
    trainer = opened()
    assert trainer.config.task == "own-3"
    trainer.run(4)
    trainer.stop()
    assert trainer.wait(10)
    whole = Experiment(trainer.config)
    losses = [whole.step().loss for _ in range(6)]
    for log in list(checkpoints._held):
        os.close(checkpoints._held.pop(log))  # as when its kernel ends
    del trainer
    forget_own(set())
    kernel.trainer, kernel.own_tasks = None, set()

    trainer = opened()
    assert (trainer.config.task, offered[-1].config.task, offered[-1].others) == ("own", "own", ())
    trainer.continue_saved(offered[-1])
    assert trainer.wait(10)
    assert trainer.run(2).column("loss").tolist() == losses
    trainer.reset(), trainer.stop(), trainer.wait(10)

    offered.clear()
    for log in list(checkpoints._held):
        os.close(checkpoints._held.pop(log))
    opened(loss=lambda output, labels: F.cross_entropy(output, labels) * 2, data=TAGS[::-1])
    assert offered[-1].others == ("data", "loss")
    assert "trained with another data=, loss=: its next" in saved_offer("run", "", 4, offered[-1].others).text
    assert "goes on with the settings that were saved" in saved_offer("run", "", 4, ("optimizer",)).text
    offered.clear()
    forget_own(set())
    kernel.trainer, kernel.own_tasks = None, set()
    here = opened(model=Renamed).config
    assert (offered[-1].config.task, offered[-1].config.model) == (here.task, here.model) == ("own", "renamed")
    assert load_run(offered[-1].log).config.model == "tagger-3"  # as in a process without the code
    offered.clear()
    opened(model=lambda: nn.Sequential(Tagger()))
    assert not offered


def test_a_run_that_fails_within_a_step_does_not_replace_its_checkpoint(tmp_path):
    fails = []

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if fails:
                raise RuntimeError("out of memory")

    config = registered(Tagger(), TAGS, loss=F.cross_entropy, optimizer=lambda weights: Failing(weights, lr=0.1))
    trainer = Trainer(config, log=tmp_path)
    trainer.run(20)
    fails.append(True)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.run(20)
    trainer.stop()
    assert trainer.wait(10)
    fails.clear()
    experiment, _ = Experiment.load(trainer.log_path.with_suffix(".checkpoint"))
    assert experiment.steps_done == 20
    whole = Experiment(trainer.config)
    for _ in range(20):
        whole.step()
    assert whole.step().loss == experiment.step().loss


class Normed(nn.Module):
    """Has running statistics, dropout, and may raise in its forward."""

    def __init__(self, fails: list[str]) -> None:
        super().__init__()
        self.fails = lambda: fails  # the world around it, which no checkpoint holds
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))

    def __deepcopy__(self, memo):
        other = Normed(self.fails())
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, rows):
        out = self.layers(rows)
        if "forward" in self.fails():
            raise RuntimeError("out of memory")
        return out


ROWS = [(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(3)]


class Shaky(list):
    """Batches that cannot be read for a while."""

    def __init__(self, batches, fails):
        super().__init__(batches)
        self.fails = lambda: fails

    def __iter__(self):
        for batch in super().__iter__():
            if "data" in self.fails():
                raise OSError("stale file handle")
            yield batch


def shaky(fails: list[str], **changed) -> ExperimentConfig:
    config = registered(Normed(fails), Shaky(ROWS, fails), loss=F.cross_entropy)
    return config.changed(**changed)


@pytest.mark.parametrize("call", ["run", "step", "step_in_stages", "start"])
def test_a_batch_that_cannot_be_read_pauses_the_run_which_goes_on(call, tmp_path, listen):
    """The error comes before anything has changed: a moment without a network drive must not cost the weights."""
    fails: list[str] = []
    config = shaky(fails)
    trainer = Trainer(config, log=tmp_path)
    trainer.run(13)
    ear = listen(trainer)
    fails.append("data")
    if call == "run":
        with pytest.raises(RuntimeError, match="stale file handle"):
            trainer.run(5)
    else:
        getattr(trainer, call)()
        assert trainer.wait(10)
    assert (trainer.state, len(trainer.history)) == ("paused", 13)
    (told,) = ear.of(Failed)
    assert not told.fatal
    assert "OSError: stale file handle" in told.text
    saved, _ = Experiment.load(trainer.log_path.with_suffix(".checkpoint"))
    fails.clear()
    trainer.step()
    assert trainer.wait(10)
    losses = trainer.run(6).column("loss").tolist()
    assert losses == Trainer(config).run(20).column("loss").tolist()
    assert [saved.step().loss for _ in range(7)] == losses[13:]


def test_a_run_that_a_batch_has_paused_is_kept_by_a_reset_and_continues():
    fails: list[str] = []
    config = shaky(fails)
    trainer = Trainer(config)
    trainer.run(13)
    fails.append("data")
    trainer.step()
    assert trainer.wait(10)
    fails.clear()
    trainer.reset()
    assert trainer.run(2).column("loss").tolist()
    trainer.continue_from(trainer.kept.runs[0])
    assert trainer.wait(10)
    losses = trainer.run(7).column("loss").tolist()
    assert losses == Trainer(config).run(20).column("loss").tolist()


def of_ten_steps(weights):
    stepped = torch.optim.SGD(weights, lr=0.1)
    schedule = lr_scheduler.OneCycleLR(stepped, 0.5, total_steps=10)
    stepped.register_step_post_hook(lambda *_: schedule.step())
    return stepped


def test_a_comparison_says_that_a_schedule_raises_at_its_end():
    trainer = Trainer(registered(Normed([]), ROWS, loss=F.cross_entropy, optimizer=of_ten_steps))
    trainer.compare([trainer.config], steps=30)
    assert trainer.wait(20)
    (run,) = trainer.kept.runs
    assert "Tried to step 11 times" in run.error.splitlines()[0]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_schedule_that_raises_at_its_end_leaves_the_run_whole(level, tmp_path):
    """The weights have the step already when a hook after it raises: its record must be there, too."""

    config = registered(Normed([]), ROWS, loss=F.cross_entropy, optimizer=of_ten_steps).changed(opt_level=level)
    trainer = Trainer(config, log=tmp_path)
    with pytest.raises(RuntimeError, match="Tried to step 11 times"):
        trainer.run(30)
    assert (trainer.state, len(trainer.history)) == ("paused", 11)
    saved, _ = Experiment.load(trainer.log_path.with_suffix(".checkpoint"))
    with pytest.raises(RuntimeError, match="Tried to step 12 times"):
        trainer.run(30)
    whole = Experiment(config)
    losses = [whole.step().loss for _ in range(12)]
    assert trainer.history.column("loss").tolist() == losses
    assert saved.step().loss == losses[11]
    trainer.change(lr=0.01, optimizer="sgd")
    assert len(trainer.run(3)) == 15


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_run_that_fails_in_a_forward_is_saved_as_it_was_before_that_step(level, tmp_path):
    """A forward changes running statistics at most, so no step is lost; runs of seconds have no other checkpoint."""
    fails: list[str] = []
    config = shaky(fails, opt_level=level)
    trainer = Trainer(config, log=tmp_path)
    trainer.start()
    while len(trainer.history) < 13:
        time.sleep(0.001)
    fails.append("forward")
    assert trainer.wait(10)
    assert trainer.state == "failed"
    steps, path = len(trainer.history), trainer.log_path.with_suffix(".checkpoint")
    assert str(path) in trainer.failures[-1].text
    fails.clear()
    saved, _ = Experiment.load(path)
    assert saved.steps_done == steps
    whole = Experiment(config)
    for _ in range(steps):
        whole.step()
    for mine, its in zip(saved.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(mine, its)
    assert [saved.step().loss for _ in range(4)] == [whole.step().loss for _ in range(4)]


def test_a_second_loss_that_raises_leaves_the_scale_of_the_first_as_it_was(tmp_path):
    """Its backward has counted the step already: saved so, the scale would grow a step early."""
    fails: list[str] = []

    def real(models, batch):
        return F.cross_entropy(models["D"](batch[0]), batch[1])

    def fake(models, batch):
        if fails:
            raise RuntimeError("out of memory")
        return models["D"](batch[0]).square().mean()

    def optimizer(weights):
        return torch.optim.SGD(weights, lr=0.1)

    models = {"D": Normed([])}
    config = registered(models, ROWS, step={"D": [real, fake]}, optimizer={"D": optimizer})
    trainer = Trainer(config.changed(growth_interval=5), log=tmp_path)
    trainer.run(8)
    trainer.step()  # which is not saved yet
    assert trainer.wait(10)
    fails.append("fake")
    trainer.step()
    assert trainer.wait(10)
    assert trainer.state == "failed"
    fails.clear()
    saved, whole = Experiment.load(trainer.log_path.with_suffix(".checkpoint"))[0], Experiment(trainer.config)
    for _ in range(9):
        whole.step()
    assert [each.state for each in saved.session.scalers] == [each.state for each in whole.session.scalers]


def test_a_forward_that_has_written_to_weights_before_it_raised_is_not_saved(tmp_path):
    fails: list[str] = []

    class Clipping(Normed):
        def forward(self, rows):
            with torch.no_grad():
                for each in self.parameters():
                    each.clamp_(-0.5, 0.5)
            return super().forward(rows)

    trainer = Trainer(registered(lambda: Clipping(fails), ROWS, loss=F.cross_entropy), log=tmp_path)
    trainer.run(13)
    path = trainer.log_path.with_suffix(".checkpoint")
    trainer.step()
    assert trainer.wait(10)
    fails.append("forward")
    trainer.step()
    assert trainer.wait(10)
    assert (trainer.state, len(trainer.history)) == ("failed", 14)
    assert Experiment.load(path)[0].steps_done == 13


def test_a_change_of_the_accumulation_goes_on_with_the_next_batch(tmp_path):
    read = []

    def numbers():
        for number in range(60):
            read.append(number)
            yield torch.full((4, 8), float(number))

    trained = []

    def step(model, batch):
        trained.append(int(batch[0, 0]))
        return model(batch / 60).square().mean()

    experiment = Experiment(registered(lambda: nn.Linear(8, 1), numbers, step=step).changed(opt_level="O0"))
    trained.clear(), read.clear()
    for accumulate in (1, 3, 2, 1):
        experiment.switch(experiment.config.changed(accumulate=accumulate))
        for _ in range(2):
            experiment.step()
    assert trained == list(range(14))
    assert read[-1] == 13
    experiment.save(tmp_path / "run.checkpoint", {})
    again, _ = Experiment.load(tmp_path / "run.checkpoint")
    again.step()
    assert trained[-1] == 14


class Noam(lr_scheduler.LRScheduler):
    """Has a function, a deque and a number of NumPy in its attributes."""

    def __init__(self, optimizer):
        self.factor, self.recent, self.scale = (lambda step: 1 / (1 + step)), deque(maxlen=3), np.float64(1.0)
        super().__init__(optimizer)

    def get_lr(self):
        self.recent.append(self.last_epoch)
        self.scale = self.scale * 0.9
        return [0.1 * self.factor(sum(self.recent)) * self.scale for _ in self.base_lrs]


class Warmup:
    """No LRScheduler, as those of timm."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = 0.01 * self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


SCHEDULES = {
    "with a function": Noam,
    "of another class": Warmup,
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=12),
    "at milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 7, 9]),
    "one after another": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.MultiStepLR(optimizer, [2, 6])],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_goes_on_through_a_change_and_a_restart(make, level, tmp_path):
    def optimizer(weights):
        stepped = torch.optim.SGD(weights, lr=0.1)
        schedule = make(stepped)
        stepped.register_step_post_hook(lambda *_: schedule.step())
        return stepped

    config = registered(Tagger(), TAGS, loss=F.cross_entropy, optimizer=optimizer).changed(opt_level=level)
    whole, changed = Experiment(config), Experiment(config)
    losses = [whole.step().loss for _ in range(12)]
    seen = [changed.step().loss for _ in range(4)]
    changed.switch(config.changed(growth_interval=777))
    seen += [changed.step().loss for _ in range(4)]
    changed.save(tmp_path / "run.checkpoint", {})
    again, _ = Experiment.load(tmp_path / "run.checkpoint")
    assert seen + [again.step().loss for _ in range(4)] == losses
    with pytest.raises(ValueError, match="a schedule in a hook of it, sets the learning rate"):
        again.switch(again.config.changed(lr=0.3))


def test_a_log_of_it_opens_in_a_process_that_does_not_have_the_code(tmp_path):
    trainer = Trainer(registered(Tagger(), TAGS, loss=F.cross_entropy), log=tmp_path)
    trainer.run(3)
    trainer.stop()
    assert trainer.wait(10)
    forget_own(set())
    assert "tagger" not in MODELS
    run = load_run(trainer.log_path)
    assert (len(run.history), str(run.config)) == (3, "amplab/1 task=own model=tagger opt_level=O1 optimizer=adam")
    with pytest.raises(ValueError, match=r"open it again with amplab\.lab\.open"):
        Experiment(run.config)


class Late(Tagger):
    """Makes a layer in its first forward, as code does that learns its sizes there."""

    def forward(self, ids):
        if not hasattr(self, "last"):
            self.last = nn.Linear(5, 5)
        return super().forward(ids)


def test_a_run_that_a_restarted_kernel_cannot_continue_is_told_while_it_is_there(tmp_path):
    trainer = Trainer(registered(Late, TAGS, loss=F.cross_entropy), log=tmp_path)
    trainer.run(3)
    (failure,) = trainer.failures
    assert "a restarted kernel cannot continue this run" in failure.text
    assert "unexpected key(s) last.weight, last.bias" in failure.text
    trainer.run(3)
    assert (len(trainer.history), len(trainer.failures)) == (6, 1)
    trainer.stop()
    assert trainer.wait(10)


def test_the_check_of_a_checkpoint_leaves_what_hooks_share(tmp_path):
    seen, model = [], Tagger()
    model.out.register_forward_hook(lambda _module, _args, output: seen.append(output.mean().item()))
    config = registered(model, TAGS, loss=F.cross_entropy)
    del seen[:]
    shown = seen  # another name for the list of the hook, as an object in a notebook has it
    trainer = Trainer(config, log=tmp_path)
    for number in (2, 4, 6):
        trainer.run(2)
        assert len(shown) == number
    assert not trainer.failures
    trainer.stop()
    assert trainer.wait(10)
