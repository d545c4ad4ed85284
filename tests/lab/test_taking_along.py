"""What one takes along: a run as CSV and JSON, and a report that opens without a kernel."""

import csv
import io
import json
import math
import re
import tracemalloc
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import amplab
from amplab.lab import ExperimentConfig, StepRecord, Trainer, load_run, report, run_csv, run_json
from amplab.lab.history import COLUMNS, History


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run with a change of level, a skipped step and a loss that is NaN."""
    trainer = Trainer(ExperimentConfig(hidden=16), log=tmp_path_factory.mktemp("runs"))
    trainer.run(30)
    trainer.change(opt_level="O2")
    trainer.inject("overflow")
    trainer.run(5)
    trainer.inject("nan")
    trainer.run(3)
    return trainer


def test_csv_holds_every_step_bit_for_bit(trained: Trainer) -> None:
    rows = list(csv.DictReader(io.StringIO(run_csv(trained.history))))
    assert list(rows[0]) == list(COLUMNS)
    assert len(rows) == 38
    for name in ("loss", "loss_scale"):
        written = [float(row[name]) for row in rows]
        expected = trained.history.column(name).tolist()
        assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(written, expected, strict=True))
    assert [row["skipped"] for row in rows].count("True") == trained.history.skip_count == 2


@pytest.mark.parametrize(
    "name",
    [
        "=cmd|' /C calc'!A0",
        "+1",
        "-1",
        "@SUM(A1)",
        "\t=1",
        " =1",
        "\uff1d1",
        "'quoted",
        "a,b",
        'a"b',
        "x.=1",
        "fc.weight",
    ],
)
def test_csv_has_no_name_that_a_spreadsheet_runs(name: str) -> None:
    history = History()
    history.append(StepRecord(0, -1.5, 2.0, -math.inf, True, name, "-", None, 0.1, name, -3.0))
    [row] = csv.DictReader(io.StringIO(run_csv(history)))
    assert row["first_nonfinite"].lstrip()[0] not in "=+-@\uff1d"
    assert row["first_nonfinite"] == row["injected"]
    assert row["first_nonfinite"].removeprefix("'") == name
    assert row["opt_level"] == "'-"
    assert (row["loss"], row["next_loss_scale"], row["grad_exponent"]) == ("-1.5", "-inf", "-3.0"), "numbers stay"


def test_csv_shows_control_characters_as_escapes() -> None:
    history = History()
    history.append(StepRecord(0, 1.0, 2.0, 2.0, True, "a\x1b[2J\x9b\u202eb\u2066\r=1", "O1", None, 0.1, "\r=1", 3.0))
    [row] = csv.DictReader(io.StringIO(run_csv(history)))
    assert row["first_nonfinite"] == r"a\x1b[2J\x9b\u202eb\u2066\r=1"
    assert row["injected"] == r"\r=1"


def test_json_holds_the_run_and_the_string_that_repeats_it(trained: Trainer) -> None:
    taken = json.loads(run_json(trained.history, trained.config), parse_constant=pytest.fail)
    assert ExperimentConfig.parse(taken["config"]) == trained.config
    steps = [dict(zip(taken["columns"], row, strict=True)) for row in taken["steps"]]
    assert [step["step"] for step in steps] == list(range(38))
    assert "NaN" in [step["loss"] for step in steps]
    assert any(change["text"] == "opt_level O1 → O2" for change in taken["changes"])
    assert taken["explanations"]


@pytest.mark.parametrize("export", [run_csv, lambda history: run_json(history, "config")], ids=["csv", "json"])
def test_a_long_run_is_exported_in_little_more_memory_than_its_text(export: Callable[[History], str]) -> None:
    history, count = History(), 20_000
    values = {name: [float(step) for step in range(count)] for name in ("loss", "seconds", "grad_exponent")}
    words = dict.fromkeys(("first_nonfinite", "injected"), [None] * count) | {"opt_level": ["O1"] * count}
    scales = dict.fromkeys(("loss_scale", "next_loss_scale"), [65536.0] * count)
    values |= words | scales | {"step": list(range(count)), "skipped": [False] * count, "score": [None] * count}
    history.extend({name: values[name] for name in COLUMNS})
    tracemalloc.start()
    try:
        text = export(history)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text.count("65536.0") == 2 * count
    assert most < 5 * len(text)


@pytest.mark.parametrize("export", [run_csv, lambda run: run_json(run, "config")], ids=["csv", "json"])
def test_a_run_in_place_of_its_history_is_refused(export, trained: Trainer) -> None:
    with pytest.raises(TypeError, match="history of type Trainer: expected a History, as the attribute history of"):
        export(trained)


class Tags(HTMLParser):
    """The tags and links of a page, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(path: Path) -> Tags:
    page = Tags()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def test_a_report_says_what_happened_and_needs_nothing_else(trained: Trainer, tmp_path: Path) -> None:
    page = read(report(trained, tmp_path / "run.html"))
    text = " ".join(page.words)
    assert page.links == []
    assert "script" not in page.tags
    assert page.tags.count("svg") >= 2
    assert page.tags.count("h2") == 6
    for words in ("opt_level O1 → O2", "cross_entropy", "cast its output to float32", "skipped", str(trained.config)):
        assert words in text, words
    explained = trained.history.explanations
    assert all(each.sentence in text for each in explained.values())


@pytest.mark.parametrize("source_lines", [False, True])
def test_a_report_holds_no_path_and_lines_of_code_only_if_asked(
    trained: Trainer, tmp_path: Path, *, source_lines: bool
) -> None:
    text = report(trained, tmp_path / "run.html", source_lines=source_lines).read_text(encoding="utf-8")
    folders = {str(Path(amplab.__file__).parent), str(Path.home()), str(tmp_path), str(trained.log_path.parent)}
    assert not any(folder in text for folder in folders if folder != "/")
    assert not re.search(r"(?<![\w<:/.])/(?:home|root|tmp|usr|opt|work)/", text)
    assert ("self.hidden1(x)" in text) == source_lines


def test_a_report_of_a_log_and_of_a_watched_loop(trained: Trainer, tmp_path: Path) -> None:
    trained.wait()
    log = read(report(load_run(trained.log_path), tmp_path / "log.html"))
    assert "opt_level O1 → O2" in " ".join(log.words)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = amplab.watch(model, optimizer)
    with watch:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    trace = amplab.xray(model, torch.ones(2, 4)).trace
    watched = " ".join(read(report(watch, tmp_path / "own.html", trace=trace)).words)
    assert "Linear" in watched
    assert "linear" in watched
    assert report(watch, tmp_path / "own.html") == tmp_path / "own-2.html", "a file is never overwritten"


def test_only_a_run_can_be_reported(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="load_run"):
        report("run.jsonl", tmp_path / "run.html")
