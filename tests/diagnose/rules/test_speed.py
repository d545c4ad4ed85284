"""Why half is no faster: ops too small to be worth starting, and casts that move more than the ops do."""

import pytest
import torch
from torch import nn

from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.rules.speed import CASTS, TINY, speed_findings
from amplab.trace import trace_step


def named(name, model, x):
    def loss_fn():
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x).float().sum()

    return [each for each in speed_findings(trace_step(model, loss_fn)) if each.name == name]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("rows", "width", "tiny"), [(4, 16, True), (8, 64, True), (512, 128, False), (256, 256, False)]
)
def test_ops_too_small_to_be_worth_starting(rows, width, tiny, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    seen = named("launch-bound", model, torch.randn(rows, width))
    assert [(each.severity, each.certainty) for each in seen] == ([("note", "possible")] if tiny else [])
    assert all(each.evidence["median_elements"] < TINY for each in seen)


class Chain(nn.Module):
    """A product in half, and sums of one element in turns of half and float32: each a cast of all of it, or none."""

    def __init__(self, width, casts):
        super().__init__()
        self.body = nn.Linear(width, width)
        self.casts = casts

    def forward(self, x):
        x = self.body(x)
        for _ in range(8):
            x = x.float().half() if self.casts else x.relu()
        return x


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("casts", [False, True])
def test_casts_that_move_more_than_ops(width, casts):
    seen = named("cast-traffic", Chain(width, casts), torch.randn(8 * width, width))
    assert [each.severity for each in seen] == (["note"] if casts else [])
    assert all(each.evidence["cast_bytes"] > CASTS * each.evidence["op_bytes"] for each in seen)


def test_a_step_without_products_in_half_has_no_speed_to_miss():
    model = nn.Linear(7, 7)
    assert speed_findings(trace_step(model, lambda: model(torch.ones(3, 7)).sum())) == []


@pytest.mark.parametrize(("regions", "remedy"), [(1, "opt_level"), (2, "around the whole forward")])
def test_a_region_is_proposed_only_where_weights_are_cast_more_than_once(regions, remedy):
    model, x = nn.Linear(64, 64), torch.randn(8, 64)

    def step():
        out = x
        for _ in range(regions):
            with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
                out = model(out)
        return out.float().sum()

    (seen,) = (
        each for each in speed_findings(trace_step(model, step), Api(casting=ApiStyle.TORCH)) if "cast" in each.name
    )
    assert remedy in seen.remedy
