"""One page of JupyterLab in Chromium: opens a notebook, runs its cells, and records its errors."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from lab_server import LabServer
from playwright.sync_api import Browser, Locator, Page, Playwright, expect

__all__ = ["NOTEBOOKS", "LabPage", "chromium_path", "launch_chromium", "sound_page"]

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"

PATIENCE = 30_000  # ms; a busy machine is no failure
expect.set_options(timeout=PATIENCE)

LOCAL = {"127.0.0.1", "localhost", ""}  # data: and blob: have no host
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    # Only this machine's name resolves, so that a forgotten CDN fails.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
]
IDLE = """() => {
  const panel = window.jupyterapp?.shell.currentWidget;
  return Boolean(panel?.context?.isReady) && panel.sessionContext?.session?.kernel?.status === "idle";
}"""
RUN_CODE = """async (code) => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const future = kernel.requestExecute({ code, stop_on_error: false });
  const texts = [];
  future.onIOPub = (message) => texts.push(message.content.text ?? message.content.evalue ?? "");
  await future.done;
  return texts.join("");
}"""

# JupyterLab scrolls once more after Run All, some 70 ms late; 15 frames without a move are longer than that.
SHOW = """async (element) => {
  for (let still = 0, last = NaN; still < 15; ) {
    element.scrollIntoView({ block: "start" });
    await new Promise(requestAnimationFrame);
    const { top } = element.getBoundingClientRect();
    still = top === last ? still + 1 : 0;
    last = top;
  }
}"""


def chromium_path() -> str | None:
    """Return the browser to use: $AMPLAB_CHROMIUM, else the first Chromium or Chrome on the path, else None."""
    named = os.environ.get("AMPLAB_CHROMIUM")
    return named or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


@contextmanager
def launch_chromium(playwright: Playwright) -> Iterator[Browser]:
    """Start a headless browser with a fresh profile."""
    browser = playwright.chromium.launch(executable_path=chromium_path(), headless=True, args=FLAGS)
    try:
        yield browser
    finally:
        browser.close()


class LabPage:
    """A page with one notebook.

    Attributes:
        page: Playwright's page.
        errors: Uncaught errors of the page.
        foreign: Requests that would have left this machine.
    """

    def __init__(self, server: LabServer, browser: Browser, *, width: int = 1000, scale: float = 1) -> None:
        self.server = server
        self._context = browser.new_context(viewport={"width": width, "height": 900}, device_scale_factor=scale)
        self._context.set_default_timeout(PATIENCE)
        self.page: Page = self._context.new_page()
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self._context.on("request", lambda request: self._note_request(request.url))
        # A page with unsaved changes asks before it goes.
        self.page.on("dialog", lambda dialog: dialog.accept())

    def open(self, notebook: Path) -> None:
        """Copy `notebook` into the server's folder and open it as one document in the light theme; its kernel is idle.

        JupyterLab keeps the theme that an earlier test chose. The lab offers to continue a run of an earlier test,
        unless its checkpoint is gone.
        """
        for checkpoint in self.server.runs.glob("*.checkpoint"):
            checkpoint.unlink()
        shutil.copy(notebook, self.server.root / notebook.name)
        self.page.goto(self.server.url(f"/doc/tree/{notebook.name}"))
        self.wait_until_idle()
        if self.page.locator("body[data-jp-theme-light=false]").count():
            self.theme("JupyterLab Light")

    def reload(self) -> None:
        """Reload the page; the kernel keeps running."""
        self.page.reload()
        self.page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.context?.isReady")

    def wait_until_idle(self) -> None:
        """Wait for the notebook and for its kernel: run-all before that never resolves."""
        self.page.wait_for_function(IDLE, timeout=60_000)

    def command(self, name: str) -> None:
        """Run one of JupyterLab's commands and wait for it."""
        self.page.evaluate("name => window.jupyterapp.commands.execute(name)", name)

    def run_all(self) -> None:
        """Run every cell and wait for the last."""
        self.command("notebook:run-all-cells")

    def save(self) -> None:
        """Save the notebook."""
        self.command("docmanager:save")

    def execute(self, code: str) -> str:
        """Run code in the notebook's kernel, behind its cells, and return what it printed or raised."""
        return self.page.evaluate(RUN_CODE, code)

    def theme(self, name: str) -> None:
        """Switch to "JupyterLab Light" or "JupyterLab Dark" and wait until it is there.

        JupyterLab removes its splash by a timer that each change sets: of two changes within 200 ms, the
        second timer raises in the page. So wait for the splash to go, too.
        """
        self.page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", name)
        light = "true" if name.endswith("Light") else "false"
        self.page.wait_for_selector(f"body[data-jp-theme-light={light}]", state="attached")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")

    def show_dashboard(self) -> Locator:
        """Scroll the dashboard to the top and return it."""
        dashboard = self.page.locator(".amp-dashboard").last
        dashboard.wait_for()
        dashboard.evaluate(SHOW)
        return dashboard

    def close(self) -> None:
        """Shut the kernel down and close the page."""
        self.page.evaluate("() => window.jupyterapp?.shell.currentWidget?.sessionContext?.shutdown()")
        self._context.close()

    def _note_request(self, url: str) -> None:
        if (urlsplit(url).hostname or "") not in LOCAL:
            self.foreign.append(url)


@contextmanager
def sound_page(server: LabServer, browser: Browser) -> Iterator[LabPage]:
    """Open a page; when it closes, raise if it had an error or made a request to another machine."""
    lab_page = LabPage(server, browser)
    try:
        yield lab_page
    finally:
        lab_page.close()
    if lab_page.errors or lab_page.foreign:
        raise AssertionError(f"errors of the page: {lab_page.errors}; requests to other machines: {lab_page.foreign}")
