"""Renew the pictures of the lab: run `python tests/browser/pictures.py` after a visible change, and look at each.

It executes 00_the_lab.ipynb in JupyterLab as a reader would, trains, switches the level, injects an overflow, and keeps
what the dashboard then looks like: as the stored output of its cell, for the README in light and dark, and every tab in
both themes in a folder, build/pictures or the one given as argument.
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
PANELS = NOTEBOOKS.parent / "build" / "pictures"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
CELL = "the-lab"
WIDGET = "application/vnd.jupyter.widget-view+json"
LARGEST = 250_000  # bytes of a stored picture
SETTLED = 1500  # ms until every chart is drawn
STORY = (
    "lab.trainer.run(200); lab.trainer.inject('overflow'); lab.trainer.run(130); lab.trainer.change(opt_level='O2'); "
    "lab.trainer.run(120)"
)
STILL = """dashboard => {
  for (const part of dashboard.children) part.style.filter = "grayscale(1) opacity(0.3)";
  const label = document.createElement("div");
  label.textContent = "\u25b6  To start the lab, click here and press Shift+Enter";
  label.style.cssText = "position: absolute; top: 38%; left: 50%; transform: translate(-50%, -50%); z-index: 9;"
    + "background: #0b6bb8; color: white; font: 600 19px var(--jp-ui-font-family, sans-serif); padding: 16px 26px;"
    + "border-radius: 8px; white-space: nowrap; box-shadow: 0 2px 10px #0006";
  dashboard.style.position = "relative";
  dashboard.append(label);
}"""
"""Grey, with one instruction: otherwise people press the buttons of the picture."""


def main() -> None:
    """Run the notebook, take the pictures, store them."""
    panels = Path(sys.argv[1]) if len(sys.argv) > 1 else PANELS
    panels.mkdir(parents=True, exist_ok=True)
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
        lab.execute(STORY)
        for theme, name in THEMES.items():
            lab.theme(name)
            photograph_tabs(lab, panels, theme)
        lab.theme(THEMES["light"])
        still = picture_of_a_picture(lab)
        lab.close()
    store(executed, still)
    (NOTEBOOKS / "images").mkdir(exist_ok=True)
    for theme in THEMES:
        (NOTEBOOKS / "images" / f"lab_{theme}.png").write_bytes((panels / f"{theme}_01.png").read_bytes())
    print(f"renewed {LAB.name} and notebooks/images; every tab is in {panels}")


def photograph_tabs(lab: LabPage, folder: Path, theme: str) -> None:
    """Take a picture of the dashboard with each tab in front, in the order of the page."""
    dashboard = lab.show_dashboard()
    for number, tab in enumerate(dashboard.get_by_role("tab").all(), 1):
        tab.click()
        lab.page.mouse.move(0, 0)
        lab.page.wait_for_timeout(SETTLED)
        (folder / f"{theme}_{number:02}.png").write_bytes(dashboard.screenshot())
    dashboard.get_by_role("tab").first.click()


def picture_of_a_picture(lab: LabPage) -> bytes:
    """Return the dashboard as the output of a cell that has not run yet."""
    dashboard = lab.show_dashboard()
    lab.page.wait_for_timeout(SETTLED)
    dashboard.evaluate(STILL)
    return dashboard.screenshot()


def store(notebook: dict, picture: bytes) -> None:
    """Write the executed notebook, with the picture in place of the widget, which a file cannot hold."""
    if len(picture) > LARGEST:
        sys.exit(f"the picture has {len(picture):,} bytes; expected at most {LARGEST:,}.")
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if output.get("data", {}).pop(WIDGET, None) is not None and cell["id"] == CELL:
                output["data"].pop("text/html", None)  # JupyterLab would show it instead of the picture
                output["data"]["image/png"] = base64.b64encode(picture).decode()
        cell["metadata"].pop("execution", None)
    notebook["metadata"] = {name: notebook["metadata"][name] for name in ("kernelspec", "language_info")}
    LAB.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
