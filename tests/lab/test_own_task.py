"""A model, data and a loss of one's own in the lab: as in plain torch, and with all that the lab does."""

import copy
import itertools
import math
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rateless_optimizers import RATELESS, Relative
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
    GradientsReady,
    MemoryCounted,
    StagesReady,
    StateChanged,
    TraceReady,
    Trainer,
    TwinReady,
    checkpoints,
    config_remedy,
    load_run,
    report,
)
from amplab.lab.kept_runs import MOST_RUNS
from amplab.lab.own_task import check_devices, forget_own, register_own
from amplab.views.notice_board import saved_offer


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


ONE = Tagger()


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


@pytest.fixture(autouse=True)
def nothing_own() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    forget_own(set())
    assert set(TASKS) & {"own", "own-2"} == set()


def registered(model, data, **parts) -> ExperimentConfig:
    return ExperimentConfig(task=register_own(model, data, **parts))


def test_a_mask_that_holds_inf_from_the_start_is_no_damage():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 2)
            self.register_buffer("mask", torch.full((4,), -math.inf))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(x))

    data = [(torch.randn(8, 4, generator=DRAWN), torch.zeros(8, dtype=torch.long))]
    experiment = Experiment(registered(Masked, data, loss=F.cross_entropy))
    assert experiment.nonfinite_buffers() == ()
    experiment.inject("nan")
    experiment.step()
    assert experiment.nonfinite_buffers() == ("norm.running_mean", "norm.running_var")


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "autocast-bf16"])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.filterwarnings("ignore:Adam on half parameters")
def test_code_that_the_lab_has_never_seen_gets_all_of_it(name, level):
    """Train, look, start again bit for bit, disturb, explain, switch the level."""
    config = registered(**OWN[name]()).changed(opt_level=level)
    first, again = Experiment(config), Experiment(config)
    losses = []
    for _ in range(3):
        losses.append(first.step().loss)
        assert first.gradients().layers
        assert len(first.trace()) > 5
    repeated = [again.step().loss for _ in range(3)]
    assert str(repeated) == str(losses)  # NaN at O3 with Adam is the same text
    first.inject("nan")
    record = first.step()
    assert record.injected == "nan"
    if config.is_dynamic:
        assert record.skipped
        assert first.explain_skip().cause in ("batch", "input")
    first.switch(config.changed(opt_level="O0" if level != "O0" else "O2"))
    first.step()


@pytest.mark.filterwarnings("ignore:Adam on half parameters")
@pytest.mark.parametrize("name", ["resnet", "rnn", "two inputs"])
def test_a_run_of_ones_own_model_gets_every_tool_of_the_lab(name, tmp_path, listen):
    """Slow motion, every skip explained, memory, op dtypes, a comparison of all levels, a twin, and a report."""
    config = registered(**OWN[name]()).changed(init_scale=2.0**24)
    trainer = Trainer(config, log=tmp_path)
    ear = listen(trainer)
    assert trainer.run(12).skip_count
    trainer.step_in_stages()
    trainer.request_stages(trainer.walkable[0])
    for level in ("O0", "O2"):
        trainer.request_memory(level)
    trainer.request_trace()
    trainer.request_gradients()
    trainer.request_twin()
    trainer.compare(steps=3)
    assert trainer.wait(60)
    assert ear.of(Failed) == []
    walks = [event.stages for event in ear.of(StagesReady)]
    assert [each.record.step for each in walks] == [12, 0]
    assert all(each.parameters and not each.problems for each in walks)
    counted = {event.memory.opt_level: event.memory.parameters for event in ear.of(MemoryCounted)}
    assert counted["O2"] < counted["O0"]
    assert [len(ear.of(kind)) for kind in (TraceReady, GradientsReady, TwinReady)] == [1, 1, 1]
    assert {run.name: (len(run.history), run.error) for run in trainer.kept.runs} == dict.fromkeys(
        ("O0", "O1", "O2", "O3", "autocast fp16", "autocast bf16"), (3, "")
    )
    shown = report(trainer, tmp_path / "run.html").read_text()
    assert "fits at" in shown
    assert str(tmp_path) not in shown


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


