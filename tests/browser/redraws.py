"""The time that the page needs to draw its charts once."""

import statistics

from dashboard_page import SCALE, DashboardPage

__all__ = ["LONG_RUN", "redraw_milliseconds"]

LONG_RUN = """
import math
history = lab.trainer.history
for step in range(len(history), {steps}):
    is_skip = step % 4001 == 4000
    scale = 2.0 ** (12 + step // 4001 % 9)
    history.append_row((step, 2.0 * math.exp(-step / 2e4) + 0.1 * math.sin(step), scale, scale, is_skip,
                        "output.bias" if is_skip else None, "O1", None, 0.002 * step, None, -4.0))
lab._presenter.wake()
"""
"""Code that makes the run in a kernel as long as {steps}, without training."""

TIMED_FRAMES = """() => {
  window.amplabRedraws = [];
  const original = window.requestAnimationFrame;
  window.requestAnimationFrame = (draw) => original.call(window, (now) => {
    const began = performance.now();
    draw(now);
    window.amplabRedraws.push(performance.now() - began);
  });
  return () => { window.requestAnimationFrame = original; };
}"""


def redraw_milliseconds(dashboard: DashboardPage, times: int = 40) -> list[float]:
    """Return how long the page took for each of some redraws of both charts, each caused by an arrow key."""
    page = dashboard.lab.page
    canvas = dashboard.root.locator(SCALE)
    canvas.focus()
    page.evaluate(f"() => {{ window.amplabEnd = ({TIMED_FRAMES})(); }}")
    for _ in range(times):
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(20)
    taken: list[float] = page.evaluate("() => { window.amplabEnd(); return window.amplabRedraws; }")
    page.keyboard.press("Escape")
    slowest = sorted(taken)[-times:]  # other frames of the page draw no chart
    return [statistics.median(slowest), max(slowest)]
