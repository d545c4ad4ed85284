"""The page of the folder: its example runs on two ranks, its links exist, its figures are those of the formulas."""

import math
import os
import re
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import amplab
from amplab.parallel.agreement_cost import (
    LatencyModel,
    agreement_bounds,
    agreement_time,
    harmonic,
    simulated_agreement,
)
from amplab.scalers import TORCH_DYNAMIC

FOLDER = Path(amplab.__file__).parent / "parallel"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")


def runs_the_example(_rank, folder):
    os.chdir(folder)
    scope = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(block, "README.md", "exec"), scope)
    return scope["scaler"].last_step.stepped, scope["norm"].isfinite().item()


def test_the_example_runs(tmp_path):
    assert run_ranks(runs_the_example, tmp_path) == [(True, True)] * 2
    assert (tmp_path / "run" / "rank_1.pt").exists()


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert links
    assert all((FOLDER / link).exists() for link in links)


@pytest.mark.parametrize("gpus", [8, 1000, 10_000])
def test_the_table_of_the_agreement(gpus):
    jitter = LatencyModel(jitter=5e-6)
    low, high = agreement_bounds(gpus, jitter)
    cells = [f"{gpus:,}", f"{jitter.hosts(gpus):,}", f"{agreement_time(gpus) * 1e6:.1f}"]
    cells += [f"{low * 1e6:.1f} to {high * 1e6:.1f}", r"([\d.]+)", f"{harmonic(gpus) * 100:.0f}", r"(\d+)"]
    cells += [f"{agreement_time(gpus, algorithm='ring') * 1e6:.0f}"]
    row = re.search(r"\| " + r" \| ".join(cells) + r" \|", PAGE)
    assert row
    for spread, printed in zip((0.0, 1e-4), row.groups(), strict=True):
        simulated = simulated_agreement(gpus, jitter, spread=spread, trials=200)
        error = 4 * simulated.std().item() / math.sqrt(200)
        assert simulated.mean().item() == pytest.approx(float(printed) * 1e-6, abs=error + 1e-6)


@pytest.mark.parametrize(("times", "falls"), [(0.5, False), (2.0, True)])
def test_the_skip_rate_at_which_the_scale_collapses(times, falls):
    """At half the rate of the page the scale rises, at twice the rate it falls: a random walk of 300,000 steps."""
    rate = math.log(2) / 2000 * times
    skips = torch.rand(300_000, generator=torch.Generator().manual_seed(0)) < rate
    growths = backoffs = clean = 0
    for skipped in skips.tolist():
        clean = 0 if skipped else clean + 1
        backoffs += skipped
        if clean == TORCH_DYNAMIC.growth_interval:
            growths, clean = growths + 1, 0
    assert (backoffs > growths) == falls


@pytest.mark.parametrize("gpus", [8, 1000, 10_000])
def test_the_other_tables(gpus):
    rate = math.log(2) / 2000 / gpus
    exponent = math.floor(math.log10(rate))
    digits = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    assert f"| {gpus:,} | {rate / 10**exponent:.1f} · 10{digits} |" in PAGE
    hours = 54 * 24 / 419 * 16_384 / gpus
    apart = f"{hours / 24:.0f} days" if hours > 100 else f"{hours:.2g} hours"
    minutes = math.sqrt(2 * 60 * hours * 3600) / 60
    every = f"{minutes / 60:.1f} hours" if minutes > 100 else f"{minutes:.0f} minutes"
    assert f"| {gpus:,} | {apart} | {every} | {math.sqrt(2 * 60 / hours / 3600) * 100:.1f} % |" in PAGE
    per_second = 2 * gpus * 42_471 / 400
    units = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
    row = re.search(rf"\| {gpus:,} \| ([\d.]+) (.B) \| (\d+) (.B) \|", PAGE)
    assert row
    assert float(row[1]) * units[row[2]] == pytest.approx(per_second, rel=0.03)
    assert float(row[3]) * units[row[4]] == pytest.approx(per_second * 86_400, rel=0.03)