def test_it_is_the_loop_in_plain_torch_and_the_objects_given_are_not_changed():
    model = ResNet()
    model.dropout.p = 0.0
    optimizer = torch.optim.SGD(
        [
            {"params": model.stem.parameters(), "lr": 0.2},
            {"params": [*model.block.parameters(), *model.fc.parameters()]},
        ],
        lr=0.05,
        momentum=0.9,
    )
    data = list(DataLoader(IMAGES, batch_size=8))
    before = [weight.clone() for weight in model.parameters()]
    experiment = Experiment(registered(model, data, loss=F.cross_entropy, optimizer=optimizer).changed(opt_level="O0"))
    losses = [experiment.step().loss for _ in range(5)]
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    for step in range(5):
        images, labels = data[step % 3]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        assert loss.item() == losses[step]


def test_a_learning_rate_keeps_the_ratio_of_the_groups():
    model = Tagger()
    groups = [
        {"params": model.words.parameters(), "lr": 0.4},
        {"params": [*model.gru.parameters(), *model.out.parameters()]},
    ]
    config = registered(model, TAGS, loss=F.cross_entropy, optimizer=torch.optim.SGD(groups, lr=0.1))
    assert (config.optimizer, config.learning_rate) == ("own", 0.4)
    experiment = Experiment(config)
    experiment.switch(config.changed(lr=0.8))
    assert [group["lr"] for group in experiment.optimizer.param_groups] == [0.8, 0.2]
    experiment.switch(config.changed(optimizer="adam"))
    assert isinstance(experiment.optimizer, torch.optim.Adam)
    experiment.switch(config.changed(optimizer="own"))
    assert [group["lr"] for group in experiment.optimizer.param_groups] == [0.4, 0.1]


def drawn() -> tuple:
    return torch.rand(()).item(), random.random(), np.random.rand()


class Drawn(nn.Module):
    """Draws its weights from NumPy and Python too."""

    def __init__(self):
        super().__init__()
        weights = np.random.rand(20, 8) + random.random()
        self.words = nn.Embedding.from_pretrained(torch.as_tensor(weights).float(), freeze=False)
        self.out = nn.Linear(8, 20)

    def forward(self, ids):
        return self.out(self.words(ids)).transpose(1, 2)


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
    assert "continues, and ConstantLR.generator begins anew" in ear.of(Failed)[0].text


class Noisy(torch.optim.SGD):
    """As for stochastic gradient Langevin dynamics, or differential privacy."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(torch.randn_like(weight) + np.random.rand(), alpha=0.01)
        return super().step(closure)


def test_nothing_draws_from_the_random_numbers_of_the_process(tmp_path):
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = drawn()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    config = registered(Drawn, TAGS, loss=F.cross_entropy, optimizer=lambda weights: Noisy(weights, lr=0.1))
    trainer = Trainer(config, log=tmp_path)
    losses = trainer.run(3).column("loss").tolist()
    trainer.trace(), trainer.score()
    trainer.reset()
    assert trainer.run(3).column("loss").tolist() == losses
    trainer.stop()
    assert trainer.wait(10)
    assert drawn() == expected


def test_a_frozen_part_that_all_models_of_a_function_share_is_not_changed():
    backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)
    before = copy.deepcopy(backbone.state_dict())
    data = [torch.rand(4, 8, generator=DRAWN) for _ in range(2)]
    config = registered(
        lambda: nn.Sequential(backbone, nn.Linear(8, 1)), data, step=lambda model, batch: model(batch).square().mean()
    )
    experiment = Experiment(config.changed(opt_level="O2"))
    experiment.step()
    assert all(torch.equal(before[name], value) for name, value in backbone.state_dict().items())
    assert backbone(data[0]).dtype == torch.float32


def test_an_optimizer_given_with_frozen_weights_and_attributes_trains_as_in_plain_torch():
    class Decayed(torch.optim.SGD):
        def __init__(self, weights):
            super().__init__(weights, lr=0.1)
            self.decay = {"by": 0.99}

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.mul_(self.decay["by"]) if weight.grad is not None else None
            return super().step(closure)

    model = Tagger()
    model.words.requires_grad_(False)
    optimizer = Decayed(model.parameters())
    experiment = Experiment(registered(model, TAGS, loss=F.cross_entropy, optimizer=optimizer).changed(opt_level="O0"))
    for step in range(4):
        ids, labels = TAGS[step % 3]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids), labels)
        loss.backward()
        optimizer.step()
        assert loss.item() == experiment.step().loss


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda _weights: torch.optim.SGD(ONE.parameters(), lr=0.1),
            "of the parameters that the function",
        ),
        (lambda _weights: hooked(torch.optim.SGD(ONE.parameters(), lr=0.1)), "optimizer of the parameters"),
        ("hooked", "pass a function that makes the optimizer with its hooks"),
    ],
)
def test_an_optimizer_that_cannot_be_made_again_is_refused(make, words):
    given = hooked(torch.optim.SGD(ONE.parameters(), lr=0.1)) if make == "hooked" else make
    with pytest.raises(ValueError, match=words):
        registered(ONE, TAGS, loss=F.cross_entropy, optimizer=given)


def hooked(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class Centered(nn.Module):
    """A loss with a running mean, as of DINO."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(()))

    def forward(self, output, target):
        with torch.no_grad():
            self.center.mul_(0.9).add_(output.float().mean(), alpha=0.1)
        return F.cross_entropy(output - self.center, target) + self.center


