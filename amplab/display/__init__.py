"""Display of results outside of widgets.

Reading order: `numbers`, numbers as text; `text`, plain text of at most 100 columns; `html`, pieces of HTML; `table`,
tables and cards with both a text and an HTML form; `drawings`, SVG; `palette`, all colors, including those of widgets.
"""

from amplab.display import html, numbers, text

__all__ = ["html", "numbers", "text"]
