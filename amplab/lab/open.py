"""How a notebook opens the lab: `open()` returns a dashboard of this kernel's one experiment.

The widgets are imported when a dashboard is opened: everything else in `lab` works without Jupyter. The function hides
this module as `amplab.lab.open`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from amplab.lab.checkpoints import last_checkpoint
from amplab.lab.config import ExperimentConfig
from amplab.lab.run_log import Run, runs_directory
from amplab.lab.trainer import Trainer
from amplab.lab.watch import Watch

if TYPE_CHECKING:
    from amplab.views import Dashboard, RunView

__all__ = ["active", "attach", "open"]


class _Kernel:
    """The one experiment of this process: a cell that runs again finds it instead of starting another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.trainer: Trainer | None = None

    def obtain(self, config: ExperimentConfig | None) -> tuple[Trainer, bool]:
        """Return the experiment and True if it runs or is paused, else one of `config` that is ready and False."""
        with self._lock:
            old = self.trainer
            if old is not None and old.state in ("running", "paused"):
                return old, True
            if old is not None and old.state == "ready" and config in (None, old.config):
                return old, False
            self.trainer = new = Trainer(config, log=runs_directory())
            if old is not None:
                old.stop()
            return new, False


_kernel = _Kernel()


def active() -> Trainer | None:
    """Return the trainer of this kernel's experiment, None before the first `open()`."""
    return _kernel.trainer


def open(config: str | ExperimentConfig | None = None) -> Dashboard:
    """Return a dashboard of this kernel's experiment; a cell that ends with it displays it.

    If an experiment is running or paused, the dashboard shows that experiment, unchanged, and asks whether to continue
    it or to start the one of `config`. Otherwise it shows a new experiment, with its run log in `runs_directory()`, and
    offers to continue the last run of a kernel that has ended, from its last checkpoint.

    Args:
        config: An `ExperimentConfig`, or its string as a dashboard's `config()` returns it; None for the default one.

    Raises:
        ValueError: The config cannot be read.
        ImportError: The widget libraries or the task's data are not installed.
    """
    wanted = ExperimentConfig.parse(config) if isinstance(config, str) else config
    if not isinstance(wanted, ExperimentConfig | None):
        raise TypeError(f"open({config!r}): expected an ExperimentConfig, or its string from a dashboard's config().")
    dashboard, _ = _widgets()
    trainer, has_begun = _kernel.obtain(wanted)
    opened = dashboard(trainer)
    if has_begun:
        opened.offer(None if wanted == trainer.config else wanted)
    elif (saved := last_checkpoint(runs_directory())) is not None:
        opened.offer_saved(saved)
    return opened


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
        raise TypeError(f"attach({chosen!r}): expected a Trainer, a Watch, or a Run from load_run.")
    dashboard, run_view = _widgets()
    return run_view(chosen) if isinstance(chosen, Run | Watch) else dashboard(chosen)


def _widgets() -> tuple[type[Dashboard], type[RunView]]:
    try:
        from amplab.views import Dashboard, RunView
    except ImportError as error:
        raise ImportError(
            f'{error.name} is not installed; the dashboard needs it. Run: python -m pip install "amplab[lab]"'
        ) from error
    return Dashboard, RunView
