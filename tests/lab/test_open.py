"""The door: one experiment per kernel, found again by a second call, never killed by it."""

import subprocess
import sys
from dataclasses import replace

import pytest

import amplab.lab
from amplab.lab import ExperimentConfig, Trainer, active, attach
from amplab.lab.open import _Kernel

views = pytest.importorskip("amplab.views")

SMALL = ExperimentConfig(hidden=16)


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch):
    """A kernel of its own for each test."""
    kernel = _Kernel()
    monkeypatch.setattr(sys.modules["amplab.lab.open"], "_kernel", kernel)
    yield kernel
    if kernel.trainer is not None:
        kernel.trainer.stop()
        assert kernel.trainer.wait(10)


@pytest.fixture
def opened():
    """Open dashboards that are closed again."""
    dashboards = []

    def open_one(*arguments):
        dashboards.append(amplab.lab.open(*arguments))
        return dashboards[-1]

    yield open_one
    for dashboard in dashboards:
        dashboard.close()


def test_a_dashboard_of_a_new_experiment(opened, runs):
    dashboard = opened(str(SMALL))
    assert active() is dashboard.trainer
    assert dashboard.config() == str(SMALL)
    dashboard.trainer.run(2)
    assert dashboard.trainer.log_path.parent == runs


def test_opening_again_finds_what_has_begun(opened):
    first = opened(SMALL)
    first.trainer.run(3)
    first.trainer.change(opt_level="O2")
    assert first.trainer.wait(10)
    second = opened(SMALL)  # the cell runs again
    assert second.trainer is first.trainer
    assert second.config() == str(replace(SMALL, opt_level="O2"))
    assert len(first.trainer.history) == 3


def test_another_config_begins_and_the_paused_run_is_kept(opened):
    first = opened()
    first.trainer.run(3)
    wanted = replace(SMALL, opt_level="O2")
    assert repr(opened(wanted)) == f"<amplab lab at step 0: {wanted}>"
    (kept,) = first.trainer.kept.runs
    assert len(kept.history) == 3
    first.run(steps=2)
    assert repr(opened(wanted)) == repr(opened()) == f"<amplab lab at step 2: {wanted}>"


def test_a_running_experiment_goes_on(opened):
    first = opened(SMALL)
    first.trainer.start()
    assert opened().trainer is opened(replace(SMALL, opt_level="O2")).trainer is first.trainer
    assert first.trainer.state == "running"
    assert first.config() == str(SMALL)


def test_what_has_not_begun_gives_way(opened):
    first = opened(SMALL)
    assert opened().trainer is first.trainer
    assert opened(SMALL).trainer is first.trainer
    other = opened(replace(SMALL, seed=1))
    assert other.trainer is not first.trainer
    assert (first.trainer.state, active()) == ("stopped", other.trainer)


def test_what_has_stopped_gives_way(opened):
    first = opened(SMALL)
    first.trainer.run(1)
    first.trainer.stop()
    assert opened(SMALL).trainer is not first.trainer


def test_attach_shows_a_given_trainer_and_refuses_without_one():
    with pytest.raises(RuntimeError, match="no experiment is open"):
        attach()
    trainer = Trainer(SMALL)
    dashboard = attach(trainer)
    assert (dashboard.trainer, active()) == (trainer, None)
    dashboard.close()


def test_a_config_that_cannot_be_read_is_refused_before_anything_is_made():
    with pytest.raises(ValueError, match="config of version 9"):
        amplab.lab.open("amplab/9 task=digits")
    assert active() is None


WITHOUT_WIDGETS = """
import sys
sys.modules["ipywidgets"] = None  # as on a machine without it
import amplab.lab
try:
    amplab.lab.open()
except ImportError as error:
    print(error)
"""


def test_missing_widget_libraries_are_a_sentence():
    result = subprocess.run([sys.executable, "-c", WITHOUT_WIDGETS], capture_output=True, text=True, check=True)
    assert "ipywidgets is not installed" in result.stdout
    assert 'python -m pip install "amplab[lab]"' in result.stdout
