"""Renew the pictures of the lab: run `python tests/browser/pictures.py` after a visible change.

It executes 00_the_lab.ipynb in JupyterLab as a reader would, trains, switches the level, injects an overflow, and keeps
what the dashboard then looks like: as the stored output of its cell, and for the README in light and dark.
"""

import base64
import json
import sys
import tempfile
from pathlib import Path

from lab_page import NOTEBOOKS, LabPage, launch_chromium
from lab_server import running_server
from playwright.sync_api import sync_playwright

__all__ = ["main"]

LAB = NOTEBOOKS / "00_the_lab.ipynb"
CELL = "the-lab"
WIDGET = "application/vnd.jupyter.widget-view+json"
LARGEST = 250_000  # bytes of a stored picture
RIBBON = """dashboard => {
  const ribbon = document.createElement("div");
  ribbon.id = "still";
  ribbon.textContent = "A picture of the lab. To start it, click here and press Shift+Enter.";
  ribbon.style.cssText = "background: #0b6bb8; color: white; font: 600 14px var(--jp-ui-font-family, sans-serif);"
    + "padding: 8px 12px; border-radius: 4px; margin: 0 0 10px; text-align: center";
  dashboard.prepend(ribbon);
}"""
"""A stored output looks like the live one, so people press its buttons unless a label says that it is a picture."""


def main() -> None:
    """Run the notebook, take the pictures, store them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
        running_server(Path(folder)) as server,
        launch_chromium(playwright) as browser,
    ):
        lab = LabPage(server, browser, scale=1.4)
        lab.open(LAB)
        lab.run_all()
        lab.save()
        executed = json.loads((server.root / LAB.name).read_text(encoding="utf-8"))
        light, dark, still = photograph(lab)
        lab.close()
    store(executed, still)
    (NOTEBOOKS / "images").mkdir(exist_ok=True)
    (NOTEBOOKS / "images" / "lab_light.png").write_bytes(light)
    (NOTEBOOKS / "images" / "lab_dark.png").write_bytes(dark)


def photograph(lab: LabPage) -> tuple[bytes, bytes, bytes]:
    """Train for a while; return the dashboard in light, in dark, and with the label of a stored picture."""
    dashboard, page = lab.show_dashboard(), lab.page
    lab.execute("lab.trainer.run(200)")
    page.locator("[data-kind=overflow]").click()
    page.locator(".amp-armed").wait_for()
    lab.execute("lab.trainer.run(130); lab.trainer.change(opt_level='O2'); lab.trainer.run(120)")
    page.wait_for_timeout(1500)
    light = dashboard.screenshot()
    dashboard.evaluate(RIBBON)
    still = dashboard.screenshot()
    page.locator("#still").evaluate("ribbon => ribbon.remove()")
    lab.theme("JupyterLab Dark")
    page.wait_for_selector("#jupyterlab-splash", state="detached")
    page.wait_for_timeout(1500)
    return light, dashboard.screenshot(), still


def store(notebook: dict, picture: bytes) -> None:
    """Write the executed notebook, with the picture in place of the widget, which a file cannot hold."""
    if len(picture) > LARGEST:
        sys.exit(f"the picture has {len(picture):,} bytes; expected at most {LARGEST:,}.")
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if output.get("data", {}).pop(WIDGET, None) is not None and cell["id"] == CELL:
                output["data"]["image/png"] = base64.b64encode(picture).decode()
        cell["metadata"].pop("execution", None)
    notebook["metadata"] = {name: notebook["metadata"][name] for name in ("kernelspec", "language_info")}
    LAB.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
