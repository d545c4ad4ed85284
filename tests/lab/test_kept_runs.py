"""Runs beside the present one: a reset keeps the old run, undo continues it, all levels are compared from one seed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from long_step import busy
from torch import nn
from torch.nn.functional import mse_loss

from amplab.lab import ExperimentConfig, Failed, Trainer, TwinReady, Undone, load_run
from amplab.lab.config import OVERRIDES
from amplab.lab.kept_runs import MOST_RUNS, MOST_SHOWN
from amplab.lab.models import MODELS, ModelChoice
from amplab.lab.own_task import forget_own, register_own

SMALL = ExperimentConfig(hidden=16)


def losses(history) -> list[float]:
    return history.column("loss").tolist()


def plain_run(steps: int, config: ExperimentConfig = SMALL) -> list[float]:
    other = Trainer(config)
    return losses(other.run(steps))


def test_a_reset_keeps_the_old_run_and_says_how_it_was(trainer: Trainer) -> None:
    old = trainer.run(60)
    trainer.reset(trainer.config.changed(opt_level="O2"))
    trainer.wait()
    assert len(trainer.history) == 0
    (kept,) = trainer.kept.runs
    assert kept.history is old
    assert kept.config == SMALL
    assert kept.final_loss == pytest.approx(np.mean(losses(old)[-25:]))
    assert kept.held_out is not None
    assert 0 < kept.held_out <= 1
    assert kept.rate is not None
    assert kept.rate > 0
    weights = 64 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10
    assert kept.memory.parameters == 4 * weights
    assert kept.activations is not None
    assert kept.activations > 0


def test_a_run_that_has_not_begun_is_not_kept(trainer: Trainer) -> None:
    trainer.reset()
    trainer.reset(trainer.config.changed(model="cnn"))
    trainer.wait()
    assert trainer.kept.runs == ()


def test_undo_of_a_reset_continues_the_old_run_bit_for_bit(trainer: Trainer, listen) -> None:
    ear = listen(trainer)
    trainer.run(30)
    trainer.reset()
    trainer.run(10)
    trainer.undo()
    trainer.wait()
    assert trainer.state == "paused"
    assert len(trainer.history) == 30
    assert ear.of(Undone)[-1].text == "Reset at step 30"
    trainer.run(20)
    assert losses(trainer.history) == plain_run(50)
    (younger,) = trainer.kept.runs
    assert losses(younger.history) == plain_run(10), "what was trained after the reset is kept too"


def test_undo_of_a_reset_goes_on_after_a_run_that_continued_was_put_back(trainer: Trainer) -> None:
    for seed in (1, 2):
        trainer.run(5)
        trainer.reset_with(seed=seed)
    trainer.run(5)
    trainer.continue_from(trainer.kept.runs[1])
    present = []
    for _ in range(3):
        trainer.undo()
        trainer.wait()
        present.append(trainer.present_name)
    assert present == ["Run 3", "Run 2", "Run 1"]
    assert trainer.last_change is None


def test_undo_of_a_reset_to_a_run_that_fails_at_once_leaves_a_run_that_trains(trainer: Trainer, monkeypatch) -> None:
    class Broken(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("a bug in my model")

    monkeypatch.setitem(MODELS, "broken", ModelChoice("Broken", Broken, draws=False))
    trainer.reset_with(model="broken")
    with pytest.raises(RuntimeError, match="a bug in my model"):
        trainer.run(1)
    trainer.undo()
    trainer.wait()
    assert (trainer.state, trainer.failures) == ("ready", ())
    trainer.run(3)
    assert losses(trainer.history) == plain_run(3)


def test_undo_puts_back_exactly_the_config_before(trainer: Trainer) -> None:
    configs = [trainer.config]
    for change in (
        {"lr": 1e9},
        {"opt_level": "O2"},
        {"master_weights": False},
        {"opt_level": "O1"},  # drops master_weights
        {"growth_interval": 7},
        {"loss_scale": 128.0},  # drops growth_interval
        {"optimizer": "adam"},
    ):
        trainer.change(**change)
        trainer.wait()
        configs.append(trainer.config)
    for before in reversed(configs[:-1]):
        trainer.undo()
        trainer.wait()
        assert trainer.config == before
    assert trainer.last_change is None
    trainer.undo()
    trainer.wait()
    assert trainer.config == configs[0]


def test_undo_takes_back_changes_of_the_present_run_alone(trainer: Trainer) -> None:
    trainer.change(growth_interval=5)
    trainer.run(3)
    first = trainer.config
    trainer.reset(first.changed(opt_level="O2", lr=0.5, growth_interval=50))
    trainer.wait()
    trainer.continue_from(trainer.kept.runs[0])
    trainer.wait()
    assert (trainer.config, trainer.last_change) == (first, "Continued Run 1")
    trainer.undo()
    trainer.wait()
    second = trainer.config
    assert (second.opt_level, second.growth_interval) == ("O2", 50)
    assert trainer.last_change.startswith("Reset at step 3")
    trainer.change(momentum=0.5)
    trainer.undo()
    trainer.wait()
    assert trainer.config == second


def test_undo_does_not_change_a_run_whose_predecessor_cannot_continue(trainer: Trainer, monkeypatch, listen) -> None:
    ear = listen(trainer)
    trainer.change(growth_interval=5)
    trainer.run(3)
    monkeypatch.setattr("amplab.lab.kept_runs.MOST_BYTES", 0)
    trainer.reset(SMALL.changed(opt_level="O2", lr=0.5))
    trainer.wait()
    second = trainer.config
    assert trainer.last_change is None
    trainer.undo()
    trainer.wait()
    assert (trainer.config, ear.of(Undone)) == (second, [])


def test_changes_before_a_reset_without_a_step_are_taken_back_after_it(trainer: Trainer) -> None:
    trainer.change(lr=0.5)
    trainer.reset_with(hidden=24)
    trainer.wait()
    assert trainer.last_change == "Hidden 16 → 24"
    for expected in (SMALL.changed(lr=0.5), SMALL):
        trainer.undo()
        trainer.wait()
        assert trainer.config == expected


def test_an_undo_that_fails_is_not_told_as_undone(listen) -> None:
    makers = [torch.optim.SGD]
    model = torch.nn.Linear(4, 1)
    batch = torch.ones(2, 4), torch.zeros(2, 1)
    name = register_own(model, [batch], loss=mse_loss, optimizer=lambda weights: makers[0](weights, lr=0.1))
    trainer = Trainer(ExperimentConfig(task=name))
    ear = listen(trainer)
    trainer.change(optimizer="adam")
    trainer.run(2)
    makers.clear()
    trainer.undo()
    trainer.wait()
    assert trainer.config.optimizer == "adam"
    assert "not possible; the run is not changed" in trainer.failures[-1].text
    assert ear.of(Undone) == []
    trainer.stop()
    assert trainer.wait(10)
    forget_own(set())


def test_the_last_change_is_named_as_the_controls_show_it(trainer: Trainer) -> None:
    trainer.change(lr=0.5)
    trainer.wait()
    assert trainer.last_change == "Learning rate 0.1 → 0.5"
    trainer.inject("underflow")
    trainer.wait()
    assert trainer.last_change == "Underflow on"
    trainer.undo()
    trainer.wait()
    assert not trainer.shrinking
    trainer.inject("nan")
    trainer.wait()
    trainer.undo()
    assert not trainer.run(1).last.injected
    trainer.inject("nan")
    trainer.run(1)
    assert trainer.last_change == "Learning rate 0.1 → 0.5", "a fault that is over cannot be taken back"


def test_a_dragged_slider_is_one_change(trainer: Trainer) -> None:
    trainer.change(lr=0.5)
    trainer.wait()
    for speed in (100, 50, 20):
        trainer.set_speed(speed)
    assert trainer.last_change == "Speed: 20 steps/s"
    trainer.undo()
    trainer.wait()
    assert (trainer.speed, trainer.last_change) == (None, "Learning rate 0.1 → 0.5")


def test_another_model_while_it_runs_can_be_undone(trainer: Trainer, until) -> None:
    trainer.run(5)
    old = trainer.history
    trainer.reset(trainer.config.changed(model="cnn"))
    trainer.start()
    until(lambda: len(trainer.history) > 2 and trainer.config.model == "cnn")
    assert trainer.last_change == "Reset at step 5, Model MLP → CNN"
    trainer.undo()
    until(lambda: trainer.history is old and len(old) > 8)
    assert trainer.state == "running"
    assert trainer.config == SMALL


def test_a_kept_run_continues_and_its_log_goes_on(tmp_path: Path) -> None:
    trainer = Trainer(SMALL, log=tmp_path)
    trainer.run(12)
    first = trainer.log_path
    trainer.reset(SMALL.changed(opt_level="O2"))
    trainer.run(4)
    trainer.continue_from(trainer.kept.runs[0])
    trainer.run(6)
    assert trainer.log_path == first
    (other,) = trainer.kept.runs
    assert (other.name, other.config.opt_level, len(other.history)) == ("Run 2", "O2", 4)
    trainer.stop()
    trainer.wait()
    assert losses(load_run(first).history) == plain_run(18)
    assert losses(load_run(other.store.log_path).history) == losses(other.history)


def test_a_change_of_a_stopped_run_is_in_its_log_once_it_goes_on(tmp_path: Path) -> None:
    trainer = Trainer(SMALL, log=tmp_path)
    trainer.run(5)
    path = trainer.log_path
    trainer.stop()
    trainer.change(lr=0.01)
    trainer.inject("overflow")
    trainer.reset()
    trainer.undo()
    trainer.wait()
    trainer.run(5)
    trainer.stop()
    trainer.wait()
    run = load_run(path)
    assert losses(run.history) == losses(trainer.history)
    assert run.history.changes == trainer.history.changes
    assert [change.step for change in run.history.changes] == [0, 5, 5]


def test_all_levels_from_one_seed_beside_a_run_that_does_not_change(trainer: Trainer) -> None:
    trainer.run(20)
    trainer.compare(steps=40)
    trainer.wait()
    assert trainer.comparison is None
    by_name = {run.name: run for run in trainer.kept.runs}
    assert {"O0", "O1", "O2", "O3"} <= set(by_name)
    for name in ("O0", "O2"):
        assert losses(by_name[name].history) == plain_run(40, SMALL.changed(opt_level=name))
    parameters = {name: run.memory.parameters for name, run in by_name.items()}
    assert parameters["O3"] * 2 == parameters["O0"]
    assert by_name["O2"].memory.masters == parameters["O0"]
    assert by_name["O0"].memory.masters == by_name["O3"].memory.masters == 0
    kept = {name: run.activations for name, run in by_name.items()}
    assert kept["O3"] < kept["O0"]
    assert all(run.rate and run.held_out is not None for run in by_name.values())
    trainer.run(20)
    assert losses(trainer.history) == plain_run(40)


def test_a_comparison_can_be_stopped_and_what_was_trained_stays(trainer: Trainer, until) -> None:
    trainer.compare(steps=100_000)
    until(lambda: trainer.comparison is not None and trainer.comparison.step > 3)
    progress = trainer.comparison
    assert (progress.name, progress.run, progress.steps) == ("O0", 1, 100_000)
    trainer.change(lr=0.5)
    until(lambda: trainer.config.lr == 0.5)  # between two slices
    trainer.stop_comparison()
    trainer.wait(10)
    (run,) = trainer.kept.runs
    assert not run.is_training
    assert 3 < len(run.history) < 100_000
    assert run.held_out is not None


def test_a_run_of_a_comparison_that_cannot_begin_is_told_and_the_others_train(trainer: Trainer, listen) -> None:
    ear = listen(trainer)
    bad, good = ExperimentConfig(hidden=8, float32_modules="nope*"), ExperimentConfig(hidden=8)
    trainer.compare([bad, good, bad], steps=2)
    assert trainer.wait(20)
    assert [(run.config, len(run.history)) for run in trainer.kept.runs] == [(good, 2)]
    assert ["float32_modules=nope*" in failed.text for failed in ear.of(Failed)] == [True, True]
    assert trainer.comparison is None


@pytest.mark.parametrize("way", ["reset", "reset_with", "restart_with"])
def test_a_reset_to_modules_that_the_model_does_not_have_is_refused_at_once(trainer: Trainer, way: str) -> None:
    trainer.run(2)
    absent = {"float32_modules": "hiden*"}
    ways = {"reset": lambda **fields: trainer.reset(trainer.config.changed(**fields))}
    with pytest.raises(ValueError, match=r"float32_modules=hiden\*: .* closest are hidden"):
        ways.get(way, getattr(trainer, way))(**absent)
    assert (trainer.state, len(trainer.history), trainer.failures) == ("paused", 2, ())


@pytest.mark.parametrize("end", [Trainer.stop_comparison, Trainer.stop])
def test_a_comparison_that_waits_can_be_stopped(trainer: Trainer, end) -> None:
    with busy(trainer):
        trainer.compare(steps=100_000)
        assert trainer.comparison.step == 0
        end(trainer)
    assert trainer.wait(20)
    assert trainer.comparison is None
    assert not trainer.kept.runs


def test_a_comparison_ends_the_one_before_it_that_waits_or_trains(trainer: Trainer, until) -> None:
    level = SMALL.changed(opt_level="O2")
    with busy(trainer):
        for _ in range(2):
            trainer.compare([level], steps=100_000)
    until(lambda: trainer.comparison is not None and trainer.comparison.step > 3)
    trainer.compare([level], steps=3)
    assert trainer.wait(20)
    assert [(run.is_training, run.can_continue) for run in trainer.kept.runs] == [(False, True)] * 2


def test_two_comparisons_that_wait_leave_no_run_in_training(trainer: Trainer) -> None:
    """The first one begins before the second is asked for a slice."""
    with busy(trainer):
        trainer.compare(steps=5)
        trainer.compare(steps=5)
    assert trainer.wait(30)
    assert not any(run.is_training for run in trainer.kept.runs)
    assert {len(run.history) for run in trainer.kept.runs} == {5}


def test_a_precision_that_cannot_train_is_a_row_with_its_error(trainer: Trainer, monkeypatch) -> None:
    from amplab.lab.experiment import Experiment

    step = Experiment.step

    def fails(self: Experiment):
        if self.config.opt_level == "O2":
            raise RuntimeError("no kernel for this dtype")
        return step(self)

    monkeypatch.setattr(Experiment, "step", fails)
    trainer.compare(steps=3)
    trainer.wait()
    runs = {run.name: run for run in trainer.kept.runs}
    assert "no kernel for this dtype" in runs["O2"].error
    assert len(runs["O3"].history) == 3
    with pytest.raises(ValueError, match="O2 cannot continue"):
        trainer.continue_from(runs["O2"])


def test_rows_are_renamed_hidden_and_removed_with_undo(trainer: Trainer, tmp_path: Path) -> None:
    logged = Trainer(SMALL, log=tmp_path)
    for _ in range(2):
        logged.run(2)
        logged.reset()
    logged.wait()
    kept = logged.kept
    first, second = kept.runs
    kept.rename(first.number, "  slow   one ")
    kept.show(second.number, is_shown=False)
    kept.remove(first.number)
    assert kept.runs == (second,)
    assert first.store.log_path.exists(), "the log of a removed run stays"
    for expected in ("Removed slow one", "Hid Run 2", "Renamed Run 1 to slow one"):
        assert logged.last_change == expected
        logged.undo()
        logged.wait()
    assert kept.runs == (first, second)
    assert (first.name, second.is_shown) == ("Run 1", True)
    with pytest.raises(ValueError, match="'Run 2' is taken"):
        kept.rename(first.number, "Run 2")


def test_what_is_kept_is_bounded(trainer: Trainer) -> None:
    for _ in range(MOST_RUNS + 3):
        trainer.run(1)
        trainer.reset()
    trainer.wait()
    assert len(trainer.kept) == MOST_RUNS
    assert trainer.kept.runs[0].name == "Run 4"
    assert sum(run.is_shown for run in trainer.kept.runs) == MOST_SHOWN
    hidden = next(run for run in trainer.kept.runs if not run.is_shown)
    with pytest.raises(ValueError, match="hide one first"):
        trainer.kept.show(hidden.number, is_shown=True)


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_the_twin_starts_from_the_present_weights_and_changes_nothing(trainer: Trainer, listen, level: str) -> None:
    ear = listen(trainer)
    trainer.change(opt_level=level)
    trainer.run(10)
    trainer.request_twin()
    trainer.run(10)
    (ready,) = ear.of(TwinReady)
    assert ready.step == 10
    report = ready.report
    assert report.left == "O0"
    assert f"opt_level={level}" in report.right
    assert {row.module for row in report.rows()} >= {"hidden1", "output", "output.weight"}
    alone = Trainer(SMALL.changed(opt_level=level))
    assert losses(trainer.history) == losses(alone.run(20))
    assert report.steps[0].left.loss == pytest.approx(losses(alone.history)[10], rel=1e-2)


def test_every_override_of_the_level_is_dropped_in_the_other_levels(trainer: Trainer) -> None:
    trainer.change(opt_level="O2", master_weights=False)
    trainer.compare(steps=1)
    trainer.wait()
    for run in trainer.kept.runs:
        if run.config.opt_level in ("O0", "O1"):
            assert all(getattr(run.config, name) is None for name in OVERRIDES)


def test_the_oldest_of_as_many_runs_as_are_kept_can_continue(trainer: Trainer) -> None:
    for number in range(MOST_RUNS):
        trainer.run(3 + number)
        trainer.reset()
        trainer.wait()
    trainer.run(30)
    oldest = trainer.kept.runs[0]
    trainer.continue_from(oldest)
    assert trainer.wait(10)
    trainer.run(2)
    assert (trainer.state, len(trainer.history), trainer.failures) == ("paused", 5, ())
    assert [len(each.history) for each in trainer.kept.runs] == [*range(4, 3 + MOST_RUNS), 30]
    trainer.undo()
    assert trainer.wait(10)
    assert (trainer.state, len(trainer.history)) == ("paused", 30)


@pytest.mark.parametrize("call", ["continue", "undo"])
def test_a_run_whose_weights_fit_beside_the_present_ones_no_more_continues(monkeypatch, call: str) -> None:
    trainer = Trainer(SMALL)
    trainer.run(3)
    monkeypatch.setattr("amplab.lab.kept_runs.MOST_BYTES", int(1.5 * trainer.memory().total))
    trainer.reset()
    trainer.wait()
    trainer.run(7)
    if call == "undo":
        trainer.undo()
    else:
        trainer.continue_from(trainer.kept.runs[0])
    assert trainer.wait(10)
    trainer.run(2)
    assert (trainer.state, len(trainer.history), trainer.failures) == ("paused", 5, ())
    trainer.stop()


@pytest.mark.parametrize("call", ["continue", "undo"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_run_whose_weights_exceed_what_is_kept_continues_from_disk(call: str, level: str, monkeypatch, tmp_path):
    """A large model has its weights in memory once, and a reset must not cost what was trained."""
    trainer = Trainer(SMALL.changed(opt_level=level), log=tmp_path)
    trainer.run(7)
    monkeypatch.setattr("amplab.lab.kept_runs.MOST_BYTES", trainer.memory().total // 2)
    trainer.start()
    trainer.reset()
    trainer.run(3)
    (kept,) = trainer.kept.runs
    steps = len(kept.history)
    assert (kept.experiment, kept.can_continue) == (None, True)
    if call == "undo":
        trainer.undo()
    else:
        trainer.continue_from(kept)
    assert trainer.wait(10)
    trainer.run(4)
    assert losses(trainer.history) == plain_run(steps + 4, SMALL.changed(opt_level=level))
    assert trainer.failures == ()
    trainer.continue_from(trainer.kept.runs[-1])
    assert len(trainer.run(2)) == 5
    trainer.stop()
    assert trainer.wait(10)
    assert losses(load_run(kept.store.log_path).history) == losses(kept.history)


@pytest.mark.parametrize("loses", ["log", "checkpoint"])
def test_a_run_whose_weights_are_dropped_for_good_is_told(loses: str, monkeypatch, tmp_path, listen) -> None:
    trainer = Trainer(SMALL, log=None if loses == "log" else tmp_path)
    ear = listen(trainer)
    trainer.run(3)
    monkeypatch.setattr("amplab.lab.kept_runs.MOST_BYTES", trainer.memory().total // 2)
    trainer.reset()
    assert trainer.wait(10)
    (kept,) = trainer.kept.runs
    if loses == "log":
        (told,) = ear.of(Failed)
        assert told.text.startswith("Run 1 cannot continue any more")
        assert trainer.failures == (told,)  # after the reset, which forgets what is of the run
    else:
        kept.saved.unlink()  # as for the checkpoints of newer runs
    assert (kept.can_continue, trainer.last_change) == (False, None)
    with pytest.raises(ValueError, match="its weights are not kept any more"):
        trainer.continue_from(kept)
    trainer.stop()


def test_a_dropped_run_whose_checkpoint_is_damaged_leaves_the_present_one(monkeypatch, tmp_path) -> None:
    trainer = Trainer(SMALL, log=tmp_path)
    trainer.run(3)
    monkeypatch.setattr("amplab.lab.kept_runs.MOST_BYTES", trainer.memory().total // 2)
    trainer.reset()
    trainer.run(2)
    (kept,) = trainer.kept.runs
    kept.saved.write_bytes(kept.saved.read_bytes()[:-100])
    trainer.continue_from(kept)
    assert trainer.wait(10)
    assert "Run 1 cannot continue from" in trainer.failures[-1].text
    assert len(trainer.run(2)) == 4
    assert trainer.kept.runs == (kept,)
    trainer.stop()


def test_the_checkpoint_of_a_dropped_run_outlasts_those_of_newer_and_longer_runs(monkeypatch, tmp_path) -> None:
    trainer = Trainer(SMALL, log=tmp_path)
    trainer.run(3)
    monkeypatch.setattr("amplab.lab.kept_runs.MOST_BYTES", trainer.memory().total // 2)
    for number in range(MOST_RUNS - 1):
        trainer.reset()
        trainer.run(4 + number)
    assert trainer.wait(10)
    oldest = trainer.kept.runs[0]
    trainer.continue_from(oldest)
    assert len(trainer.run(2)) == 5
    trainer.stop()


@pytest.mark.parametrize("call", ["continue", "undo"])
def test_a_run_that_failed_in_a_forward_continues_from_the_step_before(call: str, tmp_path) -> None:
    trainer = Trainer(SMALL, log=tmp_path)
    trainer.run(6)

    def fail(*_given: object) -> None:
        raise RuntimeError("out of memory")

    trainer._run.experiment.model.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.run(5)
    trainer.reset()
    trainer.run(2)
    (kept,) = trainer.kept.runs
    assert kept.can_continue
    if call == "undo":
        trainer.undo()
    else:
        trainer.continue_from(kept)
    assert trainer.wait(10)
    assert trainer.state == "paused"
    trainer.run(5)
    assert losses(trainer.history) == plain_run(11)
    trainer.stop()


def test_a_removed_run_comes_back_to_a_list_that_has_filled_up(trainer: Trainer) -> None:
    for number in range(MOST_RUNS):
        trainer.run(3 + number)
        trainer.reset()
        trainer.wait()
    first, second, *_ = trainer.kept.runs
    trainer.kept.remove(first.number)
    trainer.run(20)
    trainer.kept.keep("Another", trainer.config, trainer.kept.runs[-1].store, trainer.kept.runs[-1].experiment)
    trainer.undo()
    assert trainer.wait(10)
    assert trainer.kept.runs[0] is first
    assert trainer.kept.can_continue(first)
    assert second not in trainer.kept.runs
    assert len(trainer.kept.runs) == MOST_RUNS


def test_levels_are_compared_whose_weights_exceed_what_is_kept(trainer: Trainer, monkeypatch) -> None:
    monkeypatch.setattr("amplab.lab.kept_runs.MOST_BYTES", trainer.memory().total // 2)
    trainer.compare(steps=5)
    assert trainer.wait(60)
    runs = trainer.kept.runs
    assert len(runs) > 3
    assert {len(run.history) for run in runs} == {5}


def test_undo_of_a_rename_and_of_hiding_finds_the_run_after_it_was_present(trainer: Trainer) -> None:
    """Each undo says that it took the change back: the run must have its name and its line again."""
    trainer.run(3)
    trainer.reset()
    trainer.run(2)
    number = trainer.kept.runs[0].number
    trainer.kept.rename(number, "slow")
    trainer.kept.show(number, is_shown=False)
    trainer.continue_from(trainer.kept.runs[0])
    trainer.undo()
    trainer.wait()
    trainer.kept.runs[0].is_shown = False
    said = []
    for _ in range(2):
        said.append(trainer.last_change)
        trainer.undo()
        trainer.wait()
    assert said == ["Hid slow", "Renamed Run 1 to slow"]
    slow = next(run for run in trainer.kept.runs if len(run.history) == 3)
    assert (slow.name, slow.is_shown) == ("Run 1", True)
