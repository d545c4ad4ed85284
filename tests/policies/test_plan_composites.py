"""Opened composites: their inner ops are cast by their own rows, also inside backward."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amplab.policies import (
    APEX,
    TORCH_CPU,
    TORCH_CUDA,
    CastingEngine,
    PrecisionPolicy,
    cpu_half,
    disable_casts,
    explaining,
)
from amplab.policies.casting.plan import COMPOSITES, composites_of, opened


@pytest.fixture(autouse=True)
def casting():
    torch.manual_seed(0)
    with CastingEngine().active():
        yield


def test_attention_with_weights_has_a_float32_softmax():
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    output, weights = attention(x, x, x)
    assert output.dtype is torch.float16
    assert weights.dtype is torch.float32
    output.float().sum().backward()
    assert attention.in_proj_weight.grad.dtype is torch.float32


def test_attention_matches_manual_casts():
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    with cpu_half("native"):
        ours, _ = attention(x, x, x, need_weights=False)
        with disable_casts():
            theirs, _ = attention.half()(x.half(), x.half(), x.half(), need_weights=False)
    assert torch.equal(ours, theirs)


def test_functional_errors_come_through():
    with pytest.raises(AssertionError, match="embedding dimension"):
        F.multi_head_attention_forward(*[torch.ones(2, 1, 4)] * 3, 8, 2, None, None, None, None, False, 0.0, None, None)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16


# torch's reentrant checkpoint refuses torch.autograd.grad.
@pytest.mark.parametrize(
    ("reentrant", "backward"),
    [(False, "method"), (False, "function"), (False, "grad"), (True, "method"), (True, "function")],
)
def test_recomputation_in_backward_is_cast_as_in_forward(reentrant, backward):
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    seen = []

    def block(x):
        y = layer(x)
        seen.append(y.dtype)
        return torch.relu(y)

    loss = checkpoint(block, x, use_reentrant=reentrant).float().sum()
    if backward == "method":
        loss.backward()
    elif backward == "function":
        torch.autograd.backward(loss)
    else:
        torch.autograd.grad(loss, x)
    assert seen == [torch.float16, torch.float16]


def test_gumbel_softmax_and_lp_pool():
    logits = torch.randn(3, 4).half()
    assert F.gumbel_softmax(logits).dtype is torch.float32
    assert torch.isfinite(F.lp_pool1d(torch.full((1, 1, 4), 300.0).half(), 2, 2)).all()


def test_composites_in_half_models_multiply_by_the_cpu_half_mode():
    width = 3072
    attention = torch.nn.MultiheadAttention(width, 1, bias=False).half()
    torch.nn.init.constant_(attention.in_proj_weight, 1.0)
    torch.nn.init.constant_(attention.out_proj.weight, 2.0**-10)
    zeros, ones = torch.zeros(1, 1, width).half(), torch.ones(1, 1, width).half()
    with torch.no_grad(), CastingEngine(PrecisionPolicy(table=None)).active(), cpu_half("fp32_accumulate"):
        output, _ = attention(zeros, zeros, ones)
    # value = sum of 3072 ones; output = 3072 * 3072 * 2^-10. A sum kept in half would stop at 2048.
    assert torch.equal(output, torch.full_like(output, 9216.0))


def test_opened_leaves_builtins_alone_and_unwraps():
    assert opened(torch.relu) is torch.relu
    assert opened(torch.Tensor.__rdiv__)(torch.full((1,), 4.0), 1) == 0.25


class Counting(torch.Tensor):
    """A subclass that counts the calls it sees."""

    calls = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_gets_the_composite_whole():
    tensor = torch.ones(2, requires_grad=True).as_subclass(Counting)
    loss = tensor.sum()
    Counting.calls.clear()
    loss.backward()
    assert torch.Tensor.backward in Counting.calls


def test_inner_ops_explain_themselves():
    seen = []
    x = torch.randn(2, 5, 8)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func.overloadpacket.__name__, explanation.decision.op if explanation.decision else None))
            return func(*args, **(kwargs or {}))

    with explaining() as explanation, Watch():
        torch.nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x)
    assert ("_softmax", "softmax") in seen
    assert any(op == "linear" for _, op in seen)


def test_a_table_opens_its_own_fall_through_rows_and_those_of_every_table():
    assert composites_of(None) == composites_of(APEX) == COMPOSITES
    assert composites_of(TORCH_CUDA) - COMPOSITES >= {F.normalize, torch.Tensor.__rdiv__}
    assert F.interpolate in composites_of(TORCH_CPU) - COMPOSITES
    x = torch.rand(1, 2, 4, 4, 4).half()
    with CastingEngine(PrecisionPolicy(TORCH_CUDA)).active():
        assert F.normalize(x).dtype is (1 / x).dtype is F.interpolate(x, size=2).dtype is torch.float32
    with CastingEngine(PrecisionPolicy(TORCH_CPU)).active():
        # The CPU's list has no resampling, but the pooling that averages over volumes.
        assert F.interpolate(x, size=2).dtype is torch.float16
        assert F.interpolate(x, size=2, mode="area").dtype is torch.float32