def test_a_loss_with_a_buffer_begins_each_run_as_given():
    loss = Centered()
    config = registered(Tagger(), TAGS, loss=loss)
    first, second = (
        [experiment.step().loss for _ in range(4)] for experiment in (Experiment(config), Experiment(config))
    )
    assert first == second
    assert loss.center == 0


@pytest.mark.parametrize("kind", ["loss", "step"])
@pytest.mark.parametrize("look", ["trace", "examine", "gradients", "activations", "twin"])
def test_a_look_changes_no_buffer_that_a_loss_uses(look, kind):
    teacher = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def distilled(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + teacher(batch[0]).mean() * model.out.bias.sum()

    def losses(*, looks):
        teacher[2].reset_running_stats()
        torch.manual_seed(0)
        given = {"loss": Centered()} if kind == "loss" else {"step": distilled}
        experiment = Experiment(registered(Tagger(), TAGS, **given))
        seen = [(getattr(experiment, look)() if looks else None, experiment.step().loss)[1] for _ in range(3)]
        return seen, teacher[2].running_mean.sum().item()

    assert losses(looks=True) == losses(looks=False)


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


class Lite:
    """Keeps its place in itself."""

    def __iter__(self):
        self.place = 0
        while self.place < len(TAGS):
            self.place += 1
            yield TAGS[self.place - 1]


def test_a_comparison_leaves_the_run_the_batches_of_data_that_keep_their_place():
    config = registered(Tagger(), Lite(), loss=F.cross_entropy)
    whole = Trainer(config).run(7).column("loss").tolist()
    trainer = Trainer(config)
    trainer.run(2)
    trainer.compare([config.changed(opt_level="O0")], steps=2)
    assert trainer.wait(30)
    assert trainer.run(5).column("loss").tolist() == whole


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
    assert "KeyError" in trainer.failures[-1].text
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


def test_open_changes_no_teacher_of_a_step_and_refuses_a_loss_with_weights():
    teacher = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(0, 1), nn.BatchNorm1d(8))
    registered(Tagger(), TAGS, step=lambda model, batch: model(batch[0]).mean() + teacher(batch[0]).mean())
    assert int(teacher[2].num_batches_tracked) == 0
    criterion = nn.Sequential(nn.Linear(5, 1))
    with pytest.raises(ValueError, match=r"has parameters to train \(0.weight, 0.bias\).*part of the model"):
        registered(Tagger(), TAGS, loss=criterion)


@pytest.mark.filterwarnings("ignore:Adam on half parameters")
@pytest.mark.parametrize("state", ["ready", "failed", "comparing"])
def test_a_cell_that_runs_again_keeps_the_runs_beside_the_present_one(kernel, state):
    fails = []

    def loss(output, labels):
        if fails:
            raise ArithmeticError("a slip")
        return F.cross_entropy(output, labels)

    def opened():
        dashboard = amplab.lab.open(model=Tagger, data=TAGS, loss=loss)
        dashboard.close()
        return dashboard.trainer

    trainer = opened()
    trainer.run(3)
    trainer.reset()
    if state == "failed":
        fails.append(True)
        with pytest.raises(RuntimeError):
            trainer.run(1)
        fails.clear()
    elif state == "comparing":
        trainer.compare(steps=3)
    again = opened()
    assert again.wait(30)
    assert [len(run.history) for run in again.kept.runs][:1] == [3]
    assert sum(run.is_compared for run in again.kept.runs) == (6 if state == "comparing" else 0)
    assert len(again.run(2)) == 2
    assert again.config.task == "own-2"


