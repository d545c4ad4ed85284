"""A wrong value of AMPLAB_KERNELS is refused where training is prepared, and not in the middle of the first step."""

import pytest
import torch

from amplab import amp
from amplab.optimizers import FusedAdam


def initialize(params):
    model = torch.nn.Linear(1, 1)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)


@pytest.mark.parametrize("make", [initialize, lambda params: amp.GradScaler("cpu"), FusedAdam])
def test_a_wrong_value_is_refused_before_training(make, monkeypatch):
    monkeypatch.setenv("AMPLAB_KERNELS", "off")
    with pytest.raises(ValueError, match="AMPLAB_KERNELS='off'"):
        make([torch.zeros(1, requires_grad=True)])
