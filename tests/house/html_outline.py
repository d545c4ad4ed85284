"""Parse a piece of HTML and check that it is well formed, accessible and loads nothing."""

import re
from html.parser import HTMLParser

__all__ = ["Outline", "outline"]

_VOID = {"br", "wbr", "hr", "img", "input"}
_FOREIGN = {"script", "link", "iframe", "object", "form"}


class Outline(HTMLParser):
    """Tags in the order in which they open, and the text between them.

    Attributes:
        tags: (tag, attributes) of each.
        counts: number of occurrences of each tag.
        text: the text, without the style sheet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.counts: dict[str, int] = {}
        self.text = ""

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    def named(self, tag: str, scope: str | None = None) -> list[dict]:
        return [each for name, each in self.tags if name == tag and scope in (None, each.get("scope"))]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def outline(html: str) -> Outline:
    """Return the outline of a piece of a page; check that it is well formed, accessible and loads nothing."""
    read = Outline()
    read.feed(html)
    read.close()
    assert read.open == []
    assert _FOREIGN.isdisjoint(read.counts)
    assert not [each for _, each in read.tags if any(name.startswith("on") for name in each)]
    for tag, attributes in read.tags:
        if tag == "th":
            assert attributes.get("scope") in ("col", "row", "rowgroup")
        if tag == "svg":
            named = attributes.get("role") == "img" and attributes.get("aria-label")
            assert named or attributes.get("aria-hidden") == "true"
        if tag == "img":
            assert attributes["alt"].strip()
            assert attributes["src"].startswith("data:")
        if attributes.get("role") in ("img", "group"):
            assert attributes["aria-label"].strip()
        assert not _fixed_colours(attributes.get("style") or "")
    assert read.counts.get("caption", 0) == read.counts.get("table", 0)
    for sheet in re.findall(r"<style>(.*?)</style>", html, re.DOTALL):
        assert not _fixed_colours(re.sub(r"--[\w-]+:[^;}]*", "", sheet))
    return read


def _fixed_colours(style: str) -> list[str]:
    """Return colors that only suit a light or a dark background; the fallback of a variable does not count."""
    bare = re.sub(r"var\([^()]*\)", "", style)
    return re.findall(r"#[0-9a-fA-F]{3,8}\b|rgba?\(|hsl\(|\b(?:white|black)\b(?!-)", bare)
