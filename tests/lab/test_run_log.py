"""The run log: every line is JSON, everything comes back, damage and foreign files are named."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import amplab
from amplab.amp.run_state.paths import given_path
from amplab.cli import main
from amplab.formats import exponent_histogram
from amplab.lab import ExperimentConfig, GradientSample, RunLog, StepRecord, Trainer, load_run, runs_directory
from amplab.lab.events import MixedScales
from amplab.lab.findings import observed_run
from amplab.lab.history import row_of
from amplab.lab.run_log import check_writable, free_path, new_path
from amplab.lab.run_log.writer import ClosedLog
from amplab.lab.run_store import RunStore
from amplab.lab.watched_run import WatchedRun
from amplab.launch import LaunchError, lessons_directory
from amplab.parallel.ranks import Rank

CONFIG = ExperimentConfig(seed=3)
RECORDS = [
    StepRecord(0, 2.302585, 65536.0, 65536.0, False, None, "O1", None, 0.01, None),
    StepRecord(1, math.nan, 65536.0, 32768.0, True, "hidden1.weight", "O1", None, 0.02, "nan"),
    StepRecord(2, math.inf, 32768.0, 16384.0, True, "hïdden.weight", "O1", None, 0.03, "overflow+underflow"),
    StepRecord(3, -math.inf, 2.0**-149, 0.1, False, None, "O2", 0.96, 0.04, None, -7.0),
    StepRecord(4, 1.0, 4.0, 4.0, False, None, "O2", None, 0.05, None, -math.inf),
]

SAMPLE = GradientSample(3, 2.0**16, exponent_histogram(torch.tensor([0.0, 2.0**-30, 1.5, -1.0, math.inf, math.nan])))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    log = RunLog(tmp_path / "deep" / "run.jsonl", CONFIG)
    for record in RECORDS[:3]:
        log.append(record)
    log.note("config", step=3, config=str(CONFIG.changed(opt_level="O2")))
    log.append(RECORDS[3])
    log.keep(SAMPLE)
    log.append(RECORDS[4])
    log.close()
    return log.path


def refuse_constant(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def test_a_run_is_read_back_unchanged(path):
    run = load_run(path)
    assert list(map(repr, run.history.records())) == list(map(repr, RECORDS))  # repr: NaN equals itself there
    assert (run.config, run.last_config) == (CONFIG, CONFIG.changed(opt_level="O2"))
    assert [event["event"] for event in run.events] == ["config"]
    (sample,) = run.history.gradient_samples
    assert (sample.step, sample.loss_scale, sample.histogram.total) == (3, 2.0**16, 6)
    assert dict(zip(sample.histogram.exponents, sample.histogram.counts, strict=True))[0] == 2
    assert sample.histogram + SAMPLE.histogram == SAMPLE.histogram + SAMPLE.histogram
    assert not run.truncated
    assert str(run) == f"{CONFIG}: 5 steps, 2 skipped"


def test_a_log_of_the_first_format_loads(path, tmp_path):
    header, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    header |= {"amplab_run": 1, "columns": [{"score": "accuracy"}.get(name, name) for name in header["columns"][:-1]]}
    old = [header, *(line[:-1] if isinstance(line, list) else line for line in lines[:-1])]  # without the checksum
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old), encoding="utf-8")
    history = load_run(tmp_path / "old.jsonl").history
    assert [record.loss_scale for record in history.records()] == [record.loss_scale for record in RECORDS]
    assert {record.grad_exponent for record in history.records()} == {None}


def test_a_log_from_before_scales_were_recorded_loads(tmp_path):
    lines = [
        '{"amplab_run":2,"amplab":"0.1.0","started":"2026-01-02T03:04:05+00:00","config":"watched/1 model=Net '
        'optimizer=SGD scaling=amplab opt_level=–","columns":["step","loss","loss_scale","next_loss_scale","skipped",'
        '"first_nonfinite","opt_level","accuracy","seconds","injected","grad_exponent"]}',
        '[0,2.31,65536.0,32768.0,true,"0.weight","–",null,0.0021,null,"inf"]',
        '[1,"nan",32768.0,32768.0,false,null,"–",null,0.0042,null,-5.0]',
    ]
    (tmp_path / "old.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = load_run(tmp_path / "old.jsonl")
    assert [record.next_loss_scale for record in run.history.records()] == [32768.0, 32768.0]
    assert run.history.mixed_scales == ()
    assert [step.backward_scales for step in observed_run(run.history)] == [(), ()]


HEADER = (
    '{"amplab_run":%d,"amplab":"0.1.0","started":"2026-01-02T03:04:05+00:00","config":"%s","columns":["step","loss",'
    '"loss_scale","next_loss_scale","skipped","first_nonfinite","opt_level","accuracy","seconds","injected",'
    '"grad_exponent"]}'
)
WATCHED = "watched/1 model=Net optimizer=SGD scaling=none opt_level=–"


def loaded(tmp_path, losses, version, config=WATCHED):
    step = '[%d,%s,1.0,1.0,false,null,"–",null,0.0021,null,null]'
    lines = [HEADER % (version, config), *(step % each for each in enumerate(losses))]
    (tmp_path / "run.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return load_run(tmp_path / "run.jsonl")


@pytest.mark.parametrize(
    ("version", "losses", "untold"),
    [
        (3, ["null", "0.5", '"nan"'], {0}),
        (3, ['"nan"'] * 3, set()),
        (2, ['"nan"'] * 3, {0, 1, 2}),  # which had no other word for it
        (2, ['"nan"', "0.5", '"nan"'], set()),
    ],
)
def test_a_missing_loss_is_read_back_as_none(tmp_path, version, losses, untold):
    run = loaded(tmp_path, losses, version)
    assert run.history.missing_losses() == untold
    steps = observed_run(run.history, run.config)
    assert [step.loss is None for step in steps] == [number in untold for number in range(3)]
    assert [math.isnan(record.loss) for record in run.history.records()] == [each != "0.5" for each in losses]
    assert ("nonfinite-loss" in [each.name for each in run.findings()]) == (untold != {0, 1, 2})
    assert (steps.scaling, steps.dynamic, steps.level) == ("none", False, "")


def test_a_missing_loss_is_null_in_the_log(tmp_path):
    log = RunLog(tmp_path / "told.jsonl", WatchedRun.parse(WATCHED))
    log.append_row((0, None, *row_of(RECORDS[0])[2:]))
    log.close()
    assert json.loads((tmp_path / "told.jsonl").read_text(encoding="utf-8").splitlines()[1])[1] is None
    assert load_run(tmp_path / "told.jsonl").history.missing_losses() == {0}


@pytest.mark.parametrize("name", ["Net(dim=3, p=2)", "Net[int,\u2028str] 50%20x opt_level=O1", "N" * 70_000])
def test_a_log_of_a_class_with_any_name_loads(tmp_path, name):
    log = RunLog(tmp_path / "run.jsonl", WatchedRun(name, "Adam(a=1, b=2)", "apex", "O2"))
    log.append(RECORDS[0])
    log.close()
    assert load_run(log.path).config == WatchedRun(name[:1000], "Adam(a=1, b=2)", "apex", "O2")


def test_the_name_of_a_watched_class_has_no_control_characters_in_what_is_shown(tmp_path: Path) -> None:
    name = "N\x1b[2J\x9b\u202eet\u2066"
    log = RunLog(tmp_path / "run.jsonl", WatchedRun(name, "Adam", "apex", "O2"))
    log.close()
    shown = str(load_run(log.path).config)
    assert shown == "watched/1 model=N%1B[2J%C2%9B%E2%80%AEet%E2%81%A6 optimizer=Adam scaling=apex opt_level=O2"
    assert WatchedRun.parse(shown).model == name
    assert str(WatchedRun("\ud800", "Adam", "apex")).split()[1] == "model=%3F"  # half of a pair is no character


def test_the_scales_of_a_step_come_back_in_a_line_of_their_own(tmp_path):
    log = RunLog(tmp_path / "run.jsonl", CONFIG)
    mixed = MixedScales(0, (65536.0, 2.0**-149, math.inf))
    log.keep_scales(mixed)
    log.append(RECORDS[0])
    log.close()
    lines = log.path.read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[1], parse_constant=refuse_constant)["event"] == "scales"
    run = load_run(log.path)
    assert run.history.mixed_scales == (mixed,)
    assert run.events == ()
    assert [finding.name for finding in run.findings()] == []  # the lab unscales the gradients before it adds them
    damaged = lines[1].replace("65536.0", '"x"')
    log.path.write_text("\n".join([lines[0], damaged, *lines[2:]]) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2 is damaged"):
        load_run(log.path)


@pytest.mark.parametrize("damage", [{"counts": "x"}, {"low": None}, {"zeros": []}])
def test_a_damaged_histogram_is_named(path, damage):
    lines = path.read_text(encoding="utf-8").splitlines()
    place = next(place for place, line in enumerate(lines) if '"gradients"' in line)
    lines[place] = json.dumps(json.loads(lines[place]) | damage)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"line {place + 1} is damaged"):
        load_run(path)


def without_checksums(path):
    """The content of a log as an earlier version wrote it, which loads as it is."""
    lines = path.read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b'{"event":"check"'))


def test_no_altered_digit_goes_unseen(path):
    """Every other digit at every place of a log that was closed: of numbers, of the config, of a checksum itself."""
    whole, expected = path.read_bytes(), repr((load_run(path).history.records(), load_run(path).events))
    digits = [place for place, byte in enumerate(whole) if byte in b"0123456789"]
    assert len(digits) > 150
    unseen = 0
    for place in digits:
        path.write_bytes(whole[:place] + (b"7" if whole[place : place + 1] != b"7" else b"3") + whole[place + 1 :])
        with suppress(ValueError):
            run = load_run(path)
            unseen += not run.truncated and repr((run.history.records(), run.events)) != expected
    assert unseen == 0


def test_an_altered_line_is_told_with_the_lines_that_may_be_it(tmp_path):
    log = RunLog(tmp_path / "run.jsonl", CONFIG)
    for step in range(150):
        log.append(replace(RECORDS[0], step=step))
    log.close()
    path = log.path
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    checks = [number for number, line in enumerate(lines, 1) if '"check"' in line]
    assert checks == [65, 130, 154]
    altered = lines[99].replace("2.302585", "2.302586")
    path.write_text("".join([*lines[:99], altered, *lines[100:]]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"lines 66 to 130 are not all as they were written: .* checksum in line 130"):
        load_run(path)
    path.write_text("".join(lines[:65]), encoding="utf-8")  # as the error says
    assert len(load_run(path).history) == 63


def test_a_log_that_is_continued_is_checked_as_one(tmp_path):
    first = RunLog(tmp_path / "run.jsonl", CONFIG)
    first.append(RECORDS[0])
    first.close()
    for continues in (first.closed, ClosedLog.of(first.path)):
        copy = tmp_path / "copy.jsonl"
        copy.write_bytes(first.path.read_bytes())
        second = RunLog(copy, CONFIG, continues=continues._replace(place=ClosedLog.of(copy).place))
        second.append(RECORDS[1])
        second.close()
        assert len(load_run(copy).history) == 2
        assert copy.read_bytes().count(b'"check"') == 2
        copy.unlink()


def test_every_line_is_strict_json(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line, parse_constant=refuse_constant) for line in lines]
    assert entries[0]["amplab_run"] == 4
    assert len(entries[0]["columns"]) == len(entries[1])
    assert len(lines) == 9
    assert entries[-1]["event"] == "check"


def test_cut_anywhere_in_the_last_line_it_loads_and_says_so(path, tmp_path):
    data = without_checksums(path)
    start_of_last = data.rstrip(b"\n").rfind(b"\n") + 1
    cut = tmp_path / "cut.jsonl"
    for end in range(start_of_last + 1, len(data) - 1):
        cut.write_bytes(data[:end])
        run = load_run(cut)
        assert (len(run.history), run.truncated) == (4, True), end
    assert str(run).endswith("; the last line was cut off and is dropped")
    cut.write_bytes(data[:-1])  # only the newline is missing: the line is whole
    assert (len(load_run(cut).history), load_run(cut).truncated) == (5, False)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is killed at its start; expected a run log of amplab"),
        (b"step,loss\n0,2.3\n", "no run log; expected a run log of amplab"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "no run log"),
        (b'{"cells": []}\n', "no run log"),
        (b'{"amplab_run": 1, "amplab": "0.1', "no run log"),
        (b'{"amplab_run": 9, "amplab": "7.0"}\n', "a run log of format 9, written by amplab 7.0"),
        (b'{"amplab_run": 1, "columns": ["step"], "config": ""}\n', "the header is damaged"),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, sentence):
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}: ") + ".*" + re.escape(sentence)):
        load_run(path)


def test_config_of_another_version_is_refused(path):
    path.write_text(path.read_text(encoding="utf-8").replace("amplab/1", "amplab/3", 1), encoding="utf-8")
    with pytest.raises(ValueError, match="config of version 3"):
        load_run(path)


def test_a_blank_line_at_the_end_does_no_harm(path):
    path.write_text(path.read_text(encoding="utf-8") + "\n\n", encoding="utf-8")
    assert len(load_run(path).history) == len(RECORDS)
    assert not load_run(path).truncated


def test_a_folder_is_not_a_run_log(tmp_path):
    with pytest.raises(ValueError, match="a folder"):
        load_run(tmp_path)


def test_a_folder_of_runs_names_the_latest(tmp_path):
    with pytest.raises(ValueError, match="a folder without run logs; expected"):
        load_run(tmp_path)
    ranks = tmp_path / "20261127-100000-digits-mlp-O1"
    for rank in range(2):
        RunLog(ranks / f"rank-{rank}.jsonl", CONFIG, rank=Rank(rank, 2, "one")).close()
    with pytest.raises(ValueError, match=re.escape(f"expected one run: load {ranks}")):
        load_run(tmp_path)
    log = RunLog(tmp_path / "run.jsonl", CONFIG)
    log.close()
    os.utime(log.path, (2e9, 2e9))
    with pytest.raises(ValueError, match=re.escape(f"load {log.path}, the latest of 2 in it")):
        load_run(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "garbage",
        "[1,2]",
        '{"evnt": 1}',
        "[" + ",".join(["null"] * 10) + "]",
        "[" * 100_000,
        '[1,1.0,2.0,2.0,"yes",null,"O1",null,0.1,null]',
        "[1,1.0,2.0,2.0,false,null,[1],null,0.1,null]",
    ],
)
def test_damage_before_the_last_line_is_named(path, damage):
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[2] = damage
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 3 is damaged"):
        load_run(path)


@pytest.mark.parametrize(("kept", "held"), [([0, 1, 1, 2], 1), ([0, 2], 2)])
def test_steps_that_were_lost_or_doubled_are_named(tmp_path, kept, held):
    path = tmp_path / "run.jsonl"
    with_steps = RunLog(path, CONFIG)
    with_steps.close()
    rows = [f'[{step},1.0,2.0,2.0,false,null,"O1",null,0.1,null,-3.0]\n' for step in kept]
    path.write_text(path.read_text(encoding="utf-8") + "".join(rows), encoding="utf-8")
    with pytest.raises(ValueError, match=f"holds step {held}"):
        load_run(path)


@pytest.mark.skipif(os.name != "posix", reason="pipes, devices and links of POSIX")
@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        (5, TypeError, "expected the path of a file"),
        ("a\0.jsonl", ValueError, "NUL character; remove it"),
        ("n" * 300, OSError, "give a shorter one"),
        ("loop.jsonl", OSError, "leads back to itself"),
        ("pipe.jsonl", ValueError, "not a regular file but a named pipe; expected a run log"),
        ("/dev/zero", ValueError, "not a regular file but a device; expected a run log"),
        ("~no-such-user/run.jsonl", ValueError, "no home folder of no-such-user"),
    ],
)
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, monkeypatch, name, error, said):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.jsonl")
    os.symlink("loop.jsonl", "loop.jsonl")
    with pytest.raises(error, match=said):
        load_run(name)


@pytest.mark.skipif(os.name != "posix", reason="pipes, devices and links of POSIX")
@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("pipe", "pipe is a named pipe"),
        ("pipe.jsonl", "pipe.jsonl is a named pipe"),
        ("link.jsonl", "pipe is a named pipe"),
        ("pipe/run.jsonl", "pipe is a named pipe"),
        ("pipe/new/run.jsonl", "pipe is a named pipe"),
        ("/dev/null", "/dev/null is a device"),
        ("/dev/null/run.jsonl", "/dev/null is a device"),
        ("notes.txt", "notes.txt is a file"),
        ("notes.txt/run.jsonl", "notes.txt is a file"),
        ("loop.jsonl", "leads back to itself"),
        ("n" * 300, "is too long"),
        ("a\0.jsonl", "NUL character; remove it"),
        ("", "an empty path"),
        ("~no-such-user/run.jsonl", "no home folder of no-such-user"),
    ],
)
def test_a_place_where_no_log_can_be_is_named_and_what_is_there(tmp_path, monkeypatch, log, said):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkfifo("pipe.jsonl")
    os.symlink("pipe", "link.jsonl")
    os.symlink("loop.jsonl", "loop.jsonl")
    (tmp_path / "notes.txt").write_text("kept")
    before = sorted(tmp_path.iterdir())
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        amplab.watch(model, torch.optim.SGD(model.parameters(), 0.1), log=log)
    assert str(refused.value).startswith("log=")
    assert "File exists" not in str(refused.value)
    assert len(str(refused.value)) < 500
    told = []
    try:
        RunStore(CONFIG, log=log, on_failure=told.append).append(RECORDS[0])
    except (ValueError, OSError) as error:
        told.append(str(error))
    assert said in told[0]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(os.name != "posix", reason="names of POSIX")
def test_a_folder_whose_name_begins_with_a_tilde_keeps_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(ExperimentConfig(hidden=4), log="./~root/run.jsonl")
    trainer.run(1)
    trainer.wait()
    trainer.stop()
    trainer.wait()
    assert sorted(each.name for each in (tmp_path / "~root").iterdir()) == ["run.checkpoint", "run.jsonl"]


@pytest.mark.skipif(os.name != "posix", reason="links of POSIX")
def test_a_tilde_and_a_link_without_a_target_name_the_file_that_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    os.symlink("elsewhere/run.jsonl", "run.jsonl")
    for log, written in (("~/one.jsonl", "home/one.jsonl"), ("run.jsonl", "elsewhere/run.jsonl")):
        check_writable(log, "log=", "")
        store = RunStore(CONFIG, log=log, on_failure=pytest.fail)
        store.append(RECORDS[0])
        store.close()
        assert store.log_path == tmp_path / written
        assert len(load_run(log).history) == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["elsewhere", "home", "run.jsonl"]


def test_a_model_with_a_long_name_gets_a_log(tmp_path):
    store = RunStore(WatchedRun("N" * 300, "Adam", "apex"), log=tmp_path, on_failure=pytest.fail)
    store.append(RECORDS[0])
    store.close()
    assert load_run(store.log_path).config.model == "N" * 300


def test_an_empty_run_names_the_function_that_was_called(path):
    with pytest.raises(ValueError, match=r"replay\(\): the run has no step yet"):
        RunStore(CONFIG, log=None, on_failure=pytest.fail).history.replay()


def test_a_log_never_writes_over_a_file(path):
    with pytest.raises(FileExistsError):
        RunLog(path, CONFIG)
    assert free_path(path).name == "run-2.jsonl"
    RunLog(free_path(path), CONFIG).close()
    assert free_path(path).name == "run-3.jsonl"


def test_a_name_of_255_bytes_gets_a_number_too(tmp_path):
    path = tmp_path / f"{'é' * 124}a.jsonl"
    for _ in range(3):
        RunLog(free_path(path), CONFIG).close()
    assert len(list(tmp_path.iterdir())) == 3


def test_the_folder_is_named_by_the_environment(runs, monkeypatch):
    assert runs_directory() == runs
    assert re.fullmatch(r"\d{8}-\d{6}-digits-mlp-O1.jsonl", new_path(runs, CONFIG).name)
    monkeypatch.delenv("AMPLAB_RUNS")
    assert runs_directory() == Path.home() / ".amplab" / "runs"


@pytest.mark.parametrize("name", ["../Net", "../../../../tmp/Net", "a/b", "/etc/Net", "Net\n\x1b[2J", "C:\\Net"])
def test_a_class_name_does_not_lead_out_of_the_folder(runs, name):
    log = new_path(runs, WatchedRun(name, "SGD", "torch"))
    assert log.parent == runs
    assert re.fullmatch(r"[\w.-]+", log.name)
    assert log.name.endswith("-torch.jsonl")


def test_a_loop_with_a_model_of_any_name_has_its_log_in_the_folder(runs):
    model = type("../../Net", (torch.nn.Linear,), {})(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amplab.watch(model, optimizer, log=runs) as w:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert w.log_path.parent == runs
    assert len(load_run(w.log_path).history) == 3


TRAIN_FOR_EVER = """
import sys, threading
from amplab.lab import ExperimentConfig, Trainer
trainer = Trainer(ExperimentConfig(hidden=16), log=sys.argv[1])
def tell(record):
    print(len(trainer.history), flush=True)
