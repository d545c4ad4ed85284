"""Levels changed in mid-training by reset and initialize: weights and optimizer state kept, the loss going on down."""

import gc
import itertools

import pytest
import torch
from torch import nn

from amplab import amp

OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}
LEVELS = ("O0", "O1", "O2", "O3")


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def state_of(optimizer):
    """Copies of the state in the order of the parameters, whatever their dtype."""
    params = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p].items()} for p in params]


def agree(left, right, rounding):
    """Assert that tensors agree: bit for bit, or once the left ones are rounded to half."""
    for one, other in zip(left, right, strict=True):
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                rounded = value.half().float() if rounding and value.dim() > 0 and value.is_floating_point() else value
                assert torch.equal(rounded, other[name].to(rounded.dtype)), name
            else:
                assert value == other[name]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("by_reset", [True, False])
def test_a_run_through_all_levels(problem, name, by_reset):
    session, model = amp.Session(), problem.model()
    optimizer = OPTIMIZERS[name](model.parameters())
    originals = list(model.parameters())
    means = []
    for level in ("O0", "O1", "O2", "O3", "O1", "O0"):
        weights, state = weights_of(model), state_of(optimizer)
        if by_reset:
            session.reset()
            assert [*itertools.chain(*(g["params"] for g in optimizer.param_groups))] == originals
            assert {param.dtype for param in model.parameters()} == {torch.float32}
            agree([weights], [weights_of(model)], rounding=False)
            agree(state, state_of(optimizer), rounding=False)
        session.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        agree([weights], [weights_of(model)], rounding=level == "O3")
        agree(state, state_of(optimizer), rounding=level == "O3")
        expected = torch.float16 if level == "O3" else torch.float32
        for entries in state_of(optimizer):
            assert {v.dtype for k, v in entries.items() if isinstance(v, torch.Tensor) and v.dim()} <= {expected}
        losses = problem.train(session, model, optimizer, range(16))
        means.append(sum(losses) / len(losses))
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.1 * means[0]
    assert all(param is original for param, original in zip(model.parameters(), originals, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_reset_takes_everything_off(problem, level):
    model = problem.model()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    problem.train(session, model, optimizer, range(2))
    session.reset()
    assert session.opt_level is None
    for module in model.modules():
        hooks = (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._state_dict_hooks,
            module._load_state_dict_pre_hooks,
            module._load_state_dict_post_hooks,
        )
        assert not any(hooks)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert all(param in optimizer.state for param in model.parameters())


@pytest.mark.parametrize("level", LEVELS[:3])
def test_float32_training_after_reset_is_what_it_would_have_been(problem, level):
    """A level that was switched on and off again between two steps has done nothing at all."""

    def run(detour):
        session, model = amp.Session(), problem.model()
        optimizer = torch.optim.Adam(model.parameters())
        session.initialize(model, optimizer, opt_level="O0", verbosity=0)
        problem.train(session, model, optimizer, range(3))
        if detour:
            session.initialize(model, optimizer, opt_level=level, verbosity=0)
        session.reset()
        for step in range(3):
            problem.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    agree([run(detour=True)], [run(detour=False)], rounding=False)


@pytest.mark.parametrize("level", LEVELS)
def test_a_cell_that_runs_twice_does_not_nest(problem, level):
    model = problem.model()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    session = amp.Session()

    def cell():
        session.initialize(model, optimizer, opt_level=level, verbosity=0)
        counts = [len(model._forward_pre_hooks), len(model._state_dict_hooks), len(optimizer._optimizer_step_pre_hooks)]
        return counts, [param.dtype for param in session.master_params(optimizer)]

    first = cell()
    problem.train(session, model, optimizer, range(2))
    weights = weights_of(model)
    assert cell() == cell() == first
    agree([weights], [weights_of(model)], rounding=False)
    problem.train(session, model, optimizer, range(2))


def test_a_cell_that_makes_a_new_optimizer_on_a_half_model(problem):
    """The model lives on from cell to cell; the optimizer is made anew on its half weights, the old one is gone."""
    model, session = problem.model(), amp.Session()
    for _ in range(2):
        optimizer = torch.optim.Adam(model.parameters())
        session.initialize(model, optimizer, opt_level="O2", verbosity=0)
        problem.train(session, model, optimizer, range(2))
        masters = [master.detach().clone() for master in session.master_params(optimizer)]
        del optimizer
        gc.collect()
    optimizer = torch.optim.Adam(model.parameters())
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert all(map(torch.equal, masters, session.master_params(optimizer)))


def test_an_old_optimizer_of_the_same_model_is_let_go(problem):
    model, session = problem.model(), amp.Session()
    old, new = torch.optim.SGD(model.parameters(), lr=0.1), None
    session.initialize(model, old, opt_level="O2", verbosity=0)
    new = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, new, opt_level="O1", verbosity=0)
    assert not old._optimizer_step_pre_hooks
    assert [*old.param_groups[0]["params"]] == list(model.parameters()) == [*new.param_groups[0]["params"]]
    with pytest.raises(RuntimeError, match=r"^This SGD was not part of amp.initialize"):
        session.scale_loss(model[0].weight.sum(), old).__enter__()


def test_two_networks_may_be_initialized_one_after_the_other(problem):
    """As GAN scripts do: the second call leaves the first network as it is, and sets scales for both."""
    session = amp.Session()
    networks = [problem.model(seed) for seed in range(2)]
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.05) for network in networks]
    for network, optimizer in zip(networks, optimizers, strict=True):
        session.initialize(network, optimizer, opt_level="O2", verbosity=0)
    for network, optimizer in zip(networks, optimizers, strict=True):
        losses = problem.train(session, network, optimizer, range(20))
        assert losses[-1] < 0.5 * losses[0]


def test_gradients_that_wait_for_a_step_change_levels_too(problem):
    session, model = amp.Session(), problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O0", verbosity=0)
    problem.loss(model, 0).backward()
    before = [param.grad.clone() for param in model.parameters()]
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert all(map(torch.equal, (master.grad for master in session.master_params(optimizer)), before))
    session.reset()
    assert all(map(torch.equal, (param.grad for param in model.parameters()), before))


def test_gradients_that_wait_scaled_are_unscaled_by_reset(problem):
    session, model = amp.Session(), problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O1", patch_torch_functions=False, verbosity=0)
    with session.scale_loss(model[0].weight.sum(), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    session.reset()
    assert torch.equal(model[0].weight.grad, torch.ones(32, 16))


def test_batch_norm_without_weights_is_cast(problem):
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8, affine=False), nn.BatchNorm1d(8), nn.LayerNorm(8))
    amp.Session().initialize(model, opt_level="O2", verbosity=0)
    assert model[1].running_mean.dtype == torch.float16
    assert model[2].running_mean.dtype == model[2].weight.dtype == torch.float32
    assert model[3].weight.dtype == torch.float16
    assert model(problem.inputs).isfinite().all()
