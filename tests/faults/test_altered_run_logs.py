"""Run logs that somebody altered: refused by a ValueError that names the file, or a run that every tool can use."""

import json
import random
import shutil
import warnings
from dataclasses import asdict

import pytest
import torch
from alterations import altered, altered_bytes

from amplab.amp import MemoryUse
from amplab.diagnose import Finding
from amplab.display.text import visible
from amplab.formats import exponent_histogram
from amplab.lab import ExperimentConfig, GradientSample, RunLog, StepRecord, load_run
from amplab.lab.events import LayerShares, MixedScales
from amplab.lab.findings import finding_to_log
from amplab.lab.html_report import report_html
from amplab.lab.run_export import run_csv, run_json
from amplab.lab.skip_explanation import SkipExplanation
from amplab.lab.watched_run import WatchedRun
from amplab.parallel.rank_state import RankState
from amplab.parallel.ranks import Rank

CONFIG = ExperimentConfig(seed=3)
FOUND = Finding("scale-too-large", "warning", "seen", "why", "code", op="mm", evidence={"absmax": 7.5, "steps": 2})
VALUES = torch.tensor([0.0, 2.0**-30, 1.5, -1.0, float("inf")])


def write_log(path, config=CONFIG, rank=None):
    """A log with lines of every kind."""
    log = RunLog(path, config, rank=rank)
    scale = 65536.0
    for step in range(12):
        skipped = step % 5 == 1
        after = scale / 2 if skipped else scale
        name, exponent = ("hidden1.weight", float("inf")) if skipped else (None, -3.0)
        score = 0.5 if step == 9 else None
        record = (step, 2.0 / (step + 1), scale, after, skipped, name, "O1", score, step / 100, None, exponent)
        log.append(StepRecord(*record))
        scale = after
    log.note("config", step=12, config=str(CONFIG.changed(opt_level="O2", lr=0.01)))
    log.note("inject", step=12, fault="underflow", on=True)
    log.note("restart", step=12)
    log.note("memory", step=1, **asdict(MemoryUse(4, 4, 0, 8)))
    log.note("finding", step=6, finding=finding_to_log(FOUND))
    log.keep(GradientSample(3, 2.0**15, exponent_histogram(VALUES), (LayerShares("hidden1", 0.5, 0.0, 0.1),)))
    log.keep_scales(MixedScales(4, (1024.0, 2048.0)))
    log.explain(SkipExplanation(6, "scale", "too large", fits=4096.0, op="mm", module="hidden1", loss=0.5))
    log.keep_state(RankState(7, 5, 17, 0.5, 2.0, 1e-7, (0.1,), "SGD()", "unknown"))
    log.close(steps=12)
    return path


def remove_checksums(path):
    """Make a log as one that alters it on purpose does, or as an earlier version wrote it."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if not line.startswith(b'{"event":"check"')))


def use(run):
    """Everything that the library does with a run; what it prints has no control characters."""
    found = run.findings()
    printed = [str(run), repr(run.findings()), str(found), *map(repr, found)]
    printed.append(found._repr_html_())
    assert (run.explained, run.states, run.end, run.differences, run.by_rank) is not None
    history = run.history
    assert len(history.records()) == len(history)
    assert history.thinned(["loss", "loss_scale", "grad_exponent"], 100)["step"].size == len(history)
    assert (history.changes, history.skips(), history.skip_groups(), history.rate(), history.last) is not None
    if run.ranks:
        printed.append(str(run.rank_table()))
    if len(history):
        replays = run.replay()
        printed.append(str(replays))
        printed.append(replays._repr_html_())
    for text in printed:
        assert visible(text) == text
    assert json.loads(run_json(history, run.config))["columns"]
    for text in (run_csv(run.by_rank or history), report_html(run)):
        assert visible(text) == text
    assert report_html(run).encode().startswith(b"<!")


def load_or_refuse(path):
    """Load a log and use it; whether it was accepted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of overflows in absurd numbers
        try:
            run = load_run(path)
        except ValueError as refusal:
            refused = str(refusal)
        else:
            use(run)
            return True
    assert str(path) in refused
    return False