def test_an_optimizer_that_is_chosen_while_a_part_is_frozen_trains_all():
    def alternating(model, batch):
        for number, part in enumerate((model.words, model.out)):
            part.requires_grad_(number == alternating.step % 2)
        alternating.step += 1
        return F.cross_entropy(model(batch[0]), batch[1])

    alternating.step = 0
    experiment = Experiment(registered(Tagger(), TAGS, step=alternating).changed(opt_level="O0"))
    experiment.step()
    experiment.switch(experiment.config.changed(optimizer="sgd"))
    assert len(experiment.optimizer.param_groups[0]["params"]) == len([*experiment.model.parameters()])


def test_a_setting_that_cannot_begin_here_is_refused_and_the_run_goes_on(tmp_path):
    trainer = Trainer(registered(Tagger(), TAGS, loss=F.cross_entropy), log=tmp_path)
    trainer.run(3)
    for text in ("amplab/1 task=own-7 model=net", "amplab/1 task=digits batch_size=60000"):
        config = ExperimentConfig.parse(text)
        if config.task != "digits":
            with pytest.raises(ValueError, match="open it again"):
                trainer.reset(config)
    assert len(trainer.run(2)) == 5
    digits = Trainer(ExperimentConfig(hidden=4))
    digits.run(2)
    with pytest.raises(ValueError, match="60000"):
        digits.reset(ExperimentConfig(hidden=4, batch_size=60000))
    assert len(digits.run(2)) == 4


def test_an_offer_of_an_older_cell_can_begin(kernel):
    dashboards = [amplab.lab.open(model=Tagger, data=TAGS, loss=F.cross_entropy)]
    trainer = dashboards[0].trainer
    trainer.run(2)
    dashboards += [amplab.lab.open(model=lambda: nn.Sequential(Tagger()), data=TAGS, loss=F.cross_entropy)]
    dashboards += [amplab.lab.open(model=Tagger, data=TAGS, loss=F.cross_entropy)]
    trainer.reset(ExperimentConfig(task="own-2"))
    assert len(trainer.run(1)) == 1
    assert isinstance(trainer._experiment.model, nn.Sequential)
    for each in dashboards:
        each.close()


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
    ear = listen(trainer)
    trainer.start()
    for _ in range(100):
        if any("are still to be read" in each.note for each in ear.of(StateChanged)):
            break
        time.sleep(0.1)
    trainer.pause()
    assert trainer.wait(5), "8 seconds are left to read"
    assert (trainer.state, len(trainer.history), trainer.failures) == ("paused", 40, ())
    waits[0] = 0.0
    assert trainer.run(2).column("loss").tolist() == whole
    trainer.stop()
    assert trainer.wait(10)


@pytest.mark.parametrize("mode", ["all eval", "root eval", "one eval"])
def test_a_model_trains_in_the_modes_that_it_has(mode):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Dropout(0.5)))
    model.train(mode == "one eval")
    if mode == "root eval":
        model[2].train()
    model[1].eval()
    data = [torch.rand(4, 8, generator=DRAWN)]
    experiment = Experiment(registered(model, data, step=lambda model, batch: model(batch).square().mean()))
    modes = [each.training for each in experiment.model.modules()]
    assert modes == ([True] * 5 if mode == "all eval" else [each.training for each in model.modules()])


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


def test_what_cannot_be_copied_beside_the_model_is_shared():
    class Locked(torch.optim.SGD):
        def __init__(self, weights):
            super().__init__(weights, lr=0.1)
            self.lock = threading.Lock()

    class Criterion(nn.CrossEntropyLoss):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    model = Tagger()
    config = registered(model, TAGS, loss=Criterion(), optimizer=Locked(model.parameters()))
    assert math.isfinite(Experiment(config).step().loss)


