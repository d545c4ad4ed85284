"""Skipped steps are explained while they can be, and the explanation does not change the run."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import amplab
from amplab.lab import (
    MODELS,
    Experiment,
    ExperimentConfig,
    SkipExplained,
    SkipExplanation,
    StagesReady,
    Trainer,
    build_model,
    load_run,
    load_task,
    past_skips,
    skip_explanation,
    watch,
)
from amplab.lab.models import register_model
from amplab.lab.skip_explanation import ExplanationBudget, explained

SMALL = ExperimentConfig(hidden=16)
HIGH = replace(SMALL, init_scale=2.0**24)


@pytest.fixture
def without_budget(monkeypatch):
    """Only the first skip of each kind is explained while training."""
    monkeypatch.setattr(skip_explanation, "SHARE", 0.0)
    monkeypatch.setattr(skip_explanation, "CREDIT", 0.0)


def why(config, fault=None, steps=1):
    """The explanations of a run's skips."""
    trainer = Trainer(config)
    if fault:
        trainer.inject(fault)
    return trainer.run(steps).explanations


def largest_gradient_of_logits(config):
    """The largest magnitude in the gradient of the logits in the first step, in float64."""
    images, labels = load_task(config.task, config.seed).batch(0, config.batch_size)
    logits = build_model(config.model, config.hidden, config.seed).double()(images.double()).detach().requires_grad_()
    nn.functional.cross_entropy(logits, labels).backward()
    return logits.grad.abs().max().item()


def test_the_first_skip_is_explained_with_the_numbers_of_the_gradient():
    (first,) = why(HIGH).values()
    assert (first.step, first.kind) == (0, "scale")
    subject, scale, reaches, fits = re.fullmatch(
        r"(.+) × 2(\S+) reaches (\S+), above 65504; fits at 2(\S+)", first.sentence
    ).groups()
    assert scale == "²⁴"
    # It is the gradient of the logits, (softmax - onehot) / 64 in float32, times 2**24 as it is cast to float16.
    assert reaches == f"{2.0**24 * largest_gradient_of_logits(HIGH):.1e}".replace("e+0", "e")
    assert subject == "output: the gradient of its output"
    # A step at that scale is taken, and at twice that scale it is skipped.
    assert not Experiment(replace(HIGH, init_scale=first.fits)).step().skipped
    assert Experiment(replace(HIGH, init_scale=2 * first.fits)).step().skipped
    assert fits == str(round(math.log2(first.fits))).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def test_a_gradient_of_a_weight_is_named_with_its_size():
    """In a loop whose only overflow is the gradient of one weight, the size is that of float64."""
    torch.manual_seed(0)
    x, w = torch.rand(64, 8).double(), torch.rand(8).double()
    model = nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(w)
    scaler = amplab.GradScaler("cpu", init_scale=2.0**16)

    def loss_of(batch):
        with torch.autocast("cpu", torch.float16):
            return model(batch).float().sum() / 16

    seen = loop(model, scaler, loss_of, [x.float()])
    (first,) = seen.history.explanations.values()
    reaches = (x.half().double().sum(0) / 16 * 2**16).abs().max().item()
    assert first.sentence.startswith(f"weight: the gradient × 2¹⁶ reaches {reaches:.1e}".replace("e+0", "e"))
    assert first.fits == 2.0 ** math.floor(math.log2(65504 / reaches * 2**16))


def loop(model, scaler, loss_of, batches, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, scaler=scaler, **{"step": loss_of, **options}) as w:
        for batch in w.batches(batches):
            optimizer.zero_grad()
            scaler.scale(w.loss(loss_of(batch))).backward()
            scaler.step(optimizer)
            scaler.update()
    return w


