"""An X-ray as HTML."""

import pytest
import torch
from html_outline import outline
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


def test_the_page_has_a_folded_table_for_each_module(found):
    read = outline(found._repr_html_())
    modules = list(dict.fromkeys(record.module for record in found.trace if not record.folds))
    assert read.counts["details"] == read.counts["table"] == read.counts["caption"] == len(modules)
    captions = [f"Ops of {module}" if module else "Ops outside any module" for module in modules]
    assert [each["aria-label"] for each in read.named("div") if each.get("role") == "region"] == captions
    assert read.words.startswith("X-ray of Net: one step, O1")


def test_the_bands_count_every_op_once(found):
    read = outline(found._repr_html_())
    shares = [int(each["style"].removeprefix("flex-grow:")) for each in read.named("i") if each["title"]]
    shown = sum(not record.folds for record in found.trace)
    assert sum(shares) == 2 * shown  # the whole step, and module by module
    (forward, backward, *_) = [each["aria-label"] for _, each in read.tags if each.get("role") == "img"]
    casts = sum(record.is_cast and record.phase == "forward" for record in found.trace)
    assert forward.startswith("forward: ")
    assert f"{casts - 1} casts to float16" in forward  # one goes back to float32 for the loss
    assert backward.startswith("backward: ")


def test_every_op_and_its_reason_is_in_a_table(found):
    words = outline(found._repr_html_()).words
    for record in found.trace:
        assert record.folds or " ".join(record.reason.split()) in words or record.reason.startswith("gradient of")


def test_the_page_takes_its_colours_from_where_it_stands(found):
    page = found._repr_html_()
    assert "currentColor" in page
    assert "--jp-" in page


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
