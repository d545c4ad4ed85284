"""torch.compile with its default backend: every level and every region trains as without it, in one graph."""

import contextlib
import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

import amplab
from amplab import amp
from amplab.policies import CastingEngine, PrecisionPolicy, cpu_half, disable_casts, thread_engines

pytestmark = [  # torch's compiler itself warns of these
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]
torch.manual_seed(0)
X, Y = torch.randn(8, 6), torch.randint(4, (8,))
BFLOAT16 = PrecisionPolicy(compute_dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _a_fresh_compiler():
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    counters.clear()
    with inductor.patch(compile_threads=1):
        yield
    torch._dynamo.reset()
    assert thread_engines() == ()
    assert _get_current_function_mode_stack() == []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.norm, self.head = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.mix = nn.Conv1d(1, 4, 3, padding=1)  # generated code calls torch.convolution under the casting mode

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.body(x)))
        return self.head(self.mix(hidden.unsqueeze(1)).mean(1))


def graphs_and_breaks() -> tuple[int, list[str]]:
    return counters["stats"]["unique_graphs"], list(counters["graph_break"])


# -- the levels of amp.initialize -------------------------------------------------------------------

LEVELS = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O1, bfloat16": {"opt_level": "O1", "policy": BFLOAT16},
    "O2": {"opt_level": "O2"},
    "O2, bfloat16": {"opt_level": "O2", "cast_model_type": torch.bfloat16},
    "O3": {"opt_level": "O3"},
}
Compiled = Callable[[nn.Module], nn.Module]


