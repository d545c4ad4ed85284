"""The optimizers' cases: what is timed on both sides leaves the same weights."""

import pytest
import torch

from amplab.bench import optimizers

SHAPES = ((5, 3), (40,))


@pytest.fixture
def weights(monkeypatch):
    """A function of a case and a side: what three runs leave of the weights."""
    made = []
    for name in ("_Training", "_Masters"):
        kept = getattr(optimizers, name)
        monkeypatch.setattr(optimizers, name, lambda *args, kept=kept: made.append(kept(*args)) or made[-1])

    def run(case, name):
        made.clear()
        side = getattr(case.make(), name)
        for _ in range(3):
            if side.prepare is not None:
                side.prepare()
            side.run()
        (tensors,) = made
        return getattr(tensors, "params", None) or [*tensors.masters, *tensors.weights]

    return run


@pytest.mark.parametrize("index", range(5))
def test_both_sides_step_to_the_same_weights(weights, index):
    case = optimizers.optimizer_cases(SHAPES, SHAPES)[index]
    start = optimizers.random_tensors(SHAPES)
    ours, theirs = weights(case, "ours"), weights(case, "theirs")
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)
    assert not any(map(torch.equal, ours, start))


def test_the_small_list_is_the_transformers():
    small = [case for case in optimizers.optimizer_cases(SHAPES) if "small" in case.name]
    assert [case.make().ours.run() for case in small] == [None, None]
    assert all(case.make().details["elements"] > 800_000 for case in small)
