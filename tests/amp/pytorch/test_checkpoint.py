"""checkpoint: gradients are bitwise those without it, whatever is active when backward is called."""

import contextlib

import pytest
import torch
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import amplab
from amplab import amp
from amplab.kernels.builder.recipe import obstacle
from amplab.policies import CastingEngine, CompiledEngine, PrecisionPolicy, cpu_half, disable_casts

HALF, BFLOAT16 = torch.float16, torch.bfloat16
KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Net(torch.nn.Module):
    """A block with dropout, a norm and an activation, between two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before = torch.nn.Linear(8, 8)
        self.block = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.LayerNorm(16),
            torch.nn.Dropout(0.3),
            torch.nn.GELU(),
            torch.nn.Linear(16, 8),
            torch.nn.Softmax(-1),
        )
        self.after = torch.nn.Linear(8, 8)

    def loss(self, x, run):
        return (self.after(run(self.block, self.before(x))) ** 2).float().mean() * 1024


def as_it_is(function, *args):
    return function(*args)


def ours(reentrant, **kwargs):
    return lambda function, *args: amplab.checkpoint(function, *args, use_reentrant=reentrant, **kwargs)


def torchs(reentrant):
    return lambda function, *args: torch_checkpoint(function, *args, use_reentrant=reentrant)


def gradients(run, forward, backward=None):
    """The gradients of a step; `backward` is around backward, None calls it inside `forward`."""
    model = Net()
    x = torch.randn(4, 8, requires_grad=True)
    with forward():
        loss = model.loss(x, run)
        if backward is None:
            loss.backward()
    if backward is not None:
        with backward():
            loss.backward()
    return [x.grad, *(param.grad for param in model.parameters())]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@contextlib.contextmanager
def initialized():
    amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", verbosity=0)
    try:
        yield
    finally:
        amp.reset()


@contextlib.contextmanager
def disabled_inside():
    with amplab.autocast("cpu", HALF), disable_casts():
        yield


@contextlib.contextmanager
def products(mode):
    with amplab.autocast("cpu", HALF), cpu_half(mode):
        yield


@contextlib.contextmanager
def inner_region_off():
    with amplab.autocast("cpu", HALF), amplab.autocast("cpu", enabled=False):
        yield


FORWARD = {
    "float16": lambda: amplab.autocast("cpu", HALF),
    "bfloat16": lambda: amplab.autocast("cpu", BFLOAT16),
    "no cache": lambda: amplab.autocast("cpu", HALF, cache_enabled=False),
    "O1": initialized,
    "engine": lambda: CastingEngine(PrecisionPolicy(compute_dtype=BFLOAT16)).active(),
    "nothing": contextlib.nullcontext,
    "disabled": disabled_inside,
    "region off": inner_region_off,
    "native": lambda: products("native"),
    "accumulated": lambda: products("fp32_accumulate"),
}
BACKWARD = {
    "inside": None,
    "outside": contextlib.nullcontext,
    "in another region": lambda: amplab.autocast("cpu", BFLOAT16),
    "in the same policy": lambda: amplab.autocast("cpu", HALF),
    "casts disabled": disable_casts,
    "device": lambda: torch.device("cpu"),
}


@KINDS
@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("forward", FORWARD)
def test_gradients_are_bitwise_those_without_checkpointing(forward, backward, reentrant):
    plain = gradients(as_it_is, FORWARD[forward], contextlib.nullcontext)
    assert same(gradients(ours(reentrant), FORWARD[forward], BACKWARD[backward]), plain)
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not amplab.is_autocast_enabled("cpu")


@KINDS
@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.skipif(obstacle() is not None, reason="nothing can be built here")
def test_the_compiled_engine_casts_again(backward, reentrant):
    engine = CompiledEngine(PrecisionPolicy(compute_dtype=BFLOAT16))
    plain = gradients(as_it_is, engine.active, contextlib.nullcontext)
    assert same(gradients(ours(reentrant), engine.active, BACKWARD[backward]), plain)


@KINDS
def test_a_decorated_block_and_regions_inside_of_it(reentrant):
    def run(checkpointed):
        def step(block, x):
            return checkpointed(amplab.autocast("cpu", HALF)(block), x.float())

        return step

    plain = gradients(run(as_it_is), lambda: amplab.autocast("cpu", BFLOAT16), contextlib.nullcontext)
    assert same(
        gradients(run(ours(reentrant)), lambda: amplab.autocast("cpu", BFLOAT16), contextlib.nullcontext), plain
    )


@KINDS
def test_checkpoints_nest(reentrant):
    def twice(function, x):
        return ours(reentrant)(lambda x: ours(reentrant)(function, x), x)

    plain = gradients(as_it_is, FORWARD["float16"], contextlib.nullcontext)
    assert same(gradients(twice, FORWARD["float16"], contextlib.nullcontext), plain)


def test_backward_twice_and_autograd_grad():
    model, x = Net(), torch.randn(4, 8, requires_grad=True)
    with amplab.autocast("cpu", HALF):
        torch.manual_seed(1)
        loss = model.loss(x, ours(False))
        torch.manual_seed(1)
        plain = model.loss(x, as_it_is)
    params = list(model.parameters())
    for _ in range(2):
        found = torch.autograd.grad(loss, params, retain_graph=True)
        assert same(found, torch.autograd.grad(plain, params, retain_graph=True))


def test_torchs_arguments_are_passed_on():
    entered = []

    @contextlib.contextmanager
    def note(word):
        entered.append(word)
        yield

    plain = gradients(as_it_is, FORWARD["float16"], contextlib.nullcontext)
    run = ours(False, context_fn=lambda: (note("forward"), note("recomputation")), preserve_rng_state=True)
    assert same(gradients(run, FORWARD["float16"], contextlib.nullcontext), plain)
    assert entered == ["forward", "recomputation"]
    x = torch.ones(2, requires_grad=True)
    assert amplab.checkpoint(lambda x, *, by: x * by, x, use_reentrant=False, by=3).tolist() == [3.0, 3.0]
    with pytest.warns(UserWarning, match="use_reentrant"):
        amplab.checkpoint(torch.exp, x)


@KINDS
def test_an_exception_in_the_recomputation_leaves_nothing_behind(reentrant):
    calls = []

    def fails_later(x):
        calls.append(None)
        if len(calls) > 1:
            raise ZeroDivisionError
        return (x @ x).exp()

    with amplab.autocast("cpu", HALF):
        loss = ours(reentrant)(fails_later, torch.ones(2, 2, requires_grad=True)).sum()
    with amplab.autocast("cpu", BFLOAT16):
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is BFLOAT16
    assert torch.overrides._get_current_function_mode_stack() == []


def test_torch_compile_traces_it():
    torch._dynamo.reset()
    model, x = Net(), torch.randn(4, 8, requires_grad=True)
    model.block[2].p = 0.0
    with amplab.autocast("cpu", HALF):
        loss = torch.compile(lambda x: model.loss(x, ours(False)), fullgraph=True, backend="eager")(x)
        assert torch.equal(loss, model.loss(x, as_it_is))


# -- what torch's own does, as the docstring says ---------------------------------------------------


def dtypes_of_torchs(reentrant, forward, backward):
    """In which dtype torch's checkpoint ran a product, first and again; and the gradient of its weight."""
    weight, seen = torch.nn.Parameter(torch.linspace(0.1, 1.3, 64).reshape(8, 8)), []

    def block(x):
        y = x @ weight
        seen.append(y.dtype)
        return y.float() ** 3

    with forward():
        loss = torch_checkpoint(block, torch.ones(8, 8, requires_grad=True), use_reentrant=reentrant).sum()
        if backward is None:
            loss.backward()
    if backward is not None:
        with backward():
            loss.backward()
    return seen, weight.grad


