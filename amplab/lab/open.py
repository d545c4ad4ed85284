"""How a notebook opens the lab: `open()` returns a dashboard of this kernel's one experiment.

The widgets are imported when a dashboard is opened: everything else in `lab` works without Jupyter. The function hides
this module as `amplab.lab.open`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from amplab.kernels.fork_renewal import renew_lock_in_forks
from amplab.lab.checkpoints import Checkpoint, last_checkpoint
from amplab.lab.config import OWN, ExperimentConfig
from amplab.lab.first_paint import START_LINE
from amplab.lab.models import models_of
from amplab.lab.own_task import forget_own, register_own
from amplab.lab.run_log import Run, runs_directory
from amplab.lab.tasks import OWN_TASK, TASKS
from amplab.lab.trainer import Trainer, tasks_in_use
from amplab.lab.watch import Watch
from amplab.trace.as_found import leaves_as_found
from amplab.trace.handed_step import Loss, shows_calls

if TYPE_CHECKING:
    from amplab.views import Dashboard, RunView

__all__ = ["active", "attach", "open"]

_LONGEST_ECHO = 60  # characters of a value in an error message
_LONGEST_RESET = 10.0  # seconds; a comparison that trains meanwhile goes on


class _Kernel:
    """The one experiment of this process: a cell that runs again finds it instead of starting another."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        renew_lock_in_forks(self, "_lock")
        self._asked: ExperimentConfig | None = None  # for what, by the last cell that named a config
        self.trainer: Trainer | None = None
        self.own_tasks: set[str] = set()  # that have ever been: a page may show a button that begins one
        self.offers: WeakKeyDictionary[Dashboard, str] = WeakKeyDictionary()  # tasks that a page asks whether to begin

    def obtain(self, config: ExperimentConfig | None, *, replaces: bool) -> tuple[Trainer, bool]:
        """Return the experiment and True if it runs or is paused, else one of `config` that is ready and False.

        With `replaces`, a config that was not asked for before begins in place of a paused experiment, which is kept.
        """
        with self._lock:
            old = self.trainer
            is_new = config not in (None, self._asked)
            self._asked = config or self._asked
            if old is not None and old.state == "paused" and replaces and is_new and config != old.config:
                old.reset(config)
                old.wait(_LONGEST_RESET)
                return old, False
            if old is not None and old.state in ("running", "paused"):
                return old, True
            if old is not None and old.state == "ready" and config in (None, old.config):
                return old, False
            if old is not None and old.state != "stopped" and old.has_begun:  # its runs stay beside the new one
                old.reset(config or ExperimentConfig())
                old.wait(_LONGEST_RESET)
                return old, False
            self.trainer = new = Trainer(config, log=runs_directory())
            if old is not None:
                old.stop()
            return new, False


_kernel = _Kernel()


def active() -> Trainer | None:
    """Return the trainer of this kernel's experiment, None before the first `open()`."""
    return _kernel.trainer


