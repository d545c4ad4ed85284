"""custom_fwd and custom_bwd: torch's own tests of its decorators, under amplab's autocast and under torch's."""

import collections

import numpy as np
import pytest
import torch

import amplab
from amplab import amp

HALF, BFLOAT16 = torch.float16, torch.bfloat16
FACES = {"amplab": amplab.autocast, "torch": torch.autocast}
Pair = collections.namedtuple("Pair", ["left", "right"])


def enabled():
    return amplab.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cpu")


class Product(torch.autograd.Function):
    """Computes under the region that it is called in."""

    expected = None

    @staticmethod
    @amplab.custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        assert a.dtype is torch.float32
        assert enabled()
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @amplab.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        assert enabled()
        a, b = ctx.saved_tensors
        a_grad, b_grad = grad.mm(b.t()), a.t().mm(grad)
        assert a_grad.dtype is b_grad.dtype is Product.expected
        return a_grad, b_grad


@pytest.mark.parametrize("around_backward", ["nothing", "itself", "other dtype", "disabled"])
@pytest.mark.parametrize("low", [HALF, BFLOAT16])
@pytest.mark.parametrize("face", FACES)
def test_backward_runs_under_the_region_of_forward(face, low, around_backward, monkeypatch):
    monkeypatch.setattr(Product, "expected", low)
    autocast = FACES[face]
    x, y = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    with autocast("cpu", low):
        output = Product.apply(x, y)
        assert output.dtype is low
        loss = output.float().sum()
        if around_backward == "itself":
            loss.backward()
    if around_backward == "nothing":
        loss.backward()
    elif around_backward == "other dtype":
        with amplab.autocast("cpu", HALF if low is BFLOAT16 else BFLOAT16):
            loss.backward()
    elif around_backward == "disabled":
        with amplab.autocast("cpu", enabled=False):
            loss.backward()
    assert x.grad.dtype is y.grad.dtype is torch.float32


class Widened(torch.autograd.Function):
    """Computes in float32 wherever it is called."""

    @staticmethod
    @amplab.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, a, container, expected):
        b = container[1][0]
        assert a.dtype is b.dtype is expected
        assert not enabled()
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @amplab.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        assert not enabled()
        _, b = ctx.saved_tensors
        return grad.mm(b.t()), None, None


@pytest.mark.parametrize("face", FACES)
def test_inputs_are_cast_and_the_body_runs_without_autocast(face):
    autocast = FACES[face]
    x = torch.randn(8, 8, dtype=HALF, requires_grad=True)
    y = (0, {0: torch.randn(8, 8, dtype=HALF)})
    with autocast("cpu", HALF):
        output = Widened.apply(x, y, torch.float32)
        assert output.dtype is torch.float32
        output.sum().backward()
    expected = (torch.ones(8, 8) @ y[1][0].float().t()).half()
    assert torch.equal(x.grad, expected)
    x.grad = None
    with autocast("cpu", HALF):
        loss = Widened.apply(x, y, torch.float32).sum()
    loss.backward()
    assert torch.equal(x.grad, expected)


def test_outside_of_a_region_nothing_is_cast_and_backward_is_as_forward():
    x = torch.randn(8, 8, dtype=HALF, requires_grad=True)
    loss = Widened.apply(x, (0, {0: torch.randn(8, 8, dtype=HALF)}), HALF).sum()
    with amplab.autocast("cpu", BFLOAT16):
        loss.backward()
    assert x.grad.dtype is HALF


def test_both_work_under_amp_initialize(monkeypatch):
    monkeypatch.setattr(Product, "expected", HALF)
    x, y = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", verbosity=0)
    loss = Product.apply(x, y).float().sum()
    wide = Widened.apply(x, (0, {0: y.detach()}), torch.float32).sum()
    amp.reset()
    loss.backward()
    wide.backward()


def received(decorator, autocast, **kwargs):
    """What a forward gets of these arguments inside a region."""
    seen = {}

    @decorator(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, *args, **kwargs):
        seen.update(kwargs)

    with autocast("cpu", HALF):
        forward(type("Context", (), {})(), **kwargs)
    return seen


def test_what_is_cast_is_what_torch_casts():
    half, array = torch.ones(2, dtype=HALF), np.ones(2)
    given = {
        "tensor": half,
        "double": torch.ones(2, dtype=torch.float64),
        "integers": torch.ones(2, dtype=torch.int64),
        "elsewhere": torch.ones(2, dtype=HALF, device="meta"),
        "list": [half, (half, "text", b"bytes", 3, None)],
        "array": array,
    }
    ours = received(amplab.custom_fwd, amplab.autocast, **given)
    theirs = received(torch.amp.custom_fwd, torch.autocast, **given)

    def kinds(value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.device.type
        return [kinds(item) for item in value] if isinstance(value, (list, tuple)) else type(value)

    assert [(name, kinds(value)) for name, value in ours.items()] == [
        (name, kinds(value)) for name, value in theirs.items()
    ]
    assert ours["array"] is array
    assert ours["tensor"].dtype is torch.float32
    pair = received(amplab.custom_fwd, amplab.autocast, pair=Pair(half, 1))["pair"]
    assert isinstance(pair, Pair)
    assert pair.left.dtype is torch.float32
    (lazy,) = received(amplab.custom_fwd, amplab.autocast, lazy=iter([half]))["lazy"]
    assert lazy.dtype is torch.float32


@pytest.mark.parametrize("name", ["custom_fwd", "custom_bwd"])
def test_arguments_are_checked_as_in_torch(name):
    ours, theirs = getattr(amplab, name), getattr(torch.amp, name)

    def body(ctx):
        """The body."""

    for decorator in (ours, theirs):
        with pytest.raises(TypeError, match="device_type"):
            decorator(body)
        with pytest.raises(ValueError, match="of type `str`"):
            decorator(body, device_type=torch.device("cpu"))
    assert ours(body, device_type="cpu").__doc__ == "The body."
    assert ours(device_type="cpu")(body).__name__ == "body"


@pytest.mark.parametrize("decorate", [lambda fwd: fwd, torch.amp.custom_fwd(device_type="cpu")], ids=["none", "torch"])
def test_a_backward_without_its_forward_says_so(decorate):
    class Twice(torch.autograd.Function):
        @staticmethod
        @decorate
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @amplab.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return grad * 2

    doubled = Twice.apply(torch.ones(1, requires_grad=True))
    said = r"Twice\.backward is decorated with custom_bwd, but its forward is not decorated .*custom_fwd"
    with pytest.raises(AttributeError, match=said):
        doubled.backward()
