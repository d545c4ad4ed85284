"""A program puts a function of its own in the place of an op of torch, and calls the op in it: that runs once."""

import subprocess
import sys
from functools import partial, wraps

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab import amp
from amplab.policies import PrecisionPolicy, apply_policy


class Wrapped:
    """Calls what was in its place, and adds the number of its calls."""

    def __init__(self, op):
        self.op, self.calls = op, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.op(*args, **kwargs) + self.calls


def as_object(op):
    wrapped = Wrapped(op)
    return wrapped, wrapped


def as_function(op):
    wrapped = Wrapped(op)

    def own(*args, **kwargs):
        return wrapped(*args, **kwargs)

    return wrapped, own


def as_function_with_its_name(op):
    wrapped, own = as_function(op)
    return wrapped, wraps(op)(own)


def as_method(op):
    wrapped = Wrapped(op)
    return wrapped, wrapped.__call__


def as_partial(op):
    wrapped = Wrapped(op)
    return wrapped, partial(wrapped)


def labels():
    return torch.tensor([0, 1, 2, 0])


CALLS = {
    (F, "cross_entropy"): lambda x: F.cross_entropy(x, labels()),
    (F, "layer_norm"): lambda x: F.layer_norm(x, (3,)),
    (F, "dropout"): lambda x: F.dropout(x, 0.0),  # on no list
    (torch.Tensor, "softmax"): lambda x: x.softmax(1),
    (torch.Tensor, "norm"): lambda x: x.norm(),  # a method that is written in Python
    (torch.Tensor, "relu"): lambda x: x.relu(),
}


def in_autocast(run, x):
    with amplab.autocast("cpu", torch.float16):
        return run(x)


def in_a_session(run, x):
    model = nn.Linear(3, 3)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    try:
        return run(x)
    finally:
        amp.reset()


def with_a_policy(run, x):
    class Model(nn.Module):
        def forward(self, x):
            return run(x)

    apply_policy(PrecisionPolicy(), model := Model())
    return model(x)


FUNCTIONS = [as_function, as_function_with_its_name]
WRAPS = [*FUNCTIONS, as_object, as_method, as_partial]
REGIONS = [in_autocast, in_a_session, with_a_policy]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize(
    ("owner", "name", "wrap"),
    [(owner, name, wrap) for owner, name in CALLS for wrap in (FUNCTIONS if owner is torch.Tensor else WRAPS)],
)
def test_a_function_in_the_place_of_an_op_runs_once(owner, name, wrap, region, monkeypatch):
    x, run = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).half(), CALLS[owner, name]
    plain = region(run, x)
    wrapped, own = wrap(getattr(owner, name))
    monkeypatch.setattr(owner, name, own)
    result = region(run, x)
    assert wrapped.calls == 1
    assert result.dtype is plain.dtype
    assert torch.equal(result, plain + 1)


SCRIPT = """
import torch
from torch.nn import functional as F

plain, calls = F.cross_entropy, []

def with_z_loss(logits, labels):
    calls.append(1)
    return plain(logits, labels) + 1e-4 * logits.logsumexp(1).square().mean()

F.cross_entropy = with_z_loss
x, labels = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).half(), torch.tensor([0, 1, 2, 0])
with torch.autocast("cpu", torch.float16):
    expected = F.cross_entropy(x, labels)

import amplab

with amplab.autocast("cpu", torch.float16):
    found = F.cross_entropy(x, labels)
assert len(calls) == 2, calls
assert found.dtype is torch.float32 and torch.allclose(found, expected, rtol=1e-3), (found, expected)
"""


def test_an_op_that_is_replaced_before_amplab_is_imported_is_cast_as_its_row_says():
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler, amplab.GradScaler])
def test_a_loop_in_a_watch_counts_each_call_once(scaler, monkeypatch):
    wrapped, own = as_function(F.cross_entropy)
    monkeypatch.setattr(F, "cross_entropy", own)
    model = nn.Linear(8, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler and scaler("cpu", init_scale=2.0**8)
    with amplab.watch(model, optimizer, scaler=scaler) as watched:
        for x in watched.batches(torch.randn(3, 4, 8)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = watched.loss(F.cross_entropy(model(x), labels()))
            (loss if scaler is None else scaler.scale(loss)).backward()
            optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
    assert wrapped.calls == 3


def test_a_tool_counts_each_call_once(monkeypatch):
    model, x = nn.Linear(8, 3), torch.randn(4, 8)
    wrapped, own = as_function(F.cross_entropy)
    monkeypatch.setattr(F, "cross_entropy", own)
    amplab.xray(model, x, loss=lambda y: F.cross_entropy(y, labels()))
    assert wrapped.calls == 1
