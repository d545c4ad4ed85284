"""Modes of amplab leave the stack in any order, and leave nothing behind in what torch stores about modes."""

import contextlib
import itertools
import threading

import pytest
import torch
from interrupts import interrupted_everywhere
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import amplab
from amplab.trace.dispatch_mode import DispatchMode, run_op


class Own(DispatchMode):
    """A mode of amplab that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Foreign(TorchDispatchMode):
    """A mode of the user."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def flags():
    return {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}


@pytest.mark.parametrize("kinds", list(itertools.product((Own, Foreign), repeat=3)))
def test_own_modes_end_in_any_order(kinds):
    """Those of torch end with their blocks, the last one first."""
    assert not any(flags().values())
    modes = [kind() for kind in kinds]
    for mode in modes:
        mode.__enter__()
    inside = flags()
    left = list(modes)
    for mode in (*(each for each in modes if isinstance(each, Own)), *reversed(modes)):
        if mode not in left:
            continue
        mode.__exit__(None, None, None)
        left.remove(mode)
        assert _get_current_dispatch_mode_stack() == left
        assert flags() == (inside if left else dict.fromkeys(inside, False))
        assert torch.ones(2).add(1).sum() == 4


def test_modes_of_two_threads_that_overlap_leave_nothing():
    """As a trace of the lab in its thread, and xray in a cell: the one that ends last has begun inside the other."""
    first_begun, second_begun, first_ended = threading.Event(), threading.Event(), threading.Event()

    def first():
        with Own():
            first_begun.set()
            assert second_begun.wait(10)
        first_ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_begun.wait(10)
    with Own():
        second_begun.set()
        assert first_ended.wait(10)
    thread.join()
    assert not any(flags().values())


def test_a_second_exit_does_nothing():
    own = Own()
    with Foreign() as foreign:
        with own:
            pass
        own.__exit__()
        assert _get_current_dispatch_mode_stack() == [foreign]
        assert any(flags().values())
    assert not any(flags().values())


def test_an_exit_after_an_interrupted_entry_leaves_nothing():
    mode = Own()
    for interrupt in interrupted_everywhere(mode.__enter__, folders=[_python_dispatch.__file__]):
        mode.__exit__()
        assert not any(flags().values()), interrupt
        assert _get_current_dispatch_mode_stack() == [], interrupt
    mode.__exit__()


def by_cond(y):
    return torch.cond(y.detach().sum() > 0, lambda y: y * 2, lambda y: y * 3, (y,))


def by_while_loop(y):
    with torch.no_grad():
        (times,) = while_loop(lambda n: n < 3, lambda n: (n + 1,), (torch.zeros((), dtype=torch.int64),))
    return y * times


class Branching(nn.Linear):
    """Calls an operator of torch that compiles itself, without `torch.compile` in the program."""

    def __init__(self, operator):
        super().__init__(4, 4)
        self.operator = operator

    def forward(self, x):
        return self.operator(super().forward(x))


def loss_of(output):
    return output.square().mean()


