"""What an optimizer owns, changed in mid-training."""

import pytest
import torch
from torch.nn import Parameter

from amplab import amp
from amplab.amp.backward.optimizer_params import cast_state, params_of, replace_params
from amplab.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adam(params, lr=0.01),
        lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
        lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
        lambda params: FusedAdam(params, lr=0.01),
        lambda params: FusedLAMB(params, lr=0.01),
        lambda params: FusedNovoGrad(params, lr=0.3),
    ],
    ids=["SGD", "Adam", "fused Adam", "FusedSGD", "FusedAdam", "FusedLAMB", "FusedNovoGrad"],
)
def test_a_model_moved_to_the_gpu_trains_on(problem, session, make):
    """Module.cuda keeps its parameters' identity; the masters and their state follow at the next backward."""
    model = problem.model(batch_norm=False)
    optimizer = make(model.parameters())
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    problem.train(session, model, optimizer, range(2))
    model.cuda()
    problem.inputs, problem.labels = problem.inputs.cuda(), problem.labels.cuda()
    losses = problem.train(session, model, optimizer, range(2, 40))
    assert losses[-1] < 0.5 * losses[0]
    masters = list(session.master_params(optimizer))
    assert {master.device.type for master in masters} == {"cuda"}
    states = [state for master in masters for name, state in optimizer.state[master].items() if name != "step"]
    assert {state.device.type for state in states} == {"cuda"}


def test_a_model_that_was_cast_behind_amps_back_is_refused(problem, session):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model.float()
    with pytest.raises(RuntimeError, match=r"^A half parameter of shape \(32, 16\) was changed to torch.float32"):
        session.scale_loss(torch.ones(()), optimizer).__enter__()


def test_what_has_no_parameters_is_refused():
    for given in (3, None, torch.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match=rf"^master_params got an object of type {type(given).__name__}: expected"):
            amp.master_params(given)
