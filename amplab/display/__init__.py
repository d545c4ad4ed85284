"""How things are shown outside of widgets: numbers as text, tables and cards as text and as HTML, drawings, colors."""

from amplab.display import html, numbers, text

__all__ = ["html", "numbers", "text"]
