"""Every public exception of amplab: a call that raises it, and that its message says what was given, allowed, to do."""

import importlib
import pkgutil

import pytest
import torch
from torch import nn

import amplab
from amplab import amp
from amplab.amp.run_state.file_format import MissingRunState
from amplab.lab.config import ExperimentConfig
from amplab.lab.config_field import SettingRefused
from amplab.launch import LaunchError, LaunchStopped
from amplab.launch.lessons import choose_lesson, find_lessons
from amplab.scalers import DeepSpeedScale, LossScaleAtMinimumError
from amplab.scripts import ScriptError, run_script


def refuse_a_setting(folder):
    ExperimentConfig(lr=-1.0)


def load_what_is_missing(folder):
    amp.load_run_state(folder / "run.pt")


def load_another_file(folder):
    (folder / "run.pt").write_text("epoch 3")
    amp.load_run_state(folder / "run.pt")


def collapse(folder):
    model, session = nn.Linear(1, 1), amp.Session()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for _ in range(100):
        with session.scale_loss(model.weight.sum() * float("nan"), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def back_off_at_the_floor(folder):
    rule = DeepSpeedScale(init_scale=1.0, floor=1.0, hysteresis=1)
    rule.next(rule.start(), True)


def run_a_missing_script(folder):
    run_script(folder / "missing.py")


def open_a_missing_lesson(folder):
    choose_lesson(find_lessons(), "zz")


def stop_a_launch(folder):
    raise LaunchStopped(15)  # what a signal to `amplab train --nproc` raises, which the command turns into 128 + 15


# The exception, a call that raises it, and what its message says: what was given, what is allowed, what to do.
CALLS = {
    SettingRefused: (refuse_a_setting, "lr=-1", "expected", ""),
    MissingRunState: (
        load_what_is_missing, "run.pt", "expected the path that save_run_state was given", "leave load_run_state out"
    ),
    amp.RunStateError: (load_another_file, "run.pt", "expected a file of save_run_state", "load another checkpoint"),
    amp.LossScaleCollapse: (collapse, "Loss scaler 0 has skipped 20 steps", "is not finite", "lower the learning rate"),
    LossScaleAtMinimumError: (back_off_at_the_floor, "The floor is 1", "cannot decrease", "raises_at_floor=False"),
    ScriptError: (run_a_missing_script, "missing.py", "expected the path of a Python file", ""),
    LaunchError: (open_a_missing_lesson, "zz", "the lessons are", "00"),
    LaunchStopped: (stop_a_launch, "signal 15", "", ""),
}  # fmt: skip


def public_exceptions():
    """The exceptions that a package of amplab exports."""
    packages = [each.name for each in pkgutil.walk_packages(amplab.__path__, "amplab.") if each.ispkg]
    for name in ("amplab", *(each for each in packages if ".jupyter" not in each and "in_children" not in each)):
        module = importlib.import_module(name)
        for exported in getattr(module, "__all__", ()):
            value = getattr(module, exported, None)
            if isinstance(value, type) and issubclass(value, BaseException):
                yield value


def test_every_public_exception_has_a_call():
    found = set(public_exceptions())
    assert len(found) >= 6
    assert found <= CALLS.keys()


@pytest.mark.parametrize("error", CALLS)
def test_the_message_says_what_was_given_what_is_allowed_and_what_to_do(error, tmp_path):
    call, *said = CALLS[error]
    with pytest.raises(error) as raised:
        call(tmp_path)
    for words in said:
        assert words in str(raised.value)
    assert isinstance(raised.value, error)