trainer.subscribe(tell)
trainer.start()
threading.Event().wait()
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_killed_process_leaves_a_log_that_loads(tmp_path):
    path = tmp_path / "killed.jsonl"
    process = subprocess.Popen([sys.executable, "-c", TRAIN_FOR_EVER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while int(process.stdout.readline()) < 200:
            assert time.monotonic() < deadline
        time.sleep(0.5)
    finally:
        process.send_signal(signal.SIGKILL)
        told = process.communicate()[0].split()
    run = load_run(path)
    steps = run.history.column("step")
    assert steps.tolist() == list(range(len(steps)))
    assert len(steps) >= 200
    last_second = run.history.rate()  # what was not flushed is less than a quarter of a second of steps
    assert int(told[-1]) - len(steps) <= 0.25 * last_second + 1


FORKS = """
import os, sys
from pathlib import Path
from amplab.lab import RunLog
from amplab.lab.watched_run import WatchedRun
from amplab.parallel.ranks import Rank
log = RunLog(Path(sys.argv[1]), WatchedRun("Net", "SGD", "none", "-"), rank=Rank(0, 2))
if os.fork():
    print("begun", flush=True)
sys.stdin.read()  # as the worker of a DataLoader that hangs
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_killed_rank_is_lost_although_a_process_that_it_forked_lives(tmp_path):
    log = tmp_path / "rank-0.jsonl"
    command = [sys.executable, "-c", FORKS, str(log)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        assert load_run(log).end.state == "running"
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60  # the forked process may not have run yet
        while load_run(log).end.state == "running" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert load_run(log).end.state == "lost"


@pytest.mark.parametrize("size", [2**27, 2**35])
def test_a_line_without_end_is_refused_and_never_read_whole(path, size):
    """The file is sparse: it takes no space on the disk."""
    before = path.stat().st_size
    os.truncate(path, size)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"a line of more than 16 MB after the first {before} bytes"):
            load_run(path)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_a_long_line_is_read(path):
    path.write_bytes(without_checksums(path))
    whole = path.read_text().splitlines(keepends=True)
    note = json.dumps({"event": "later", "step": 3, "text": "x" * 10**6}) + "\n"
    path.write_text("".join([*whole[:4], note, *whole[4:]]))
    assert len(load_run(path).history) == len(RECORDS)


def test_a_name_that_no_rank_has_is_no_log_of_the_run(tmp_path):
    for rank in (0, 1):
        log = RunLog(tmp_path / f"rank-{rank}.jsonl", CONFIG, rank=Rank(rank, 2, "launch"))
        log.append(RECORDS[0])
        log.close()
    for name in ("rank-01.jsonl", "rank-١.jsonl", "rank--1.jsonl"):
        (tmp_path / name).write_bytes((tmp_path / "rank-1.jsonl").read_bytes()[:-20])
    run = load_run(tmp_path)
    assert [each.path.name for each in run.ranks] == ["rank-0.jsonl", "rank-1.jsonl"]


def test_a_line_of_another_program_is_told_at_once_and_once(tmp_path):
    told: list[str] = []
    store = RunStore(CONFIG, log=tmp_path, on_failure=told.append)
    store.append(RECORDS[0])
    assert store.log_path is not None
    with store.log_path.open("a") as file:
        file.write("a line of another program\n")
    for record in RECORDS[1:]:
        store.append(record)
        store.flush()
    assert len(told) == 1
    assert str(store.log_path) in told[0]
    store.close()
    lines = [line for line in store.log_path.read_text().splitlines() if not line.startswith("a line of")]
    store.log_path.write_text("\n".join(lines) + "\n")
    assert len(load_run(store.log_path).history) == len(RECORDS)


@pytest.mark.skipif(os.name != "posix", reason="HOME")
def test_a_home_that_is_a_relative_path_is_refused_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "relative")
    monkeypatch.delenv("AMPLAB_RUNS")
    monkeypatch.delenv("AMPLAB_LESSONS", raising=False)
    with pytest.raises(ValueError, match="HOME=relative"):
        runs_directory()
    with pytest.raises(ValueError, match="HOME=relative"):
        given_path("~/run.pt")
    with pytest.raises(LaunchError, match="HOME=relative"):
        lessons_directory()
    assert main(["train", "--steps=1", "--hidden=4"]) == 2
    assert list(tmp_path.iterdir()) == []
    assert given_path("relative/run.pt") == Path("relative/run.pt")
