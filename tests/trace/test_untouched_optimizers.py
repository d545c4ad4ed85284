"""Optimizers that step inside an X-ray are afterwards what they were, bit by bit."""

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn

from amplab import amp
from amplab.trace import trace_step
from amplab.trace.untouched import unchanged_optimizers

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.9),
}


def bits(optimizer):
    """The state of an optimizer and what it steps, with the identities of its tensors."""
    tensors = [
        (
            id(parameter),
            parameter.detach().clone(),
            {name: (id(slot), copy.deepcopy(slot)) for name, slot in state.items()},
        )
        for parameter, state in optimizer.state.items()
    ]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return (
        tensors,
        groups,
        [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]],
    )


def plain(value):
    """Tensors as their exact bytes, the rest as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().view(-1).view(torch.uint8).tolist(), value.dtype
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def assert_same(before, after):
    assert plain(before) == plain(after)


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stepped", [False, True])
def test_state_parameters_and_settings_are_put_back(kind, stepped):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if stepped:
        train(model, optimizer)
    before = bits(optimizer)
    with unchanged_optimizers():
        for _ in range(2):
            train(model, optimizer)
            optimizer.param_groups[0]["lr"] /= 2
        assert plain(bits(optimizer)) != plain(before)
    assert_same(before, bits(optimizer))


def test_inside_a_trace_and_without_a_record_of_its_own(monkeypatch):
    """A model that is not the traced one, trained on the way; the records are those of the training alone."""
    judge, model = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)
    train(judge, optimizer)
    before = bits(optimizer)

    def loss():
        train(judge, optimizer)
        return judge(model(torch.ones(2, 4))).sum()

    trace = trace_step(model, loss)
    assert_same(before, bits(optimizer))
    monkeypatch.setattr("amplab.trace.untouched.unchanged_optimizers", contextlib.nullcontext)
    assert trace == trace_step(model, loss)
    assert plain(before) != plain(bits(optimizer))


def test_masters_of_an_initialized_optimizer():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    try:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=1.0)
        masters = list(amp.master_params(optimizer))
        before = [master.detach().clone() for master in masters]

        def loss():
            with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            return model(torch.ones(2, 4)).sum()

        halves = [parameter.detach().clone() for parameter in model.parameters()]
        trace_step(model, loss)
        assert all(map(torch.equal, masters, before))
        assert all(map(torch.equal, model.parameters(), halves))
    finally:
        amp.reset()


def test_other_threads_go_on():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with unchanged_optimizers():
        thread = threading.Thread(target=train, args=(model, optimizer))
        thread.start()
        thread.join()
    assert not torch.equal(model.weight, before)


def test_the_hook_is_off_afterwards_also_after_an_exception():
    from torch.optim import optimizer as module

    count = len(module._global_optimizer_pre_hooks)
    inside = []
    with contextlib.suppress(KeyError), unchanged_optimizers():
        inside.append(len(module._global_optimizer_pre_hooks))
        raise KeyError
    assert inside == [count + 1]
    assert len(module._global_optimizer_pre_hooks) == count
