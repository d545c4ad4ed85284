"""A weight is cast once, and again whenever it is no longer the tensor that was cast."""

import copy

import numpy
import pytest
import torch
from torch.nn import Parameter
from torch.nn import functional as F

from amplab.policies import CastCache, CastingEngine, PrecisionPolicy


@pytest.fixture
def weight():
    return Parameter(torch.full((2, 2), 3.0))


@pytest.fixture
def engine():
    return CastingEngine()


def product(weight, dtype=torch.float32):
    """ones @ weight.T, whose every element is twice the weight's."""
    return F.linear(torch.ones(1, 2), weight)


def test_used_twice_is_cast_once(weight):
    cache = CastCache()
    first = cache.cast(weight, torch.float16)
    assert cache.cast(weight, torch.float16) is first
    assert len(cache) == 1
    assert cache.cast(weight, torch.bfloat16).dtype is torch.bfloat16
    assert len(cache) == 2


def test_used_twice_gets_both_gradients(weight, engine):
    with engine.active():
        (product(weight) + product(weight)).sum().backward()
        assert engine.cache_size == 1
    assert weight.grad.dtype is torch.float32
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))


EDITS = {
    "in place": lambda w: torch.no_grad()(w.mul_)(2),
    "through .data": lambda w: w.data.mul_(2),
    "by assigning .data": lambda w: setattr(w, "data", w.detach() * 2),
    "through detach": lambda w: w.detach().mul_(2),
    "through numpy": lambda w: w.detach().numpy().__imul__(2),
    "through a view": lambda w: w.detach().view(-1).mul_(2),
    "foreach": lambda w: torch.no_grad()(torch._foreach_mul_)([w], 2),
    "set_": lambda w: torch.no_grad()(w.set_)((w * 2).detach()),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_between_two_uses_are_seen(weight, engine, edit):
    with engine.active():
        before = product(weight)
        edit(weight)
        after = product(weight)
    assert torch.equal(after, 2 * before)


def test_an_alias_through_data_taken_before_the_first_use_is_seen(weight, engine):
    with engine.active():
        alias = weight.data
        before = product(weight)
        alias.mul_(2)
        assert torch.equal(product(weight), 2 * before)


def test_other_weights_stay_cached_when_one_is_exposed(weight, engine):
    other = Parameter(torch.ones(2, 2))
    with engine.active():
        weight.data.mul_(2)
        product(other), product(weight)
        assert engine.cache_size == 1


def test_load_state_dict_and_optimizer_step(engine):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 2)
    with engine.active():
        model(x).sum().backward()
        optimizer.step()
        stepped = model(x)
        model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
        loaded = model(x)
    assert torch.equal(loaded, torch.full((1, 2), 3.0, dtype=torch.float16))
    assert not torch.equal(stepped, loaded)


def test_nested_dtypes(weight, engine):
    inner = CastingEngine(PrecisionPolicy(compute_dtype=torch.bfloat16))
    with engine.active():
        assert product(weight).dtype is torch.float16
        with inner.active():
            assert product(weight).dtype is torch.bfloat16
        assert inner.cache_size == 0
        assert product(weight).dtype is torch.float16


def test_no_grad_then_grad(weight, engine):
    with engine.active():
        with torch.no_grad():
            assert not product(weight).requires_grad
        product(weight).sum().backward()
        assert engine.cache_size == 1
    assert weight.grad is not None


def test_inference_mode_then_grad(weight, engine):
    with engine.active():
        with torch.inference_mode():
            assert product(weight).is_inference()
        product(weight).sum().backward()
    assert weight.grad is not None


def test_weights_made_in_inference_mode_are_not_cached(engine):
    with torch.inference_mode(), engine.active():
        weight = Parameter(torch.ones(2, 2))
        before = product(weight)
        weight.mul_(2)
        assert torch.equal(product(weight), 2 * before)
        assert engine.cache_size == 0


def test_views_of_weights_are_not_cached(weight, engine):
    with engine.active():
        product(weight[:1]), product(weight.t()), product(weight.detach())
        assert engine.cache_size == 0


def test_frozen_then_unfrozen(weight, engine):
    weight.requires_grad_(False)
    with engine.active():
        assert not product(weight).requires_grad
        assert engine.cache_size == 1
        weight.requires_grad_(True)
        product(weight).sum().backward()
    assert weight.grad is not None


def test_two_backward_passes_over_one_cast(weight, engine):
    with engine.active():
        product(weight).sum().backward()
        product(weight).sum().backward()
        assert engine.cache_size == 1
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))


def test_a_new_weight_at_an_old_address_is_not_taken_for_it():
    cache, memory, identities = CastCache(), numpy.zeros(2, dtype=numpy.float32), []
    values = torch.from_numpy(memory)
    for value in range(200):
        memory[:] = value
        weight = Parameter(values, requires_grad=False)
        assert cache.cast(weight, torch.float16)[0] == value
        identities.append(id(weight))
        del weight
    assert len(set(identities)) < len(identities)


def test_cleared_at_the_end_of_the_outermost_block_and_on_request(weight, engine):
    with engine.active():
        with engine.active():
            product(weight)
        assert engine.cache_size == 1
        engine.clear_cache()
        assert engine.cache_size == 0
        product(weight)
    assert engine.cache_size == 0


def test_functorch_transforms_use_no_cache(weight, engine):
    def loss(w, x):
        return F.linear(x, w).float().sum()

    x = torch.ones(3, 2)
    with engine.active():
        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
        torch.func.jacrev(lambda v: F.linear(v, weight))(x)
        assert engine.cache_size == 0
        product(weight).sum().backward()
    assert per_sample.shape == (3, 2, 2)


def test_deepcopied_model_uses_its_own_weights(engine):
    model = torch.nn.Linear(2, 2, bias=False)
    with engine.active():
        model(torch.ones(1, 2))
        twin = copy.deepcopy(model)
        torch.nn.init.ones_(twin.weight)
        assert torch.equal(twin(torch.ones(1, 2)), torch.full((1, 2), 2.0, dtype=torch.float16))
