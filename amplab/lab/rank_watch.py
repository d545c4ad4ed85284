"""What the watch of one rank writes down, tells the watches of the other ranks, and reads of theirs. Nothing waits.

    after some steps    the state of this rank (`parallel.rank_state`), to its own log, when the next step begins: the
                        loop may average the weights after the optimizer's step
                        its scales, skips, states and findings, to the store of the process group
    after a skip        a finding if communication hooks still keep NaN of it when the next step begins
    findings()          reads what the other ranks have posted, for the rules that compare ranks

The logs of all ranks say the same to `load_run`, with the same rules.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from amplab.diagnose import Finding, Observation, StepObservation
from amplab.diagnose.remedies.api_styles import Api
from amplab.diagnose.rules.ranks import compression_keeps_nonfinite, model_of_a_rank_findings, ranks_findings
from amplab.lab.findings import LOOK_BACK, finding_from_log, finding_to_log
from amplab.lab.history import History
from amplab.lab.run_log.ranks import findings_of_ranks
from amplab.lab.run_store import RunStore
from amplab.parallel.rank_state import RankState, is_state_due
from amplab.parallel.ranks import PostedTexts, Rank, data_parallel, this_rank
from amplab.policies.signals import is_interrupt

__all__ = ["RankWatch"]

_WAIT = 2.0  # seconds for which the findings after a loop wait for ranks that are about to end theirs
_STATES = 16, 48  # that are posted: the first ones and the latest ones
_FINDINGS = 16  # that are posted


@dataclass(frozen=True)
class _Posted:
    """What another rank has posted."""

    has_ended: bool
    run: Observation
    states: list[RankState]
    found: list[tuple[int, Finding]]


class RankWatch:
    """The part of a watch that concerns several ranks; without others it does nothing.

    Args:
        model, optimizers: those of the loop.
        store: keeps the run of this rank.
        api: what scales the loss, for remedies.
        wrappers: returns the DistributedDataParallel that are known to be around the model.
        fail: called with a sentence if something fails; the loop goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        store: RunStore,
        *,
        api: Api,
        wrappers: Callable[[], Sequence[DistributedDataParallel]],
        fail: Callable[[str], object],
    ) -> None:
        self._api, self._wrappers = api, wrappers
        self._model, self._optimizers, self._store, self._fail = model, optimizers, store, fail
        self._place: Rank | None = None
        self._texts: PostedTexts | None = None
        self._states: list[RankState] = []
        self._due: int | None = None  # the step whose state is written down when the next one begins
        self._after_skip: int | None = None  # the step after a skipped one, until it begins
        self._kept: list[Finding] = []  # of communication hooks, after the last skip
        self._explained = self._skips = 0
        self._has_ended = self._has_raised = self._has_waited = False

    @property
    def is_due(self) -> bool:
        """Whether `at_forward` has something to write down."""
        return self._due is not None or self._after_skip is not None

    def at_forward(self) -> None:
        """Write down and post what is due after the last step. Sync: one if something is."""
        step, self._due = self._due, None
        begins, self._after_skip = self._after_skip, None
        try:
            if begins is not None:
                self._look_at_compression(begins)
            if step is not None:
                self._note_state(step)
                self._post()
        except Exception as error:  # a comparison of ranks must not end the loop
            if is_interrupt(error):
                raise
            self._give_up(error)

    def after_step(self, step: int, *, batch_size: int | None, level: str | None) -> None:
        """Write down and post what is due after a step. Sync: none; one if no forward was seen since a state was due.

        Args:
            step: its number.
            batch_size: samples of this rank; None if unknown.
            level: the opt_level, if amp.initialize is used.
        """
        if step == 0:
            self._place = this_rank()
        if self._place is None:
            return
        self._after_skip = None
        if self._due is not None:  # the loop calls the model by another wrapper than the watch has
            self._due = step
            self.at_forward()
        self._due = step if is_state_due(step) else None
        skips, self._skips = self._skips, self._store.history.skip_count
        if self._skips > skips:
            self._after_skip = step + 1
        explained = self._store.history.explained_count
        if step and explained == self._explained:
            return  # most steps
        self._explained = explained
        try:
            if step == 0:
                for found in model_of_a_rank_findings(self._model, batch_size, level):
                    self._store.find(step, found)
            self._post()
        except Exception as error:  # a comparison of ranks must not end the loop
            if is_interrupt(error):
                raise
            self._give_up(error)

    def _look_at_compression(self, step: int) -> None:
        """Find what communication hooks keep of the skipped step before: the loop may clear it after its update."""
        wrappers = dict.fromkeys((*data_parallel(self._model), *self._wrappers()))
        found = list(compression_keeps_nonfinite(wrappers, self._api))
        for each in found if found != self._kept else ():  # once for all the skips that it causes
            self._store.find(step, each)
        self._kept = found

    def end(self, raised: str) -> None:
        """The loop has ended, with an exception or with none."""
        self._has_ended, self._has_raised = True, bool(raised)
        if self._place is None:
            return
        try:
            steps = len(self._store.history)
            if not raised and steps and (not self._states or self._states[-1].step < steps - 1):
                self._note_state(steps - 1)
            self._post()
            if self._texts is not None:
                self._texts.end()
        except Exception as error:
            if is_interrupt(error):
                raise
            if not raised:  # else the other ranks, and the store with them, may have ended
                self._give_up(error)

    def findings(self, own: Observation) -> tuple[list[Finding], list[tuple[int, Finding]], list[str]]:
        """Return what ranks differ in, the (step, finding) of all ranks, and which ranks were compared.

        The first call after the loop waits up to 2 seconds for ranks that have not ended theirs yet.

        Args:
            own: the run of this rank.
        """
        explained = list(self._store.found)
        if self._place is None:
            return [], explained, []
        others = self._others()
        silent = [rank for rank in range(self._place.world_size) if rank not in (*others, self._place.rank)]
        runs = {rank: each.run for rank, each in others.items()} | {self._place.rank: own}
        states = {rank: each.states for rank, each in others.items()} | {self._place.rank: self._states}
        found = {rank: each.found for rank, each in others.items()} | {self._place.rank: explained}
        told = [f"compared with {_named(list(others))}"] if others else []
        if silent:
            told.append(
                f"not looked at: {_named(silent)}; watch the loop on every rank, and call findings() before "
                "destroy_process_group()"
            )
        differ = ranks_findings(dict(sorted(runs.items())), dict(sorted(states.items()))) if others else []
        return differ, findings_of_ranks(dict(sorted(found.items()))), told

    def _others(self) -> dict[int, _Posted]:
        """Return what the other ranks have posted; the first time after the loop, when they have ended theirs."""
        waits = self._has_ended and not self._has_raised and not self._has_waited and this_rank() is not None
        self._has_waited = self._has_waited or waits
        until = time.monotonic() + (_WAIT if waits else 0.0)
        number = 1 if self._place is None else self._place.world_size
        while True:
            try:
                others = self._read()
            except RuntimeError:  # no process group any more, or its store has ended
                return {}
            if time.monotonic() >= until or sum(each.has_ended for each in others.values()) == number - 1:
                return others
            time.sleep(0.02)

    def _read(self) -> dict[int, _Posted]:
        try:
            texts = {} if self._texts is None else self._texts.read()
            return {rank: _read(json.loads(text)) for rank, text in texts.items()}
        except (ValueError, KeyError, TypeError):  # of another version
            return {}

    def _note_state(self, step: int) -> None:
        state = RankState.of(step, self._model, self._optimizers, self._wrappers())
        self._states.append(state)
        self._store.keep_state(state)
        first, latest = _STATES
        if len(self._states) > 2 * (first + latest):
            self._states[first:-latest] = []

    def _post(self) -> None:
        if self._texts is None:
            self._texts = PostedTexts("watch")
        first, latest = _STATES
        states = self._states if len(self._states) <= first + latest else self._states[:first] + self._states[-latest:]
        text = {
            "ended": self._has_ended,
            **_steps_of(self._store.history),
            "states": [each.as_dict() for each in states],
            "found": [[step, finding_to_log(each)] for step, each in list(self._store.found)[-_FINDINGS:]],
        }
        self._texts.post(json.dumps(text))

    def _give_up(self, error: Exception) -> None:
        self._place = None
        self._fail(f"the ranks are not compared: {type(error).__name__}: {error}")


def _steps_of(history: History) -> Mapping[str, Any]:
    """Return the latest steps in few numbers: where they begin and end, the changes of the scale, and the skips."""
    start = max(0, len(history) - LOOK_BACK)
    scales, skipped = (history.column(name)[start:] for name in ("loss_scale", "skipped"))
    changes = np.flatnonzero(np.diff(scales, prepend=np.nan) != 0)
    return {
        "start": start,
        "end": len(history),
        "scales": [[int(place), float(scales[place])] for place in changes],
        "skips": np.flatnonzero(skipped).tolist(),
    }


def _read(text: Mapping[str, Any]) -> _Posted:
    start, skips, scales = text["start"], set(text["skips"]), dict(text["scales"])
    steps, scale = [], 1.0
    for place in range(text["end"] - start):
        scale = scales.get(place, scale)
        steps.append(StepObservation(start + place, None, scale, place in skips))
    states = [state for each in text["states"] if (state := RankState.from_dict(each)) is not None]
    found = [(step, finding_from_log(fields)) for step, fields in text["found"]]
    return _Posted(text["ended"], Observation(tuple(steps)), states, found)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