def test_an_optimizer_of_a_watch_is_taken_and_an_average_in_a_hook_is_no_schedule():
    model, average = Tagger(), Meter({"steps": 0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amplab.watch(model, optimizer):
        registered(model, TAGS, loss=F.cross_entropy, optimizer=optimizer)

    def averaged(weights):
        stepped = torch.optim.SGD(weights, lr=0.1)
        stepped.register_step_post_hook(lambda *_: vars(average))
        return stepped

    experiment = Experiment(registered(Tagger(), TAGS, loss=F.cross_entropy, optimizer=averaged))
    experiment.switch(experiment.config.changed(lr=0.3))
    assert experiment.optimizer.param_groups[0]["lr"] == 0.3


class File:
    """Reads from a file, which it closes at its end."""

    def __init__(self, path):
        self.file = path.open("rb")

    def __iter__(self):
        self.file.seek(0)
        return (TAGS[each % 3] for each in self.file.read())

    def __del__(self):
        self.file.close()


def test_data_that_close_a_file_at_their_end_are_not_copied(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(9)))
    data = File(path)
    trainer = Trainer(registered(Tagger(), data, loss=F.cross_entropy))
    trainer.run(12)
    trainer.reset()
    trainer.run(3)
    assert not data.file.closed


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
    opened(model=lambda: nn.Sequential(Tagger()))
    assert not offered


def test_a_dashboard_that_was_replaced_begins_its_own_model_again(kernel):
    def opened(model):
        dashboard = amplab.lab.open(model=model, data=TAGS, loss=F.cross_entropy)
        dashboard.close()
        return dashboard.trainer

    torch.manual_seed(0)
    first = opened(nn.Sequential(Tagger()))
    second, third = opened(nn.Sequential(Tagger(), nn.Tanh())), opened(nn.Sequential(Tagger(), nn.Sigmoid()))
    for trainer, size in ((first, 1), (second, 2)):
        trainer.reset()
        trainer.run(1)
        assert len(trainer._experiment.model) == size
    assert len({each.config.task for each in (first, second, third)}) == 3


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


def test_a_score_that_cannot_be_measured_once_does_not_end_the_run(listen):
    fails = [True]

    def accuracy(model):
        if fails:
            raise OSError(f"the disk does not answer{fails.pop()}")
        return 0.5

    trainer = Trainer(registered(Tagger(), TAGS, loss=F.cross_entropy, evaluate=accuracy))
    ear = listen(trainer)
    trainer.run(50)
    assert [trainer.history.records(step)[0].score for step in (24, 49)] == [None, 0.5]
    assert ["the disk does not answer" in each.text for each in ear.of(Failed)] == [True]


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


def test_a_comparison_goes_on_though_many_runs_are_kept_meanwhile():
    trainer = Trainer(registered(Tagger(), TAGS, loss=F.cross_entropy))
    trainer.compare([trainer.config] * 2, steps=30)
    for _ in range(MOST_RUNS + 2):
        trainer.step()
        trainer.reset()
    assert trainer.wait(60)
    assert [len(run.history) for run in trainer.kept.runs if run.is_compared][-1:] == [30]
    assert trainer.comparison is None


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
    with pytest.raises(ValueError, match="a schedule sets the learning rate"):
        again.switch(again.config.changed(lr=0.3))


@pytest.mark.parametrize("kind", RATELESS)
def test_an_optimizer_without_a_learning_rate_is_trained_as_it_is(kind):
    config = registered(Tagger(), TAGS, loss=F.cross_entropy, optimizer=kind)
    assert (config.optimizer, config.learning_rate) == ("own", 0.0)
    experiment = Experiment(config)
    options = copy.deepcopy(experiment.optimizer.state_dict()["param_groups"])
    before = [weight.clone() for weight in experiment.model.parameters()]
    experiment.step()
    experiment.switch(config.changed(lr=0.8))
    assert experiment.optimizer.state_dict()["param_groups"] == options
    assert not any(map(torch.equal, before, experiment.model.parameters()))


def test_a_group_that_computes_its_rate_keeps_none_beside_one_that_has_it():
    model = Tagger()
    groups = [
        {"params": model.words.parameters(), "lr": 0.4},
        {"params": [*model.gru.parameters(), *model.out.parameters()]},
    ]
    config = registered(model, TAGS, loss=F.cross_entropy, optimizer=Relative(groups))
    experiment = Experiment(config)
    experiment.switch(config.changed(lr=0.8))
    assert [group["lr"] for group in experiment.optimizer.param_groups] == [0.8, None]


def test_a_gan_has_a_scale_for_each_loss():
    experiment = Experiment(registered(**gan()))
    assert [loss.name for loss in experiment.task.losses] == ["D 1", "D 2", "G"]
    assert len(experiment.optimizers) == 2
    experiment.inject("overflow")
    record = experiment.step()
    assert record.first_nonfinite.startswith("D.")
    experiment.step()
    assert experiment.mixed_scales.scales == (2.0**15, 2.0**16, 2.0**16)


def test_a_held_out_score_has_the_name_of_its_function():
    def word_accuracy(model):
        assert not model.training
        return (model(TAGS[0][0]).argmax(1) == TAGS[0][1]).float().mean().item()

    trainer = Trainer(registered(Tagger(), TAGS, loss=F.cross_entropy, evaluate=word_accuracy))
    trainer.run(25)
    assert TASKS["own"].score.name == "word accuracy"
    assert TASKS["own"].score.text(0.5) == "50.0 %"
    assert 0 <= trainer.history.last_score == trainer.score() <= 1
    trainer.stop()


def test_a_change_that_cannot_be_made_leaves_the_run_as_it_was():
    """The optimizer of one's own cannot be built a second time."""
    works = True

    def make(weights):
        if not works:
            raise RuntimeError("no other optimizer")
        return torch.optim.SGD(weights, lr=0.1)

    batches = [(torch.rand(4, 8), torch.rand(4, 1)) for _ in range(3)]
    config = registered(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)), batches, loss=F.mse_loss, optimizer=make)
    trainers = [Trainer(config.changed(optimizer="adam", opt_level="O2", growth_interval=3)) for _ in range(2)]
    for trainer in trainers:
        trainer.run(4)
    works = False
    trainers[0].change(opt_level="O1", optimizer="own", lr=0.5)
    changed, other = [trainer.run(4) for trainer in trainers]
    assert changed.column("loss").tolist() == other.column("loss").tolist()
    assert changed.column("loss_scale").tolist() == other.column("loss_scale").tolist()
    assert (trainers[0].state, trainers[0].config, trainers[0].last_change) == ("paused", trainers[1].config, None)
    (told,) = trainers[0].failures
    assert told.attempted
    assert "no other optimizer" in told.text
    trainers[0].change(lr=0.01)
    trainers[0].run(1)
    assert trainers[0].config == trainers[1].config.changed(lr=0.01)
    for trainer in trainers:
        trainer.stop()