@pytest.mark.parametrize(
    ("config", "fault", "kind", "words"),
    [
        (SMALL, "nan", "injected", r"injected NaN: batch\.images holds NaN in 1 of 4,096 elements, .* in sample 0"),
        (SMALL, "overflow", "injected", r"injected overflow: .* reaches .*, above 65504"),
        (replace(SMALL, lr=1e9), None, "divergence", r"diverged: the loss is \S+ in float32, and was 2\.\d+ in the fi"),
        (replace(SMALL, lr=1e9, opt_level="O2"), None, "divergence", r"diverged: an update step was too large.*holds"),
        (
            replace(SMALL, lr=1e20, opt_level="O0", loss_scale="dynamic"),
            None,
            "divergence",
            r"diverged: it overflows in float32 too; .* above 3\.4e38",
        ),
    ],
)
def test_each_kind_of_skip_reads_differently(config, fault, kind, words):
    first = next(iter(why(config, fault, steps=3).values()))
    assert first.kind == kind
    assert re.match(words, first.sentence)
    assert first.fits is None


class Loud(nn.Module):
    """Its second layer leaves float16 at every loss scale; float32 holds it."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, images):
        return self.second(self.first(images.flatten(1)) * 1e6) * 1e-6


@pytest.fixture
def model_named(request):
    def add(name, build):
        register_model(name, label=name)(build)
        request.addfinalizer(lambda: MODELS.pop(name))
        return replace(SMALL, model=name)

    return add


def test_a_value_of_the_forward_that_no_scale_mends(model_named):
    (first, *_) = why(model_named("loud", Loud)).values()
    assert first.kind == "format"
    assert re.fullmatch(r"\S+ .*reaches \S+, above 65504; no loss scale helps, float32 does", first.sentence)


def test_the_run_is_bit_by_bit_the_same_with_dropout_and_batchnorm(model_named, with_budget):
    def build(width):
        hidden = nn.Linear(64, width)
        return nn.Sequential(nn.Flatten(), hidden, nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 10))

    config = replace(model_named("dropped", build), init_scale=2.0**24, growth_interval=4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(5)
        bare = Experiment(config)
        records = [replace(bare.step(), seconds=0.0) for _ in range(30)]
    finally:
        torch.set_num_threads(threads)
    torch.manual_seed(5)
    trainer = Trainer(config)
    history = trainer.run(30)
    assert len(history.explanations) == history.skip_count > 5
    assert [replace(record, seconds=0.0) for record in history.records()] == records
    state = trainer._run.experiment.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in bare.model.state_dict().items())
    # It is the step that was skipped, with its own dropout: none is finite when it runs again.
    assert {each.kind for each in history.explanations.values()} == {"scale"}


def test_the_first_of_each_kind_is_explained_at_once_and_the_last_when_the_run_pauses(without_budget):
    trainer = Trainer(HIGH)
    history = trainer.run(3)
    assert history.skip_count == 3
    assert sorted(history.explanations) == [0, 2]  # the first, and the one whose weights were there at the pause
    trainer.inject("nan")
    trainer.run(4)
    assert history.explanations[3].kind == "injected"


def test_a_skip_is_explained_on_request_while_its_weights_are_there(without_budget, listen, until):
    trainer = Trainer(HIGH)
    ear = listen(trainer)
    trainer.run(2)
    trainer.request_explanation(0)
    trainer.request_explanation(1)
    trainer.wait()
    assert [event.step for event in ear.of(SkipExplained)] == [0, 1, 0, 1]
    assert all(event.explanation.step == event.step for event in ear.of(SkipExplained))


def without_explanations(monkeypatch):
    monkeypatch.setattr(ExplanationBudget, "allows", lambda *_args, **_: False)


def skipping(model=None, **fields):
    """A run that skips about every fifth step."""
    return replace(SMALL if model is None else model, init_scale=2.0**20, growth_interval=4, **fields)


def dropped_and_normed(width):
    hidden = nn.Linear(64, width)
    return nn.Sequential(nn.Flatten(), hidden, nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 10))


@pytest.mark.parametrize("fields", [{}, {"opt_level": "O2"}, {"accumulate": 2}])
def test_skips_left_over_are_explained_when_the_run_pauses(model_named, monkeypatch, fields):
    """They read as if each had been explained at once, and the run is bit for bit the same."""
    config = skipping(model_named("dropped", dropped_and_normed), **fields)
    with monkeypatch.context() as patch:
        patch.setattr(skip_explanation, "SHARE", math.inf)
        at_once = Trainer(config)
        at_once.run(40)
    without_explanations(monkeypatch)
    monkeypatch.setattr("amplab.lab.trainer._PAUSE_SECONDS", 60.0)  # two seconds are few on a busy machine
    later = Trainer(config)
    later.run(40)
    rows = later.history.skip_groups().tolist()
    assert len(rows) > 4
    found = later.history.explanations
    assert all(any(first <= step <= last for step in found) for first, last in rows)  # one for skips in a row
    assert found == {step: why for step, why in at_once.history.explanations.items() if step in found}
    later.run(10)
    at_once.run(10)
    assert [replace(each, seconds=0.0) for each in later.history.records()] == [
        replace(each, seconds=0.0) for each in at_once.history.records()
    ]
    state = later._run.experiment.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in at_once._run.experiment.model.state_dict().items())
    assert [each.name for each in later.findings()] == [each.name for each in at_once.findings()]


def test_a_change_of_level_keeps_the_buffers_with_which_a_step_runs_again(model_named):
    """O2 and O3 replace the buffers of a BatchNorm; those of the step before do not hold its NaN yet."""
    trainer = Trainer(model_named("dropped", dropped_and_normed))
    for level in ("O3", "O2"):
        trainer.change(opt_level=level)
        trainer.run(2)
    trainer.inject("nan")
    trainer.run(1)
    assert trainer.history.explanations[4].sentence.startswith("injected NaN: batch.images holds NaN in 1 of")


def test_a_skip_of_an_earlier_level_is_explained_as_it_was(monkeypatch):
    without_explanations(monkeypatch)
    monkeypatch.setattr("amplab.lab.trainer._PAUSE_SECONDS", 0.0)
    trainer = Trainer(HIGH)
    trainer.run(1)  # a pause explains the last step
    trainer.run(1)
    trainer.change(opt_level="O0")
    trainer.run(3)
    trainer.request_explanation(0)
    trainer.wait()
    assert trainer.history.explanations[0].sentence.startswith("output: the gradient of its output × 2²⁴")
    assert trainer.config.opt_level == "O0"


def test_a_skip_is_explained_on_request_while_the_run_goes_on(monkeypatch, listen, until):
    without_explanations(monkeypatch)
    trainer = Trainer(skipping())
    ear = listen(trainer)
    trainer.start()
    try:
        until(lambda: trainer.history.skip_count > 3)
        step = trainer.explainable[1]
        assert step not in trainer.history.explanations
        trainer.request_explanation(step)
        until(lambda: ear.of(SkipExplained))
        assert trainer.state == "running"
        assert ear.of(SkipExplained)[0].explanation.step == step
        trainer.request_explanation(10**6)
        until(lambda: len(ear.of(SkipExplained)) > 1)
        assert ear.of(SkipExplained)[1] == SkipExplained(10**6, None)
    finally:
        trainer.stop()
        trainer.wait()


def test_start_does_not_wait_for_skips_left_over(monkeypatch, until):
    without_explanations(monkeypatch)
    trainer = Trainer(skipping())
    trainer.start(200)
    until(lambda: trainer.state == "paused")
    trainer.start()
    until(lambda: len(trainer.history) > 205)
    left = [each.step for each in trainer.history.skips() if each.step not in trainer.history.explanations]
    trainer.stop()
    trainer.wait()
    assert len(left) > 5


def test_what_is_kept_of_skipped_steps_is_bounded_and_the_oldest_goes_first(monkeypatch):
    without_explanations(monkeypatch)
    monkeypatch.setattr("amplab.lab.trainer._PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(past_skips, "MOST_BYTES", 100_000)  # of about 28,000 for one; the weights are 6,000
    trainer = Trainer(skipping())
    trainer.run(60)
    kept = trainer._run.experiment.past_skips
    skips = trainer.history.skipped_steps()
    assert 1 < len(kept.steps) < len(skips)
    assert list(kept.steps) == skips[-len(kept.steps) :]
    assert kept.nbytes <= 100_000
    held = {id(each): each.nbytes for step in kept.steps for each in kept.get(step).weights}
    assert kept.nbytes == sum(held.values()) + sum(kept.get(step).beginning.nbytes for step in kept.steps)
    monkeypatch.setattr(past_skips, "MOST_BYTES", 10_000)
    trainer.run(20)
    assert kept.steps == ()
    assert kept.nbytes == 0


@pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped:UserWarning")
def test_skips_in_a_row_share_one_copy_of_the_weights():
    trainer = Trainer(replace(HIGH, init_scale=2.0**24))
    trainer.run(4)
    kept = trainer._run.experiment.past_skips
    assert len({id(kept.get(step).weights) for step in kept.steps}) == 1 < len(kept.steps)


@pytest.mark.parametrize("fields", [{}, {"opt_level": "O2"}])
def test_a_past_skip_is_walked_through_as_if_it_had_been_recorded(fields, listen):
    config, wanted = skipping(**fields), 11
    recorded, later = Trainer(config), Trainer(config)
    ears = listen(recorded), listen(later)
    recorded.run(wanted)
    recorded.step_in_stages()
    recorded.wait()
    later.run(30)
    assert wanted in later.walkable
    before = {name: value.clone() for name, value in later._run.experiment.model.state_dict().items()}
    later.request_stages(wanted)
    later.wait()
    ((there,), (here,)) = (ear.of(StagesReady) for ear in ears)
    assert there.stages.record.skipped
    assert replace(here.stages.record, seconds=0.0) == replace(there.stages.record, seconds=0.0)
    assert [each.scale for each in here.stages.checks] == [each.scale for each in there.stages.checks]
    for name, stages in there.stages.parameters.items():
        again = here.stages.parameters[name]
        assert again.skipped
        for moment in ("stored", "used", "inputs", "outputs", "scaled", "unscaled", "stepped"):
            one, other = getattr(stages, moment), getattr(again, moment)
            assert torch.equal(one.kept.nan_to_num(), other.kept.nan_to_num())
    assert all(torch.equal(value, before[name]) for name, value in later._run.experiment.model.state_dict().items())


@pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped:UserWarning")
def test_of_many_skips_of_one_kind_only_some_are_explained():
    trainer = Trainer(replace(SMALL, lr=1e9))  # every step is skipped
    trainer.run(400)
    assert trainer.history.skip_count == 399
    assert 2 <= len(trainer.history.explanations) < 200
    assert {each.kind for each in trainer.history.explanations.values()} == {"divergence"}


def test_explanations_take_a_small_share_of_the_time():
    budget, spent, trained = ExplanationBudget(), 0.0, 0.0
    for number in range(20_000):
        trained += 0.01
        cost = 0.02 + 0.03 * (number % 7)
        if budget.allows("skip", trained):
            budget.took(cost, "skip")
            spent += cost
    assert 0.045 * trained < spent < 0.05 * trained + 0.5


def test_the_log_holds_the_explanations(runs):
    trainer = Trainer(HIGH, log=runs)
    trainer.run(3)
    trainer.stop()
    trainer.wait()
    assert load_run(trainer.log_path).history.explanations == trainer.history.explanations != {}


@pytest.mark.parametrize("broken", [{"step": "1"}, {"kind": "odd"}, {"sentence": 3}, {"fits": "2"}])
def test_a_damaged_explanation_is_not_read(broken):
    whole = SkipExplanation(1, "scale", "too large", fits=2.0)
    assert SkipExplanation.from_dict(whole.as_dict() | {"later": 1}) == whole
    assert SkipExplanation.from_dict(whole.as_dict() | broken) is None


def test_a_finite_step_says_so():
    assert explained(None, step=4).kind == "once"


# A loop of one's own


class Moody(nn.Module):
    """Leaves float16 in about every third forward, as its random draw decides."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x):
        return self.inner(x) * (1e8 if torch.rand(()) < 0.3 else 1.0)


