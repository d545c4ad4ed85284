"""Training by hand with two lists of parameters is training in float32 with rounded weights."""

import pytest
import torch
from torch import nn

from amplab.fp16_utils import (
    clip_grad_norm,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
    to_python_float,
)


@pytest.mark.parametrize("flat", [False, True])
def test_a_step_by_hand(flat):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).half()
    frozen = nn.Parameter(torch.ones(1).half(), requires_grad=False)
    model.register_parameter("frozen", frozen)
    model_params, masters = prep_param_lists(model, flat_master=flat)
    assert len(model_params) == 2
    assert {master.dtype for master in masters} == {torch.float32}
    wanted = [param.detach().float() for param in model_params]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    (model(torch.randn(5, 4).half()).float().sum() * 128).backward()
    model_grads_to_master_grads(model_params, masters, flat_master=flat)
    for master in masters:
        master.grad.mul_(1 / 128)
    optimizer.step()
    master_params_to_model_params(model_params, masters, flat_master=flat)
    for param, start in zip(model_params, wanted, strict=True):
        assert torch.equal(param, (start - 0.1 * (param.grad.float() / 128)).half())


def test_parameters_without_gradients():
    model = nn.Linear(2, 2).half()
    for flat in (False, True):
        model_params, masters = prep_param_lists(model, flat_master=flat)
        model_grads_to_master_grads(model_params, masters, flat_master=flat)
        assert [master.grad is None or not master.grad.any() for master in masters] == [True] * len(masters)


def test_a_flat_master_wants_one_dtype():
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"torch\.float16, torch\.float32"):
        prep_param_lists(model, flat_master=True)


def test_small_ones():
    assert to_python_float(torch.tensor([2.5])) == to_python_float([2.5]) == 2.5
    assert clip_grad_norm is nn.utils.clip_grad_norm_
