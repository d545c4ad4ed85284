"""What forward writes into its inputs is seen by the caller, whatever the level (apex lost it: #385)."""

import pytest
import torch
from torch import nn

from amplab.amp import Session


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs, history, *, more):
        out = self.layer(inputs["x"])
        inputs["out"] = out
        inputs["deep"]["n"] = 7
        del inputs["gone"]
        history.append(out)
        history.pop(0)
        more["mask"] = torch.ones(2, dtype=torch.bool)
        return out


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_container_of_inputs_is_the_callers(level):
    torch.manual_seed(0)
    model = Writes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, first, second = torch.randn(3, 4), torch.zeros(1), torch.ones(1)
    inputs, history, more = {"x": x, "deep": {"y": x}, "gone": 1}, [first, second], {"z": x}
    session = Session()
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    try:
        with session.casting():
            out = model(inputs, history, more=more)
    finally:
        session.reset()
    assert inputs["x"] is x
    assert list(inputs) == ["x", "deep", "out"]
    assert torch.equal(inputs["out"], out)
    assert inputs["out"].dtype is out.dtype
    assert inputs["deep"] == {"y": inputs["deep"]["y"], "n": 7}
    assert inputs["deep"]["y"] is x
    assert history[0] is second
    assert torch.equal(history[1], out)
    assert set(more) == {"z", "mask"}


def test_it_is_carried_over_when_forward_raises():
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, inputs):
            inputs["seen"] = True
            raise KeyError

    model, inputs, session = Raises(), {"x": torch.zeros(1)}, Session()
    session.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    with pytest.raises(KeyError):
        model(inputs)
    session.reset()
    assert inputs["seen"]
