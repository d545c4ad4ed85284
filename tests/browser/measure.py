"""Measure the cost of the live view and the time to the first plot: `python tests/browser/measure.py`.

    cost = 1 - median over the rounds of (steps/s open / steps/s closed in the same round)

Both in one kernel and one page, digits, MLP of width 128, O1: the dashboard is closed (its output cleared) and opened
in turn, with each of its tabs in front, and every turn trains for the same seconds. The time to the first plot runs
from the start of the command `amplab lab` until the line of the loss scale is painted; Start is pressed as soon as the
dashboard is there. Compare the ratios and their spread: the absolute numbers depend on the machine and its load.
"""

import argparse
import json
import statistics
import tempfile
import time
from operator import truediv
from pathlib import Path

from dashboard_page import ACCENT_LIGHT, DashboardPage
from lab_page import NOTEBOOKS, LabPage, launch_chromium
from lab_server import LabServer, running_amplab_lab, running_server
from playwright.sync_api import Playwright, sync_playwright

__all__ = ["first_plot", "main", "view_cost"]

TABS = ("dtypes", "gradients", "skipped")
SETTLE = 2.0  # seconds between a change of the view and the measurement
STEPS_PER_SECOND = """
import time
history = lab.trainer.history
steps, began = len(history), time.perf_counter()
time.sleep({seconds})
print((len(history) - steps) / (time.perf_counter() - began))
"""


def view_cost(playwright: Playwright, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return steps/s by view, one number per round: "closed" and one for each tab.

    Args:
        playwright: The driver.
        rounds: Turns through all views.
        seconds: Length of one measurement.
    """
    rates: dict[str, list[float]] = {view: [] for view in ("closed", *TABS)}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder)) as server,
        launch_chromium(playwright) as browser,
    ):
        page = LabPage(server, browser)
        page.open(NOTEBOOKS / "00_the_lab.ipynb")
        page.run_all()
        page.execute("lab.trainer.start()")
        for turn in range(rounds):
            for view in sorted(rates, reverse=turn % 2 == 1):
                show(page, view)
                time.sleep(SETTLE)
                rates[view].append(float(page.execute(STEPS_PER_SECOND.format(seconds=seconds))))
        page.close()
    return rates


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
        while dashboard.painted_columns(1, ACCENT_LIGHT) < 20:
            time.sleep(0.02)
        moment = time.perf_counter()
        page.close()
        return moment


def main() -> None:
    """Print a table and, with --json, the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="turns through all views (default: 9)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON too")
    options = parser.parse_args()
    with sync_playwright() as playwright:
        plot = first_plot(playwright)
        rates = view_cost(playwright, options.rounds, options.seconds)
    print(f"first plot after {plot:.1f} s (goal: at most 20 s)")
    for view, values in rates.items():
        spread = f"{min(values):.0f}…{max(values):.0f}"
        cost = 100 * (1 - statistics.median(map(truediv, values, rates["closed"])))
        print(f"{view:10} {statistics.median(values):6.0f} steps/s  ({spread})  cost {cost:5.1f} %")
    if options.json:
        print(json.dumps({"first_plot_seconds": plot, "steps_per_second": rates}))


if __name__ == "__main__":
    main()
