"""Experiments in mixed precision: a config, a trainer that publishes events, a history in memory and a log on disk.

    trainer = Trainer(ExperimentConfig(opt_level="O1"))
    trainer.run(300)
    trainer.change(opt_level="O2")   # weights and optimizer state are kept

The files, by part::

    what to train           config (the fields of an experiment), tasks, models, levels
    code of your own        own_task, batches, own_objects, own_values, own_state (what objects keep, in another
                            process), kept_attributes (during a look), own_code (in a watch), kept_weights,
                            model_buffers, schedule_states, code_digests
    training                experiment (one step), trainer, present_run (what changes and replaces its run), controls
                            (what its thread is to do), worker (the thread), drawing_turns (which of them draws random
                            numbers), events
    one step in stages      step_stages
    the run                 history (in memory), changes (made by a person), run_log (on disk), run_store (both),
                            checkpoints, skip_explanation, past_skips, step_explainer, run_status, findings,
                            config_remedies, scale_growth
    single effects          scenarios
    to take along           run_export (CSV, JSON), html_report
    memory                  memory_count, memory_fit (what fits on a card)
    several ranks           run_log.ranks (as one run), rank_watch (ranks compared), rank_exchange (in each step),
                            rank_training (`amplab train`)
    several runs            kept_runs (beside the present one), comparison (all levels), undo
    your own loop           watch, watched_run, scale_probe, watched_losses, step_losses, held_gradients,
                            gradient_measure, left_scales, idle_optimizers, watched_skips, step_look, step_check,
                            step_rerun, step_code, forward_again, watch_callback, tensorboard_scalars
    how to start            open (JupyterLab), first_paint (until it is there), console (terminal)

Four files examine the steps of your own loop; watched_skips calls the last two::

    file           runs                                                          finds
    scale_probe    after every step                                              its loss scale; whether it was skipped
    step_look      during the first step, and one step in a thousand             what `doctor` finds in a step
    step_rerun     after a skip, the 1st and the 5th in a row, if `watch` got    the op that made the first inf or NaN,
                   `loss=` or `step=` and the batches; runs the step again       by `first_nonfinite`
    step_check     during the next step after 5 skips in a row, if step_rerun    the first module output and gradient
                   cannot run                                                    that are not finite

If the loss scale is not dynamic, step_rerun runs a step that is not finite again before the optimizer steps.

`open()` shows an experiment in JupyterLab. The widgets are in `amplab.views`, which `open()` imports.
"""

import amplab.lab.first_paint as first_paint  # noqa: F401  shows its line before torch is imported
from amplab.lab.changes import RunChange
from amplab.lab.comparison import Progress
from amplab.lab.config import DEFAULT_LR, FIELDS, LIVE_FIELDS, OPTIMIZERS, OVERRIDES, ExperimentConfig, field_named
from amplab.lab.config_remedies import ConfigRemedy, config_remedy, taken_back
from amplab.lab.events import (
    STATES,
    ActivationsReady,
    ConfigChanged,
    Event,
    Failed,
    FaultSwitched,
    GradientRecord,
    GradientSample,
    GradientsReady,
    InputsReady,
    LayerShares,
    LevelTraced,
    MemoryCounted,
    Reading,
    RunsChanged,
    SkipExplained,
    StagesReady,
    StateChanged,
    StepRecord,
    TraceReady,
    TwinReady,
    Undone,
)
from amplab.lab.experiment import Experiment
from amplab.lab.faults import FAULTS
from amplab.lab.history import COLUMNS, History
from amplab.lab.html_report import report
from amplab.lab.kept_runs import KeptRun, KeptRuns
from amplab.lab.levels import LEVELS, Level
from amplab.lab.models import CNN, MLP, MODELS, build_model, models_of, register_model
from amplab.lab.open import active, attach, open
from amplab.lab.run_export import run_csv, run_json
from amplab.lab.run_log import Run, RunLog, load_run, runs_directory
from amplab.lab.run_status import RunStatus, run_status
from amplab.lab.skip_explanation import SKIP_KINDS, SkipExplanation
from amplab.lab.step_stages import (
    GradientCheck,
    ParameterStages,
    ScaleChange,
    Snapshot,
    StageRecorder,
    StepStages,
    snapshot,
)
from amplab.lab.tasks import TASKS, Score, Task, TaskChoice, TaskLoss, load_task
from amplab.lab.trainer import Trainer
from amplab.lab.watch import Watch, watch
from amplab.lab.watch_callback import WatchCallback
from amplab.lab.watched_run import WatchedRun

__all__ = [
    "TASKS",
    "MODELS",
    "LEVELS",
    "Level",
    "OPTIMIZERS",
    "FAULTS",
    "DEFAULT_LR",
    "FIELDS",
    "LIVE_FIELDS",
    "OVERRIDES",
    "ExperimentConfig",
    "field_named",
    "Task",
    "TaskChoice",
    "TaskLoss",
    "Score",
    "load_task",
    "MLP",
    "CNN",
    "build_model",
    "models_of",
    "register_model",
    "STATES",
    "Event",
    "StepRecord",
    "GradientRecord",
    "GradientSample",
    "SkipExplanation",
    "SKIP_KINDS",
    "StateChanged",
    "Reading",
    "ConfigChanged",
    "TraceReady",
    "LevelTraced",
    "InputsReady",
    "MemoryCounted",
    "GradientsReady",
    "LayerShares",
    "SkipExplained",
    "StagesReady",
    "Failed",
    "Undone",
    "FaultSwitched",
    "RunsChanged",
    "ActivationsReady",
    "TwinReady",
    "COLUMNS",
    "RunChange",
    "History",
    "RunLog",
    "Run",
    "load_run",
    "runs_directory",
    "RunStatus",
    "run_status",
    "ConfigRemedy",
    "config_remedy",
    "taken_back",
    "Snapshot",
    "snapshot",
    "ParameterStages",
    "GradientCheck",
    "ScaleChange",
    "StepStages",
    "StageRecorder",
    "Experiment",
    "Trainer",
    "KeptRun",
    "KeptRuns",
    "Progress",
    "open",
    "attach",
    "active",
    "Watch",
    "watch",
    "WatchCallback",
    "WatchedRun",
    "report",
    "run_csv",
    "run_json",
]
