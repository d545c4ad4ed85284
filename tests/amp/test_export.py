"""torch.export and torch.jit.trace: what they keep computes in the dtypes of eager; what they would lose is refused."""

import pytest
import torch
from torch import Tensor, nn

import amplab
from amplab import amp

X = torch.ones(4, 4)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    amp.reset()
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.body(x)
        return hidden, hidden @ hidden, torch.softmax(hidden, 0)


class Operator(nn.Module):
    def __init__(self, apply) -> None:
        super().__init__()
        self.apply_it = apply

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_it(x)


class Decorated(Net):
    @amplab.autocast("cpu", torch.float16)
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x)


def at(level: str) -> nn.Module:
    return amp.initialize(Net(), opt_level=level, verbosity=0)


def dtypes(results: tuple[Tensor, ...]) -> list[torch.dtype]:
    return [result.dtype for result in results]


@pytest.mark.parametrize("model", [Decorated, lambda: at("O1")], ids=["region", "O1"])
@pytest.mark.parametrize("strict", [False, True])
def test_the_casts_of_a_region_and_of_o1_are_not_exported_as_float32(model, strict):
    with pytest.raises(RuntimeError, match=r"torch\.export"):
        torch.export.export(model(), (X,), strict=strict)


@pytest.mark.parametrize("apply", [lambda h: h @ h, lambda h: 2**h, lambda h: 1 / h, lambda h: h.mm(h)])
def test_operators_are_refused_like_functions(apply):
    with amplab.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match=r"torch\.export"):
        torch.export.export(Operator(apply), (X.half(),))


def test_what_is_not_cast_is_exported():
    with amplab.autocast("cpu", torch.float16):
        exported = torch.export.export(Operator(torch.relu), (X,)).module()
    assert exported(X).dtype is torch.float32
    model = Net()
    exported = torch.export.export(model, (X,)).module()
    assert all(torch.equal(ours, eager) for ours, eager in zip(exported(X), model(X), strict=True))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_model_with_weights_in_half_is_exported_with_its_casts(level):
    model = at(level)
    exported = torch.export.export(model, (X,)).module()
    for ours, eager in zip(exported(X), model(X), strict=True):
        assert ours.dtype is eager.dtype
        torch.testing.assert_close(ours, eager, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_traced_model_computes_in_the_dtypes_of_eager(level):
    model = at(level)
    assert dtypes(torch.jit.trace(model, X)(X)) == dtypes(model(X))


def test_a_region_traces_without_its_cache():
    model = Net()
    with amplab.autocast("cpu", torch.float16, cache_enabled=False):  # as torch.autocast
        expected = dtypes(model(X))
        assert dtypes(torch.jit.trace(model, X)(X)) == expected
