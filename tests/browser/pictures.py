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
SCALE = 1.4  # pixels of a picture for each of the page
WIDGET = "application/vnd.jupyter.widget-view+json"
LARGEST = 250_000  # bytes of a stored picture
SETTLED = 1500  # ms until every chart is drawn
STORY = (
    "lab.trainer.run(200); lab.trainer.inject('overflow'); lab.trainer.run(130); lab.trainer.change(opt_level='O2'); "
    "lab.trainer.run(120)"
)
LABEL = "\u25b6  To start the lab, click here and press Shift+Enter"
STILL = """async ([source, label, ratio]) => {
  const picture = Object.assign(new Image(), { src: source });
  await picture.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [picture.width, picture.height];
  const pen = canvas.getContext("2d");
  pen.drawImage(picture, 0, 0);
  const pixels = pen.getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < pixels.data.length; at += 4) {
    const [red, green, blue] = pixels.data.subarray(at, at + 3);
    const ink = 1 - (0.3 * red + 0.59 * green + 0.11 * blue) / 255;
    pixels.data.set([128, 128, 128, 10 * Math.round(13 * ink)], at);
  }
  pen.putImageData(pixels, 0, 0);
  pen.font = `600 ${19 * ratio}px sans-serif`;
  const [wide, tall] = [pen.measureText(label).width + 52 * ratio, 54 * ratio];
  const [left, top] = [(canvas.width - wide) / 2, 0.38 * canvas.height - tall / 2];
  pen.fillStyle = "#0b6bb8";
  pen.beginPath();
  pen.roundRect(left, top, wide, tall, 8 * ratio);
  pen.fill();
  pen.fillStyle = "white";
  pen.textBaseline = "middle";
  pen.fillText(label, left + 26 * ratio, top + tall / 2);
  return canvas.toDataURL("image/png");
}"""
"""Ink of one gray on nothing, for light and dark pages, with one instruction: otherwise people press the buttons."""


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
        lab = LabPage(server, browser, scale=SCALE)
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
    source = "data:image/png;base64," + base64.b64encode(dashboard.screenshot()).decode()
    return base64.b64decode(lab.page.evaluate(STILL, [source, LABEL, SCALE]).partition(",")[2])


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
    notebook["metadata"]["language_info"].pop("version", None)
    LAB.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