def watched(model, batch, *, in_batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with amplab.watch(model, optimizer) as w:
        for x in w.batches([batch] * 2) if in_batches else [batch] * 2:
            w.loss(loss_of(model(x))).backward()
            optimizer.step()
    assert w.failures == ()
    assert len(w.history) == 2


TOOLS = {
    "xray": lambda model, x: amplab.xray(model, x, loss=loss_of),
    "first_nonfinite": lambda model, x: amplab.first_nonfinite(model, x, loss=loss_of),
    "doctor": lambda model, x: amplab.doctor(model, x, loss=loss_of),
    "watch": lambda model, x: watched(model, x, in_batches=False),
    "batches": lambda model, x: watched(model, x, in_batches=True),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler
@pytest.mark.parametrize(
    ("tool", "operator"),
    [*((tool, by_while_loop) for tool in TOOLS), ("watch", by_cond), ("batches", by_cond)],
)
def test_a_higher_order_operator_runs_in_a_tool_and_afterwards(tool, operator):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Branching(operator), torch.ones(2, 4)
    TOOLS[tool](model, x)
    found = model(x)
    torch._dynamo.reset()
    assert torch.equal(found, model(x))
    torch._dynamo.reset()  # a look of the next test begins


class Running(DispatchMode):
    """A mode of amplab that runs ops as its tools do."""

    def run(self, func, args, kwargs):
        return run_op(func, args, kwargs)


@torch.library.custom_op("amplab_tests::product", mutates_args=())
def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ x.t() + x.t() @ grad


class InRegions(nn.Module):
    """An op in a disabled region, in a region, and in another dtype."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            first = torch.linalg.pinv(x)
        with torch.autocast("cpu", torch.float16):
            second = product(x, x)
        return first, second.float() @ x, torch.linalg.pinv(first)


def attention(x):
    torch.manual_seed(0)
    each = x[None]
    return nn.MultiheadAttention(8, 2, batch_first=True).eval()(each, each, each, need_weights=False)[0]


def encoder(x):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()(x[None])


COMPOSITE = {
    "add": lambda x: x + 1,
    "matmul": lambda x: x @ x,
    "linear": lambda x: functional.linear(x, x, x[0]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "pinv": torch.linalg.pinv,
    "pinv, hermitian": lambda x: torch.linalg.pinv(x + x.t(), hermitian=True),
    "sparse.mm": lambda x: torch.sparse.mm(torch.eye(8).to_sparse(), x),
    "bilinear": lambda x: functional.bilinear(x, x, torch.ones(3, 8, 8)),
    "cdist": lambda x: torch.cdist(x.repeat(5, 1), x.flip(0), compute_mode="use_mm_for_euclid_dist"),
    "matrix_power": lambda x: torch.linalg.matrix_power(x, 3),
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x / 8),
    "conv2d": lambda x: functional.conv2d(x[None, None], x[None, None, :3, :3]),
    "conv_transpose2d": lambda x: functional.conv_transpose2d(x[None, None], x[None, None, :3, :3], dilation=2),
    "attention of three": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "a fast path of attention": attention,
    "a fast path of a transformer": encoder,
    "a custom op": lambda x: product(x, x),
    "a function of autograd": Squared.apply,
    "regions": InRegions(),
}


def results(call, x, dtype, *modes):
    with contextlib.ExitStack() as blocks:
        for mode in modes:
            blocks.enter_context(mode)
        with torch.autocast("cpu", dtype):
            found = call(x)
            found = found if isinstance(found, tuple) else (found,)
            taken = [each for each in found if each.requires_grad]
            if taken and x.requires_grad:
                found += torch.autograd.grad(sum(each.float().sum() for each in taken), x)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", COMPOSITE)
def test_torch_autocast_casts_inside_an_op_as_without_a_mode(name, grad, dtype):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) + 4 * torch.eye(8)
    x.requires_grad_(grad and name != "a custom op" and name != "regions")
    with torch.set_grad_enabled(grad):
        alone = results(COMPOSITE[name], x, dtype)
        for modes in ([Running()], [Running(), Running()]):
            for found, expected in zip(results(COMPOSITE[name], x, dtype, *modes), alone, strict=True):
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)


def test_an_op_that_the_dispatcher_does_not_have_runs():
    """It tells a subclass of tensors that code asks for its device."""
    with Running():
        assert torch.ops.prim.device.default(torch.ones(1)) == torch.device("cpu")
        assert run_op(torch.ops.prim.device.default, (torch.ones(1),), {}) == torch.device("cpu")


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_watched_loop_validates_a_transformer_under_torch_autocast(dtype, in_batches):
    """As without a watch; its fast path is an op that multiplies in its kernel."""

    def losses(watch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3))
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
        data = list(torch.randn(2, 6, 2, 8))
        with watch(model, optimizer) as w:
            for x in w.batches(data) if w and in_batches else data:
                model.eval()
                with torch.no_grad(), torch.autocast("cpu", dtype):
                    found.append(model(x).float().sum().item())
                model.train()
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype):
                    loss = model(x).float().square().mean()
                loss.backward() if w is None else w.loss(loss).backward()
                optimizer.step()
        assert w is None or w.failures == ()
        return found

    assert losses(amplab.watch) == losses(lambda *_: contextlib.nullcontext())


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_watched_loop_exports_its_model(in_batches):
    """After a backward: torch.export copies gradients as tensors without values, before its own mode is on."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amplab.watch(model, optimizer) as w:
        for batch in w.batches([x] * 3) if in_batches else [x] * 3:
            w.loss(loss_of(model(batch))).backward()
            exported = torch.export.export(model, (batch,)).module()
            optimizer.step()
            assert torch.equal(exported(batch), model(batch))
    assert w.failures == ()
