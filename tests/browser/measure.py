"""Measure how fast the lab is in the browser: `python tests/browser/measure.py`.

    kept = median over the pairs of (steps/s open / steps/s closed)
    own  = the same with steps per second of processor time of the trainer's thread

A pair is two blocks of a few seconds, one after the other in one kernel and one page: the dashboard closed (its output
cleared), and open with a tab in front. The next pair is in reverse order, with the next tab. Digits, MLP of width 128,
O1. Other load on the machine changes slowly, so it is in both blocks of most pairs. `own` is what the lab's own work
in the kernel costs; in `kept` is also the time in which the thread waits for a core that the browser, the server or
something else has. The time to the first plot runs
from the start of the command `amplab lab` until the line of the loss scale is painted; Start is pressed as soon as the
dashboard is there. Compare the ratios and their spread: the absolute numbers depend on the machine and its load.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dashboard_page import ACCENT_LIGHT, SCALE, DashboardPage
from lab_page import NOTEBOOKS, LabPage, launch_chromium
from lab_server import LabServer, running_amplab_lab, running_server
from playwright.sync_api import Playwright, sync_playwright
from redraws import LONG_RUN, redraw_milliseconds

__all__ = ["click_to_effect", "first_plot", "main", "redraws", "view_pairs", "warm_start"]

TABS = ("dtypes", "gradients", "skipped", "findings", "step_through", "runs", "scale", "memory")
SETTLE = 2.0  # seconds between a change of the view and the measurement
STEPS_PER_SECOND = """
import threading, time
history = lab.trainer.history
thread = next(each for each in threading.enumerate() if each.name == "amplab trainer")
clock = time.pthread_getcpuclockid(thread.ident)
steps, began, used = len(history), time.perf_counter(), time.clock_gettime(clock)
time.sleep({seconds})
steps = len(history) - steps
print(steps / (time.perf_counter() - began), steps / (time.clock_gettime(clock) - used))
"""


CLICK_TO_EFFECT = """async (root, level) => {
  const button = [...root.querySelectorAll("button")].find((each) => each.textContent === level);
  const began = performance.now();
  button.click();
  while (button.getAttribute("aria-checked") !== "true") await new Promise((done) => setTimeout(done, 1));
  const taken = (performance.now() - began) / 1000;
  await new Promise((done) => setTimeout(done, 300));
  return taken;
}"""


class Rates(NamedTuple):
    """Steps per second, and per second of processor time of the trainer's thread."""

    wall: float
    own: float


def view_pairs(playwright: Playwright, pairs: int, seconds: float) -> list[tuple[str, Rates, Rates]]:
    """Return the tab, and the rates with it open and without, of each pair.

    Args:
        playwright: The driver.
        pairs: How many.
        seconds: Length of one block.
    """
    measured = []
    with lab_page(playwright) as page:
        page.execute("lab.trainer.start()")
        for number in range(pairs):
            tab, rates = TABS[number % len(TABS)], {}
            for view in ("closed", tab) if number % 2 else (tab, "closed"):
                show(page, view)
                time.sleep(SETTLE)
                rates[view] = Rates(*map(float, page.execute(STEPS_PER_SECOND.format(seconds=seconds)).split()))
            measured.append((tab, rates[tab], rates["closed"]))
    return measured


def show(page: LabPage, view: str) -> None:
    """Clear the dashboard's output, or show it with a tab in front."""
    is_open = page.page.locator(".amp-dashboard").count() > 0
    if view == "closed":
        page.command("notebook:clear-all-cell-outputs")
    else:
        if not is_open:
            page.page.evaluate("() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 1; }")
            page.command("notebook:run-cell")
        DashboardPage(page).open_tab(view)
    if view == "gradients":
        page.page.locator(".amp-histogram").last.wait_for()


def warm_start(playwright: Playwright, times: int) -> list[float]:
    """Return the seconds from running the lab's cell in a warm kernel to a painted dashboard."""
    with lab_page(playwright) as page:
        taken = []
        for _ in range(times):
            show(page, "closed")
            page.page.evaluate("() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 1; }")
            began = time.perf_counter()
            page.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell'); }")
            page.page.locator(".amp-dashboard canvas").first.wait_for()
            dashboard = DashboardPage(page)
            while dashboard.painted_columns(SCALE, ACCENT_LIGHT) < 20:
                time.sleep(0.01)
            taken.append(time.perf_counter() - began)
    return taken


