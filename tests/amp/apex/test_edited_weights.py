"""Half weights written after `initialize`, by what wraps or edits the model: masters follow until the first step."""

import pytest
import torch

from amplab import amp


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_edit_of_the_model_before_the_first_step_reaches_the_masters(problem, dtype):
    model = problem.model()
    full = [param.detach().clone() for param in model[3].parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O2", cast_model_type=dtype, verbosity=0)
    weight = model[0].weight
    weight.data.copy_(torch.full((32, 16), 0.3))
    torch.nn.init.ones_(model[0].bias)
    problem.train(session, model, optimizer, [0])
    masters = list(session.master_params(optimizer))
    assert torch.equal(masters[0], torch.full((32, 16), 0.3).to(dtype).float())
    assert torch.equal(weight, masters[0].to(dtype))
    assert torch.equal(masters[1], torch.ones(32))
    assert all(map(torch.equal, masters[-2:], full))  # not edited: not rounded


@pytest.mark.parametrize("undo", ["state_dict", "reset", "another level"])
def test_an_edit_of_the_model_before_the_first_step_is_kept_by(problem, undo):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    full = model[3].state_dict()["weight"].clone()
    model[0].weight.data.fill_(0.25)
    if undo == "reset":
        session.reset()
    elif undo == "another level":
        session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    saved = model.state_dict()
    assert torch.equal(saved["0.weight"], torch.full((32, 16), 0.25))
    assert torch.equal(saved["3.weight"], full)


def test_a_master_edited_before_the_first_step_stays_edited(problem):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    next(session.master_params(optimizer)).data.fill_(0.3)
    problem.train(session, model, optimizer, [0])
    assert torch.equal(next(session.master_params(optimizer)), torch.full((32, 16), 0.3))
    assert torch.equal(model[0].weight, torch.full((32, 16), 0.3).half())


def test_an_edit_that_comes_after_a_backward_is_overwritten_by_the_step(problem):
    """As in apex; `amplab.amp`'s page names it among the limits."""
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    problem.train(session, model, optimizer, [0])
    before = model[0].weight.detach().clone()
    model[0].weight.data.fill_(0.25)
    problem.train(session, model, optimizer, [1])
    assert torch.equal(model[0].weight, before)
