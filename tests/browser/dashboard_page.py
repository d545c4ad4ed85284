"""The dashboard as a person sees it: figures, buttons, tabs, tables, and what is painted on its canvases."""

import re

from lab_page import LabPage
from playwright.sync_api import Locator, expect

__all__ = ["DashboardPage"]

# Columns of a canvas in which the given color is painted, its channels off by at most so much in sum.
PAINTED = """(canvas, [[red, green, blue], most]) => {
  const { width, height } = canvas;
  const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const wanted = [red, green, blue];
  const near = (at) => wanted.reduce((sum, value, i) => sum + Math.abs(pixels[at + i] - value), 0) <= most;
  let columns = 0;
  for (let x = 0; x < width; x += 1) {
    for (let y = 0; y < height; y += 1) {
      const at = 4 * (y * width + x);
      if (pixels[at + 3] > 200 && near(at)) { columns += 1; break; }
    }
  }
  return columns;
}"""
SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
ACCENT_LIGHT = [0x0B, 0x6B, 0xB8]
SKIP_LIGHT = [0xC0, 0x4F, 0x00]
# The charts, as CSS selectors.
LOSS = "canvas[aria-label^='Training loss over steps']"
SCALE = "canvas[aria-label^='Loss scale over steps']"
HISTOGRAM = ".amp-histogram"


class DashboardPage:
    """The last dashboard of a page.

    Attributes:
        lab: The page around it.
        root: The dashboard's element.
    """

    def __init__(self, lab: LabPage) -> None:
        self.lab = lab
        self.root: Locator = lab.show_dashboard()

    def button(self, text: str) -> Locator:
        """Return the button with this text."""
        return self.root.locator("button", has_text=re.compile(rf"^{re.escape(text)}$"))

    def press(self, text: str) -> None:
        """Press the button with this text."""
        self.button(text).click()

    def inject(self, kind: str) -> None:
        """Press one of the faults."""
        self.root.locator(f"[data-kind={kind}]").click()

    def open_tab(self, name: str) -> None:
        """Bring a tab to the front: by its name, such as dtypes."""
        self.root.locator(f"[role=tab][data-tab={name}]").click()

    def figure(self, name: str) -> str:
        """Return one of the figures above the charts: step, skipped, scale, accuracy, rate, memory."""
        return self.root.locator(f"[data-figure={name}]").inner_text()

    @property
    def step(self) -> int:
        """How many steps are done."""
        return int(self.figure("step").replace(",", ""))

    @property
    def log2_scale(self) -> int:
        """The exponent of the loss scale."""
        return exponent(self.figure("scale"))

    def wait_for_step(self, least: int) -> None:
        """Wait until at least `least` steps are done and drawn; the page may replace the figure meanwhile."""
        for _ in range(300):
            if self.step >= least:
                return
            self.lab.page.wait_for_timeout(100)
        raise AssertionError(f"{self.step} steps are done after 30 seconds, expected at least {least}")

    def wait_for_state(self, state: str) -> None:
        """Wait until the first button shows that the experiment runs (Pause) or not (Start)."""
        expect(self.root.locator(".amp-primary[data-does]")).to_have_text("Pause" if state == "running" else "Start")

    def rows(self, panel: str) -> Locator:
        """Return the rows of a panel's table."""
        return self.root.locator(f"[data-panel={panel}] tbody tr:not(.amp-empty)")

    def painted_columns(self, chart: str, color: list[int], most: int = 24) -> int:
        """Return in how many pixel columns of a chart (`LOSS`, `SCALE` or `HISTOGRAM`) a color is painted.

        Edges are drawn in between: a thin slanting line is found with a `most` of some hundred.
        """
        return self.root.locator(chart).evaluate(PAINTED, [color, most])

    def wait_for_paint(self, chart: str, color: list[int], least: int) -> None:
        """Wait until a chart has the color in at least `least` pixel columns; a busy page draws later."""
        for _ in range(100):
            painted = self.painted_columns(chart, color)
            if painted >= least:
                return
            self.lab.page.wait_for_timeout(50)
        raise AssertionError(f"{chart}: {painted} columns are painted in {color}, expected at least {least}")


def exponent(text: str) -> int:
    """Read 2¹⁶ as 16."""
    return int(text.removeprefix("2").translate(SUPERSCRIPTS))
