"""A model, data and a loss of one's own in the lab: as in plain torch, and with all that the lab does."""

import copy
import math
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from own_models import DRAWN, IMAGES, OWN, TAGS, Meter, ResNet, Tagger, gan, registered
from rateless_optimizers import RATELESS, Relative
from torch import Tensor, nn
from torch.utils.data import DataLoader

import amplab.lab
from amplab.lab import (
    TASKS,
    Experiment,
    Failed,
    GradientsReady,
    MemoryCounted,
    StagesReady,
    TraceReady,
    Trainer,
    TwinReady,
    config_remedy,
    report,
)
from amplab.lab.kept_runs import MOST_RUNS

pytestmark = pytest.mark.usefixtures("nothing_own")


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


class Recurrent(nn.Module):
    """Keeps its hidden state from batch to batch, in a buffer or in an attribute, and counts its calls."""

    def __init__(self, kind):
        super().__init__()
        self.cell, self.norm, self.calls = nn.GRUCell(8, 8), nn.BatchNorm1d(8), 0
        if kind == "buffer":
            self.register_buffer("hidden", torch.zeros(4, 8))
        else:
            self.hidden = torch.zeros(4, 8)

    def forward(self, x):
        self.calls += 1
        hidden = self.cell(self.norm(x), self.hidden.to(x.dtype))
        self.hidden = hidden.detach().float()
        return hidden * (1 + self.calls % 3)


def trained(kind, look, *, steps, evaluate=True):
    """Return the losses and the state of a run of `steps` steps with a look in its middle."""
    batches = [(torch.linspace(-1, number, 32).view(4, 8), torch.arange(4)) for number in range(3)]

    def held_out(model):
        model.train()  # as for samples of dropout
        return F.cross_entropy(model(batches[2][0]), batches[2][1]).item()

    torch.manual_seed(0)
    parts = {"loss": F.cross_entropy, "evaluate": held_out if evaluate else None}
    trainer = Trainer(registered(Recurrent(kind), batches, **parts))
    trainer.run(steps // 2)
    look(trainer)
    assert trainer.wait(30)
    losses = trainer.run(steps - steps // 2).column("loss").tolist()
    model = trainer._run.experiment.model
    return losses, model.norm.running_mean.tolist(), model.hidden.tolist(), model.calls, trainer


def continued(trainer):
    trainer.reset()
    trainer.wait()
    trainer.continue_from(trainer.kept.runs[-1])


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
@pytest.mark.parametrize("look", [Trainer.score, continued], ids=["score", "continued"])
def test_a_run_that_is_scored_goes_on_as_if_it_had_not_been(look, kind):
    """A kept run is scored, too."""
    *plain, _ = trained(kind, lambda _: None, steps=8)
    *scored, _ = trained(kind, look, steps=8)
    assert scored == plain


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_the_scores_of_a_run_do_not_change_it(kind):
    *plain, _ = trained(kind, lambda _: None, steps=54, evaluate=False)
    *scored, trainer = trained(kind, lambda _: None, steps=54)
    assert [record.step for record in trainer.history.records() if record.score is not None] == [24, 49]
    assert scored == plain


def test_a_comparison_goes_on_though_many_runs_are_kept_meanwhile():
    trainer = Trainer(registered(Tagger(), TAGS, loss=F.cross_entropy))
    trainer.compare([trainer.config] * 2, steps=30)
    for _ in range(MOST_RUNS + 2):
        trainer.step()
        trainer.reset()
    assert trainer.wait(60)
    assert [len(run.history) for run in trainer.kept.runs if run.is_compared][-1:] == [30]
    assert trainer.comparison is None


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


class Average:
    """An average of weights, each of which gets a new tensor; no module, and so in no state_dict."""

    def __init__(self, net):
        self.net = copy.deepcopy(net).requires_grad_(False)

    def update(self, net):
        for old, new in zip(self.net.parameters(), net.parameters(), strict=True):
            old.data = old.data * 0.9 + new.data.float() * 0.1


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.average = nn.Linear(8, 4), Average(nn.Linear(8, 4))

    def forward(self, x):
        if self.training:
            self.average.update(self.net)
        return self.net(x) - self.average.net(x)


def test_a_look_leaves_an_average_whose_weights_get_new_tensors():
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(each)) for each in range(10)]
    config = registered(
        Averaged,
        data,
        step=lambda model, x: model(x).square().mean(),
        optimizer=lambda each: torch.optim.SGD(each, lr=0.05),
    ).changed(opt_level="O0")
    model, losses = Averaged(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x in data:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trainer = Trainer(config)
    for step in range(10):
        trainer.run(1)
        if step == 4:
            trainer.trace()
    assert trainer.history.column("loss").tolist() == losses
