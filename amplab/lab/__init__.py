"""Experiments in mixed precision: a config, a trainer that calls back and never draws, a history, a log on disk.

    trainer = Trainer(ExperimentConfig(opt_level="O1"))
    trainer.run(300)
    trainer.change(opt_level="O2")   # weights and optimizer state kept

`open()` shows one in JupyterLab; the widgets are in `views`, which is imported then and not before.
"""

from amplab.lab.config import DEFAULT_LR, FIELDS, LIVE_FIELDS, OPTIMIZERS, OVERRIDES, ExperimentConfig, field_named
from amplab.lab.events import (
    STATES,
    ConfigChanged,
    Event,
    Failed,
    GradientRecord,
    GradientSample,
    GradientsReady,
    SkipExplained,
    StateChanged,
    StepRecord,
    TraceReady,
)
from amplab.lab.experiment import FAULTS, Experiment
from amplab.lab.history import COLUMNS, History
from amplab.lab.models import CNN, MLP, MODELS, build_model
from amplab.lab.open import active, attach, open
from amplab.lab.run_log import Run, RunLog, load_run, runs_directory
from amplab.lab.tasks import TASKS, Task, load_task
from amplab.lab.trainer import Trainer
from amplab.lab.watch import Watch, watch
from amplab.lab.watch_callback import WatchCallback
from amplab.lab.watched_run import WatchedRun

__all__ = [
    "TASKS",
    "MODELS",
    "OPTIMIZERS",
    "FAULTS",
    "DEFAULT_LR",
    "FIELDS",
    "LIVE_FIELDS",
    "OVERRIDES",
    "ExperimentConfig",
    "field_named",
    "Task",
    "load_task",
    "MLP",
    "CNN",
    "build_model",
    "STATES",
    "Event",
    "StepRecord",
    "GradientRecord",
    "GradientSample",
    "StateChanged",
    "ConfigChanged",
    "TraceReady",
    "GradientsReady",
    "SkipExplained",
    "Failed",
    "COLUMNS",
    "History",
    "RunLog",
    "Run",
    "load_run",
    "runs_directory",
    "Experiment",
    "Trainer",
    "open",
    "attach",
    "active",
    "Watch",
    "watch",
    "WatchCallback",
    "WatchedRun",
]