def click_to_effect(playwright: Playwright, times: int) -> list[float]:
    """Return the seconds from a click on an opt_level to the button's new state, while training runs."""
    with lab_page(playwright) as page:
        page.execute("lab.trainer.start()")
        dashboard = DashboardPage(page)
        dashboard.wait_for_step(dashboard.step + 50)
        return [float(dashboard.root.evaluate(CLICK_TO_EFFECT, "O1" if turn % 2 else "O2")) for turn in range(times)]


def redraws(playwright: Playwright, lengths: tuple[int, ...]) -> dict[str, list[float]]:
    """Return median and maximum of the milliseconds in which both charts are drawn once, by the length of the run."""
    found = {}
    with lab_page(playwright) as page:
        dashboard = DashboardPage(page)
        for steps in lengths:
            page.execute(LONG_RUN.format(steps=steps))
            dashboard.wait_for_step(steps)
            found[f"{steps:,}"] = redraw_milliseconds(dashboard)
    return found


@contextmanager
def lab_page(playwright: Playwright) -> Iterator[LabPage]:
    """Open the lab's notebook with its cells run."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder)) as server,
        launch_chromium(playwright) as browser,
    ):
        page = LabPage(server, browser)
        page.open(NOTEBOOKS / "00_the_lab.ipynb")
        page.run_all()
        yield page
        page.close()


def first_plot(playwright: Playwright) -> float:
    """Return the seconds from the command `amplab lab` to the first plot."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with running_amplab_lab(Path(folder)) as server:
            return drawn(playwright, server) - began


def drawn(playwright: Playwright, server: LabServer) -> float:
    """Open the lab's lesson, which opens the lab, train, and return when a line is painted."""
    with launch_chromium(playwright) as browser:
        page = LabPage(server, browser)
        page.page.goto(server.url("/doc/tree/00_the_lab.ipynb"))
        page.page.locator(".amp-dashboard canvas").first.wait_for()
        dashboard = DashboardPage(page)
        dashboard.press("Start")
        while dashboard.painted_columns(SCALE, ACCENT_LIGHT) < 20:
            time.sleep(0.02)
        moment = time.perf_counter()
        page.close()
        return moment


def main() -> None:
    """Print a table and, with --json, the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=16, help="pairs of blocks with and without a view (default: 16)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one block (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON too")
    options = parser.parse_args()
    with sync_playwright() as playwright:
        plot = first_plot(playwright)
        warm = warm_start(playwright, 5)
        clicks = click_to_effect(playwright, 30)
        drawings = redraws(playwright, (1_000, 100_000))
        pairs = view_pairs(playwright, options.pairs, options.seconds)
    print(f"dashboard drawn {statistics.median(warm):.2f} s after its cell ran in a warm kernel (goal: at most 3 s)")
    print(
        f"click to effect {1000 * statistics.median(clicks):.0f} ms, at most {1000 * max(clicks):.0f} ms (goal: 150 ms)"
    )
    for steps, (middle, most) in drawings.items():
        print(f"both charts of {steps} steps drawn in {middle:.1f} ms, at most {most:.1f} ms (goal: 16 ms)")
    print(f"first plot after {plot:.1f} s (goal: at most 20 s)")
    for what, place in (("steps/s", 0), ("steps per second of the trainer's processor time", 1)):
        ratios = [is_open[place] / closed[place] for _, is_open, closed in pairs]
        spread = ", ".join(f"{tab} {100 * each:.0f}" for (tab, *_), each in zip(pairs, ratios, strict=True))
        print(f"{what} with a view {100 * statistics.median(ratios):.0f} % of those without (goal: 90 %): {spread}")
    if options.json:
        print(
            json.dumps(
                {
                    "first_plot_seconds": plot,
                    "warm_start_seconds": warm,
                    "click_seconds": clicks,
                    "redraw_milliseconds": drawings,
                    "tab_open_closed": pairs,
                }
            )
        )


if __name__ == "__main__":
    main()
