"""An X-ray as text and as HTML."""

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab.trace import xray


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


@pytest.fixture
def found():
    """An X-ray at O1 with statistics."""
    torch.manual_seed(0)
    batch = torch.randn(6, 16), torch.arange(6) % 4
    return xray(Net(), batch, loss=F.cross_entropy, opt_level="O1", stats=True)


class Outline(HTMLParser):
    """Counts tags and checks that each is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_table_has_a_line_for_each_row_and_the_phases_apart(found):
    table, totals = str(found).split("\n\n")
    head, *lines = table.splitlines()
    assert " ".join(head.split()) == ("# op module line in → out cast bytes absmax smallest 0 / sub / inf / nan reason")
    phases = [line for line in lines if line.startswith("-- ")]
    assert [phase.split()[1] for phase in phases] == ["forward", "backward"]
    (relu,) = [line for line in lines if " relu " in line and "mirror" not in line]
    assert re.search(r"relu\s+Net\s+\S*test_xray_text\.py:\d+\s+float16 → float16", relu)
    assert totals.splitlines()[0] == f"{repr(found)[5:-1]}."
    assert "Backward starts from cross_entropy, as given, times 2^16." in totals
    assert "Activations kept for backward:" in totals
    assert "Casts of weights kept for backward: 64 bytes: fc2 64" in totals


def test_neighbours_share_a_line_and_every_line_can_be_asked_for(found):
    assert "cast ×3" in str(found)
    assert "of fc1.weight, fc1.bias" in str(found)
    body = [line for line in found.text(every=True).split("\n\n")[0].splitlines()[1:] if not line.startswith("-- ")]
    assert len(body) == len(found.trace)


def test_the_page_has_a_folded_table_for_each_module(found):
    outline = Outline()
    outline.feed(found._repr_html_())
    assert outline.open == []
    modules = list(dict.fromkeys(record.module for record in found.trace if not record.folds))
    assert outline.counts["details"] == outline.counts["table"] == len(modules)
    text = " ".join(outline.text)
    for module in filter(None, modules):
        assert f"{module}: " in text
    assert "outside of every module: " in text
    assert {"script", "link", "img", "iframe"}.isdisjoint(outline.counts)


def test_the_page_takes_its_colours_from_where_it_stands(found):
    style = re.search(r"<style>(.*?)</style>", found._repr_html_(), re.DOTALL)[1]
    assert "currentColor" in style
    assert "--jp-" in style
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b|rgb\(", style)


def test_what_a_model_is_called_cannot_write_into_the_page():
    class Evil(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<b>", nn.Linear(2, 2))

        def forward(self, x):
            return getattr(self, "<b>")(x)

    page = xray(Evil(), torch.ones(1, 2))._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
