"""The door from a notebook: `open()` gives a dashboard of this kernel's one experiment.

The widgets are imported when a dashboard is opened, not before: everything else in `lab` works without Jupyter. The
function takes this module's place as `amplab.lab.open`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from amplab.lab.config import ExperimentConfig
from amplab.lab.run_log import Run, runs_directory
from amplab.lab.trainer import Trainer
from amplab.lab.watch import Watch

if TYPE_CHECKING:
    from amplab.views import Dashboard, RunView

__all__ = ["active", "attach", "open"]


class _Kernel:
    """The one experiment of this process, so that a cell that is run again finds it instead of starting another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.trainer: Trainer | None = None

    def obtain(self, config: ExperimentConfig | None) -> tuple[Trainer, bool]:
        """Return the experiment that has begun and True, else one that has not (of `config`) and False."""
        with self._lock:
            old = self.trainer
            if old is not None and old.state in ("running", "paused"):
                return old, True
            if old is None or old.state != "ready" or config not in (None, old.config):
                self.trainer = Trainer(config, log=runs_directory())
                if old is not None:
                    old.stop()
            return self.trainer, False


_kernel = _Kernel()


def active() -> Trainer | None:
    """Return the trainer of this kernel's experiment, None before the first `open()`."""
    return _kernel.trainer


def open(config: str | ExperimentConfig | None = None) -> Dashboard:
    """Return a dashboard of this kernel's experiment; a cell that ends with it shows it.

    Where an experiment has begun (running or paused) the dashboard is one of that experiment, which goes on untouched,
    and it asks whether to go on or to begin the one asked for. Otherwise a new experiment is made, with its run log in
    `runs_directory()`.

    Args:
        config: An `ExperimentConfig`, or its string as a dashboard's `config()` gives it; None for the default one.

    Raises:
        ValueError: The config cannot be read.
        ImportError: The widget libraries or the task's data are not installed.
    """
    wanted = ExperimentConfig.parse(config) if isinstance(config, str) else config
    if not isinstance(wanted, ExperimentConfig | None):
        raise TypeError(f"open({config!r}): expected an ExperimentConfig, or its string as config() gives it.")
    dashboard, _ = _widgets()
    trainer, has_begun = _kernel.obtain(wanted)
    opened = dashboard(trainer)
    if has_begun:
        opened.offer(None if wanted == trainer.config else wanted)
    return opened


def attach(run: Trainer | Watch | Run | None = None) -> Dashboard | RunView:
    """Return a dashboard of a trainer of your own, None for this kernel's; it asks nothing.

    Args:
        run: a `Trainer`; or a `Watch` around a loop of your own, or a `Run` read back with `load_run`, which are shown
            on the same charts without controls.

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
            f'the dashboard needs {error.name}, which is not installed; run: python -m pip install "amplab[lab]"'
        ) from error
    return Dashboard, RunView
