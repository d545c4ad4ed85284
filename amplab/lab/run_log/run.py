"""A run that was read back from its log."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amplab.diagnose import Finding, Findings, WhatIf, WhatIfs, run_findings
from amplab.diagnose.rules.ranks import RankEnd, rank_lost, ranks_findings
from amplab.display.table import Table
from amplab.display.text import visible
from amplab.lab.config import ExperimentConfig
from amplab.lab.findings import finding_from_log, observed_run, with_explained, with_lab_remedies
from amplab.lab.history import History
from amplab.lab.run_log.header import held_by
from amplab.lab.run_log.lock import is_held
from amplab.lab.run_log.ranks import RankDifference, findings_of_ranks, rank_differences, rank_table
from amplab.lab.watched_run import WatchedRun
from amplab.parallel.rank_state import RankState
from amplab.policies.signals import deferring_signals
from amplab.scalers import ScaleRule

__all__ = ["Run"]


@dataclass(frozen=True, eq=False)
class Run:
    """A run read back from its log.

    Attributes:
        path: The file.
        config: What the run started with, or what was watched.
        last_config: The config in effect at its end.
        history: Every step.
        events: The events as they were written: dicts with "event" and "step".
        truncated: Whether the last line was cut off, as after a kill; it is dropped.
        started: Time of the start, ISO 8601, UTC.
        version: The version of amplab that wrote the log.
        rank: Of the process that wrote the log; None for one process, and for the joined run of several.
        world_size: The number of processes that trained together.
        ranks: The runs of the single ranks, in order, if this is the run that they are together; see `ranks`.
        held: Host and inode of a rank's log, which its process locks while it writes it; ("", 0) if it could not.
    """

    path: Path
    config: ExperimentConfig | WatchedRun
    last_config: ExperimentConfig | WatchedRun
    history: History
    events: tuple[dict[str, Any], ...]
    truncated: bool
    started: str
    version: str
    rank: int | None = None
    world_size: int = 1
    ranks: tuple[Run, ...] = ()
    held: tuple[str, int] | None = None

    def findings(self) -> Findings:
        """Return what the rules find in the run, with the explanations of its skipped steps, the worst first."""
        found = list(run_findings(observed_run(self.history, self.last_config)))
        explained = self.explained
        if self.ranks:
            found += ranks_findings(
                {r: observed_run(each, self.last_config) for r, each in self.by_rank.items()},
                {each.rank or 0: each.states for each in self.ranks},
            )
            found += rank_lost({each.rank or 0: each.end for each in self.ranks})
            explained = findings_of_ranks({each.rank or 0: each.explained for each in self.ranks})
        ranked = with_explained(found, explained, [record.step for record in self.history.skips()])
        return with_lab_remedies(ranked) if isinstance(self.last_config, ExperimentConfig) else ranked

    @property
    def explained(self) -> list[tuple[int, Finding]]:
        """The findings in single steps, each with its step."""
        events = [event for event in self.events if event["event"] == "finding"]
        return [(event["step"], finding_from_log(event["finding"])) for event in events]

    @property
    def states(self) -> list[RankState]:
        """The states of this rank, for a comparison with others."""
        read = (RankState.from_dict(event) for event in self.events if event["event"] == "state")
        return [state for state in read if state is not None]

    @property
    @deferring_signals
    def end(self) -> RankEnd:
        """How the log of one rank ends; "unknown" if a process on another host may still write it."""
        steps, quiet = len(self.history), 0.0
        with suppress(OSError):
            quiet = max(0.0, time.time() - self.path.stat().st_mtime)
        last = self.events[-1] if self.events else {"event": ""}
        if (last["event"], last.get("step")) == ("end", steps):
            return RankEnd(steps, "closed", str(last.get("raised", "")), quiet)
        if self.held is None:  # of an earlier version, or of one process
            return RankEnd(steps, "running")
        with suppress(OSError):
            if self.held == tuple(held_by(self.path)):
                return RankEnd(steps, "running" if is_held(self.path) else "lost", quiet=quiet)
        return RankEnd(steps, "unknown", quiet=quiet)

    @property
    def differences(self) -> tuple[RankDifference, ...]:
        """Where the ranks differ although they must be equal; empty if they agree, and for one process."""
        return rank_differences(self.by_rank) if self.ranks else ()

    def rank_table(self) -> Table:
        """Return one line for each rank; ≠ marks a value that must be equal on all ranks and is not.

        Raises:
            ValueError: This is the run of one process.
        """
        if not self.ranks:
            raise ValueError(f"{self.path}: the log of one process; expected the folder of a run on several ranks.")
        return rank_table(self.by_rank)

    @property
    def by_rank(self) -> dict[int, History]:
        """The history of each rank; empty for one process."""
        return {each.rank or 0: each.history for each in self.ranks}

    def replay(self, rule: ScaleRule | str | None = None) -> WhatIf | WhatIfs:
        """Return what this run would have been under another loss-scaling rule; see `History.replay`."""
        return self.history.replay(rule)

    def __str__(self) -> str:
        """Return one line: what the run was, its numbers of steps and skips, and where its ranks differ."""
        steps, skips = len(self.history), self.history.skip_count
        cut = "; the last line was cut off and is dropped" if self.truncated else ""
        place = f" on rank {self.rank} of {self.world_size}" if self.rank is not None else ""
        if self.ranks:
            here = "" if len(self.ranks) == self.world_size else f", of which {len(self.ranks)} have a log here"
            place = f" on {self.world_size} ranks{here}"
        differ = "".join(f"; {each}" for each in self.differences)
        return visible(f"{self.config}{place}: {steps} steps, {skips} skipped{cut}{differ}")
