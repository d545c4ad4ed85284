"""What a gradient that no kernel takes is called: by its parameter's name, or by its place."""

import pytest
import torch
from torch import nn

from amplab.amp import GradScaler


def parameters():
    params = {"weight": nn.Parameter(torch.ones(2)), "phase": nn.Parameter(torch.ones(2, dtype=torch.complex64))}
    params["weight"].grad, params["phase"].grad = torch.ones(2), torch.ones(2, dtype=torch.complex64)
    return params


def unscale(optimizer):
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def test_a_gradient_is_named_where_the_optimizer_has_names():
    optimizer = torch.optim.SGD(parameters().items(), lr=1.0)
    with pytest.raises(RuntimeError, match=r"^the gradient of phase is complex64: expected float16, bfloat16, float32"):
        unscale(optimizer)


def test_a_gradient_is_named_by_its_place_where_there_are_no_names():
    params = [nn.Parameter(torch.ones(3)), *parameters().values()]  # the first has no gradient
    with pytest.raises(RuntimeError, match=r"^the gradient of parameter 2 is complex64: expected"):
        unscale(torch.optim.SGD(params, lr=1.0))


def test_two_gradients_in_one_place_are_named():
    params = {name: nn.Parameter(torch.ones(2)) for name in ("first", "second", "third")}
    params["first"].grad = params["third"].grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"^the gradient of first and the gradient of third overlap in memory"):
        unscale(torch.optim.SGD(params.items(), lr=1.0))
    assert params["first"].grad.tolist() == [1.0, 1.0]
