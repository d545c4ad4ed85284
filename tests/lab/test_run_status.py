"""How a run is, in words; and remedies that make it train."""

import math
from dataclasses import replace

import pytest

from amplab.diagnose import CATALOGUE, Finding
from amplab.lab import (
    OPTIMIZERS,
    ExperimentConfig,
    History,
    SkipExplanation,
    StepRecord,
    Trainer,
    config_remedy,
    run_status,
)
from amplab.lab.changes import config_changes
from amplab.lab.config import LEVELS
from amplab.lab.config_remedies import taken_back
from amplab.lab.run_status import Measured, verdict
from amplab.lab.tasks import HELD_OUT, ImageTask, load_task, task_choice
from amplab.lab.tasks.text import ALPHABET

SMALL = ExperimentConfig(hidden=16)


@pytest.fixture
def trainer():
    made = Trainer(SMALL)
    yield made
    made.stop()


def run(losses, skips=(), scale=2.0**16):
    history = History()
    for step, loss in enumerate(losses):
        after = scale / 2 if step in skips else scale
        history.append(StepRecord(step, loss, scale, after, step in skips, None, "O1", None, 0.01 * step, None))
        scale = after
    return history


def falling(steps):
    return [2.3 * 0.99**step for step in range(steps)]


def test_a_run_without_a_step_is_ready():
    assert run_status(History()).kind == "ready"


def test_a_healthy_run_is_described_with_its_numbers():
    status = run_status(run(falling(500), skips={100, 200, 300}))
    assert (status.kind, status.is_bad) == ("healthy", False)
    assert status.text.startswith("Healthy: the loss fell from 2.3 to 0.01")
    assert status.text.endswith("loss scale 2¹³, 3 skips in 500 steps.")


def test_a_loss_that_does_not_fall_is_reported_after_a_while():
    assert run_status(run([2.3] * 50)).kind == "unknown"
    assert run_status(run([2.3] * 500)).text.startswith("Not learning: the loss is 2.3, and was 2.3;")


def test_a_scale_that_settles_is_no_fault_and_one_that_does_not_help_is():
    losses = falling(50)
    status = run_status(run(losses, skips={47, 48, 49}))
    assert (status.kind, status.step, status.is_bad) == ("searching", 47, False)
    assert status.text == "Searching for a loss scale that fits: 3 steps skipped, now 2¹³."
    status = run_status(run(losses, skips=set(range(30, 50))))
    assert (status.kind, status.step, status.is_bad) == ("skipping", 30, True)
    assert status.text.startswith("Every step is skipped since step 30: ")


def test_a_long_search_is_told_from_skips_that_no_scale_mends():
    history = run(falling(50), skips=set(range(30, 50)), scale=2.0**40)
    history.explain(SkipExplanation(30, "scale", "too large", fits=2.0**17))
    status = run_status(history)
    assert (status.kind, status.step, status.is_bad) == ("searching", 30, False)
    assert status.text == ("Searching for a loss scale that fits: 20 steps skipped, now 2²⁰; gradients fit at 2¹⁷.")
    history.explain(SkipExplanation(49, "scale", "too large", fits=2.0**20))
    assert run_status(history).text == (
        "Loss scale found: 20 steps skipped, and the gradients fit at the next one, 2²⁰."
    )
    history.explain(SkipExplanation(49, "scale", "too large", fits=2.0**17))
    assert run_status(history, floor=2.0**20).text == (
        "Every step is skipped since step 30: the loss scale is at its floor, 2²⁰, and gradients fit at 2¹⁷."
    )
    history.explain(SkipExplanation(45, "format", "65504"))
    assert run_status(history).kind == "skipping"


def test_a_scale_at_its_floor_is_reported():
    skips = set(range(46, 48))
    status = run_status(run(falling(50), skips), floor=2.0**14)
    assert status.text.startswith("Loss scale at its floor, 2¹⁴: it cannot fall at the next overflow.")
    status = run_status(run(falling(50), set(range(20, 50))), floor=2.0**-14)
    assert status.text == "Every step is skipped since step 20: the loss scale is at its floor, 2⁻¹⁴."


@pytest.mark.parametrize(("loss", "word"), [(math.nan, "NaN"), (math.inf, "inf")])
def test_a_loss_that_is_not_finite_and_was_not_skipped_damages(loss, word):
    status = run_status(run([*falling(10), loss, loss]))
    assert (status.kind, status.step) == ("damaged", 10)
    assert status.text == f"Damaged since step 10: the loss is {word}, and no step was skipped."


def test_a_run_diverges_after_a_change():
    losses = [*falling(300), *([1e9] * 40)]
    history = run(losses)
    history.keep_changes(*config_changes(SMALL, replace(SMALL, lr=1e9), 300))
    status = run_status(history)
    assert (status.kind, status.step) == ("diverged", 300)
    assert status.text == "Diverged at step 300, after learning rate 0.1 → 1e9: the loss is 1e9, and was 2.3."


