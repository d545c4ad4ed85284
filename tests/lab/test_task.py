"""What is trained: any batches, several losses and optimizers, accumulated batches, six levels."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amplab.lab import (
    LEVELS,
    MODELS,
    TASKS,
    Experiment,
    ExperimentConfig,
    Score,
    StepRecord,
    Task,
    TaskChoice,
    TaskLoss,
    Trainer,
    build_model,
    load_task,
    register_model,
)
from amplab.lab.config_field import SettingRefused
from amplab.lab.experiment import StepStopped
from amplab.trace.handed_step import ModelGroup


class Text(Task):
    """Next letters: a batch of whole numbers alone."""

    name = "toy-text"
    score = Score("perplexity")
    losses = (
        TaskLoss(
            "cross-entropy", lambda model, ids: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        ),
    )

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def batch(self, step: int, batch_size: int) -> Tensor:
        return torch.randint(0, 20, (batch_size, 9), generator=torch.Generator().manual_seed(step))

    def measure(self, model: nn.Module) -> float:
        assert not model.training
        return math.exp(self.losses[0].of(model, self.batch(10**6, 8)).item())


class Letters(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, hidden)
        self.recurrent = nn.LSTM(hidden, hidden, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(hidden, 20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.dropout(self.recurrent(self.embedding(ids))[0]))


class Gan(Task):
    """Two models, two optimizers, three losses with a loss scale each."""

    name = "toy-gan"

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.losses = (
            TaskLoss("D, real", lambda models, batch: judged(models.D(batch["real"]), 1.0), 0),
            TaskLoss("D, fake", lambda models, batch: judged(models.D(models.G(batch["noise"]).detach()), 0.0), 0),
            TaskLoss("G", lambda models, batch: judged(models.D(models.G(batch["noise"])), 1.0), 1),
        )

    def batch(self, step: int, batch_size: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return {
            "real": torch.randn(batch_size, 8, generator=generator),
            "noise": torch.randn(batch_size, 4, generator=generator),
        }

    def optimizers(self, model, make):
        return [make(model.D.parameters()), make(model.G.parameters())]


def judged(logits: Tensor, target: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def gan(hidden: int) -> ModelGroup:
    generator = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 8))
    return ModelGroup({"G": generator, "D": nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 1))}, None)


@pytest.fixture(autouse=True)
def toys() -> Iterator[None]:
    """Offer the tasks of this file, and compute with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    TASKS["toy-text"] = TaskChoice("toy text", Text, score=Text.score, optimizer="adam", learning_rates={"adam": 0.01})
    TASKS["toy-gan"] = TaskChoice("toy GAN", Gan, score=None, optimizer="adamw")
    register_model("letters", label="LSTM", task="toy-text")(Letters)
    register_model("toy-gan", label="GAN", task="toy-gan")(gan)
    yield
    torch.set_num_threads(threads)
    for table, names in ((TASKS, ("toy-text", "toy-gan")), (MODELS, ("letters", "toy-gan"))):
        for name in names:
            del table[name]


def config_of(task: str, **fields: object) -> ExperimentConfig:
    return ExperimentConfig(task=task, hidden=16, batch_size=8, **fields)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("task", ["toy-text", "toy-gan"])
def test_any_task_trains_at_every_level_and_looking_changes_nothing(task, level):
    config = config_of(task, opt_level=level, optimizer="sgd", lr=0.1)
    watched, left_alone = Experiment(config), Experiment(config)
    for _ in range(3):
        torch.rand(1)  # random numbers of the process are its own
        state = torch.get_rng_state()
        records = [replace(each.step(), seconds=0.0) for each in (watched, left_alone)]
        assert records[0] == records[1]
        assert math.isfinite(records[0].loss)
        assert math.isfinite(records[0].grad_exponent)
        assert len(watched.gradients().layers) == len(list(watched.model.parameters()))
        assert len(watched.trace()) > 10
        watched.score()
        assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(watched.model.parameters(), left_alone.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("task", ["toy-text", "toy-gan", "digits"])
@pytest.mark.parametrize("fault", ["overflow", "nan"])
@pytest.mark.parametrize("level", ["O1", "O2", "autocast-fp16"])
def test_faults_are_real_for_any_batch_and_are_explained(task, fault, level):
    experiment = Experiment(config_of(task, opt_level=level))
    experiment.step()
    before = [weight.clone() for weight in experiment.model.parameters()]
    experiment.inject(fault)
    record = experiment.step()
    assert (record.skipped, record.injected, record.loss_scale) == (True, fault, 2.0**16)
    assert record.first_nonfinite in dict(experiment.model.named_parameters())
    assert math.isnan(record.loss) == (fault == "nan")
    found = experiment.explain_skip()
    assert found.cause == {"overflow": "format", "nan": "input" if task == "toy-text" else "batch"}[fault]
    if task != "toy-gan":  # its generator steps
        assert all(map(torch.equal, before, experiment.model.parameters()))
    assert not experiment.step().skipped


def test_an_injected_underflow_shrinks_the_gradients_of_any_task():
    experiment = Experiment(config_of("toy-text"))
    plain = experiment.gradients().sample.histogram.largest_exponent
    experiment.inject("underflow")
    assert experiment.gradients().sample.histogram.largest_exponent == plain - 16


def test_a_gan_has_a_loss_scale_for_each_loss_and_the_steps_of_apexs_example():
    """The oracle is the loop of a GAN in plain torch, at O0."""
    experiment = Experiment(config_of("toy-gan", opt_level="O0", optimizer="sgd", lr=0.1, momentum=0.0))
    losses = [experiment.step().loss for _ in range(4)]
    models, task = build_model("toy-gan", 16, 0), load_task("toy-gan", 0)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (models.D, models.G))
    for step, given in enumerate(losses):
        batch, values = task.batch(step, 8), []
        for optimizer, parts in ((first, task.losses[:2]), (second, task.losses[2:])):
            optimizer.zero_grad()
            for part in parts:
                values.append(part.of(models, batch))
                values[-1].backward()
            optimizer.step()
        assert given == sum(value.item() for value in values)


