"""An X-ray as text and as HTML."""

import re

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


def parts(text: str) -> list[list[str]]:
    """The totals, the table, and the reasons in full."""
    return [part.splitlines() for part in text.split("\n\n")]


def test_the_table_has_a_line_for_each_row_and_the_phases_apart(found):
    totals, (head, *lines), _ = parts(str(found))
    assert " ".join(head.split()) == "# op module line in → out cast values of them reason"
    phases = [line for line in lines if line.startswith("-- ")]
    assert [phase.split()[1] for phase in phases] == ["forward", "backward"]
    (relu,) = [line for line in lines[: lines.index(phases[1])] if " relu " in line]
    assert re.search(r"relu\s+Net\s+test_xray_\s+float16 →", relu)  # long cells go on below
    assert " ".join(line.strip() for line in totals).startswith(f"{repr(found)[5:-1]}.")
    assert "Backward starts from cross_entropy, as given, multiplied by 2^16." in totals
    assert any(line.startswith("Activations kept for backward:") for line in totals)
    assert "Casts of weights kept for backward: 64 B: fc2 64 B." in totals


def test_neighbours_share_a_line_and_every_line_can_be_asked_for(found):
    assert "cast ×3" in str(found)
    numbered = [line for line in parts(found.text(every=True))[1][1:] if re.match(r" *\d+  ", line)]
    assert len(numbered) == len(found.trace)


@pytest.mark.parametrize("stats", [False, True])
def test_a_page_of_text_is_wide_enough_for_long_names(stats):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            deep = nn.ModuleDict({"a_residual_attention_block_with_a_long_name": Net()})
            self.encoder_of_the_source_language = nn.ModuleDict({"layers": deep})

        def forward(self, x):
            return self.encoder_of_the_source_language["layers"]["a_residual_attention_block_with_a_long_name"](x)

    text = str(xray(Model(), torch.ones(2, 16), opt_level="O1", stats=stats))
    assert max(map(len, text.splitlines())) <= 100
    assert "attention_block" in text


def test_truncated_reasons_are_printed_below_once(found):
    *_, reasons = parts(str(found))
    assert reasons[0] == "In full:"
    whole = " ".join(" ".join(reasons).split())
    linear = next(record.reason for record in found.trace if record.op == "linear" and len(record.reason) > 90)
    assert whole.count(linear) == 1
    assert linear not in " ".join(parts(str(found))[1])


def test_the_ends_of_a_range_have_the_same_digits():
    layer = nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(1.766)
        layer.bias.zero_()
    found = xray(layer, torch.ones(1, 1), stats=True)
    assert "1.77 to 1.77" in str(found)
    assert "1.77 to 1.77" in found._repr_html_()


def test_the_page_has_a_folded_table_for_each_module(found):
    read = outline(found._repr_html_())
    modules = list(dict.fromkeys(record.module for record in found.trace if not record.folds))
    assert read.counts["details"] == read.counts["table"] == read.counts["caption"] == len(modules)
    captions = [f"Ops of {module}" if module else "Ops outside any module" for module in modules]
    assert [each["aria-label"] for each in read.named("div") if each.get("role") == "group"] == captions
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
