"""The tasks of the lab, each with its data, its losses and, where no other task can train them, its models.

    task          what a task is
    digits        images of digits: classification at three ranges of gray levels, even or odd with two losses
    text          the next character of a text: a transformer, the same with a softmax by hand, an LSTM
    regression    data whose units float16 cannot hold: targets too small, inputs too large
    gan           a DCGAN on the digits, with three losses and two optimizers

To add a task, add an entry to `TASKS`. The models of the digits are in `amplab.lab.models`.
"""

from amplab.lab.tasks.digits import DIGITS_CHOICES, HELD_OUT, ImageBatch, ImageTask
from amplab.lab.tasks.gan import GAN_CHOICE
from amplab.lab.tasks.regression import PRESSURE_CHOICE, SMALL_TARGETS_CHOICE
from amplab.lab.tasks.task import ACCURACY, MakeOptimizer, Score, Task, TaskChoice, TaskLoss, rows_of_step
from amplab.lab.tasks.text import TEXT_CHOICE

__all__ = [
    "ACCURACY",
    "HELD_OUT",
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
]

TASKS: dict[str, TaskChoice] = {
    **DIGITS_CHOICES,
    "text": TEXT_CHOICE,
    "small-targets": SMALL_TARGETS_CHOICE,
    "pressure": PRESSURE_CHOICE,
    "gan": GAN_CHOICE,
}
"""Each task by the name that a config gives it."""


def score_named(task: str) -> Score | None:
    """Return what a task measures; of a task that this process does not know, a score without a name of its own."""
    return TASKS[task].score if task in TASKS else Score("score")


def load_task(name: str, seed: int) -> Task:
    """Return the task `name`, with data split by `seed` into training and held-out data.

    Raises:
        ImportError: scikit-learn, which bundles the digits, is not installed.
        ValueError: There is no such task.
    """
    if name not in TASKS:
        raise ValueError(f"task={name}: expected one of {', '.join(TASKS)}.")
    return TASKS[name].load(seed)
