"""``amplab bench``: the table on stdout, progress on stderr, JSON in a file, and one sentence for bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from amplab.bench import SUITES
from amplab.bench.suites import DEFAULT_ROUNDS
from amplab.cli import BENCH_SUITES, build_parser, main

ROOT = Path(__file__).resolve().parents[2]


def test_bench_prints_a_table_and_writes_json(tmp_path):
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "amplab", "bench", "scaler", "--rounds", "1", "--json", str(path)]
    environment = {**os.environ, "AMPLAB_KERNELS": "reference"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    # Whether goals are met or not: pure torch meets few of them.
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("what ")
    assert "goals met" in result.stdout
    assert result.stderr.startswith("1/")
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["suite"] == "scaler"
    assert written["machine"]["kernels"] == "reference"
    assert len(written["rows"]) == len(SUITES["scaler"]()) == result.stderr.count("\n")


def test_the_command_knows_the_suites():
    assert set(BENCH_SUITES) == set(SUITES)
    assert build_parser().parse_args(["bench", "scaler"]).rounds == DEFAULT_ROUNDS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dance"], ["'dance'", "scaler", "casting", "kernels"]),
        ([], ["scaler|casting|kernels|xray|diagnose"]),
        (["scaler", "--rounds", "0"], ["'0'", "whole number > 0"]),
        (["scaler", "--json", "{}"], ["--json", "writable folder"]),
        (["scaler", "--json", "{}/nowhere/figures.json"], ["nowhere", "writable folder"]),
    ],
)
def test_bad_input_is_refused_in_one_sentence(capsys, tmp_path, arguments, said):
    try:
        status = main(["bench", *(word.format(tmp_path) for word in arguments)])
    except SystemExit as exit_:
        status = exit_.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    for words in said:
        assert words in printed.err