def train(
    arguments: dict, before: Compiled = lambda model: model, after: Compiled = lambda model: model, net: type = Net
) -> tuple[list[float], list[torch.dtype]]:
    """Losses of three steps, and the dtypes of outputs, gradients and parameters."""
    session, model = amp.Session(), before(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = session.initialize(model, optimizer, verbosity=0, **arguments)
    model, losses, dtypes = after(model), [], []
    for _ in range(3):
        optimizer.zero_grad()
        output = model(X)
        loss = F.cross_entropy(output, Y)
        with session.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        grads = [each.grad for each in amp.master_params(optimizer)]
        dtypes += [each.dtype for each in (output, *model.parameters(), *grads)]
        optimizer.step()
        losses.append(loss.item())
    session.reset()
    return losses, dtypes


def same_as_eager(level: str, losses: list[float], dtypes: list[torch.dtype]) -> bool:
    eager_losses, eager_dtypes = train(LEVELS[level])
    return dtypes == eager_dtypes and losses == pytest.approx(eager_losses, rel=2e-2) and losses[-1] < losses[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_trains_under_the_default_backend(level):
    trained = train(LEVELS[level], after=torch.compile)
    assert graphs_and_breaks() == (1, [])
    assert same_as_eager(level, *trained)


def aot(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def aot_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


ORDERS = {
    "after initialize": {"after": aot},
    "before initialize": {"before": aot},
    "in place, after": {"after": aot_in_place},
    "in place, before": {"before": aot_in_place},
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_model_of_every_level_may_be_compiled_before_initialize_or_after_it_and_in_place(level, order):
    trained = train(LEVELS[level], **ORDERS[order])
    assert graphs_and_breaks() == (1, [])
    assert same_as_eager(level, *trained)


class Batch(Net):
    def forward(self, batch: dict) -> Tensor:
        batch["seen"] = super().forward(batch["x"][0])
        return batch["seen"]


def test_inputs_in_containers_are_cast_and_edits_are_carried_back_in_one_graph():
    session, model = amp.Session(), Batch()
    model = session.initialize(model, opt_level="O2", verbosity=0)
    batch, other = {"x": [X]}, {"x": [X]}
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(batch)
    expected = model(other)
    assert batch["x"][0] is X
    assert torch.equal(batch["seen"], output)
    assert output.dtype is other["seen"].dtype is torch.float32
    assert torch.equal(output, expected)


# -- rules ------------------------------------------------------------------------------------------


class Large(Net):
    """Net with a layer whose outputs exceed 65504 in the first step already."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.body.weight, 6e4)


RULES = {
    "float32": {"module_rules": {"body": "float32"}},
    "bfloat16": {"module_rules": {"body": "bfloat16"}},
    "op": {"op_rules": {"linear": "float32"}},
    "outputs cast back": {"module_rules": {"body": "float32"}, "cast_outputs_back": True},
}


@pytest.mark.parametrize(
    ("level", "rule", "backend"),
    [("O1", "float32", "inductor"), *((level, rule, "aot_eager") for level in ("O1", "O2") for rule in RULES)],
)
def test_a_rule_keeps_a_layer_finite_that_overflows_without_it_in_one_graph(level, rule, backend):
    arguments = {"opt_level": level, "policy": PrecisionPolicy(**RULES[rule])}
    losses, dtypes = train(arguments, after=functools.partial(torch.compile, backend=backend), net=Large)
    assert graphs_and_breaks() == (1, [])
    eager_losses, eager_dtypes = train(arguments, net=Large)
    assert dtypes == eager_dtypes
    assert losses == pytest.approx(eager_losses, rel=2e-2, nan_ok=True)
    assert math.isfinite(losses[-1]) == (rule != "outputs cast back")


# -- regions ------------------------------------------------------------------------------------------

REGIONS = {
    "float16": lambda: amplab.autocast("cpu", torch.float16),
    "bfloat16": lambda: amplab.autocast("cpu", torch.bfloat16),
    "engine": CastingEngine().active,
}
PLACES = ["region in the function", "region around the function", "backward in the region"]


def train_in_region(region: Callable, place: str, backend: str | None) -> tuple[list[float], torch.dtype]:
    """Losses of three steps, and the dtype of the outputs."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []

    def forward(x):
        with region() if place == "region in the function" else contextlib.nullcontext():
            output = model(x)
            return output, F.cross_entropy(output, Y)

    forward = forward if backend is None else torch.compile(forward, fullgraph=True, backend=backend)
    for _ in range(3):
        optimizer.zero_grad()
        with region() if place != "region in the function" else contextlib.nullcontext():
            output, loss = forward(X)
            if place == "backward in the region":
                loss.backward()
        if place != "backward in the region":
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, output.dtype


@pytest.mark.parametrize(
    ("name", "place", "backend"),
    [
        ("bfloat16", "backward in the region", "inductor"),
        *((name, place, "aot_eager") for name in REGIONS for place in PLACES),
    ],
)
def test_a_region_trains_compiled(name, place, backend):
    losses, dtype = train_in_region(REGIONS[name], place, backend)
    assert graphs_and_breaks() == (1, [])
    eager_losses, eager_dtype = train_in_region(REGIONS[name], place, None)
    assert dtype is eager_dtype
    assert losses == pytest.approx(eager_losses, rel=2e-2)
    assert losses[-1] < losses[0]


def test_casts_are_switched_in_a_graph():
    engine, x = CastingEngine(), torch.randn(4, 4)

    def products(x: Tensor) -> tuple[Tensor, ...]:
        with engine.active():
            first = x @ x
            with disable_casts():
                second = x @ x
            with cpu_half("native"):
                return first, second, x @ x

    compiled = torch.compile(products, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(compiled(x), products(x), strict=True):
        assert ours.dtype is eager.dtype
        torch.testing.assert_close(ours, eager)


def test_other_shapes_and_no_grad_and_eval_keep_the_dtypes_of_eager():
    model = Net()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for samples in (8, 3, 5):
        for mode in (contextlib.nullcontext, torch.no_grad):
            with mode(), amplab.autocast("cpu", torch.float16):
                ours, eager = compiled(X[:samples]), model(X[:samples])
            assert ours.dtype is eager.dtype is torch.float16
            torch.testing.assert_close(ours, eager)
    assert counters["stats"]["unique_graphs"] <= 4  # with gradients and without, static and dynamic


# -- a call that does not end well ------------------------------------------------------------------


class Failing(Net):
    error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        torch._dynamo.graph_break()
        if self.error is not None:
            raise self.error
        return hidden @ hidden.t()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("order", ["after initialize", "before initialize"])
def test_an_error_or_an_interrupt_in_a_compiled_model_leaves_nothing_switched_on(order, error):
    session, model = amp.Session(), Failing()
    unchanged: Compiled = lambda model: model  # noqa: E731
    compiled = ORDERS[order].get("before", unchanged)(model)
    compiled = ORDERS[order].get("after", unchanged)(session.initialize(compiled, opt_level="O1", verbosity=0))
    assert compiled(X).dtype is torch.float16
    model.error = error
    with pytest.raises(error):
        compiled(X)
    assert thread_engines() == ()
    assert (X @ X.t()).dtype is torch.float32
    model.error = None
    assert compiled(X).dtype is torch.float16
    session.reset()
