"""A step recorded in its stages: bit for bit the step without a record, and what is recorded is what happened."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amplab.amp import Session
from amplab.lab import Experiment, ExperimentConfig, StageRecorder, StagesReady, StepRecord, StepStages, Trainer
from amplab.lab.models import MODELS, ModelChoice
from amplab.lab.step_stages import Snapshot

LEVELS = ["O0", "O1", "O2", "O3"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def with_dropout(monkeypatch) -> str:
    """A model with BatchNorm and dropout, as a config names it."""

    def build(hidden: int) -> nn.Module:
        layers = nn.Flatten(), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Dropout(0.5)
        return nn.Sequential(*layers, nn.Linear(hidden, 10))

    monkeypatch.setitem(MODELS, "with-dropout", ModelChoice("with dropout", build))
    return "with-dropout"


def state(experiment: Experiment) -> list[Tensor]:
    """Everything that the next step depends on."""
    optimizer = experiment.optimizer
    moments = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [*experiment.model.state_dict().values(), *weights, *moments, torch.get_rng_state()]


def bits(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor.detach().contiguous().numpy().tobytes(), np.uint8)


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for mine, yours in zip(one, other, strict=True):
        assert mine.dtype == yours.dtype
        np.testing.assert_array_equal(bits(mine), bits(yours))


FAULTS = {2: "overflow", 4: "underflow", 6: "nan"}


def eventful(config: ExperimentConfig, recorded: set[int]) -> tuple[list[StepRecord], list[Tensor], object]:
    """Eight steps with an overflow, an underflow and a NaN; those in `recorded` in stages."""
    torch.manual_seed(7)  # of the dropout
    experiment = Experiment(config)
    records = []
    for step in range(8):
        if step in FAULTS:
            experiment.inject(FAULTS[step])
        record = experiment.step_in_stages()[0] if step in recorded else experiment.step()
        records.append(replace(record, seconds=0.0, loss=0.0 if record.loss != record.loss else record.loss))
    return records, state(experiment), experiment.session.state_dict()


@pytest.mark.parametrize("scale", ["dynamic", 128.0])
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_is_bit_for_bit_the_same_with_recorded_steps(level, scale, with_dropout):
    config = ExperimentConfig(model=with_dropout, hidden=16, opt_level=level, loss_scale=scale)
    plain, ended, scales = eventful(config, set())
    watched, ended_too, scales_too = eventful(config, {0, 2, 3, 4, 6, 7})
    assert watched == plain
    assert_same(ended_too, ended)
    assert scales_too == scales
    assert any(record.skipped for record in plain) == (scale == "dynamic")


def stages(**changes: object) -> StepStages:
    """The second step of a small experiment."""
    experiment = Experiment(ExperimentConfig(hidden=16, **changes))
    experiment.step()
    return experiment.step_in_stages()[1]


def array(snapshot: Snapshot | None) -> np.ndarray:
    assert snapshot is not None
    return snapshot.kept.numpy()


def test_o1_casts_computes_scales_unscales_and_steps():
    recorded = stages(opt_level="O1", momentum=0.0)
    seen = recorded.parameters["hidden2.weight"]
    assert (seen.kind, seen.is_cast, seen.has_master, seen.backwards) == ("Linear", True, False, 1)
    np.testing.assert_array_equal(array(seen.used), array(seen.stored).astype(np.float16))
    assert recorded.checks[0].scaled_loss.value(0) == recorded.checks[0].loss.value(0) * 2.0**16
    np.testing.assert_array_equal(array(seen.scaled), array(seen.computed).astype(np.float32))
    np.testing.assert_array_equal(array(seen.unscaled), array(seen.scaled) * np.float32(2.0**-16))
    moved = array(seen.stored) + np.float32(-0.1) * array(seen.unscaled)
    np.testing.assert_allclose(array(seen.stepped), moved, rtol=1e-6, atol=1e-8)
    assert (recorded.checks[0].nonfinite, recorded.checks[0].checked) == (0, 64 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10)
    assert recorded.problems == recorded.left_out == ()


def test_the_recorded_product_is_the_one_of_the_recorded_arguments():
    """Float16 in, float32 accumulated, rounded once: computed again in float64 from what was recorded."""
    seen = stages(opt_level="O2").parameters["output.weight"]
    weight = array(seen.used).astype(np.float64).reshape(10, 16)
    bias = array(stages(opt_level="O2").parameters["output.bias"].used).astype(np.float64)
    expected = weight @ array(seen.inputs).astype(np.float64) + bias
    np.testing.assert_allclose(array(seen.outputs), expected, rtol=2e-3, atol=1e-3)
    assert seen.outputs.shape == (64, 10)
    assert seen.outputs.kept_shape == (10,)


def test_at_o0_the_gradient_is_autograds():
    experiment = Experiment(ExperimentConfig(hidden=16, opt_level="O0"))
    images, labels = experiment._task.batch(0, 64)
    weights = dict(experiment.model.named_parameters())
    loss = F.cross_entropy(experiment.model(images), labels)
    expected = torch.autograd.grad(loss, list(weights.values()))
    recorded = experiment.step_in_stages()[1]
    for name, grad in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(array(recorded.parameters[name].scaled), grad.flatten().numpy())


def test_o2_steps_the_master_and_rounds_it_into_the_model():
    seen = stages(opt_level="O2").parameters["hidden1.weight"]
    assert (seen.has_master, seen.is_cast, seen.computed) == (True, False, None)
    assert (seen.stored.dtype, seen.used.dtype, seen.scaled.dtype) == (torch.float32, torch.float16, torch.float16)
    assert seen.unscaled.dtype == torch.float32
    np.testing.assert_array_equal(array(seen.used), array(seen.stored).astype(np.float16))
    np.testing.assert_array_equal(array(seen.copied), array(seen.stepped).astype(np.float16))
    assert (array(seen.stepped) != array(seen.stored)).any()


def test_an_overflow_is_seen_where_it_happens_and_the_step_is_skipped():
    experiment = Experiment(ExperimentConfig(hidden=16, opt_level="O1"))
    experiment.step()
    experiment.inject("overflow")
    record, recorded = experiment.step_in_stages()
    seen = recorded.parameters["output.weight"]
    assert record.skipped
    assert seen.skipped
    assert recorded.checks[0].scaled_loss.value(0) == pytest.approx(recorded.checks[0].loss.value(0) * 2.0**60)
    assert recorded.checks[0].nonfinite > 0
    assert seen.scaled.nonfinite > 0
    np.testing.assert_array_equal(array(seen.stepped), array(seen.stored))
    change = recorded.checks[0].scale
    assert (change.before, change.after, change.clean_before, change.clean_after) == (2.0**16, 2.0**15, 1, 0)


def test_a_clean_step_counts_towards_the_growth_of_the_scale():
    recorded = stages(opt_level="O1", growth_interval=2)
    change = recorded.checks[0].scale
    assert (change.clean_before, change.clean_after, change.growth_interval) == (1, 0, 2)
    assert change.after == 2 * change.before
    static = stages(opt_level="O3").checks[0].scale
    assert (static.growth_interval, static.skips, static.before, static.after) == (None, False, 1.0, 1.0)


def test_the_forward_that_measures_accuracy_is_not_recorded():
    experiment = Experiment(ExperimentConfig(hidden=16))
    for _ in range(24):
        experiment.step()
    record, recorded = experiment.step_in_stages()
    assert record.score is not None
    assert recorded.parameters["output.weight"].outputs.shape == (64, 10)


def test_accumulated_batches_are_one_check_and_several_backwards():
    recorded = stages(opt_level="O1", accumulate=3)
    seen = recorded.parameters["output.weight"]
    assert (len(recorded.checks), seen.backwards) == (1, 3)
    assert (array(seen.unscaled) != array(seen.scaled) * np.float32(2.0**-16)).any()
    assert seen.stepped is not None


# A loop and a model of one's own


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.fake, self.judge = nn.Linear(3, 4), nn.Linear(4, 1)


def test_a_gan_records_the_last_backward_before_the_step_of_each_optimizer():
    torch.manual_seed(0)
    model, session = Pair(), Session()
    judging, faking = torch.optim.SGD(model.judge.parameters(), 0.1), torch.optim.SGD(model.fake.parameters(), 0.1)
    session.initialize(model, [judging, faking], num_losses=3, verbosity=0, dynamic_init_scale=256.0)
    x, z = torch.randn(5, 4), torch.randn(5, 3)
    with StageRecorder(model, [judging, faking], session) as recorder, session.casting():
        for number, batch in enumerate((x, model.fake(z).detach())):
            with session.scale_loss(model.judge(batch).mean(), judging, loss_id=number) as scaled:
                scaled.backward()
        before = model.judge.weight.grad.clone()
        judging.step()
        with session.scale_loss(model.judge(model.fake(z)).mean(), faking, loss_id=2) as scaled:
            scaled.backward()
        faking.step()
    recorded = recorder.stages(StepRecord(0, 0.0, 1.0, 1.0, False, None, "O1", None, 0.0, None))
    judge, fake = (recorded.parameters[f"{name}.weight"] for name in ("judge", "fake"))
    assert (judge.backwards, fake.backwards) == (2, 1)
    assert (judge.check, fake.check) == (1, 2)
    assert [check.scale.clean_after for check in recorded.checks] == [1, 1, 1]
    assert [check.checked for check in recorded.checks] == [5, 5, 16]
    np.testing.assert_array_equal(array(judge.unscaled), before.flatten().numpy())
    assert fake.scaled is not None
    assert fake.stepped is not None


def test_gradients_that_are_clipped_are_shown_before_and_after():
    model, session = nn.Linear(4, 1), Session()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    with StageRecorder(model, [optimizer], session) as recorder:
        with session.scale_loss(model(torch.full((2, 4), 8.0)).mean(), optimizer) as scaled:
            scaled.backward()
        session.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    seen = recorder.stages(StepRecord(0, 0.0, 1.0, 1.0, False, None, "O2", None, 0.0, None)).parameters["weight"]
    np.testing.assert_array_equal(array(seen.unscaled), np.full(4, 8.0, np.float32))
    norm = (4 * 8.0**2 + 1) ** 0.5
    np.testing.assert_allclose(array(seen.clipped), 8.0 / norm, rtol=1e-6)


def test_a_weight_that_a_parent_reads_is_seen_too():
    """nn.MultiheadAttention reads the weight of its out_proj without calling it."""
    torch.manual_seed(0)
    model, session = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)), Session()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
    with StageRecorder(model, [optimizer], session) as recorder, session.casting():
        with session.scale_loss(model(torch.randn(2, 3, 8)).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    recorded = recorder.stages(StepRecord(0, 0.0, 1.0, 1.0, False, None, "O1", None, 0.0, None))
    seen = recorded.parameters["0.self_attn.out_proj.weight"]
    assert seen.is_cast
    assert seen.outputs is None
    np.testing.assert_array_equal(array(seen.used), array(seen.stored).astype(np.float16))
    np.testing.assert_array_equal(array(seen.scaled), array(seen.computed).astype(np.float32))


class Refusing(nn.Module):
    """A layer whose output has a dtype that cannot be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * self.weight
        return self.last.detach().to(torch.float8_e5m2)


