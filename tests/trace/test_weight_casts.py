"""Which casts the weight cache served, counted by hand; in amplab's engines and in torch.autocast."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amplab.policies import CastingEngine
from amplab.trace import xray


class Twice(nn.Module):
    """One layer called twice, and a head that shares its weight with a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x):
        return self.tied(self.head(self.layer(self.layer(x))))


def served(found):
    return [(cast.parameter, cast.module, cast.saved) for cast in found.casts if cast.cached]


EXPECTED = [("layer.weight", "layer", 6 * 64), ("layer.bias", "layer", 6 * 8), ("head.weight", "tied", 6 * 64)]


@pytest.mark.parametrize(
    "setting",
    [
        {"opt_level": "O1"},
        {"policy": "apex/bfloat16"},
        {"autocast": {"dtype": torch.bfloat16}},
        {"autocast": {"dtype": torch.float16}},
        {"autocast": {"policy": None, "dtype": torch.bfloat16}},
    ],
)
def test_every_weight_is_cast_once_and_then_read_from_the_cache(setting):
    found = xray(Twice(), torch.randn(3, 8), **setting)
    made = [cast for cast in found.casts if cast.parameter and cast.phase == "forward" and not cast.cached]
    assert sorted(cast.parameter for cast in made) == ["head.weight", "layer.bias", "layer.weight"]
    assert sorted(served(found)) == sorted(EXPECTED)
    assert all(cast.nbytes == 0 for cast in found.casts if cast.cached)
    assert sum(cast.nbytes for cast in found.casts) == found.trace.cast_bytes


@pytest.mark.parametrize(
    "setting",
    [
        {"autocast": {"dtype": torch.bfloat16, "cache_enabled": False}},
        {"autocast": {"policy": None, "dtype": torch.bfloat16, "cache_enabled": False}},
    ],
)
def test_without_a_cache_every_use_is_a_cast(setting):
    found = xray(Twice(), torch.randn(3, 8), **setting)
    made = [cast.parameter for cast in found.casts if cast.parameter and cast.phase == "forward"]
    assert sorted(made) == ["head.weight", "head.weight", "layer.bias", "layer.bias", "layer.weight", "layer.weight"]
    assert served(found) == []


def test_a_cast_in_the_code_that_is_read_twice_does_not_count_as_cached():
    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, x):
            half = self.weight.half()
            return (x.half() @ half) @ half

    for setting in ({}, {"opt_level": "O1"}):
        found = xray(ByHand(), torch.ones(2, 8), **setting)
        assert served(found) == []
        assert [cast.op for cast in found.casts if cast.phase == "forward"][:2] == ["half", "half"]


def test_an_edited_weight_is_cast_again():
    layer = nn.Linear(8, 8, bias=False)

    def loss():
        first = layer(torch.ones(2, 8))
        with torch.no_grad():
            layer.weight.mul_(2)
        return (first.detach() + layer(torch.ones(2, 8))).sum()

    found = xray(layer, step=loss, opt_level="O1")
    assert served(found) == []
    assert [cast.parameter for cast in found.casts if cast.parameter and cast.phase == "forward"] == ["weight"] * 2


def test_a_block_that_is_computed_again_reads_the_cache():
    layer = nn.Linear(8, 8, bias=False)

    def loss():
        return checkpoint(layer, torch.ones(2, 8, requires_grad=True), use_reentrant=True).sum()

    engine = CastingEngine()
    with engine.active():
        found = xray(layer, step=loss)
    (again,) = [cast for cast in found.casts if cast.cached]
    assert (again.parameter, again.phase) == ("weight", "backward")


def test_the_row_and_the_text_say_so():
    found = xray(Twice(), torch.randn(3, 8), opt_level="O1")
    rows = [row for row in found.rows(every=True) if row["from_cache"]]
    assert [name for row in rows for name in row["from_cache"]] == ["layer.weight", "layer.bias", "head.weight"]
    assert "cached: head.weight" in found.text(every=True)
    assert "The weight cache avoided 816 B of casts." in str(found)