def alter_structure(path, random):
    """Alter a value of one line; write NaN and Infinity as Python does, which is not JSON."""
    lines = path.read_text(encoding="utf-8").splitlines()
    place = random.choice((0, *range(len(lines)), *range(12, len(lines))))
    lines[place] = json.dumps(altered(json.loads(lines[place]), random), default=str)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def alter_lines(path, random):
    """Cut, double, remove or exchange whole lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    one, other = random.randrange(len(lines)), random.randrange(len(lines))
    match random.randrange(4):
        case 0:
            lines.insert(one, lines[other])
        case 1:
            del lines[one]
        case 2:
            lines[one], lines[other] = lines[other], lines[one]
        case 3:
            lines[one] = lines[one][: random.randrange(len(lines[one]))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def alter_content(path, random):
    path.write_bytes(altered_bytes(path.read_bytes(), random))


ALTERATIONS = {"structure": alter_structure, "lines": alter_lines, "bytes": alter_content}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A log of the lab, one of a watched loop, and a folder with the logs of two ranks."""
    folder = tmp_path_factory.mktemp("logs")
    watched = WatchedRun("Net", "Adam", "apex", "O1")
    write_log(folder / "lab.jsonl")
    write_log(folder / "watched.jsonl", watched)
    for rank in range(2):
        write_log(folder / "ranks" / f"rank-{rank}.jsonl", watched, Rank(rank, 2, "one"))
    return folder


KINDS = {"lab": "lab.jsonl", "watched": "watched.jsonl", "ranks": "ranks"}


def attack(written, tmp_path, kind, alter, seeds):
    target = tmp_path / KINDS[kind]
    copy = shutil.copytree if (written / KINDS[kind]).is_dir() else shutil.copy
    copy(written / KINDS[kind], target)
    path = target / "rank-1.jsonl" if target.is_dir() else target
    remove_checksums(path)
    whole = path.read_bytes()
    accepted = 0
    for seed in seeds:
        path.write_bytes(whole)
        alter(path, random.Random(seed))
        accepted += load_or_refuse(target)
    path.write_bytes(whole)
    assert load_or_refuse(target)
    assert 0 < accepted < len(seeds)  # the attack is neither harmless nor deadly


every_attack = pytest.mark.parametrize("alteration", ALTERATIONS)
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@every_attack
def test_an_altered_log_is_refused_or_usable(written, tmp_path, kind, alteration):
    attack(written, tmp_path, kind, ALTERATIONS[alteration], range(25))


@pytest.mark.long
@every_kind
@every_attack
def test_many_altered_logs(written, tmp_path, kind, alteration):
    attack(written, tmp_path, kind, ALTERATIONS[alteration], range(1000, 2000))


DAMAGED = {
    "400 digits": "[12," + "9" * 400 + ',1.0,1.0,false,null,"O1",null,0.1,null,null]',
    "Infinity": '[12,Infinity,1.0,1.0,false,null,"O1",null,0.1,null,null]',
    "score": '[12,1.0,1.0,1.0,false,null,"O1","high",0.1,null,null]',
    "word": '[12,1.0,1.0,1.0,false,{},"O1",null,0.1,null,null]',
    "true": '[12,true,1.0,1.0,false,null,"O1",null,0.1,null,null]',
    "no step": '{"event":"finding","finding":{}}',
    "finding": '{"event":"finding","step":3,"finding":{"name":"a"}}',
    "memory": '{"event":"memory","step":3,"parameters":1}',
    "inject": '{"event":"inject","step":3,"fault":7,"on":true}',
    "wide": (
        '{"event":"gradients","step":3,"loss_scale":1.0,"low":1000000000,"counts":[1],"zeros":0,"infs":0,"nans":0}'
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_each_damage_is_named(tmp_path, damage):
    log = RunLog(tmp_path / "run.jsonl", CONFIG)
    for step in range(12):
        log.append(StepRecord(step, 1.0, 1.0, 1.0, False, None, "O1", None, 0.1, None))
    log.close()
    remove_checksums(log.path)
    with log.path.open("a", encoding="utf-8") as file:
        file.write(DAMAGED[damage] + '\n{"event":"restart","step":12}\n')
    with pytest.raises(ValueError, match="line 14 is damaged"):
        load_run(log.path)


def test_a_text_that_is_no_unicode_neither_ends_the_training_nor_the_report(tmp_path):
    log = RunLog(tmp_path / "run.jsonl", CONFIG)
    log.note("finding", step=0, finding={**finding_to_log(FOUND), "symptom": "no file \udcff"})
    log.close()
    run = load_run(log.path)
    assert run.explained[0][1].symptom == "no file ?"
    assert report_html(run).encode()


def test_a_log_of_another_rank_is_refused(tmp_path):
    watched = WatchedRun("Net", "Adam", "apex", "O1")
    for name in (0, 1):
        write_log(tmp_path / f"rank-{name}.jsonl", watched, Rank(1, 2, "one"))
    with pytest.raises(ValueError, match=r"rank-0\.jsonl: the log of rank 1; expected that of rank 0"):
        load_run(tmp_path)


def test_a_finding_of_a_later_version_loads(tmp_path):
    log = RunLog(tmp_path / "run.jsonl", CONFIG)
    log.note("finding", step=0, finding={**finding_to_log(FOUND), "weight": 3})
    log.note("something-new", step=0, more=[1, 2])
    log.close()
    assert load_run(log.path).explained == [(0, FOUND)]