@START_LINE.until_open
@shows_calls(
    "amplab.lab.open(config)",
    "amplab.lab.open(model=model, data=loader, loss=criterion, optimizer=lambda weights: SGD(weights, lr=0.1))",
)
@leaves_as_found  # the code of one's own that runs here may raise, or be interrupted, before it switches grad mode back
def open(
    config: str | ExperimentConfig | None = None,
    *,
    model: Any = None,
    data: Any = None,
    loss: Loss | None = None,
    step: Any = None,
    optimizer: Any = None,
    evaluate: Callable[[Any], float] | None = None,
) -> Dashboard:
    """Return a dashboard of this kernel's experiment; a cell that ends with it displays it.

    If an experiment is running or paused, the dashboard shows that experiment, unchanged, and asks whether to continue
    it or to start the new one. A `config` that was not asked for before starts at once in place of a paused experiment,
    which stays under *Runs*. Otherwise the dashboard shows a new experiment, with its log in `runs_directory()`, and
    offers to continue the last run of a kernel that has ended, from its last checkpoint; a run of few steps does not
    hide a long one before it.

    With `model` and `data` the experiment trains a model of your own. The lab needs fresh models and optimizers for
    Reset and Compare: it calls the functions that it was given, or copies the objects as they are now. What you pass is
    not changed. What `step` and functions in hooks use besides the model, such as a teacher, and a loss that is no
    module, are not copied: make them a part of the model for each run to begin with them as they are now. A look at a
    step, such as a trace, runs it once more, and leaves attributes of modules, hooks and losses and variables of the
    functions around them as they were, with numbers, text, tensors, arrays, lists and dicts in them up to 256 MiB, and
    in attributes also up to 1,000 objects of your own classes with the modules in them. Other objects, such as those
    that `step` or a function names, and global variables are as after one more step: a cell may change them meanwhile.
    What a cell writes to such attributes and variables while the lab looks at a step may be taken back: pause it first.
    `open` returns when the trace that the page shows first is done. While such an experiment runs, each step seeds the
    generators of torch, Python and NumPy, and restores them: pause it before a cell that needs random numbers of its
    own. Debug a cell that controls a run without Ctrl-C; see `Trainer`.

    In a restarted kernel a run continues with its parameters and buffers, its optimizers, and schedules that step in
    their hooks. So does what the model, a loss that is a module, optimizers, the hooks of these, and data with samplers
    and datasets keep in attributes of their own, such as a counter: numbers, text, tensors, arrays of numbers, and
    lists and dicts of them, also in objects of your own classes, such as a meter, with the weights of modules in them,
    such as an average of weights. Of these, tensors and arrays in a model, a loss and optimizers are those of the saved
    run even if it has not changed them, as random features. What functions and `step` name, and other objects in
    attributes, such as a generator of random numbers, begin anew.

    Args:
        config: An `ExperimentConfig`, or its string as a dashboard's `config()` returns it; None for the default one.
        model: A `torch.nn.Module` in float32, a list or dict of several, or a function that returns one; a function if
            hooks are registered on parameters, which copies leave out.
        data: An iterable of batches that can be read again, such as a `DataLoader` or a list, or a function that
            returns one. Every run has the same batches; generators in the attributes of the data, as a `DataLoader` has
            one, begin as they are now, and workers begin anew for each epoch. From the second epoch on the order of a
            loader with such a generator is not that of a loop of your own, since each epoch is seeded anew. The object
            itself, the samplers of a loader and an `IterableDataset` are copied for each run; what they have in
            attributes, such as a list that is shuffled in place, other datasets with all that they count, and what a
            function counts, all runs share. `open` warns if the data begin with another batch when they are read again.
            `amplab.xray` says how the model is called with a batch.
        loss: A function of the output and the rest of the batch; None for the output's own loss.
        step: Instead of `loss`, a function that is called as ``step(model, batch)`` with the model that the lab trains,
            runs its forward and returns the loss. Of several models in a dict, a dict of functions by model.
        optimizer: A function that makes an optimizer of the parameters it gets, or an optimizer of the model's
            parameters; None for Adam with lr=1e-3. Of several models, a dict by model.
        evaluate: A function of the model, in evaluation mode, that returns the score on held-out data; its name is
            the name of the score.

    Raises:
        TypeError, ValueError: The config cannot be read, or what was passed does not fit together.
        ImportError: The widget libraries or the task's data are not installed.
    """
    wanted = ExperimentConfig.parse(config) if isinstance(config, str) else config
    if not isinstance(wanted, ExperimentConfig | None):
        raise TypeError(_not_a_config(config))
    dashboard, _ = _widgets()
    parts = {"data": data, "loss": loss, "step": step, "optimizer": optimizer, "evaluate": evaluate}
    given = [name for name, value in parts.items() if value is not None]
    if model is not None:
        if data is None:
            raise TypeError(f"open(model=…) without data=: expected the batches to train on as well; {_OWN_CALL}.")
        forget_own(tasks_in_use() | {*_kernel.offers.values()})
        own = register_own(model, **parts, taken=_kernel.own_tasks)
        _kernel.own_tasks.add(own)
        wanted = _of_own(wanted, own)
    elif given:
        raise TypeError(f"open({given[0]}=…) without model=: expected the model to train as well; {_OWN_CALL}.")
    trainer, has_begun = _kernel.obtain(wanted, replaces=model is None)
    opened = dashboard(trainer)
    if has_begun:
        opened.offer(None if wanted == trainer.config else wanted)
        if wanted is not None:
            _kernel.offers[opened] = wanted.task
    elif not trainer.kept.runs and (saved := last_checkpoint(runs_directory(), partial(_as_here, trainer.config))):
        opened.offer_saved(saved)
    return _with_first_look(opened)


