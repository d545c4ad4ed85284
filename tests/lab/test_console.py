"""Training in a terminal: what is printed, where the log goes, and what an interrupt leaves."""

import io
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from amplab.lab import ExperimentConfig, load_run
from amplab.lab.console import train

SMALL = ExperimentConfig(hidden=16)


def test_it_prints_the_config_the_skips_and_a_table(runs: Path):
    out = io.StringIO()
    summary = train(SMALL.changed(init_scale=2.0**24, max_loss_scale=2.0**24), steps=30, stream=out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "amplab/1 task=digits model=mlp opt_level=O1 hidden=16 init_scale=2**24"
    skips = [line for line in lines if line.endswith("step skipped, scale now 2^23")]
    assert skips[0].startswith("step 0: gradient overflow in ")
    assert " at loss scale 2^24; " in skips[0]
    assert summary.skipped == sum("step skipped" in line for line in lines) > 0
    assert [(line[:16].strip(), line[16:]) for line in lines[-10:-6]] == [
        ("steps", f"30, {summary.skipped} skipped"),
        ("loss", f"{summary.loss:.4f}"),
        ("accuracy", f"{100 * summary.score:.1f} % on held-out data"),
        ("loss scale", f"2^{int(summary.loss_scale).bit_length() - 1} (dynamic)"),
    ]
    assert [line[:16].strip() for line in lines[-6:]] == [
        "speed", "parameters", "gradients", "master weights", "optimizer state", "run log",
    ]  # fmt: skip
    assert lines[-5][16:] == "5.93 kB"  # decimal, as in the dashboard
    assert lines[-1][16:] == str(summary.log_path)
    assert "\r" not in out.getvalue()
    assert summary.log_path.parent == runs
    assert len(load_run(summary.log_path).history) == summary.steps == 30
    assert summary.exit_status == 0


def test_a_second_run_leaves_the_first_log_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    first = train(SMALL, steps=2, log_path=path, stream=io.StringIO())
    second = train(SMALL, steps=3, log_path=path, stream=io.StringIO())
    assert (first.log_path, second.log_path) == (path, tmp_path / "run-2.jsonl")
    assert [len(load_run(log).history) for log in (first.log_path, second.log_path)] == [2, 3]


def test_a_log_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("AMPLAB_RUNS", str(blocked / "runs"))
    out = io.StringIO()
    summary = train(SMALL, steps=2, stream=out)
    assert f"log: cannot write {blocked / 'runs'}" in out.getvalue()
    assert out.getvalue().endswith("none: it could not be written\n")
    assert (summary.steps, summary.exit_status) == (2, 1)


@pytest.mark.parametrize("name", ["runs", "run.jsonl"])
def test_a_place_for_the_log_that_was_named_must_be_writable(tmp_path, name):
    blocked = tmp_path / "file"
    blocked.write_text("")
    out = io.StringIO()
    with pytest.raises(ValueError, match="cannot write there"):
        train(SMALL, steps=2, log_path=blocked / name, stream=out)
    assert out.getvalue() == ""


def test_bad_requests_are_refused_before_anything_runs(runs: Path):
    with pytest.raises(ValueError, match="steps=0"):
        train(SMALL, steps=0, stream=io.StringIO())
    with pytest.raises(ValueError, match="batch_size=5000"):
        train(SMALL.changed(batch_size=5000), steps=1, stream=io.StringIO())
    assert not runs.exists()


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal and SIGINT")
def test_a_terminal_gets_a_bar_and_an_interrupt_leaves_a_table_and_a_log(tmp_path):
    code = (
        "import sys; from amplab.lab import ExperimentConfig; from amplab.lab.console import train; "
        "sys.exit(train(ExperimentConfig(hidden=16), steps=10**6, log_path=sys.argv[1]).exit_status)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run.jsonl")]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    seen = ""
    end = time.monotonic() + 60
    while "] " not in seen or seen.count("\r") < 8:
        assert time.monotonic() < end
        seen += os.read(ours, 4096).decode()
    process.send_signal(signal.SIGINT)
    while True:
        try:
            chunk = os.read(ours, 4096).decode()
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(ours)
    assert process.wait(30) == 130
    with process.stderr as errors:
        assert errors.read() == b""
    assert "[........................] " in seen
    assert "/1000000  loss " in seen
    assert "interrupted" in seen
    assert f"run log         {tmp_path / 'run.jsonl'}" in seen
    run = load_run(tmp_path / "run.jsonl")
    assert not run.truncated
    assert f"steps           {len(run.history)}, " in seen


@pytest.mark.skipif(os.name != "posix", reason="needs SIGINT")
def test_a_second_interrupt_does_not_wait_for_the_end_of_a_long_step(tmp_path):
    """The thread of the step is inside torch then, where the end of Python would abort the process.

    A step of many batches ends after one of them; this one has one.
    """
    long_step = ["--task", "text", "--model", "lstm", "--hidden", "2048", "--batch-size", "256"]
    command = [sys.executable, "-m", "amplab", "train", *long_step, "--log", str(tmp_path / "run.jsonl")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert any(line.startswith("0/300") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            assert any("Press Ctrl+C again to end now." in line for line in process.stdout)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert process.stderr.read() == ""
        finally:
            process.kill()
