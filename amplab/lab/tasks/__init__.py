"""The tasks of the lab, each with its data, its losses and, where no other task can train them, its models.

    task          what a task is
    digits        images of digits: classification at three ranges of gray levels, even or odd with two losses
    text          the next character of a text: a transformer, the same with a softmax by hand, an LSTM
    regression    data whose units float16 cannot hold: targets too small, inputs too large
    gan           a DCGAN on the digits, with three losses and two optimizers

To add a task, add an entry to `TASKS`. The models of the digits are in `amplab.lab.models`, a model and data of one's
own in `amplab.lab.own_task`.
"""

import re

from amplab.lab.tasks.digits import DIGITS_CHOICES, HELD_OUT, ImageBatch, ImageTask
from amplab.lab.tasks.gan import GAN_CHOICE
from amplab.lab.tasks.regression import PRESSURE_CHOICE, SMALL_TARGETS_CHOICE
from amplab.lab.tasks.task import ACCURACY, MakeOptimizer, Score, Task, TaskChoice, TaskLoss, rows_of_step
from amplab.lab.tasks.text import TEXT_CHOICE

__all__ = [
    "ABSENT_OWN",
    "ACCURACY",
    "HELD_OUT",
    "OWN_TASK",
    "TASKS",
    "ImageBatch",
    "ImageTask",
    "MakeOptimizer",
    "Score",
    "Task",
    "TaskChoice",
    "TaskLoss",
    "load_task",
    "rows_of_step",
    "score_named",
    "task_choice",
]

TASKS: dict[str, TaskChoice] = {
    **DIGITS_CHOICES,
    "text": TEXT_CHOICE,
    "small-targets": SMALL_TARGETS_CHOICE,
    "pressure": PRESSURE_CHOICE,
    "gan": GAN_CHOICE,
}
"""Each task by the name that a config gives it."""


OWN_TASK = re.compile(r"own(-\d+)?")
"""The names of tasks that are code of one's own, which a later process may not have; see `amplab.lab.own_task`."""

ABSENT_OWN = "own-0"
"""Such a name that no task gets."""


def _absent(_seed: int) -> Task:
    raise ValueError(
        "task=own: a model of your own, which this process does not have; open it again with "
        "amplab.lab.open(config, model=…, data=…, loss=…)."
    )


_ABSENT_OWN = TaskChoice(
    "your own", _absent, score=Score("score"), optimizer="own", learning_rates={"own": 0.001}, has_own_optimizer=True
)


def task_choice(name: str) -> TaskChoice:
    """Return the entry of a task; a stand-in for code of one's own that this process does not have.

    Raises:
        KeyError: There is no such task.
    """
    return _ABSENT_OWN if name not in TASKS and OWN_TASK.fullmatch(name) else TASKS[name]


def score_named(task: str) -> Score | None:
    """Return what a task measures on held-out data, None if nothing."""
    return task_choice(task).score


def load_task(name: str, seed: int) -> Task:
    """Return the task `name`, with data split by `seed` into training and held-out data.

    Raises:
        ImportError: scikit-learn, which bundles the digits, is not installed.
        ValueError: There is no such task.
    """
    if name not in TASKS and not OWN_TASK.fullmatch(name):
        raise ValueError(f"task={name}: expected one of {', '.join(TASKS)}.")
    return task_choice(name).load(seed)
