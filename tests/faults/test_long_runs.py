"""Long runs: a million steps in bounded memory, loaded and replayed in seconds; watches that leave nothing behind."""

import math
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import amplab
from amplab.formats import exponent_histogram
from amplab.lab import COLUMNS, ExperimentConfig, GradientSample, History, SkipExplanation, load_run
from amplab.lab.findings import LOOK_BACK, observed_run
from amplab.lab.run_log import RunLog
from amplab.lab.run_status import run_status
from amplab.scalers import PUBLISHED_RULES
from amplab.views.live_payload import frame_rows
from amplab.views.tabs.scale_payload import dynamics
from amplab.views.tabs.skipped_payload import skipped_payload

SHORT, LONG = 20_000, 1_000_000
STEPS = [SHORT, pytest.param(LONG, marks=pytest.mark.long)]
SECONDS_OF_A_MILLION = 10.0  # twice what was measured while other processes shared the two cores


def write(path: Path, steps: int) -> Path:
    """A log as torch's rule writes it, with gradients whose exponents are spread around -5."""
    log, generator, scale, clean = RunLog(path, ExperimentConfig()), random.Random(0), 65536.0, 0
    for step in range(steps):
        exponent = float(math.floor(generator.gauss(-5, 1.2)))
        used, skipped = scale, scale * 2.0**exponent >= 65520.0
        clean = 0 if skipped else clean + 1
        if skipped or clean == 2000:
            scale, clean = scale / 2 if skipped else scale * 2, 0
        name = "hidden1.weight" if skipped else None
        score = generator.random() if step % 25 == 24 else None
        exponent = math.inf if skipped else exponent
        loss, seconds = generator.random(), 0.001 * step
        log.append_row((step, loss, used, scale, skipped, name, "O1", score, seconds, None, exponent))
    log.close()
    return path


def cpu_seconds(call: Callable[[], object]) -> float:
    """The best of three."""
    taken = []
    for _ in range(3):
        began = time.process_time()
        call()
        taken.append(time.process_time() - began)
    return min(taken)


@pytest.mark.parametrize("steps", STEPS)
def test_a_log_loads_and_replays_in_seconds_and_in_little_memory(tmp_path: Path, steps: int) -> None:
    path, allowed = write(tmp_path / "run.jsonl", steps), SECONDS_OF_A_MILLION * max(steps / LONG, 0.2)
    assert path.stat().st_size < 100 * steps
    assert cpu_seconds(lambda: load_run(path)) < allowed
    tracemalloc.start()
    try:
        run = load_run(path)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 30e6
    assert list(run.replay("torch").scales) == run.history.column("loss_scale").tolist()
    for rule in PUBLISHED_RULES:
        assert cpu_seconds(lambda rule=rule: run.replay(rule)) < allowed
    assert cpu_seconds(run.findings) < allowed


def test_what_a_chart_costs_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """The whole run, a part of it and one step; the first drawing reads everything once."""
    history = load_run(write(tmp_path / "run.jsonl", SHORT)).history
    long = History()
    for _ in range(LONG // SHORT):
        start = len(long)
        long.extend({name: history.column(name).tolist() for name in COLUMNS} | {"step": range(start, start + SHORT)})
    for run in (history, long):
        run.thinned(["loss", "loss_scale"], 800)
    middle = LONG // 2
    assert cpu_seconds(lambda: long.thinned(["loss", "loss_scale"], 800)) < 0.1
    assert cpu_seconds(lambda: long.thinned(["loss", "loss_scale"], 800, middle, middle + 500)) < 0.1
    assert cpu_seconds(lambda: long.record(middle)) < 0.01
    assert len(long) == LONG


TICK: dict[str, Callable[[History], object]] = {
    "charts": frame_rows,
    "skipped": skipped_payload,
    "scale": lambda history: dynamics(history, ExperimentConfig(), 65536.0, None),
    "status": lambda history: run_status(history, floor=1.0),
    "findings": observed_run,
}
"""What the dashboard computes while a run goes on, up to ten times a second."""


def lengthen(history: History, steps: int) -> None:
    """Add steps; every 23rd is skipped and explained, and gradients are measured every 500 steps."""
    first = len(history)
    numbers = range(first, first + steps)
    skipped = [step % 23 == 22 for step in numbers]
    row: tuple[object, ...] = (0, 2.0, 65536.0, 65536.0, False, None, "O1", None, 0.0, None, -4.0)
    values = {name: [value] * steps for name, value in zip(COLUMNS, row, strict=True)}
    history.extend(values | {"step": numbers, "skipped": skipped, "seconds": [0.001 * step for step in numbers]})
    for step in [each for each in numbers if each % 23 == 22]:
        history.explain(SkipExplanation(step, ("scale", "data")[step % 2], "too large"))
    for step in numbers[::500]:
        history.keep(GradientSample(step, 65536.0, exponent_histogram(torch.ones(4))))


@pytest.mark.parametrize("name", TICK)
def test_what_the_dashboard_computes_does_not_grow_with_the_run(name: str) -> None:
    short, long, draw = History(), History(), TICK[name]
    lengthen(short, LOOK_BACK + 1000)
    for _ in range(8):
        lengthen(long, LONG // 10)
    assert long.explained_count == long.skip_count > 30_000
    for history in (short, long):
        draw(history)  # the first drawing reads everything once
    assert cpu_seconds(lambda: draw(long)) < 4 * cpu_seconds(lambda: draw(short)) + 0.002


def used() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts the open files in /proc")
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.long)])
def test_watches_leave_no_thread_and_no_file_open(tmp_path: Path, count: int) -> None:
    def watched(number: int) -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with amplab.watch(model, optimizer, log=tmp_path / f"{number}.jsonl") as w:
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(torch.ones(2, 4)).square().mean()
                w.loss(loss)
                loss.backward()
                optimizer.step()

    watched(0)
    before = used()
    for number in range(1, count):
        watched(number)
    assert used() == before
