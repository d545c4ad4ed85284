"""The JavaScript and CSS of the views, read from the files beside this one.

A widget's front end is one ES module, and a module sent as text cannot import its neighbours; so the files that
several views share are joined here, in front of the view's own, and comments stay in the files.
"""

from __future__ import annotations

import re
from pathlib import Path

from amplab.display.palette import palette_css

__all__ = ["joined", "stylesheet"]

FOLDER = Path(__file__).parent
# Whole-line comments only: `//` within a line may be part of a string.
COMMENT = re.compile(r"^[ \t]*(?://.*|/\*\*.*\*/[ \t]*)\n", re.MULTILINE)


def joined(*names: str) -> str:
    """Return the JavaScript files `names` as one module, in that order, without whole-line comments.

    Raises:
        FileNotFoundError: the package was installed without its JavaScript.
    """
    return COMMENT.sub("", "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in names))


def stylesheet(name: str = "dashboard.css") -> str:
    """Return the palette and the CSS file `name` as one style sheet."""
    return palette_css() + (FOLDER / name).read_text(encoding="utf-8")
