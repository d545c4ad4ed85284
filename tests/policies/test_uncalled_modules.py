"""A rule for a module whose weights are read without calling it: it works, or a warning names it."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import _get_current_function_mode_stack

from amplab.amp import Session
from amplab.policies import PrecisionPolicy, apply_policy


class Tied(nn.Module):
    """A language model that reads the weight of its head without calling the head."""

    def __init__(self, product):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        self.product = product

    def forward(self, tokens):
        return self.product(torch.relu(self.body(self.embed(tokens))), self.head)


TOKENS = torch.tensor([[1, 2, 3]])
HEAD = PrecisionPolicy(module_rules={"head": "float32"})
PRODUCTS = {
    "linear": lambda h, head: F.linear(h, head.weight),
    "T": lambda h, head: h @ head.weight.T,
    "t()": lambda h, head: h @ head.weight.t(),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_rule_without_effect_is_named_once(name):
    model = Tied(PRODUCTS[name])
    with apply_policy(HEAD, model):
        with pytest.warns(UserWarning, match=r"head=float32 in head has no effect on .*Write the rule for the") as told:
            assert model(TOKENS).dtype is torch.float16
        assert name in str(told[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(TOKENS)
    assert _get_current_function_mode_stack() == []


def test_with_half_weights_the_weight_decides():
    model, session = Tied(PRODUCTS["linear"]), Session()
    with torch.no_grad():
        model.head.weight.mul_(2.0**20)
    session.initialize(model, opt_level="O2", verbosity=0, policy=HEAD, cast_model_outputs=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model(TOKENS)
    assert found.abs().max() > 65504
    assert found.isfinite().all()
    session.reset()
    model.product = PRODUCTS["T"]
    session.initialize(model, opt_level="O2", verbosity=0, policy=HEAD)
    with pytest.warns(UserWarning, match="head=float32 in head has no effect on T,"):
        model(TOKENS)
    session.reset()


@pytest.mark.parametrize(
    "product",
    [
        lambda h, head: head(h),
        lambda h, head: head(h) + F.linear(h, head.weight),  # called, and so within the rule at least once
        lambda h, head: h,  # a layer that is left out in this forward
        lambda h, head: h * head.weight.numel() + head.weight.dim(),
    ],
)
def test_other_models_get_no_warning(product):
    model = Tied(product)
    with apply_policy(HEAD, model), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(TOKENS)


def test_a_parametrized_weight_is_no_bypass():
    model = Tied(lambda h, head: head(h))
    weight_norm(model.head)
    with apply_policy(HEAD, model), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(TOKENS)


def test_copies_and_pickles_watch_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with apply_policy(PrecisionPolicy(module_rules={"1": "float32"}), model):
        for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert each(torch.ones(1, 2)).dtype is torch.float32


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_ends_the_watch(error):
    def raising(_h, _head):
        raise error

    model = Tied(raising)
    with apply_policy(HEAD, model):
        with pytest.raises(error):
            model(TOKENS)
        model.product = lambda h, head: head(h)
        model(TOKENS)
        assert _get_current_function_mode_stack() == []
