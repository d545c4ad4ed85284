"""The optimizers' cases: both sides leave the same weights and the same state."""

import pytest
import torch

from amplab.bench import optimizers

SHAPES = ((5, 3), (40,))
RUNS = 3


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
        for _ in range(RUNS):
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


@pytest.fixture
def trained(monkeypatch):
    """A function of a case and a side: what some runs leave of the weights and, by its names, of the state."""
    kept = optimizers.random_tensors
    monkeypatch.setattr(optimizers, "random_tensors", lambda *args: torch.manual_seed(0) and kept(*args))

    def run(case, name):
        side = getattr(case.make(), name)
        for _ in range(RUNS):
            side.run()
        optimizer = side.run.__self__
        params = optimizer.param_groups[0]["params"]
        return {
            "param": [param.detach() for param in params],
            **{key: [optimizer.state[param][key] for param in params] for key in optimizer.state[params[0]]},
        }

    return run


@pytest.mark.parametrize("case", optimizers.rule_cases(SHAPES), ids=lambda case: case.name.split()[0])
def test_both_sides_leave_the_same_weights_and_state(trained, case):
    ours, theirs = trained(case, "ours"), trained(case, "theirs")
    assert ours.keys() == theirs.keys()
    for key, tensors in ours.items():
        for mine, other in zip(tensors, theirs[key], strict=True):
            assert torch.allclose(mine, other, rtol=1e-5, atol=1e-7), key
    assert {step.item() for step in ours["step"]} == {RUNS + 1}


def test_every_case_names_a_rule_of_its_own():
    cases = optimizers.rule_cases(SHAPES)
    assert len({case.name for case in cases}) == len(cases)
    assert [case.make().details for case in cases] == [{"tensors": 2, "elements": 55}] * len(cases)