def test_a_step_runs_again_with_its_own_random_draw(with_budget):
    torch.manual_seed(0)
    model, scaler = Moody(), amplab.GradScaler("cpu", init_scale=2.0)

    def loss_of(batch):
        with torch.autocast("cpu", torch.float16):
            return model(batch).float().square().mean()

    w = loop(model, scaler, loss_of, [torch.rand(4, 8)] * 30)
    assert w.history.skip_count > 4
    assert len(w.history.explanations) == w.history.skip_count
    assert "once" not in {each.kind for each in w.history.explanations.values()}


def test_a_step_function_outside_of_autocast_is_told_so_by_name():
    model = nn.Linear(8, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    def plain_loss(batch):
        return model(batch).float().square().mean()

    def autocast_loss(batch):
        with torch.autocast("cpu", torch.float16):
            return plain_loss(batch)

    with pytest.warns(RuntimeWarning, match="step=plain_loss does not enter autocast"):
        w = loop(model, scaler, autocast_loss, [torch.full((4, 8), 30.0)] * 2, step=plain_loss)
    assert w.history.skip_count
    assert "step=plain_loss does not enter autocast" in w.findings().named("step-not-explained")[0].symptom
    assert "enter the region in plain_loss" in next(iter(w.history.explanations.values())).sentence


def test_parameters_of_several_optimizers_have_the_models_names(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in model]
    scaler = amplab.GradScaler("cpu", init_scale=2.0**24)

    def loss_of(batch):
        with torch.autocast("cpu", torch.float16):
            return model(batch).float().square().mean()

    with watch(model, optimizers, scaler=scaler, step=loss_of, log=tmp_path) as w:
        for batch in w.batches([torch.full((4, 8), 30.0)] * 4):
            for each in optimizers:
                each.zero_grad()
            scaler.scale(w.loss(loss_of(batch))).backward()
            for each in optimizers:
                scaler.step(each)
            scaler.update()
    skips = w.history.skips()
    assert skips
    assert {record.first_nonfinite for record in skips} <= set(dict(model.named_parameters()))
    assert "param_groups" not in w.log_path.read_text() + str(w.findings())
    assert load_run(w.log_path).history.explanations == w.history.explanations != {}


def test_a_batch_that_is_too_large_is_not_blamed_on_the_learning_rate():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), amplab.GradScaler("cpu", init_scale=1024.0)
    step = amplab.autocast("cpu", dtype=torch.float16)(lambda batch: model(batch).float().abs().mean())
    batches = [torch.randn(8, 16) * (1e37 if place == 2 else 1.0) for place in range(4)]
    with watch(model, optimizer, scaler=scaler, step=step) as w:
        for batch in w.batches(batches):
            optimizer.zero_grad()
            scaler.scale(w.loss(step(batch))).backward()
            scaler.step(optimizer)
            scaler.update()
    first = w.history.explanations[2]
    assert first.kind == "data"
    assert "the batch contains numbers up to" in first.sentence
    assert "learning rate" not in first.sentence
    assert "the batch contains numbers up to" in w.findings()[0].cause


def test_a_bad_batch_is_named_again_after_an_earlier_one_left_nan_in_running_statistics():
    """Training does not read them, so a finite batch between the two trains, and the second is not their fault."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = torch.autocast("cpu", dtype=torch.float16)(lambda batch: model(batch).float().square().mean())
    batches = [torch.randn(4, 4) for _ in range(6)]
    batches[1][0, 0] = batches[4][1, 1] = math.inf
    with watch(model, optimizer, scaler=scaler, step=step) as w:
        for batch in w.batches(batches):
            optimizer.zero_grad()
            scaler.scale(w.loss(step(batch))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert model[1].running_var.isnan().all()
    assert {number: each.kind for number, each in w.history.explanations.items()} == {1: "data", 4: "data"}
    assert "the first in sample 1" in w.history.explanations[4].sentence
