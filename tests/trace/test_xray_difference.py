"""Two X-rays compared: levels, rules, and a step that has another op."""

import dataclasses
from itertools import groupby

import pytest
import torch
from html_outline import outline
from torch import nn
from torch.nn import functional as F

from amplab.policies import PrecisionPolicy
from amplab.trace import xray


class Net(nn.Module):
    def __init__(self, *, twice: bool = False) -> None:
        super().__init__()
        self.fc, self.norm, self.twice = nn.Linear(8, 8), nn.LayerNorm(8), twice

    def forward(self, x):
        hidden = self.norm(self.fc(x))
        return torch.tanh(hidden) if self.twice else hidden


BATCH = torch.ones(2, 8)


def test_what_a_level_changes():
    model = Net()
    before, after = xray(model, BATCH, opt_level="O0"), xray(model, BATCH, opt_level="O1", loss_scale=1.0)
    found = before.diff(after)
    assert [(row["op"], row["before"], row["after"]) for row in found.rows() if row["phase"] == "forward"] == [
        ("linear", "float32 ×3 → float32", "float16 ×3 → float16")
    ]
    assert {row["kind"] for row in found.rows()} == {"changed"}
    (norm, layer) = sorted(found.casts(), key=lambda row: row["module"], reverse=True)
    assert (norm["module"], norm["casts_before"], norm["bytes_before"]) == ("norm", 0, 0)
    assert layer["bytes_after"] == 6 * (16 + 64 + 8) + 6 * (64 + 8)  # forward, and the gradients of the weights back
    assert "casts 0 → 7" in found.sentence
    assert "2 casts" not in found.sentence
    assert len(found) == len(found.rows())


def test_before_and_after_a_rule():
    model = Net()
    before = xray(model, BATCH, policy="apex/float16")
    after = xray(model, BATCH, policy=PrecisionPolicy(op_rules={"linear": "float32"}))
    (row, *_) = before.diff(after).rows()
    assert (row["op"], row["after"]) == ("linear", "float32 ×3 → float32")
    assert "your rule" in row["reason"]
    assert "linear" in str(before.diff(after))


def test_the_same_twice_is_no_difference():
    model = Net()
    found = xray(model, BATCH, opt_level="O1").diff(xray(model, BATCH, opt_level="O1"))
    assert (len(found), found.rows(), found.casts()) == (0, [], [])
    assert " ".join(str(found).split()) == found.sentence
    assert "table" not in outline(found._repr_html_()).counts
    assert ": of 10 ops 0 changed dtypes, 0 added, 0 removed; casts 7 → 7," in found.sentence


@pytest.mark.parametrize(("first", "kind"), [(False, "added"), (True, "removed")])
def test_ops_that_come_and_go(first, kind):
    found = xray(Net(twice=first), BATCH).diff(xray(Net(twice=not first), BATCH))
    assert [(row["op"], row["kind"], row["phase"]) for row in found.rows()] == [
        ("tanh", kind, "forward"),
        ("tanh", kind, "backward"),
    ]
    (text, *_) = [line for line in str(found).splitlines() if "tanh" in line]
    assert f"({kind})" in text


def test_text_and_html_say_the_same():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    found = xray(model, (BATCH, torch.tensor([0, 1])), loss=F.cross_entropy, opt_level="O0").diff(
        xray(model, (BATCH, torch.tensor([0, 1])), loss=F.cross_entropy, opt_level="O2")
    )
    said, (head, *lines) = (part.splitlines() for part in str(found).split("\n\n"))
    assert head.split()[:2] == ["op", "module"]
    assert " ".join(line.strip() for line in said) == found.sentence
    assert max(map(len, (*said, *lines))) <= 100
    page = outline(found._repr_html_())
    assert page.words.startswith(found.sentence)
    alike = len(list(groupby(found.rows())))
    assert page.counts["tr"] == 1 + alike + len(page.named("th", "rowgroup"))
    assert repr(found) == f"XRayDifference({found.sentence})"


class Other(Net):
    """The same model under another name."""


def test_two_models_are_said_to_be_two():
    found = xray(Net(), BATCH).diff(xray(Other(), BATCH))
    assert found.sentence.startswith("two models, Net and Other, as it is → as it is: of 8 ops 0 changed dtypes")
    assert xray(Net(), BATCH).diff(xray(Net(), BATCH)).sentence.startswith("as it is → as it is: ")


def test_models_with_nothing_in_common_are_refused():
    other = xray(nn.Sequential(nn.Tanh()), BATCH.clone().requires_grad_(), loss=lambda out: out.square().mean())
    with pytest.raises(ValueError, match="Linear and Sequential"):
        xray(nn.Linear(8, 8), BATCH, loss=lambda out: out.sum()).diff(
            dataclasses.replace(other, events=other.events[:1])
        )