def test_a_diverged_run_whose_steps_are_all_skipped_is_told_from_a_scale_that_is_too_large():
    history = run([2.3] * 10, skips=set(range(1, 10)))
    assert run_status(history).kind == "skipping"
    history.explain(SkipExplanation(1, "divergence", "diverged"))
    assert run_status(history, learning_rate=1e9).text == (
        "Diverged at step 1 at learning rate 1e9: every step since is skipped."
    )


# Whether it has learned


def scored(losses, score):
    history = run(losses[:-1])
    history.append(replace(run(losses).last, score=score))
    return history


DIGITS = Measured(task_choice("digits"))


def test_a_score_no_better_than_chance_is_named_although_the_training_loss_fell():
    buffers = replace(DIGITS, nonfinite_buffers=("norm1.running_var",))
    status = run_status(scored(falling(100), 0.111), measured=buffers)
    assert (status.kind, status.is_bad, status.has_learned) == ("evaluation", True, False)
    assert status.text == (
        "Held-out accuracy 11.1 %, no better than chance: norm1.running_var holds inf or NaN. The training loss fell "
        "from 2.3 to 0.936."
    )
    assert "no better than chance. The" in run_status(scored(falling(100), 0.111), measured=DIGITS).text
    assert run_status(scored(falling(100), 0.93), measured=buffers).kind == "healthy"
    unscored = run_status(run(falling(100)), measured=replace(buffers, task=None))
    assert unscored.text.startswith("Evaluation uses norm1.running_var, which holds inf or NaN. The training loss fell")


def test_a_run_whose_loss_hardly_fell_has_learned_if_its_score_is_better_than_chance():
    slowly = [2.36 - 0.0005 * step for step in range(300)]
    status = run_status(scored(slowly, 0.336), measured=DIGITS)
    assert (status.kind, status.has_learned) == ("slow", True)
    assert status.text.startswith("Learning slowly: held-out accuracy 33.6 %, the loss is 2.22, and was 2.36;")
    status = run_status(scored(slowly, 0.125), measured=DIGITS)
    assert (status.kind, status.has_learned) == ("stuck", False)
    assert run_status(scored(slowly[:30], 0.336), measured=DIGITS).has_learned is None


def test_losses_that_oppose_each_other_do_not_say_that_a_run_is_stuck():
    status = run_status(run([1.4] * 300), measured=Measured(task_choice("gan")))
    assert (status.kind, status.has_learned, status.is_bad) == ("opposed", None, False)


def test_the_verdict_looks_behind_a_search_for_a_loss_scale():
    history = run(falling(100), skips={99})
    assert run_status(history).kind == "searching"
    assert verdict(history).has_learned


@pytest.mark.parametrize("task", ["digits", "even-logits", "text", "small-targets", "pressure"])
def test_constant_answers_score_no_better_than_chance(task):
    for seed in range(3):
        loaded = load_task(task, seed)
        if isinstance(loaded, ImageTask):
            best = loaded.held_out_labels.unique(return_counts=True)[1].max().item() / HELD_OUT
            assert best < loaded.score.chance < best + 0.13
        elif task == "text":
            assert loaded.score.chance == len(ALPHABET)
            assert not loaded.score.is_chance(28.0)
        else:
            assert loaded.score.is_chance(0.0)
        assert loaded.score.is_chance(math.nan)
        assert loaded.score == task_choice(task).score


def test_a_step_that_was_skipped_because_of_a_fault_is_no_fault_of_the_run(trainer):
    trainer.run(100)
    trainer.inject("nan")
    last = trainer.run(1).last
    assert (last.skipped, last.injected) == (True, "nan")
    status = run_status(trainer.history, measured=DIGITS)
    assert status.kind == "healthy"
    assert status.text.endswith(" in 101 steps.")
    assert not {"nonfinite-loss", "nonfinite-in-data"} & {each.name for each in trainer.findings()}
    assert trainer.findings().looked_at[-1] == "left out 1 step that an injected fault made skip"


def test_damage_by_a_fault_that_was_injected_is_said_to_be_so_and_nothing_is_offered():
    trainer = Trainer(replace(SMALL, opt_level="O0"))
    trainer.run(10)
    trainer.inject("nan")
    trainer.run(5)
    assert run_status(trainer.history).text.startswith("Damaged since step 10, after injected NaN: ")
    (found,) = (each for each in trainer.findings() if each.name == "nonfinite-loss")
    assert found.symptom.endswith("A fault was injected in step 10, and the step was not skipped.")
    assert config_remedy(found, trainer.config) is None
    assert found.remedy.startswith("trainer.reset()")  # no loop of the user around which a watch could be
    trainer.stop()


@pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped:UserWarning")
def test_a_bad_loss_that_nothing_skipped_has_a_remedy_for_a_run_of_the_lab_that_finds_the_cause():
    trainer = Trainer(replace(SMALL, opt_level="O0", lr=1e9))
    trainer.run(10)
    (found,) = trainer.findings()
    assert found.name == "nonfinite-loss"
    eval(found.remedy, {"trainer": trainer})
    assert trainer.run(4).skip_count == 3
    assert next(iter(trainer.findings())).name == "diverging"
    trainer.stop()


@pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped:UserWarning")
def test_a_rate_that_was_put_back_is_not_blamed_for_a_divergence(trainer):
    trainer.run(20)
    trainer.change(lr=1e9)
    trainer.run(10)
    assert "diverging" in [each.name for each in trainer.findings()]
    trainer.change(lr=0.1)
    for _ in range(3):
        trainer.step()
    assert trainer.wait(20)
    assert "diverging" not in [each.name for each in trainer.findings()]
    trainer._run.explainer.examine()  # whatever the budget allows
    assert "diverging" not in [each.name for each in trainer.findings()]


def test_a_gan_adds_gradients_that_are_unscaled():
    trainer = Trainer(ExperimentConfig(task="gan", hidden=16))
    trainer.run(3)
    trainer.inject("overflow")
    history = trainer.run(4)
    assert history.mixed_scales
    assert "accumulation-across-scales" not in [each.name for each in trainer.findings()]
    trainer.stop()


# Remedies


@pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped:UserWarning")
@pytest.mark.parametrize(
    ("config", "fault", "finding"),
    [
        (replace(SMALL, lr=1e9), None, "diverging"),
        (replace(SMALL, lr=30.0), None, "diverging"),
        (replace(SMALL, opt_level="O2", loss_scale=2.0**24), None, "nonfinite-parameter"),
        (replace(SMALL, min_loss_scale=2.0**22, init_scale=2.0**24), None, "scale-collapse"),
        (replace(SMALL, opt_level="O3"), "underflow", "gradients-underflow"),
    ],
)
def test_an_applied_remedy_makes_the_run_train(config, fault, finding):
    trainer = Trainer(config)
    if fault:
        trainer.inject(fault)
    trainer.run(105)
    assert run_status(trainer.history).kind in ("diverged", "damaged", "skipping", "stuck")
    (found,) = (each for each in trainer.findings() if each.name == finding)
    remedy = config_remedy(found, trainer.config)
    trainer.apply(remedy)
    trainer.wait(0.1)
    trainer.pause()
    trainer.wait()
    if fault:
        trainer.inject(fault, on=False)
    trainer.run(200)
    while run_status(trainer.history).kind == "searching" and len(trainer.history) < 600:
        trainer.run(20)  # the scale has just grown until a step overflowed; how many steps there were before depends
    assert run_status(trainer.history).kind == "healthy"
    assert trainer.history.last.loss < 1.0
    assert trainer.findings().harmful.named(finding).found == ()
    trainer.stop()


@pytest.mark.parametrize("level", LEVELS)
def test_a_remedy_for_every_finding_at_every_level_is_another_config_or_none(level):
    for name, entry in CATALOGUE.items():
        for optimizer in OPTIMIZERS:
            config = replace(SMALL, opt_level=level, optimizer=optimizer)
            remedy = config_remedy(Finding(name, entry.severities[0], "seen", "cause", "remedy"), config)
            assert remedy is None or config.changed(**remedy.changes) != config


def test_masters_are_offered_where_half_weights_do_not_change():
    trainer = Trainer(replace(SMALL, opt_level="O3", lr=1e-5))
    trainer.run(5)
    (found,) = trainer.findings().named("updates-rounded-away")
    assert config_remedy(found, trainer.config).text == "master_weights by O3 → True"
    trainer.apply(config_remedy(found, trainer.config))
    trainer.run(100)
    assert not trainer.findings().named("updates-rounded-away")
    trainer.stop()


def test_a_healthy_run_has_no_harmful_finding():
    trainer = Trainer(SMALL)
    trainer.run(150)
    assert not trainer.findings().harmful
    assert run_status(trainer.history).kind == "healthy"


def test_what_another_finding_explains_has_no_remedy_of_its_own():
    trainer = Trainer(replace(SMALL, lr=1e9))
    trainer.run(10)
    found = trainer.findings()
    assert [each.name for each in found][:2] == ["diverging", "overflow-in-half"]
    assert config_remedy(found[0], trainer.config).label == "Learning rate 1e9 → 0.1, and start again"
    assert config_remedy(found[1], trainer.config) is None


def test_a_change_is_taken_back_by_the_config_before_it():
    changed = replace(SMALL, lr=1e9, batch_size=32)
    remedy = taken_back(SMALL, changed)
    assert changed.changed(**remedy.changes) == SMALL
    assert remedy.restarts
    assert taken_back(SMALL, SMALL) is None
