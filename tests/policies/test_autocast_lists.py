"""PyTorch's autocast test lists for CUDA, on the CPU: the dtype asked for, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def lists():
    """What the script says, table by table."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("autocast_lists.py"))],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def test_all_entries_that_a_cpu_can_run_are_bit_equal_to_manual_casts(lists):
    results = lists["torch_cuda"]["cast"]
    impossible = [name for name, said in results.items() if said == "impossible on a CPU"]
    assert len(impossible) == 3
    assert {name: said for name, said in results.items() if said != "equal" and name not in impossible} == {}
    assert list(results.values()).count("equal") >= 96


def test_apexs_table_differs_in_tensordot_alone(lists):
    results = lists["apex"]["cast"]
    others = {name.rpartition(" ")[2] for name, said in results.items() if said not in ("equal", "impossible on a CPU")}
    assert others == {"tensordot"}  # which it lowers as the matrix product that it is


@pytest.mark.parametrize("table", ["apex", "torch_cuda"])
def test_mixed_arguments_promote(lists, table):
    found = lists[table]["promoted"]
    assert len(found) > 20
    # equal() returns a plain bool.
    assert all(given in (expected, "bool") for given, expected in (said.split() for said in found.values()))
