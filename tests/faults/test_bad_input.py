"""Words of the command line, config strings, messages of a page that make no sense: one line each, no traceback."""

import os
import random
import time
from contextlib import suppress

import pytest
from alterations import STRANGE, altered

from amplab.cli import main
from amplab.lab import FIELDS, ExperimentConfig, Trainer
from amplab.views.dashboard import Dashboard
from amplab.views.parts import MOST_PAGES, LiveView

WORDS = (
    "", "x", "-1", "0", "nan", "inf", "1e400", "2**99999", "2**2**9", "9" * 5000, "a" * 5000, "\x1b[31m", "ü", "\udcff",
    "none", "None", "true", "-", "=", "a=b", "/", ".", "..", "/dev/full", "x.py:f", ":", "x:y:z", "O1", "1e-400",
    "0x10", "1_000", "٣", "*", "[", "a,b,,", "{}", "%s", "\t", "1.5", "2**-3", "(" * 300, "\u202e",
)  # fmt: skip


def test_every_config_string_is_parsed_or_refused_by_a_value_error():
    chance = random.Random(0)
    fields = [*FIELDS, "", "other"]
    parsed = 0
    for _ in range(3000):
        pairs = (f"{chance.choice(fields)}={chance.choice(WORDS)}" for _ in range(chance.randrange(1, 4)))
        text = chance.choice((f"amplab/1 {' '.join(pairs)}", *chance.sample(WORDS, 1)))
        with suppress(ValueError):
            config = ExperimentConfig.parse(text)
            assert ExperimentConfig.parse(str(config)) == config
            parsed += 1
    assert parsed


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary.jsonl").write_bytes(random.Random(0).randbytes(3000))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "digits.jsonl").write_text('{"amplab_run":' + "9" * 5000 + "}")
    (tmp_path / "given.py").write_text("def three(): return 3\ndef wrong(): return {'model': 3}\nnumber = 1\n")
    return tmp_path


LOGS = [
    f"{name}.jsonl" for name in ("binary", "empty", "folder", "deep", "digits", "missing", "loop", "pipe", "a" * 5000)
]
TARGETS = [*LOGS, "given.py:three", "given.py:wrong", "given.py:number", "given.py:missing", "given.py:", *WORDS]
COMMANDS = [
    *(["doctor", target] for target in TARGETS if target not in ("/dev/full",)),
    *(["run", word] for word in WORDS if word not in ("/dev/full", "-") and not word.startswith("-")),
    *(["train", "--steps", word] for word in ("", "x", "-1", "0", "nan", "inf", "1e400", "1.5", "2**99999")),
    *(["train", option, word] for option in ("--steps", "--nproc", "--max-restarts") for word in ("2**2**9", "1e10")),
    ["train", "--nproc", "1025"],
    *(["train", f"--{name.replace('_', '-')}=\x1b[31m", "--steps=1"] for name in FIELDS),
    *(["bench", word] for word in WORDS),
    *(["bench", "scaler", "--json", path] for path in ("pipe.jsonl", "loop.jsonl", "a" * 300, "~no-such-user/x", "/")),
    *(["train", "--log", path] for path in ("pipe.jsonl/x", "loop.jsonl", "a" * 300, "~no-such-user/x")),
    *(["lab", "--notebook", word] for word in ("zz", "9" * 5000, "\x1b", "../../etc/passwd")),
    *([word] for word in WORDS),
]


def status_of(command):
    try:
        return main(command)
    except SystemExit as exit:
        return exit.code


def test_every_command_line_ends_with_one_sentence(working_folder, capsys):
    for command in COMMANDS:
        status = status_of(command)
        said = capsys.readouterr().err
        assert status == 2, command
        assert len(said.strip().splitlines()) == 1, (command, said)
        assert "\x1b" not in said
        assert "Traceback" not in said


def forms(step):
    """A message of each kind that a page sends, by the widget that sends it."""
    return {
        "notices": [{"type": "dismiss", "id": 1}, {"type": "new", "id": 1}, {"type": "reset", "id": 1}],
        "controls": [
            *({"type": kind} for kind in ("step", "pause", "undo", "defaults", "reset")),
            {"type": "run", "steps": 1}, {"type": "inject", "kind": "nan"},
            {"type": "change", "field": "lr", "value": 0.1}, {"type": "default", "field": "lr"},
        ],
        "live": [
            {"type": "hello", "view": "a"}, {"type": "bye", "view": "a"}, {"type": "select", "step": step},
            {"type": "range", "view": "a", "low": 0, "high": 3}, {"type": "range", "view": "a", "last": 5},
        ],
        "panels": [
            {"type": "select", "step": step}, {"type": "view", "tab": "scale", "view": "now"},
            {"type": "explain", "tab": "skipped", "step": step}, {"type": "compare", "tab": "dtypes", "level": "O2"},
        ],
        "gallery": [{"type": "close"}, {"type": "again"}, {"type": "fix"}],
        "take_away": [{"type": "file", "kind": "csv"}, {"type": "setting", "text": "amplab/1 task=nothing"}],
    }  # fmt: skip


def tell(part, content):
    """Deliver a message as the comm of a kernel does."""
    part._handle_custom_msg(content, [])


def wait_for(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def test_messages_of_no_known_form_leave_the_dashboard_working(monkeypatch):
    monkeypatch.setenv("AMPLAB_KERNELS", "reference")
    trainer = Trainer(ExperimentConfig(hidden=16))
    lab = Dashboard(trainer)
    parts = lab._presenter.parts
    chance = random.Random(0)
    try:
        for _ in range(400):
            name, known = chance.choice([*forms(1).items()])
            message = altered(chance.choice(known), chance)
            if isinstance(message, dict) and message.get("type") in ("run", "start"):
                continue  # a whole number of steps that another test would wait for
            tell(getattr(parts, name), message)
        assert len(parts.live._pages) <= MOST_PAGES
        tell(parts.live, {"type": "hello", "view": "page"})
        tell(parts.controls, {"type": "change", "field": "lr", "value": 0.037})
        assert wait_for(lambda: trainer.config.learning_rate == 0.037)
        for notice in parts.notices.notices:
            assert "\n" not in notice["text"]
    finally:
        lab.close()
        trainer.stop()
        assert trainer.wait(20)


def test_pages_that_never_say_that_they_close_are_forgotten():
    opened = []
    live = LiveView(lambda: opened.append(1))
    for number in range(10 * MOST_PAGES):
        tell(live, {"type": "hello", "view": f"page {number}"})
        tell(live, {"type": "range", "view": f"page {number}", "low": 0, "high": 10})
    assert (len(live._pages), len(live._ranges)) == (MOST_PAGES, MOST_PAGES)
    assert f"page {10 * MOST_PAGES - 1}" in live._pages
    for strange in STRANGE:
        tell(live, strange)
        tell(live, {"type": strange, "view": "page"})
        tell(live, {"type": "hello", "view": strange if not isinstance(strange, str) else 7})
        tell(live, {"type": "range", "view": "page 639", "low": strange if strange is not None else "x"})
    assert len(live._pages) == MOST_PAGES
    live.close()