def test_what_cannot_be_recorded_is_said_and_the_step_goes_on():
    model, session = nn.Sequential(Refusing()), Session()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.initialize(model, optimizer, opt_level="O0", verbosity=0)
    with StageRecorder(model, [optimizer], session) as recorder:
        model(torch.ones(4))
        with session.scale_loss(model[0].last.sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    recorded = recorder.stages(StepRecord(0, 0.0, 1.0, 1.0, False, None, "O0", None, 0.0, None))
    assert "0: RuntimeError: tensor 0: expected float16" in recorded.problems[0]
    np.testing.assert_allclose(array(recorded.parameters["0.weight"].stepped), 0.9)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_raises_leaves_no_hook(error):
    experiment = Experiment(ExperimentConfig(hidden=16))

    def fail(*_: object) -> None:
        raise error("in forward")

    failing = experiment.model.output.register_forward_hook(fail)
    before = state(experiment)
    with pytest.raises(error):
        experiment.step_in_stages()
    failing.remove()
    assert_same(state(experiment), before)
    assert not any(module._forward_hooks for module in experiment.model.modules() if list(module.children()) == [])
    assert not any(weight._post_accumulate_grad_hooks for weight in experiment.model.parameters())
    fresh = Experiment(ExperimentConfig(hidden=16))
    assert replace(experiment.step(), seconds=0.0) == replace(fresh.step(), seconds=0.0)


def test_a_large_model_is_recorded_in_part_and_the_chosen_parameter_always(monkeypatch):
    monkeypatch.setattr("amplab.lab.step_stages.BUDGET", 500)
    experiment = Experiment(ExperimentConfig(hidden=16))
    recorded = experiment.step_in_stages("hidden1.weight")[1]
    assert "hidden1.weight" in recorded.parameters
    assert "hidden2.weight" in recorded.left_out
    assert set(recorded.parameters) | set(recorded.left_out) == set(dict(experiment.model.named_parameters()))


def test_a_snapshot_measures_all_elements_and_copies_some():
    from amplab.lab.step_stages import KEPT, snapshot

    taken = snapshot("x", torch.full((KEPT + 1,), 2.0))
    assert (taken.stats.numel, len(taken.kept), taken.mean) == (KEPT + 1, KEPT, 2.0)
    broken = snapshot("x", torch.tensor([[1.0, float("nan")], [float("inf"), 3.0]]), sample=True)
    assert (broken.nonfinite, broken.mean, broken.kept_shape) == (2, 2.0, (2,))


# The trainer


def test_the_trainer_publishes_the_stages_of_the_step_after_its_record_and_pauses(trainer, listen):
    ear = listen(trainer)
    trainer.run(2)
    trainer.step_in_stages("output.weight")
    assert trainer.wait(20)
    assert trainer.state == "paused"
    assert [type(event) for event in ear.events[-2:]] == [StepRecord, StagesReady]
    assert ear.events[-1].stages.record is ear.events[-2]
    assert len(trainer.history) == 3
    plain = Trainer(trainer.config)
    plain.run(3)
    assert [replace(each, seconds=0.0) for each in trainer.history.records()] == [
        replace(each, seconds=0.0) for each in plain.history.records()
    ]


def test_a_running_experiment_takes_one_more_step_in_stages_and_pauses(trainer, listen, until):
    ear = listen(trainer)
    trainer.start()
    until(lambda: len(trainer.history) > 3)
    trainer.step_in_stages()
    assert trainer.wait(20)
    assert ear.of(StagesReady)[0].stages.record.step == len(trainer.history) - 1


def test_a_stopped_run_refuses(trainer):
    trainer.stop()
    with pytest.raises(RuntimeError, match="reset"):
        trainer.step_in_stages()