@KINDS
@pytest.mark.parametrize("forward", ["float16", "O1"])
def test_torchs_is_right_with_backward_inside(reentrant, forward):
    seen, _ = dtypes_of_torchs(reentrant, FORWARD[forward], None)
    assert seen == [HALF, HALF]
    assert same(gradients(torchs(reentrant), FORWARD[forward]), gradients(as_it_is, FORWARD[forward]))


def test_torchs_outside_raises_or_computes_in_float32_without_a_word():
    for reentrant, forward in ((True, "native"), (True, "accumulated"), (False, "accumulated")):
        seen, grad = dtypes_of_torchs(reentrant, FORWARD[forward], contextlib.nullcontext)
        assert seen == [HALF, torch.float32]
        _, right = dtypes_of_torchs(reentrant, FORWARD[forward], None)
        assert not torch.equal(grad, right)
    with pytest.raises(CheckpointError):
        dtypes_of_torchs(False, FORWARD["native"], contextlib.nullcontext)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@KINDS
@pytest.mark.parametrize("backward", ["inside", "outside", "in another region"])
def test_gradients_on_cuda_whose_backward_has_a_thread_of_its_own(reentrant, backward):
    def step(run):
        model = Net().cuda()
        x = torch.randn(4, 8, device="cuda", requires_grad=True)
        torch.manual_seed(1)
        with amplab.autocast("cuda", HALF):
            loss = model.loss(x, run)
            if backward == "inside":
                loss.backward()
        if backward == "outside":
            loss.backward()
        elif backward == "in another region":
            with amplab.autocast("cuda", BFLOAT16):
                loss.backward()
        return [param.grad for param in model.parameters()]

    assert same(step(ours(reentrant)), step(as_it_is))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torch_checkpoints_are_right_in_scale_loss(level, use_reentrant):
    class Checkpointed(torch.nn.Sequential):
        def forward(self, inputs):
            first, *rest = self
            hidden = first(inputs)
            for layer in rest:
                hidden = torch_checkpoint(layer, hidden, use_reentrant=use_reentrant) if self.again else layer(hidden)
            return hidden

    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        model.again = again
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = amp.Session()
        session.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
        with session.scale_loss(model(torch.ones(2, 4)).mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        gradients.append([param.grad for param in session.master_params(optimizer)])
        session.reset()
    assert all(map(torch.equal, *gradients))


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match=r"checkpoint\(None\): expected a function or a module"):
        amplab.checkpoint(None, torch.ones(2), use_reentrant=False)
