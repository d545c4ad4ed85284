"""The decorators half_function, float_function and promote_function."""

import pickle

import pytest
import torch
from torch import nn

from amplab import amp


@amp.half_function
def product(weight, x):
    """Multiply."""
    return weight * x, weight.dtype


class Norm(nn.Module):
    @amp.float_function
    def forward(self, x):
        return x


class Square(torch.autograd.Function):
    @staticmethod
    @amp.half_function
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def o1(model):
    return amp.initialize(model, opt_level="O1", verbosity=0)


def test_they_keep_name_documentation_and_pickle():
    assert (product.__name__, product.__doc__) == ("product", "Multiply.")
    assert pickle.loads(pickle.dumps(product)) is product


def test_they_act_between_initialize_and_reset():
    def seen():
        return product(torch.ones(2), torch.ones(2))[1]

    assert seen() == torch.float32
    o1(nn.Linear(1, 1))
    assert seen() == torch.float16
    with amp.disable_casts():
        assert seen() == torch.float32
    later = amp.half_function(lambda x: x.dtype)
    assert later(torch.ones(2)) == torch.float16
    amp.reset()
    assert seen() == later(torch.ones(2)) == torch.float32


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_they_rest_at_other_levels(level):
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    assert product(torch.ones(2), torch.ones(2))[1] == torch.float32


def test_a_method_passes_self_on():
    model = o1(nn.Sequential(nn.Linear(2, 2), Norm()))
    assert model(torch.ones(1, 2)).dtype == torch.float32


def test_gradients_come_back_in_the_dtype_of_the_leaf():
    o1(nn.Linear(1, 1))
    x = torch.full((3,), 1.5, requires_grad=True)
    Square.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))
    applied = amp.half_function(Square.apply)
    assert applied(torch.ones(2)).dtype == torch.float16


def test_a_weight_is_cast_once_for_all_its_uses():
    weight = nn.Parameter(torch.ones(3))
    seen = []
    use = amp.half_function(lambda w: seen.append(w) or w.sum())
    o1(nn.Linear(1, 1))
    (use(weight) + use(weight)).backward()
    assert seen[0] is seen[1]
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def test_promotion_takes_the_widest():
    widest = amp.promote_function(lambda *tensors: [tensor.dtype for tensor in tensors])
    o1(nn.Linear(1, 1))
    half, single, double = torch.ones(1).half(), torch.ones(1), torch.ones(1).double()
    assert widest(half, single) == [torch.float32] * 2
    assert widest(half, half) == [torch.float16] * 2
    assert widest(half, double) == [torch.float64] * 2  # apex: NotImplementedError


@pytest.mark.parametrize("given", [3, nn.Linear, staticmethod(print)])
def test_other_things_are_refused(given):
    with pytest.raises(TypeError, match=r"^float_function got .*: expected a function or a method; decorate a class's"):
        amp.float_function(given)
