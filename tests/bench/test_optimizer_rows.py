"""The optimizers' cases: what is timed on both sides leaves the same weights."""

import pytest
import torch

from amplab.bench import optimizer_rows
from amplab.bench.interleaved import Contestant

SHAPES = ((5, 3), (40,))


@pytest.fixture
def sides(monkeypatch):
    """Both sides of every case, with the tensors that each of them steps."""
    made = []
    for name in ("_Training", "_Masters"):
        kept = getattr(optimizer_rows, name)
        monkeypatch.setattr(optimizer_rows, name, lambda *args, kept=kept: made.append(kept(*args)) or made[-1])

    def run(case):
        made.clear()
        pair = case.make()
        for side in (pair.ours, pair.theirs):
            for _ in range(3):
                if side.prepare is not None:
                    side.prepare()
                side.run()
        return [getattr(each, "params", None) or [*each.masters, *each.weights] for each in made]

    return run


@pytest.mark.parametrize("index", range(5))
def test_both_sides_step_to_the_same_weights(sides, index):
    case = optimizer_rows.optimizer_cases(SHAPES, SHAPES)[index]
    ours, theirs = sides(case)
    start = optimizer_rows.random_tensors(SHAPES)
    for mine, other, before in zip(ours, theirs, start, strict=False):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)
        assert not torch.equal(mine, before)
    assert isinstance(case.make().ours, Contestant)


def test_the_small_list_is_the_transformers():
    assert sum(torch.Size(shape).numel() for shape in optimizer_rows._transformer_shapes()) > 800_000
