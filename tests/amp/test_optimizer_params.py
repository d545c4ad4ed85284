"""What an optimizer owns, changed in mid-training."""

import torch
from torch.nn import Parameter

from amplab.amp.optimizer_params import cast_state, params_of, replace_params


def stepped(optimizer, param):
    param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_state_follows_the_parameter_into_its_dtype():
    old, kept = Parameter(torch.ones(3)), Parameter(torch.ones(2))
    optimizer = stepped(torch.optim.Adam([{"params": [old], "lr": 0.5}, {"params": [kept]}]), old)
    groups, moments = [group["params"] for group in optimizer.param_groups], dict(optimizer.state[old])
    new = Parameter(torch.ones(3).half())
    replace_params(optimizer, lambda param: new if param is old else param)
    assert [group["params"] for group in optimizer.param_groups] == [[new], [kept]]
    assert all(group["params"] is before for group, before in zip(optimizer.param_groups, groups, strict=True))
    assert list(params_of(optimizer)) == [new, kept]
    assert list(optimizer.state) == [new]
    assert torch.equal(optimizer.state[new]["exp_avg_sq"], moments["exp_avg_sq"].half())
    assert optimizer.state[new]["step"] is moments["step"]


def test_single_numbers_keep_their_dtype():
    """ASGD keeps its step size as a tensor: half would stop counting at 2048."""
    param = Parameter(torch.ones(3))
    optimizer = stepped(torch.optim.ASGD([param]), param)
    param.grad, param.data = None, param.data.half()
    cast_state(optimizer, param)
    assert {name: value.dtype for name, value in optimizer.state[param].items()} == {
        "step": torch.float32,
        "eta": torch.float32,
        "mu": torch.float32,
        "ax": torch.float16,
    }


def test_state_in_lists_is_cast():
    param = Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([param])
    optimizer.step(lambda: param.square().sum().backward() or param.square().sum())
    param.grad, param.data = None, param.data.half()
    cast_state(optimizer, param)
    assert {entry.dtype for entry in optimizer.state[param]["old_dirs"] or [param]} == {torch.float16}
