"""At O2 and O3 every kind of module takes what a module with a rule returns, and computes what float32 does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm
from amplab.policies import PrecisionPolicy


class Llama(nn.Module):
    """A norm as Llama's: in float32, and back."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return (gradient @ weight).to(x.dtype), (gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight.dtype)


class Own(nn.Linear):
    """A layer with an autograd function of its own."""

    def forward(self, x):
        return Product.apply(x, self.weight)


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cell = kind(8, 8, batch_first=True, **options)

    def forward(self, x):
        return self.cell(x)[0]


class Residual(nn.Module):
    """Half attention over float32 and half tensors, in functions."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        attended = F.scaled_dot_product_attention(x, self.keys(x), self.values(x))
        return x + torch.einsum("bij,bkj->bik", torch.softmax(x @ self.keys(x).mT, -1), attended.mT)


def transformer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


AFTER = {
    "Linear": lambda: nn.Linear(8, 8),
    "LayerNorm": lambda: nn.LayerNorm(8),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "GroupNorm": lambda: nn.GroupNorm(5, 5),
    "BatchNorm": lambda: nn.BatchNorm1d(5),
    "BatchNorm without weights": lambda: nn.BatchNorm1d(5, affine=False),
    "InstanceNorm": lambda: nn.InstanceNorm1d(5, affine=True),
    "Conv": lambda: nn.Conv1d(5, 5, 3),
    "ConvTranspose": lambda: nn.ConvTranspose1d(5, 5, 3),
    "PReLU": lambda: nn.PReLU(5),
    "GELU": nn.GELU,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU, bidirectional=True),
    "attention": lambda: Attention(8, 2, batch_first=True),
    "transformer": transformer,
    "FusedLayerNorm": lambda: FusedLayerNorm(8),
    "MixedFusedLayerNorm": lambda: MixedFusedLayerNorm(8),
    "FusedRMSNorm": lambda: FusedRMSNorm(8),
    "Llama's norm": Llama,
    "an autograd function": lambda: Own(8, 8, bias=False),
    "functions": Residual,
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("rules", [{"module_rules": {"0": "float32"}}, {"op_rules": {"sigmoid": "float32"}}], ids=str)
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("kind", AFTER)
def test_it_runs_forward_and_backward(session, kind, level, rules):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), AFTER[kind](), nn.Flatten(), nn.LazyLinear(4))
    x = torch.randn(2, 5, 8)
    model(x)
    twin = copy.deepcopy(model)
    received = []
    model[1].register_forward_pre_hook(lambda _, args: received.append(args[0].dtype))
    session.initialize(model, opt_level=level, verbosity=0, policy=PrecisionPolicy(**rules))
    for training in (True, False):
        model.train(training), twin.train(training)
        found, expected = model(x), twin(x)
        assert torch.allclose(found, expected, atol=0.03, rtol=0.03)
        model.zero_grad(), twin.zero_grad()
        with session.casting():  # as scale_loss does: autograd functions are cast in backward, too
            found.square().sum().backward()
        expected.square().sum().backward()
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(own.grad.float(), other.grad, atol=0.05 * other.grad.abs().max().item() + 1e-3)
        with torch.no_grad():
            assert torch.allclose(model(x), twin(x), atol=0.03, rtol=0.03)
    assert set(received) == {torch.float32}


def test_outside_of_the_models_forward_a_ruled_module_returns_the_dtype_of_the_weights_around(session):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def encode(self, x):
            return self.last(self.first(x))

        def forward(self, x):
            return self.encode(x)

    model, x = Encoder(), torch.ones(2, 4)
    session.initialize(model, opt_level="O2", verbosity=0, policy=PrecisionPolicy(module_rules={"first": "float32"}))
    assert model(x).dtype is torch.float32
    assert model.encode(x.half()).dtype is torch.float16


def test_ops_of_one_dtype_and_float64_are_left_alone(session):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            half = self.last(x)
            seen = [half @ half.t(), F.softmax(half, -1), half.sum(), half + torch.tensor(1.0), half.double() * half]
            return self.first(x), [each.dtype for each in seen]

    model = Mixed()
    session.initialize(model, opt_level="O2", verbosity=0, policy=PrecisionPolicy(module_rules={"first": "float32"}))
    assert model(torch.ones(2, 4))[1] == [torch.float16] * 4 + [torch.float64]