def attach(run: Trainer | Watch | Run | None = None) -> Dashboard | RunView:
    """Return a dashboard of your own trainer, or of this kernel's experiment.

    Args:
        run: a `Trainer`, or None for this kernel's. A `Watch` around a loop of your own, or a `Run` from `load_run`, is
            shown on the same charts without controls.

    Raises:
        RuntimeError: No experiment is open in this kernel.
        ImportError: The widget libraries are not installed.
    """
    chosen = _kernel.trainer if run is None else run
    if chosen is None:
        raise RuntimeError("attach(): no experiment is open in this kernel; call open(), or pass a Trainer.")
    if not isinstance(chosen, Trainer | Watch | Run):
        expected = "expected a Trainer, a Watch around a loop that runs, or a Run from load_run"
        also = f"; for the lab to train a model of your own, {_OWN_CALL}" if _is_training_code(chosen) else ""
        raise TypeError(f"attach({_short(chosen)}): {expected}{also}.")
    dashboard, run_view = _widgets()
    return run_view(chosen) if isinstance(chosen, Run | Watch) else _with_first_look(dashboard(chosen))


_OWN_CALL = "write amplab.lab.open(model=model, data=loader, loss=criterion)"


def _with_first_look(opened: Dashboard) -> Dashboard:
    """Return a dashboard once nothing draws random numbers for it beside the next line of the cell."""
    try:
        opened.wait_for_first_look()
    except BaseException:
        opened.close()
        raise
    return opened


def _as_here(present: ExperimentConfig, saved: Checkpoint) -> Checkpoint | None:
    """Return a saved run with its config in this process; None if its task, model or code is not here."""
    if OWN_TASK.fullmatch(saved.config.task):
        return saved.of_task(present.task, present.model) if OWN_TASK.fullmatch(present.task) else None
    return saved if saved.config.task in TASKS and saved.config.model in models_of(saved.config.task) else None


def _of_own(config: ExperimentConfig | None, task: str) -> ExperimentConfig:
    """Return a config with a task of one's own; what it says of another one does not apply."""
    wanted = config or ExperimentConfig()
    optimizer = wanted.optimizer if wanted.task == task else None
    if optimizer == OWN and not TASKS[task].has_own_optimizer:
        optimizer = None
    return replace(wanted, task=task, model=None, optimizer=optimizer)  # type: ignore[arg-type]  # None: the task's


def _not_a_config(given: Any) -> str:
    if isinstance(given, Trainer | Watch | Run):
        return f"open({_short(given)}): expected a config; to see a run that exists, write amplab.lab.attach(run)."
    if _is_training_code(given):
        return f"open({_short(given)}): expected a config; to train a model of your own, {_OWN_CALL}."
    return f"open({given!r}): expected an ExperimentConfig, or its string from a dashboard's config()."


def _is_training_code(given: Any) -> bool:
    return isinstance(given, nn.Module | Optimizer | DataLoader) or callable(given)


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= _LONGEST_ECHO else type(given).__name__


def _widgets() -> tuple[type[Dashboard], type[RunView]]:
    try:
        from amplab.views import Dashboard, RunView
    except ImportError as error:
        raise ImportError(
            f'{error.name} is not installed; the dashboard needs it. Run: python -m pip install "amplab[lab]"'
        ) from error
    return Dashboard, RunView