def test_compare_and_twin_take_it():
    trainer = Trainer(registered(Tagger(), TAGS, loss=F.cross_entropy, optimizer=lambda w: torch.optim.SGD(w, lr=0.1)))
    trainer.run(2)
    trainer.compare(steps=3)
    assert trainer.wait(60)
    assert {run.name for run in trainer.kept.runs} >= {"O0", "O1", "O2", "O3"}
    assert all(run.error == "" for run in trainer.kept.runs)
    report = Experiment(trainer.config.changed(opt_level="O2")).twin(steps=2)
    assert report.rows()
    trainer.stop()


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


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"data": iter(TAGS)}, "read only once"),
        ({"loss": None}, "float"),  # nothing that can be a loss: below
        ({"step": lambda batch: batch}, r"amplab\.lab\.open\(model=model, data=loader, step=lambda model, batch"),
        ({"loss": F.cross_entropy, "step": lambda model, batch: model}, "both loss= and step="),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)}, "not the model's"),
        ({"optimizer": lambda: None}, "called with the parameters"),
        (
            {"model": Tagger, "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)},
            "pass a function as well",
        ),
        ({"model": [Tagger(), Tagger()]}, "several models without step="),
        ({"model": {"A": Tagger()}, "step": {"B": lambda models, batch: models}}, "'B'"),
        ({"evaluate": 0.5}, "evaluate=float"),
        ({"model": nn.ReLU()}, "nothing to train"),
        ({"model": lambda: ONE}, r"the same \S+ twice, and Reset and Compare need fresh ones"),
        ({"model": lambda: [Tagger(), ONE], "step": lambda models, batch: 0}, r"same Tagger1\S+ twice"),
        ({"model": 3}, "int"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_trains(parts, words):
    given = {"model": Tagger(), "data": TAGS, "loss": F.cross_entropy, **parts}
    if "step" in parts and parts.get("loss") is None:
        given["loss"] = None
    if parts == {"loss": None}:
        given["step"], words = (lambda model, batch: 3.0), "float"
    with pytest.raises((TypeError, ValueError), match=words):
        register_own(given.pop("model"), given.pop("data"), **given)
    assert "own" not in TASKS


def test_a_model_without_a_loss_is_refused():
    with pytest.raises(TypeError, match=r"Linear returns none of its own.*Pass loss="):
        register_own(nn.Linear(4, 2), [(torch.ones(3, 4), torch.zeros(3, dtype=torch.long))])
    assert "own" not in TASKS


# -- the door ------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch):
    """A kernel of its own."""
    pytest.importorskip("amplab.views")
    kernel = sys.modules["amplab.lab.open"]._Kernel()
    monkeypatch.setattr(sys.modules["amplab.lab.open"], "_kernel", kernel)
    yield kernel
    if kernel.trainer is not None:
        kernel.trainer.stop()
        assert kernel.trainer.wait(10)


def test_a_model_on_mps_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"on mps, which has no float64.*model\.to\('cpu'\)"):
        check_devices({"cpu", "mps"})


def test_open_shows_ones_own_model_and_finds_it_again(kernel):
    dashboard = amplab.lab.open(model=Tagger(), data=TAGS, loss=F.cross_entropy)
    assert dashboard.config() == "amplab/1 task=own model=tagger opt_level=O1 optimizer=adam"
    dashboard.trainer.run(2)
    again = amplab.lab.open(model=ResNet(), data=loader(), loss=F.cross_entropy)
    assert again.trainer is dashboard.trainer  # it has begun, so the page asks
    assert {"own", "own-2"} <= set(TASKS)
    dashboard.trainer.reset(ExperimentConfig(task="own-2"))
    assert math.isfinite(dashboard.trainer.run(1).last.loss)
    assert MODELS[dashboard.trainer.config.model].label == "ResNet"
    dashboard.close(), again.close()


def test_a_setting_of_ones_own_model_can_be_opened_again(kernel):
    text = "amplab/1 task=own model=tagger opt_level=O2 optimizer=adamw lr=0.003"
    dashboard = amplab.lab.open(text, model=Tagger(), data=TAGS, loss=F.cross_entropy)
    config = dashboard.trainer.config
    assert (config.opt_level, config.optimizer, config.lr) == ("O2", "adamw", 0.003)
    dashboard.close()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: amplab.lab.open(Tagger()), r"write amplab\.lab\.open\(model=model, data=loader, loss=criterion\)"),
        (lambda: amplab.lab.open(model=Tagger()), "without data="),
        (lambda: amplab.lab.open(data=TAGS, loss=F.cross_entropy), "without model="),
        (lambda: amplab.lab.open(Tagger(), TAGS), r"Write amplab\.lab\.open\(config\) or"),
        (lambda: amplab.lab.open(criterion=F.cross_entropy), "use loss="),
        (lambda: amplab.lab.attach(Tagger()), r"write amplab\.lab\.open\(model="),
        (lambda: amplab.lab.open(Trainer(ExperimentConfig(hidden=4))), r"amplab\.lab\.attach\(run\)"),
    ],
)
def test_a_wrong_call_says_which_of_open_and_attach_to_use(kernel, call, words):
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped:UserWarning")
def test_an_optimizer_as_given_that_diverges_is_found_and_mended_by_the_remedy():
    trainer = Trainer(registered(Tagger(), TAGS, loss=F.cross_entropy, optimizer=lambda w: torch.optim.SGD(w, lr=1e9)))
    trainer.run(30)
    remedies = [remedy for each in trainer.findings() if (remedy := config_remedy(each, trainer.config))]
    assert remedies, str(trainer.findings())
    trainer.apply(remedies[0])
    trainer.wait(0.1)
    trainer.pause()
    trainer.wait()
    assert trainer.config.learning_rate == 1e8
    trainer.stop()
