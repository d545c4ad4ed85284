"""Lines of a run log that are parsed together are those of the reader of single lines, right ones and damaged ones."""

import json
import math
import random

import pytest

from amplab.lab import ExperimentConfig, StepRecord, load_run
from amplab.lab.run_log import RunLog, reader

CONFIG = ExperimentConfig()
ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1.7e308, 3]


def write(path, steps, seed=0):
    generator, log = random.Random(seed), RunLog(path, CONFIG)
    for step in range(steps):
        loss = generator.choice([None, generator.random(), generator.choice(ODD)])
        score = generator.choice([None, generator.choice(ODD)])
        exponent = generator.choice([None, math.nan, math.inf, -math.inf, -5.0, -0.0, 3])
        name, level = generator.choice([None, "a[0].weight", 'ü"\\'] if step > steps // 2 else [None]), f"O{step % 3}"
        log.append_row((step, loss, 2.0, 1e39, step % 5 == 0, name, level, score, step / 7, name, exponent))
        if generator.random() < 0.01:
            log.note("note", step=step, text="[]")
    log.close()
    return path


def read(path):
    """Everything that is read of a log, or the error."""
    try:
        run = load_run(path)
    except ValueError as error:
        return str(error)
    history = run.history
    facts = (history.missing_losses(), history.level_changes(), history.last, history.last_score, history.skip_count)
    return repr((history.records(), facts, run.events, run.truncated))


def singly(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(reader, "read_steps", lambda *_: None)
        return read(path)


def test_every_value_comes_back(tmp_path, monkeypatch):
    together = []
    patched = reader.read_steps
    with monkeypatch.context() as patch:
        patch.setattr(reader, "read_steps", lambda *given: together.append(steps := patched(*given)) or steps)
        path = write(tmp_path / "run.jsonl", 3000)
        found = read(path)
    assert any(steps is not None for steps in together)
    assert any(steps is None for steps in together)
    assert found == singly(path, monkeypatch)


DAMAGE = [
    lambda line: line[:-5],
    lambda line: line + "," + line,
    lambda line: line.replace("[", "[[", 1),
    lambda line: line[:-1] + ",3]",
    lambda line: line.replace("false", "0").replace("true", "1"),
    lambda line: line.replace("[", "[1", 1),
    lambda line: line.replace("2.0", "NaN", 1),
    lambda line: line.replace("2.0", "1e999", 1),
    lambda line: line.replace("2.0", "9" * 400, 1),
    lambda line: line.replace("2.0", '"many"', 1),
    lambda line: line.replace("2.0", "true", 1),
    lambda line: line.replace("2.0", "null", 1),
    lambda line: line.replace('"O', "3e5,\n[" + '"O', 1),
    lambda line: line + "\n\n" + "   ",
    lambda line: " " + line,
    lambda line: line + "]",
    lambda line: line.rsplit(",", 1)[0] + ",0.5]",
    lambda line: "[]",
    lambda line: "",
    lambda line: "\x00" * len(line),
]


@pytest.mark.parametrize("damage", range(len(DAMAGE)))
def test_damaged_lines_are_judged_as_single_ones(tmp_path, monkeypatch, damage):
    lines = write(tmp_path / "whole.jsonl", 300).read_text(encoding="utf-8").splitlines()
    for place in (1, 150, len(lines) - 1):
        altered = [*lines]
        altered[place] = DAMAGE[damage](altered[place])
        path = tmp_path / f"{place}.jsonl"
        path.write_text("\n".join(altered) + "\n", encoding="utf-8")
        try:
            expected = singly(path, monkeypatch)
        except (OverflowError, TypeError, KeyError) as error:
            with pytest.raises(type(error)):
                read(path)
        else:
            assert read(path) == expected


def test_an_array_over_two_lines_is_none(tmp_path):
    path = write(tmp_path / "run.jsonl", 0)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    record = StepRecord(0, 1.0, 1.0, 1.0, False, None, "O1", None, 0.0, None, 0.0)
    line = json.dumps([getattr(record, name) for name in record.__dataclass_fields__])
    with path.open("a", encoding="utf-8") as file:
        file.write(
            line + "," + line.replace("[0", "[1") + "\n" + line.replace("[0", "[2").replace(", ", ",\n", 1) + "\n"
        )
    with pytest.raises(ValueError, match="line 2 is damaged"):
        load_run(path)