def test_an_overflow_of_one_loss_of_a_gan_moves_its_scale_alone():
    trainer = Trainer(config_of("toy-gan"))
    trainer.run(2)
    trainer.inject("overflow")
    history = trainer.run(2)
    assert [record.skipped for record in history.records()] == [False, False, True, False]
    assert [(mixed.step, mixed.scales) for mixed in history.mixed_scales] == [(3, (2.0**15, 2.0**16, 2.0**16))]
    assert history.records()[3].loss_scale == 2.0**15
    trainer.stop()


def test_random_numbers_of_a_step_depend_on_the_step_alone():
    """Dropout is the same in the run, in its replay and after a reset, whatever else draws random numbers."""
    config = config_of("toy-text", opt_level="O0")
    first = Experiment(config)
    losses = [first.step().loss for _ in range(3)]
    torch.manual_seed(99)
    second = Experiment(config)
    assert [second.step().loss for _ in range(3)] == losses
    assert len({*losses}) == 3


def test_accumulated_batches_are_one_batch():
    """The oracle is one batch of the same rows: the mean of means over parts of equal size."""
    accumulated = Experiment(ExperimentConfig(hidden=16, batch_size=16, accumulate=4, opt_level="O0"))
    whole = Experiment(ExperimentConfig(hidden=16, batch_size=64, opt_level="O0"))
    for _ in range(5):
        first, second = accumulated.step(), whole.step()
        assert first.loss == pytest.approx(second.loss, rel=1e-4)
    for one, other in zip(accumulated.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_a_step_of_accumulated_batches_is_checked_once():
    experiment = Experiment(ExperimentConfig(hidden=16, accumulate=3, growth_interval=2))
    records = [experiment.step() for _ in range(2)]
    assert [record.next_loss_scale for record in records] == [2.0**16, 2.0**17]
    assert experiment.mixed_scales is None
    experiment.inject("nan")
    assert experiment.step().next_loss_scale == 2.0**16
    assert re.fullmatch(r"batch\[\d\]\.images", experiment.explain_skip().tensor)


def state_of(experiment: Experiment) -> list[Tensor]:
    """Copy everything that the next steps depend on: weights, masters, buffers, optimizer state, scales."""
    tensors = [*experiment.model.state_dict().values()]
    for optimizer in experiment.optimizers:
        tensors += experiment.session.master_params(optimizer)
        tensors += [each for slots in optimizer.state.values() for each in slots.values() if isinstance(each, Tensor)]
    scales = [torch.tensor([each.state.scale, each.state.clean_steps]) for each in experiment.session.scalers]
    return [each.detach().clone() for each in (*tensors, *scales)]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for mine, its in zip(one, other, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)


def without_clock(record: StepRecord) -> str:
    return repr(replace(record, seconds=0.0))


def stop_at(experiment: Experiment, batch: int) -> bool:
    """Stop a step before its backward number `batch`, and return True; False if it has fewer: it is made."""
    asked = itertools.count()
    experiment.goes_on = lambda: next(asked) < batch
    try:
        experiment.step()
    except StepStopped:
        return True
    finally:
        experiment.goes_on = lambda: True
    return False


TASKS_STOPPED = [("digits", "cnn"), ("gan", "dcgan"), ("text", "lstm")]


@pytest.mark.filterwarnings("ignore:Adam on half parameters")
@pytest.mark.parametrize("scale", [2.0**16, 2.0**24], ids=["", "skips"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "autocast-fp16"])
@pytest.mark.parametrize(("task", "model"), TASKS_STOPPED)
def test_a_step_that_is_stopped_after_any_batch_leaves_nothing(task, model, level, scale):
    """With BatchNorm, several losses and optimizers, and skips: the run has the bits of one that was not stopped."""
    init = {"init_scale": scale} if LEVELS[level].properties.loss_scale == "dynamic" else {}
    config = ExperimentConfig().changed(
        task=task, model=model, opt_level=level, hidden=16, batch_size=8, accumulate=3, optimizer="adam", **init
    )
    stopped, whole = Experiment(config), Experiment(config)
    random, skips = torch.get_rng_state(), 0
    for _ in range(2):
        before, batch = state_of(stopped), 0
        while stop_at(stopped, batch):
            assert_same(state_of(stopped), before)
            assert all(weight.grad is None for weight in stopped.model.parameters())
            batch += 1
        assert batch >= 3 * len(stopped.task.losses)
        record = whole.step()
        skips += record.skipped
        assert_same(state_of(stopped), state_of(whole))
        assert without_clock(stopped.step()) == without_clock(whole.step())
    assert torch.equal(torch.get_rng_state(), random)
    assert skips > 0 or scale == 2.0**16 or not init


def test_a_stopped_step_is_not_taken_for_the_skipped_one_before_it():
    experiment = Experiment(ExperimentConfig(hidden=16, accumulate=2))
    experiment.inject("overflow")
    assert experiment.step().skipped
    assert stop_at(experiment, 1)
    assert experiment.last_skip is None
    assert experiment.past_skips.steps == (0,)


def test_a_level_chosen_after_a_stopped_step_is_as_without_it():
    stopped, whole = (Experiment(ExperimentConfig(model="cnn", hidden=16, accumulate=3)) for _ in range(2))
    for each in (stopped, whole):
        each.step()
    for level in ("O2", "O1", "autocast-fp16"):
        assert stop_at(stopped, 2)
        for each in (stopped, whole):
            each.switch(each.config.changed(opt_level=level))
        assert without_clock(stopped.step()) == without_clock(whole.step())
        assert_same(state_of(stopped), state_of(whole))


def test_what_cannot_be_taken_back_is_not_stopped():
    """A registered model may change its attributes in a forward."""
    experiment = Experiment(config_of("toy-text", accumulate=2))
    assert not stop_at(experiment, 0)
    assert experiment.steps_done == 1


@pytest.mark.parametrize(("level", "dtype"), [("autocast-fp16", torch.float16), ("autocast-bf16", torch.bfloat16)])
def test_the_autocast_levels_run_cudas_lists(level, dtype):
    experiment = Experiment(ExperimentConfig(hidden=16, opt_level=level))
    record = experiment.step()
    assert (record.opt_level, record.loss_scale) == (level, 2.0**16 if dtype is torch.float16 else 1.0)
    trace = experiment.trace()
    assert {out.dtype for each in trace if each.op == "linear" for out in each.outputs} == {dtype}
    losses = [out.dtype for each in trace if each.op == "cross_entropy" for out in each.outputs]
    assert set(losses) <= {torch.float32}
    assert {weight.dtype for weight in experiment.model.parameters()} == {torch.float32}


def test_levels_switch_with_weights_kept():
    experiment = Experiment(ExperimentConfig(hidden=16))
    experiment.step()
    before = [weight.clone() for weight in experiment.model.parameters()]
    for level in ("autocast-bf16", "O2", "autocast-fp16", "O1"):
        experiment.switch(experiment.config.changed(opt_level=level))
        assert all(
            torch.equal(old, new.float())
            for old, new in zip(before, experiment.session.master_params(experiment.optimizer), strict=True)
        )


def test_a_task_brings_its_model_optimizer_and_learning_rate():
    config = ExperimentConfig().changed(task="toy-text")
    assert (config.model, config.optimizer, config.learning_rate) == ("letters", "adam", 0.01)
    assert str(config) == "amplab/1 task=toy-text model=letters opt_level=O1"
    assert ExperimentConfig.parse(str(config)) == config
    assert ExperimentConfig.parse("amplab/1 task=toy-text").model == "letters"
    assert config.changed(task="digits") == ExperimentConfig()
    assert config.choices("model") == {"letters": "LSTM"}


def test_a_model_of_another_task_is_refused_in_labels():
    with pytest.raises(SettingRefused, match="model=cnn with task=toy-text: expected letters") as refused:
        ExperimentConfig(task="toy-text", model="cnn")
    assert refused.value.shown == "Model CNN does not fit Task toy text; choose LSTM."
    with pytest.raises(SettingRefused, match="optimizer=own"):
        ExperimentConfig(optimizer="own")


def test_the_score_is_the_tasks(capsys):
    trainer = Trainer(config_of("toy-text"))
    trainer.run(25)
    assert trainer.history.last_score == trainer.score()
    assert 5 < trainer.score() < 30
    trainer.stop()
    assert Experiment(config_of("toy-gan")).score() is None
