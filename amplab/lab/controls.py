"""What any thread wants of a trainer's own thread: its state, its speed, and changes and answers that wait.

A control takes effect at once in `state`, and in the thread at the next step boundary, where it is announced. A step
that is made meanwhile can be withdrawn, so that a control need not wait for its end. The thread is in `worker.py`.

A control takes effect as a whole or not at all: an exception or Ctrl-C in it leaves what was wanted and queued before.
A state without its announcement would have steps withdrawn for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from amplab.lab.config import ExperimentConfig
from amplab.lab.worker import Worker

__all__ = ["Controls"]

_WANTED = (
    "state",
    "config",
    "stops",
    "steps_asked",
    "steps_left",
    "_counted_from",
    "_changes",
    "_replacing",
    "_setting",
)  # what a control changes


class Controls:
    """The controls of one trainer.

    Args:
        config: In effect at first.
        step: Makes the next step of a run that goes on.
        announce: Called in the thread, with a state and a note, when it has come to the state.
        on_idle: Called under `lock` when the last change that waited is made.
        on_error: As of the `Worker`.
        on_rest: As of the `Worker`.

    Attributes:
        worker: The thread and its queue.
        lock: The worker's; guards the attributes of this object.
        state: As the last control wants it; see `Trainer`.
        config: In effect once all changes that wait are made.
        announced: The state that the thread has come to.
        stops: Calls of `stop` whose effect is to come.
        steps_made: Also of runs that another has replaced.
        steps_asked: By the last start; None for no limit.
        steps_left: Of these, until the run pauses.
        speed: Steps per second at most, None for full speed.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        step: Callable[[], None],
        announce: Callable[[str, str], None],
        on_idle: Callable[[], None],
        on_error: Callable[[str], None],
        on_rest: Callable[[], None],
    ) -> None:
        self._step, self._announce, self._on_idle = step, announce, on_idle
        self.worker = Worker(
            step=self._make_next,
            is_wanted=lambda: self.state == "running",
            on_error=on_error,
            seconds_left=lambda: self._due - time.monotonic(),
            on_rest=on_rest,
        )
        self.lock = self.worker.lock
        self.state = self.announced = "ready"
        self.config = config
        self.stops = self.steps_made = 0
        self.steps_asked: int | None = None
        self.steps_left: int | None = None
        self.speed: float | None = None
        self._due = 0.0  # when the next step may begin, by time.monotonic()
        self._begun = self._counted_from = 0  # steps, and those of them that a start does not count
        self._changes = frozenset[Callable[[], None]]()  # that wait in the queue, or are made now
        self._replacing = frozenset[Callable[[], None]]()  # those that wait and may replace the present run
        self._setting = frozenset[Callable[[], None]]()  # those that wait and whose state is set already
        self._answers = set[str]()
        self._is_withdrawn: bool | None = None  # the step that is made now, by a control; None between steps
        self._is_asked_for = False  # whether that step was asked for by itself

    @property
    def is_replacing(self) -> bool:
        """Whether another run is wanted in place of the present one, or none."""
        return bool(self._replacing) or self.state == "stopped"

    @property
    def is_state_set(self) -> bool:
        """Whether a stop or a reset waits: the state that follows it is set, whatever run comes before."""
        return self.stops > 0 or bool(self._setting)

    @property
    def is_announced(self) -> bool:
        """Whether the thread has come to the state that is wanted."""
        return self.state == self.announced

    # Any thread

    def refuse_unless_alive(self, call: str) -> None:
        """Raise a RuntimeError if the run has stopped or failed, or Python ends."""
        self.worker.refuse_at_end()
        if self.state in ("stopped", "failed"):
            raise RuntimeError(f"{call}: the run has {self.state}; call reset() to start again.")

    def as_whole(self, control: Callable[[], None]) -> None:
        """Call `control`; if it raises, also because of Ctrl-C, put back what was wanted and queued before.

        The thread takes nothing from the queue meanwhile: it needs the lock.
        """
        with self.lock:
            wanted, queued = {name: getattr(self, name) for name in _WANTED}, self.worker.queued
            try:
                control()
            except BaseException:
                vars(self).update(wanted)
                self.worker.queued = queued
                raise

    def enter(self, state: str, note: str = "", *, again: bool = False) -> None:
        """Want another state, or the same one again, and withdraw the step that is made now."""

        def enter() -> None:
            if self.state != state or again:
                self.state = state
                self.worker.post(partial(self._come_to, state, note))
                self.withdraw(ends_run=state in ("ready", "stopped"))

        self.as_whole(enter)

    def start(self, steps: int | None) -> None:
        """Want steps to be made: so many after the one that is made now, or None for no limit."""

        def start() -> None:
            self.steps_asked = self.steps_left = steps
            self._counted_from = self._begun
            if self.state != "running":
                self._due = 0.0
            self.enter("running")

        self.as_whole(start)

    def pause(self) -> None:
        """Want no more steps, if some are wanted."""
        with self.lock:
            if self.state == "running":
                self.enter("paused")

    def pace(self, speed: float | None) -> None:
        """Limit the steps per second; the next step is due as long after the last one as the new speed says."""
        with self.lock:
            begun = self._due - _period(self.speed)
            self.speed, self._due = speed, begun + _period(speed)  # at once: the due time is of this speed
            self.worker.wake()

    def change(self, make: Callable[[], object], *, replaces: bool = False, sets_state: bool = False) -> None:
        """Change the run at the next step boundary, or put another one in its place.

        Args:
            make: Changes it.
            replaces: Whether another run may come in its place.
            sets_state: Whether the caller sets the state that follows.

        Raises:
            RuntimeError: In a forked process.
        """

        def make_once() -> None:
            with self.lock:
                self._replacing -= {make_once}
                self._setting -= {make_once}
            try:
                make()
            finally:
                with self.lock:
                    self._changes -= {make_once}
                    if not self._changes:
                        self._on_idle()

        def want() -> None:
            self._changes |= {make_once}
            self._replacing |= {make_once} if replaces else set()
            self._setting |= {make_once} if sets_state else set()
            self.worker.post(make_once)
            self.withdraw()

        self.as_whole(want)

    def in_turn(self, make: Callable[[], object]) -> None:
        """Make at once what does not wait for a step, or after the changes that wait."""
        with self.lock:
            if self._changes:
                self.change(make)
            else:
                make()

    def answer(self, name: str, give: Callable[[], None]) -> None:
        """Give an answer at the next step boundary, unless one of this name waits already."""

        def give_once() -> None:
            self._answers.discard(name)
            give()

        with self.lock:
            if name not in self._answers:
                self.worker.post(give_once)  # first: Ctrl-C leaves no name that is never answered
                self._answers.add(name)

    def withdraw(self, *, ends_run: bool = False) -> None:
        """Take back the step that is made now, if it can be stopped.

        One that was asked for by itself is made, unless the run ends: what was called after `step` finds it made.
        """
        with self.lock:
            if self._is_withdrawn is False and (ends_run or not self._is_asked_for):
                self._is_withdrawn = True

    # The trainer's thread

    @contextmanager
    def withdrawable(self, *, is_asked_for: bool = False) -> Iterator[None]:
        """Let controls withdraw the step that the block makes, also those that came just before it."""
        with self.lock:
            ends_run = not self.is_announced and self.state in ("ready", "stopped")
            is_changed = not self.is_announced or bool(self._changes)
            came_before = ends_run or (is_changed and not is_asked_for)
            self._is_withdrawn, self._is_asked_for = came_before, is_asked_for
        try:
            yield
        finally:
            self._is_withdrawn = None

    def goes_on(self) -> bool:
        """Whether no control has withdrawn the step that is made now."""
        return not self._is_withdrawn

    def begin_step(self) -> None:
        """A step begins now: the next one is due after it."""
        with self.lock:
            self._begun += 1
            self._due = time.monotonic() + _period(self.speed)

    def leave_step(self) -> None:
        """The step that has begun was not made: it is due at once."""
        self._due = 0.0

    def count_step(self) -> None:
        """A step is made; pause after the last one that was wanted."""
        with self.lock:
            self.steps_made += 1
            if self.steps_left is not None and self._begun > self._counted_from:
                self.steps_left -= 1
                if self.steps_left <= 0:
                    self.pause()

    def _make_next(self) -> None:
        with self.withdrawable():
            self._step()

    def _come_to(self, state: str, note: str) -> None:
        self.announced = state
        self._announce(state, note)


def _period(speed: float | None) -> float:
    """Return the seconds from one step to the next, 0 at full speed."""
    return 0.0 if speed is None else 1.0 / speed
