"""How results are shown outside of widgets.

Reading order: `numbers`, numbers as text; `text`, plain text of at most 100 columns; `html`, pieces of HTML; `table`,
tables and cards that are described once for both; `drawings`, SVG; `palette`, the colors of everything, widgets too.
"""

from amplab.display import html, numbers, text

__all__ = ["html", "numbers", "text"]
