"""One experiment: repeatable, switched without loss, disturbed through the real path, looked at without a trace."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from amplab.formats import FLOAT16, exponent_histogram
from amplab.lab import Experiment, ExperimentConfig, StepRecord, build_model, load_task
from amplab.trace.input_statistics import InputStatistics

SMALL = ExperimentConfig(hidden=16)
LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture(autouse=True)
def one_compute_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def steps(experiment: Experiment, count: int) -> list[StepRecord]:
    return [replace(experiment.step(), seconds=0.0) for _ in range(count)]


def weights(experiment: Experiment) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in experiment.model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_o0_is_plain_torch():
    """The oracle is a training loop without amplab."""
    config = replace(SMALL, opt_level="O0", model="cnn", seed=5)
    experiment = Experiment(config)
    losses = [experiment.step().loss for _ in range(12)]
    task, model = load_task("digits", 5), build_model("cnn", 16, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, loss_of_experiment in enumerate(losses):
        images, labels = task.batch(step, 64)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        assert loss.item() == loss_of_experiment
    model.eval()
    accuracy = (model(task.held_out_images).argmax(1) == task.held_out_labels).float().mean().item()
    assert experiment.score() == accuracy


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_same_config_same_run_bit_for_bit(level, model):
    config = replace(SMALL, opt_level=level, model=model)
    first, second = Experiment(config), Experiment(config)
    assert steps(first, 8) == steps(second, 8)
    assert same(weights(first), weights(second))


def test_a_step_says_what_happened():
    records = steps(Experiment(SMALL), 26)
    assert [record.step for record in records] == list(range(26))
    assert [record.step for record in records if record.score is not None] == [24]
    assert {record.opt_level for record in records} == {"O1"}
    assert records[0].loss == pytest.approx(math.log(10), abs=0.3)
    assert (records[0].loss_scale, records[0].injected, records[0].first_nonfinite) == (65536.0, None, None)


def test_looking_does_not_change_the_run():
    """Traces, gradients and accuracy between the steps change nothing of them."""
    config = replace(SMALL, model="cnn", opt_level="O2")
    watched, left_alone = Experiment(config), Experiment(config)
    for _ in range(4):
        assert steps(watched, 1) == steps(left_alone, 1)
        watched.trace()
        watched.gradients()
        watched.score()
    assert same(weights(watched), weights(left_alone))


@pytest.mark.parametrize("kind", ["overflow", "nan"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_injected_fault_is_skipped_by_a_dynamic_scale(kind, level):
    experiment = Experiment(replace(SMALL, opt_level=level))
    steps(experiment, 3)
    before = weights(experiment)
    experiment.inject(kind)
    hit, after = steps(experiment, 2)
    assert (hit.skipped, hit.injected) == (True, kind)
    assert (hit.loss_scale, hit.next_loss_scale) == (65536.0, 32768.0)
    assert hit.first_nonfinite in before
    assert math.isnan(hit.loss) == (kind == "nan")
    assert (after.skipped, after.injected, after.loss_scale) == (False, None, 32768.0)


def test_a_skipped_step_leaves_weights_and_the_next_batch_comes():
    experiment = Experiment(SMALL)
    steps(experiment, 3)
    before = weights(experiment)
    experiment.inject("overflow")
    assert steps(experiment, 1)[0].skipped
    assert same(weights(experiment), before)
    assert experiment.steps_done == 4


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_an_overflow_goes_through_the_real_path_where_nothing_guards(level):
    """With a static scale the gradients that overflowed reach the weights."""
    experiment = Experiment(replace(SMALL, opt_level=level))
    experiment.inject("overflow")
    hit, after = steps(experiment, 2)
    assert (hit.skipped, hit.injected, math.isfinite(hit.loss)) == (False, "overflow", True)
    assert math.isnan(after.loss)
    assert not all(value.isfinite().all() for value in weights(experiment).values())


def test_underflow_shrinks_the_gradients_until_switched_off():
    """At O3 (no scale) 2^-16 flushes most gradients to zero: the weights barely move."""
    config = replace(SMALL, opt_level="O3")
    plain, shrunk = Experiment(config), Experiment(config)
    start = weights(plain)
    shrunk.inject("underflow")
    assert shrunk.shrinking
    plain.step()
    record = shrunk.step()
    assert record.injected == "underflow"
    assert record.loss == pytest.approx(math.log(10), abs=0.3)  # told as it is, not shrunk
    moved = [sum(int((w[name] != start[name]).sum()) for name in start) for w in (weights(plain), weights(shrunk))]
    assert moved[1] < 0.05 * moved[0]
    shrunk.inject("underflow")
    assert (shrunk.shrinking, shrunk.step().injected) == (False, None)


def test_faults_can_come_together_and_be_called_off():
    experiment = Experiment(SMALL)
    experiment.inject("underflow", on=True)
    experiment.inject("underflow", on=True)
    experiment.inject("nan")
    experiment.inject("overflow")
    experiment.inject("nan", on=False)
    assert experiment.step().injected == "overflow+underflow"
    assert experiment.step().injected == "underflow"
    with pytest.raises(ValueError, match="'inf'"):
        experiment.inject("inf")


def momentum(experiment: Experiment) -> list[torch.Tensor]:
    optimizer = experiment.optimizer
    return [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize(("old", "new"), [(a, b) for a in LEVELS for b in LEVELS if a != b])
def test_switching_the_level_keeps_weights_and_optimizer_state(old, new):
    experiment = Experiment(replace(SMALL, model="cnn", opt_level=old))
    steps(experiment, 5)
    exact = [weight.float().clone() for weight in experiment.session.master_params(experiment.optimizer)]
    moved = momentum(experiment)
    experiment.switch(experiment.config.changed(opt_level=new))
    assert experiment.session.opt_level == new
    halved = (lambda value: value.half().float()) if new == "O3" else (lambda value: value)
    for before, now in zip(exact, experiment.session.master_params(experiment.optimizer), strict=True):
        assert torch.equal(halved(before), now.float())
    for before, now in zip(moved, momentum(experiment), strict=True):
        assert torch.allclose(before.float(), now.float(), rtol=1e-3, atol=1e-6)
    record = experiment.step()
    assert (record.step, record.opt_level) == (5, new)
    assert record.loss < math.log(10) + 0.5


def test_switching_a_level_and_back_is_not_a_change():
    """O1 -> O2 -> O1 keeps float32 weights exactly: the run goes on as if nothing had been touched."""
    switched, plain = Experiment(SMALL), Experiment(SMALL)
    steps(switched, 4), steps(plain, 4)
    switched.switch(SMALL.changed(opt_level="O2"))
    switched.switch(SMALL)
    assert steps(switched, 4) == steps(plain, 4)


def test_a_dynamic_scale_goes_on_unless_its_start_changes():
    experiment = Experiment(replace(SMALL, growth_interval=5))
    steps(experiment, 12)
    assert experiment.loss_scale == 2.0**18
    experiment.switch(experiment.config.changed(opt_level="O2"))
    assert experiment.loss_scale == 2.0**18
    assert steps(experiment, 3)[-1].next_loss_scale == 2.0**19  # its clean steps were kept too
    experiment.switch(experiment.config.changed(growth_interval=1000))
    assert experiment.loss_scale == 2.0**19
    experiment.switch(experiment.config.changed(max_loss_scale=2.0**17))
    assert experiment.loss_scale == 2.0**17
    experiment.switch(experiment.config.changed(max_loss_scale=2.0**16))
    experiment.switch(experiment.config.changed(max_loss_scale=2.0**24))
    assert experiment.loss_scale == 2.0**16  # it grows again from where the ceiling left it
    experiment.switch(experiment.config.changed(min_loss_scale=2.0**20, init_scale=2.0**20))
    assert experiment.loss_scale == 2.0**20
    experiment.switch(experiment.config.changed(min_loss_scale=None))
    experiment.switch(experiment.config.changed(init_scale=1024.0))
    assert experiment.loss_scale == 1024.0
    experiment.switch(experiment.config.changed(loss_scale=128.0))
    assert experiment.loss_scale == 128.0
    experiment.switch(experiment.config.changed(loss_scale="dynamic"))
    assert experiment.loss_scale == 2.0**16  # the static scale dropped the start of the dynamic one


@pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped:UserWarning")
def test_a_new_level_does_not_keep_a_scale_that_has_collapsed():
    """At 2^-10 nearly every gradient is lost in float16, and 26 growths take 1,300 steps."""
    experiment = Experiment(ExperimentConfig(task="pressure", opt_level="O2", hidden=16))
    steps(experiment, 26)
    assert experiment.loss_scale == 2.0**-10
    experiment.switch(experiment.config.changed(growth_interval=20))
    assert experiment.loss_scale == 2.0**-10
    experiment.switch(experiment.config.changed(opt_level="O1"))
    assert experiment.loss_scale == 2.0**16
    assert not steps(experiment, 20)[-1].skipped


def test_a_shorter_window_than_the_clean_steps_still_grows():
    experiment = Experiment(replace(SMALL, growth_interval=100))
    steps(experiment, 20)
    experiment.switch(experiment.config.changed(growth_interval=10))
    assert steps(experiment, 1)[0].next_loss_scale == 2.0**17


def test_lr_momentum_and_optimizer_change_in_place():
    experiment = Experiment(SMALL)
    steps(experiment, 2)
    experiment.switch(SMALL.changed(lr=0.025, momentum=0.5))
    group = experiment.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.025, 0.5)
    before = weights(experiment)
    experiment.switch(experiment.config.changed(optimizer="adamw", lr=None))
    assert isinstance(experiment.optimizer, torch.optim.AdamW)
    assert experiment.optimizer.param_groups[0]["lr"] == 0.005
    assert same(weights(experiment), before)
    assert math.isfinite(steps(experiment, 2)[-1].loss)


def test_what_needs_new_weights_is_refused():
    experiment = Experiment(SMALL)
    with pytest.raises(ValueError, match="hidden=32: expected 16"):
        experiment.switch(replace(SMALL, hidden=32))
    with pytest.raises(ValueError, match="batch_size=5000"):
        experiment.switch(replace(SMALL, batch_size=5000))
    with pytest.raises(ValueError, match="batch_size=5000"):
        Experiment(replace(SMALL, batch_size=5000))


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_those_of_float32_at_the_master_weights(level):
    experiment = Experiment(replace(SMALL, opt_level=level, model="cnn"))
    steps(experiment, 3)
    twin = build_model("cnn", 16, 0)
    with torch.no_grad():
        masters = experiment.session.master_params(experiment.optimizer)
        for parameter, master in zip(twin.parameters(), masters, strict=True):
            parameter.copy_(master)
    images, labels = load_task("digits", 0).batch(3, 64)
    F.cross_entropy(twin(images), labels).backward()
    record = experiment.gradients()
    assert (record.step, record.loss_scale) == (3, experiment.loss_scale)
    assert [name for name, _ in record.layers] == [name for name, _ in twin.named_parameters()]
    for (_, histogram), parameter in zip(record.layers, twin.parameters(), strict=True):
        gradient = parameter.grad
        assert (histogram.total, histogram.zeros) == (gradient.numel(), int((gradient == 0).sum()))
        exponent = torch.frexp(gradient.abs().max())[1].item() - 1
        assert histogram.exponents[histogram.counts.nonzero()[0]].max() == exponent
        assert histogram == exponent_histogram(gradient)


def test_gradients_show_an_injected_underflow_and_what_a_scale_saves():
    experiment = Experiment(SMALL)
    plain = experiment.gradients().layers[0][1]
    experiment.inject("underflow")
    shrunk = experiment.gradients().layers[0][1]
    assert shrunk.underflow_fraction(FLOAT16) > 0.5
    assert (shrunk.counts[:-16] == plain.counts[16:]).all()  # the same histogram, 16 binades lower
    assert plain.shifted(16).underflow_fraction(FLOAT16) < 0.01


def test_a_trace_of_a_model_that_draws_nothing_leaves_random_states_alone():
    """The trace runs beside the cell that has opened the lab, which may seed and draw meanwhile."""
    experiment = Experiment(ExperimentConfig(hidden=4))
    experiment.model.register_forward_pre_hook(lambda *_: torch.manual_seed(7) and None)
    experiment.trace()
    drawn = torch.rand(3).tolist()
    assert torch.initial_seed() == 7
    torch.manual_seed(7)
    assert drawn == torch.rand(3).tolist()


def test_the_trace_is_of_the_present_level():
    experiment = Experiment(SMALL)
    linear = next(record for record in experiment.trace() if record.op == "linear")
    assert {tensor.dtype for tensor in linear.outputs} == {torch.float16}
    experiment.switch(SMALL.changed(opt_level="O0"))
    dtypes = {tensor.dtype for record in experiment.trace() for tensor in record.outputs}
    assert torch.float32 in dtypes
    assert torch.float16 not in dtypes


@pytest.mark.parametrize(
    ("level", "parameters", "gradients", "masters"),
    [("O0", 4, 4, 0), ("O1", 4, 4, 0), ("O2", 2, 4, 4), ("O3", 2, 2, 0)],
)
def test_memory_counts_bytes_where_gradients_are(level, parameters, gradients, masters):
    experiment = Experiment(replace(SMALL, opt_level=level))
    steps(experiment, 2)
    count = 64 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10
    memory = experiment.memory()
    assert (memory.parameters, memory.gradients, memory.masters) == (
        count * parameters,
        count * gradients,
        count * masters,
    )
    assert memory.optimizer_state == count * (2 if level == "O3" else 4)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loaded_experiment_tells_its_memory_and_its_growth_before_a_step(level, tmp_path):
    experiment = Experiment(replace(SMALL, opt_level=level, optimizer="adam"))
    steps(experiment, 3)
    experiment.save(tmp_path / "run", {})
    loaded, _ = Experiment.load(tmp_path / "run")
    held = [value for each in loaded.optimizers for state in each.state.values() for value in state.values()]
    assert loaded.memory().optimizer_state == sum(value.nbytes for value in held) > 0
    assert loaded.memory().parameters == sum(weight.nbytes for weight in loaded.model.parameters())
    assert loaded.scale_growth == experiment.scale_growth
    assert loaded.scale_growth.clean_steps == 3


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skip_by_the_scale_is_explained(level):
    experiment = Experiment(replace(SMALL, opt_level=level, init_scale=2.0**24))
    assert experiment.explain_skip() is None
    assert experiment.step().skipped
    before = weights(experiment)
    found = experiment.explain_skip()
    assert (found.cause, found.setting.loss_scale, found.phase) == ("scale", 2.0**24, "backward")
    assert found.fitting_scale < 2.0**24
    assert same(before, weights(experiment))


def test_a_bad_batch_is_distinguished_from_an_overflow():
    experiment = Experiment(replace(SMALL, opt_level="O1"))
    experiment.inject("nan")
    assert experiment.step().skipped
    found = experiment.explain_skip()
    assert (found.cause, found.tensor) == ("batch", "batch.images")


def test_an_injected_overflow_is_found_where_it_enters_half():
    experiment = Experiment(replace(SMALL, opt_level="O2"))
    experiment.inject("overflow")
    assert experiment.step().skipped
    found = experiment.explain_skip()
    assert (found.phase, found.cause, found.record.op) == ("backward", "format", "cast")
    while experiment.step().skipped:
        pass
    assert experiment.last_skip is None  # a clean step has changed the weights
    assert experiment.explain_skip() is None


def test_a_module_is_put_into_float32_at_a_step_boundary_and_taken_back() -> None:
    config = ExperimentConfig(hidden=16, opt_level="O2")
    ruled = config.changed(float32_modules="hidden1", float32_ops="linear")
    experiment = Experiment(config)
    experiment.step()
    weights = [each.detach().float() for each in experiment.model.parameters()]
    experiment.switch(ruled)
    assert experiment.model.hidden1.weight.dtype == torch.float32
    assert all(
        torch.equal(before.half(), now.half())
        for before, now in zip(weights, experiment.model.parameters(), strict=True)
    ), "the weights are kept, in float32 those of the masters"
    linear = [each for each in experiment.trace() if each.op == "linear" and each.phase == "forward" and not each.folds]
    assert all(each.outputs[0].dtype == torch.float32 for each in linear if not each.is_cast)
    experiment.switch(config)
    assert experiment.model.hidden1.weight.dtype == torch.float16
    assert ExperimentConfig.parse(str(ruled)) == ruled


def test_only_modules_and_ops_that_there_are_can_be_put_into_float32() -> None:
    experiment = Experiment(ExperimentConfig(hidden=16))
    with pytest.raises(ValueError, match="zip"):
        experiment.check_switch(experiment.config, experiment.config.changed(float32_modules="zip"))
    with pytest.raises(ValueError, match="lineal"):
        ExperimentConfig(float32_ops="lineal")
    ruled = ExperimentConfig(float32_modules="hidden1", float32_ops="linear").changed(model="cnn")
    assert (ruled.float32_modules, ruled.float32_ops) == (None, "linear"), "another model has other modules"


def test_what_one_looks_at_in_a_step_does_not_change_the_run() -> None:
    plain, looked_at = (Experiment(ExperimentConfig(hidden=16)) for _ in range(2))
    for _ in range(4):
        inputs = InputStatistics(5)
        looked_at.trace(inputs)
        Experiment(looked_at.config.changed(opt_level="O2")).trace()
        assert plain.step().loss == looked_at.step().loss
    assert inputs.inputs
    pairs = zip(plain.model.parameters(), looked_at.model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
