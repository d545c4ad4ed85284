"""The dashboard: one trainer's experiment as live widgets, with the methods that a cell calls.

Three threads are involved. The trainer's thread publishes events and only wakes the ticker. The kernel's thread
receives the page's messages and only queues them. The ticker's thread does everything else: it calls the trainer,
builds payloads, and is the only one that changes widgets. `presenter.py` decides when to draw; the files in `web` draw.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import ipywidgets

from amplab.lab import ConfigChanged, Event, ExperimentConfig, StateChanged, StepRecord, Trainer
from amplab.lab.checkpoints import Checkpoint
from amplab.views.parts import close_inside
from amplab.views.presenter import Presenter
from amplab.views.run_report import RunReport, run_report

__all__ = ["Dashboard", "wait_for_steps"]


_ELSEWHERE = (
    "The lab was open here. To see it, select this cell and press <b>Shift+Enter</b>: a run in this kernel is shown as "
    "it is, and a run of a kernel that has ended can be continued from its last checkpoint."
)


_PATIENCE = 0.1  # seconds between two looks at whether a run has begun


class Dashboard(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The lab on one screen.

    Args:
        trainer: The experiment to show and to control; None for a new one with the default config and without a log.

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
        side = ipywidgets.VBox([parts.status, parts.live, parts.take_away, parts.panels])
        body = ipywidgets.HBox([parts.controls, side])
        super().__init__([parts.notices, parts.gallery, body])
        side.add_class("amp-side")
        body.add_class("amp-body")
        self.add_class("amp-dashboard")

    def config(self) -> str:
        """Return the experiment as a string that `amplab.lab.open` accepts."""
        return str(self.trainer.config)

    def run(self, steps: int = 50) -> RunReport:
        """Train `steps` steps while the cell waits, drawn live, and return a report of them.

        The same config gives the same run: seed, split and batches are part of it. If the experiment is already
        running, the cell waits for its next `steps` steps (fewer if it is paused) and leaves it running.

        The report has fewer steps if the run is paused or stopped meanwhile, by code of another thread: what is pressed
        in the page may take effect only when the cell ends. Interrupt the kernel to end it. If another run takes its
        place, as after a reset, only the steps of that run count.

        Raises:
            RuntimeError: The experiment has failed or was stopped, or it was paused, stopped or reset before a step; or
                another config was asked for, and the page waits for the choice between the two.
            ValueError: `steps` is not a whole number > 0.
        """
        if (other := self._presenter.unanswered) is not None:
            raise RuntimeError(
                f"this lab shows {self.config()} at step {len(self.trainer.history)}, but {other} was asked for: "
                f"choose one above the charts, or call lab.trainer.reset(config) or lab.trainer.run({steps})."
            )
        run = None if self.trainer.state == "running" else self.trainer.run
        with self._presenter.cell_waits():
            return wait_for_steps(self.trainer, steps, run)

    def offer(self, wanted: ExperimentConfig | None = None) -> None:
        """Ask in the page whether to continue this experiment or to begin a new one.

        Args:
            wanted: Config of the new one; None for the present config.
        """
        self._presenter.offer(wanted)

    def offer_saved(self, saved: Checkpoint) -> None:
        """Ask in the page whether to continue a run of a kernel that has ended."""
        self._presenter.offer_saved(saved)

    def wait_for_first_look(self) -> None:
        """Wait for the trace that the page shows first, if it draws random numbers: else it would draw beside the cell.

        It does not wait for a run or a comparison, nor in a callback of the trainer.
        """
        trainer = self.trainer
        if trainer.draws:
            self._presenter.wait()
            with suppress(RuntimeError):  # in the trainer's own thread
                while trainer.state != "running" and trainer.comparison is None and not trainer.wait(_PATIENCE):
                    pass

    def close(self) -> None:
        """Remove the widgets from the page; the experiment continues."""
        if hasattr(self, "_presenter"):  # else an interrupt has come before it was made
            self._presenter.close()
        close_inside(self)
        super().close()

    def _repr_mimebundle_(self, **settings: object) -> dict[str, object]:
        """Add a sentence for pages that cannot show the widget, such as a notebook that was reloaded untrusted."""
        bundle: dict[str, object] = super()._repr_mimebundle_(**settings)
        return bundle | {"text/html": f"<p>{_ELSEWHERE}</p>"}

    def __repr__(self) -> str:
        """Return one line with the step and the config."""
        return f"<amplab lab at step {len(self.trainer.history)}: {self.config()}>"


def wait_for_steps(trainer: Trainer, steps: int, run: Callable[[int], object] | None = None) -> RunReport:
    """Wait until a running trainer has made `steps` more steps; return the report of those that it made.

    They are fewer if the trainer stops earlier. A reset starts the count again. An interrupt ends only the waiting.

    Args:
        trainer: The trainer.
        steps: How many.
        run: Called first, with `steps`, if the trainer is not running: its method `run`.

    Raises:
        RuntimeError: The trainer stopped before a step.
    """
    made, over = 0, threading.Event()
    present = trainer.config, trainer.history  # of the steps made: a later reset leaves this history as it is

    def hear(event: Event) -> None:
        nonlocal made, present
        if isinstance(event, StepRecord):
            made, present = made + 1, (trainer.config, trainer.history)
        elif isinstance(event, ConfigChanged) and event.reset:
            made = 0
        if made >= steps or (isinstance(event, StateChanged) and event.state != "running"):
            over.set()

    unsubscribe = trainer.subscribe(hear)
    try:
        if run is not None:
            run(steps)
        while not over.wait(0.2) and trainer.state == "running":
            pass
    finally:
        unsubscribe()
    if made == 0:
        raise RuntimeError(f"run({steps}): the experiment stopped ({trainer.state}) before a step; call run() again.")
    return run_report(*present, min(made, steps))
