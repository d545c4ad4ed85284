"""The dashboard: one trainer's experiment as live widgets, and what a cell can ask of it.

Three threads meet here. The trainer's publishes events and only wakes the ticker; the kernel's delivers the page's
messages and only queues them; the ticker's does everything else: it acts on the trainer, builds payloads and is alone
in touching widgets. What is drawn when is in `presenter.py`, layout and drawing in the JS and CSS files.
"""

from __future__ import annotations

import ipywidgets

from amplab.lab import ExperimentConfig, Trainer
from amplab.views.presenter import Presenter
from amplab.views.run_report import RunReport, run_report
from amplab.views.watch import watch

__all__ = ["Dashboard"]


class Dashboard(ipywidgets.VBox):
    """The lab's one screen.

    Args:
        trainer: The experiment to show and to drive; None for a new one of the default config, without a log.

    >>> from amplab.lab import Trainer, ExperimentConfig
    >>> lab = Dashboard(Trainer(ExperimentConfig(hidden=16)))
    >>> lab
    <amplab lab at step 0: amplab/1 task=digits model=mlp opt_level=O1 hidden=16>
    >>> lab.run(steps=2).skipped
    0
    >>> lab.close()
    """

    def __init__(self, trainer: Trainer | None = None) -> None:
        self.trainer = Trainer() if trainer is None else trainer
        self._presenter = Presenter(self.trainer)
        parts = self._presenter.parts
        side = ipywidgets.VBox([parts.live, parts.panels])
        body = ipywidgets.HBox([parts.controls, side])
        super().__init__([parts.notices, body])
        side.add_class("amp-side")
        body.add_class("amp-body")
        self.add_class("amp-dashboard")

    def config(self) -> str:
        """Return the experiment as a string that `amplab.lab.open` takes back."""
        return str(self.trainer.config)

    def run(self, steps: int = 50) -> RunReport:
        """Train `steps` steps while the cell waits, drawn live, and return what came of it.

        The same config gives the same run: seed, split and batches are part of it. Where the experiment is running
        already, the cell waits for its next `steps` steps (fewer when it is paused) and lets it run on.

        Raises:
            RuntimeError: It has failed or was stopped, or was running and came to rest without a step.
            ValueError: `steps` is not a whole number > 0.
        """
        if self.trainer.state == "running":
            steps = watch(self.trainer, steps)
        else:
            self.trainer.run(steps)
        return run_report(self.trainer.config, self.trainer.history, steps)

    def offer(self, wanted: ExperimentConfig | None = None) -> None:
        """Ask in the page whether to go on with this experiment or to begin a new one.

        Args:
            wanted: Config of the new one; None for the present config.
        """
        self._presenter.offer(wanted)

    def close(self) -> None:
        """Take the widgets off the page; the experiment goes on."""
        self._presenter.close()
        super().close()

    def __repr__(self) -> str:
        """Return one line with the step and the config."""
        return f"<amplab lab at step {len(self.trainer.history)}: {self.config()}>"
