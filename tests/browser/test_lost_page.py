"""A page that gives no answer is no longer drawn; a page that a cell keeps from being heard is."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dashboard_page import DashboardPage
from lab_page import PATIENCE, LabPage

# In the kernel: count a page as lost after 3 seconds, ask it often, and write down once a second what is sent to it.
NOTE = """
import json, pathlib, threading, time
from amplab.views import parts
parts.MOST_UNANSWERED, parts._ASKED_EVERY = 30, 5
live = lab._presenter.parts.live
sent, send = [0, 0], live.send
def count(content, buffers=None):
    sent[content["kind"] == "frame"] += 1
    send(content, buffers)
live.send = count
def note():
    while True:
        told = {"frames": sent[1], "pages": len(live._pages), "turns": live._hearing.turns,
                "step": len(lab.trainer.history)}
        with pathlib.Path(PATH).open("a") as file:
            file.write(json.dumps(told) + chr(10))
        time.sleep(1)
threading.Thread(target=note, daemon=True).start()
"""
HANG = "seconds => { setTimeout(() => { const end = Date.now() + 1000 * seconds; while (Date.now() < end); }, 100); }"


def begin(lab: LabPage, path: Path) -> DashboardPage:
    """Start a run in the page, and note in a file how it is drawn."""
    said = lab.execute(NOTE.replace("PATH", repr(str(path))))
    assert said == ""
    dashboard = DashboardPage(lab)
    dashboard.press("Start")
    dashboard.wait_for_step(10)
    return dashboard


def notes(path: Path) -> list[dict[str, int]]:
    """What was noted so far, in whole lines."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for(path: Path, fits: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """Wait for a note."""
    end = time.monotonic() + PATIENCE / 1000
    while time.monotonic() < end:
        if found := [each for each in notes(path)[-1:] if fits(each)]:
            return found[0]
        time.sleep(0.2)
    raise AssertionError(f"no such note in {notes(path)[-3:]}")


def test_a_page_that_gives_no_answer_is_no_longer_drawn_until_it_does(lab: LabPage, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    dashboard = begin(lab, path)
    assert wait_for(path, lambda note: note["turns"] > 60)["pages"] == 1, "a page that answers is not lost"
    lab.page.evaluate(HANG, 15)
    lost = wait_for(path, lambda note: note["pages"] == 0)
    later = wait_for(path, lambda note: note["step"] > lost["step"] + 100)
    assert (later["pages"], later["frames"]) == (0, lost["frames"])
    wait_for(path, lambda note: note["pages"] == 1 and note["frames"] > later["frames"] + 60)
    dashboard.wait_for_step(later["step"] + 1)


@pytest.mark.parametrize("cell", ["time.sleep(9)", "import asyncio; await asyncio.sleep(9)"])
def test_a_page_is_drawn_on_while_a_cell_runs(lab: LabPage, tmp_path: Path, cell: str) -> None:
    path = tmp_path / "notes"
    dashboard = begin(lab, path)
    before = wait_for(path, lambda note: note["frames"] > 5)
    first = len(notes(path))
    lab.execute(f"import time; {cell}")
    step = dashboard.step
    noted = notes(path)[first:]
    assert all(note["pages"] == 1 for note in noted)
    assert noted[-1]["frames"] > before["frames"] + 45
    dashboard.wait_for_step(step + 20)
    assert wait_for(path, lambda note: note["frames"] > noted[-1]["frames"] + 60)["pages"] == 1
