"""What float32 tensors would be under a policy around: against the policy itself, run on the same code."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab.policies import CastingEngine, PrecisionPolicy
from amplab.policies.modules.would_be_dtypes import WouldBeDtypes

FLOAT32 = CastingEngine(PrecisionPolicy(None, torch.float32))
W = torch.linspace(-1, 1, 16).reshape(4, 4)
ATTENTION = nn.MultiheadAttention(4, 2)
LSTM = nn.LSTM(4, 4)
NORM = nn.BatchNorm1d(4)

CODES = {
    "linear": lambda x: F.linear(x, W),
    "operator": lambda x: x @ W,
    "exp": lambda x: (x @ W).exp(),
    "relu of a product": lambda x: torch.relu(x @ W).T.reshape(-1),
    "relu of an input": torch.relu,
    "residual": lambda x: x + x @ W,
    "number": lambda x: 2 * (x @ W) + 1,
    "division": lambda x: 1 / (x @ W),
    "in place": lambda x: (x @ W).add_(x),
    "cat": lambda x: torch.cat([x, x @ W]),
    "attention": lambda x: ATTENTION(x, x, x)[0],
    "lstm": lambda x: LSTM(x)[0],
    "batch norm": lambda x: NORM(x @ W),
    "asked for": lambda x: (x @ W).float(),
    "asked for in the call": lambda x: torch.sum(x @ W, dtype=torch.float32),
    "split": lambda x: (x @ W).chunk(2)[1],
    "loss": lambda x: F.mse_loss(x @ W, x),
    "cross entropy": lambda x: F.cross_entropy(x @ W, torch.tensor([0, 1, 2, 3])),
    "integers": lambda x: x.argmax(0).float(),
    "double": lambda x: x.double() @ W.double(),
}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("table", "compute_dtype"), [("apex", torch.float16), ("apex", torch.bfloat16), ("torch_cuda", torch.float16)]
)
def test_what_it_would_be_is_what_it_is(code, dtype, table, compute_dtype):
    policy = PrecisionPolicy(table, compute_dtype)
    arrived = torch.ones(4, 4, dtype=dtype)
    with CastingEngine(policy).active():
        expected = CODES[code](arrived if code != "lstm" else arrived.float()).dtype
    x = arrived.float()
    with WouldBeDtypes(policy) as would_be, FLOAT32.active():
        would_be.note(x, dtype if code != "lstm" else torch.float32)
        result = CODES[code](x)
    assert would_be.of(result) is expected


def test_only_float32_tensors_are_followed():
    would_be = WouldBeDtypes(PrecisionPolicy())
    half, wide, doubles = torch.ones(1).half(), torch.ones(1), torch.ones(1).double()
    for tensor in (half, wide, doubles):
        would_be.note(tensor, torch.bfloat16)
    assert [would_be.of(tensor) for tensor in (half, wide, doubles)] == [half.dtype, torch.bfloat16, doubles.dtype]
