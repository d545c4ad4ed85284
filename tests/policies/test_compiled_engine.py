"""CompiledEngine: the casts of the default engine, made in the dispatcher, and nothing outside its own regions."""

import contextlib
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from op_calls import CALLS
from torch import nn
from torch.utils.checkpoint import checkpoint
from whole_table import MIXTURES, differences, outcome

from amplab.kernels.builder.recipe import obstacle
from amplab.policies import (
    TABLES,
    CastingEngine,
    CompiledEngine,
    PrecisionPolicy,
    cpu_half,
    disable_casts,
    explaining,
    thread_engines,
)

pytestmark = pytest.mark.skipif(
    obstacle() is not None or os.environ.get("AMPLAB_KERNELS") == "reference", reason="nothing can be built here"
)
BFLOAT16 = PrecisionPolicy(compute_dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def engine() -> CompiledEngine:
    return CompiledEngine(BFLOAT16)


@pytest.fixture(scope="module")
def half() -> CompiledEngine:
    return CompiledEngine(PrecisionPolicy())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 10)
    )


def loss_and_gradients(net: nn.Module, region: contextlib.AbstractContextManager) -> list[torch.Tensor]:
    torch.manual_seed(1)
    images, labels = torch.randn(5, 1, 8, 8), torch.randint(10, (5,))
    with region:
        loss = F.cross_entropy(net(images), labels)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in net.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mode", ["native", "fp32_accumulate"])
def test_a_step_has_the_bits_of_the_default_engine(dtype, mode):
    policy = PrecisionPolicy(compute_dtype=dtype)
    with cpu_half(mode):
        ours = loss_and_gradients(model(), CompiledEngine(policy).active())
        theirs = loss_and_gradients(model(), CastingEngine(policy).active())
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    plain = loss_and_gradients(model(), contextlib.nullcontext())
    assert torch.equal(ours[1], plain[1]) == (dtype is torch.float32)


# Functions written in Python are cast op by op here, and as a whole by the default engine.
IN_PYTHON = {
    "gaussian_nll_loss",
    "local_response_norm",
    "multilabel_soft_margin_loss",
    "normalize",
    "triplet_margin_with_distance_loss",
}
# Leaves that are no Parameters are cast once a use by the default engine; LAPACK's last bits differ from call to call;
# a tensor that is moved to the CPU it is on becomes no ATen op.
OTHERWISE = {"lstm", "lstm_cell", "lstsq", "cpu"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("table", TABLES)
def test_every_row_gives_what_the_default_engine_gives(table, dtype):
    policy = PrecisionPolicy(table, dtype)
    regimes = CompiledEngine(policy).active, CastingEngine(policy).active
    differ = set()
    with cpu_half("native"):
        for row in TABLES[table].rows:
            if row.op in CALLS and row.op not in IN_PYTHON | OTHERWISE:
                pairs = ([outcome(row.op, mixture, dtype, regime) for regime in regimes] for mixture in MIXTURES)
                differ |= {row.op for ours, theirs in pairs if differences(ours, theirs)}
    assert differ == set()


def test_it_sees_what_cpp_calls_inside_an_op(engine):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    seen = []
    handle = layer.linear1.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    with engine.active():
        layer(torch.randn(2, 3, 16))
        assert torch.ops.aten.mm(torch.randn(2, 2), torch.randn(2, 2)).dtype is torch.bfloat16
    handle.remove()
    assert seen == [torch.bfloat16]


def test_the_region_is_the_threads_alone_and_ends_with_it(engine):
    x, found = torch.randn(3, 3), []
    with engine.active():
        other = threading.Thread(target=lambda: found.append(torch.mm(x, x).dtype))
        other.start()
        other.join()
    with pytest.raises(ZeroDivisionError), engine.active():
        _ = 1 / 0
    assert found == [torch.float32]
    assert torch.mm(x, x).dtype is torch.float32
    assert thread_engines() == ()


def test_regions_nest_with_each_other_and_with_the_default_engine(engine, half):
    x = torch.randn(3, 3)
    default = CastingEngine(PrecisionPolicy())
    with engine.active():
        with default.active():
            assert torch.mm(x, x).dtype is torch.float16
        with half.active(), engine.active():
            assert torch.mm(x, x).dtype is torch.bfloat16
        with disable_casts():
            assert torch.mm(x, x).dtype is torch.float32
        with default.active(), engine.active():
            assert torch.mm(x, x).dtype is torch.bfloat16
        assert torch.mm(x, x).dtype is torch.bfloat16
    assert torch.mm(x, x).dtype is torch.float32


def test_installed_it_casts_until_it_is_uninstalled(engine):
    x = torch.randn(3, 3)
    engine.install()
    try:
        assert engine.installed
        assert torch.mm(x, x).dtype is torch.bfloat16
        with disable_casts():
            assert torch.mm(x, x).dtype is torch.float32
    finally:
        engine.uninstall()
    assert torch.mm(x, x).dtype is torch.float32


def test_casts_of_weights_are_kept_until_they_are_edited_or_the_region_ends(engine):
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with engine.active():
        with torch.no_grad():
            torch.mm(x, weight)
        assert engine.cache_size == 1
        product = torch.mm(x, weight)  # the copy made under no_grad is linked to the weight
        product.sum().backward()
        assert weight.grad is not None
        with torch.no_grad():
            weight.mul_(2)
        assert torch.mm(x, weight)[0, 0].item() == 4
        weight.data = torch.full((2, 2), 3.0)
        assert torch.mm(x, weight)[0, 0].item() == 6
        weight.data.fill_(5.0)  # cannot be seen
        engine.clear_cache()
        assert torch.mm(x, weight)[0, 0].item() == 10
    assert engine.cache_size == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_casts_without_gradients_too(engine, mode):
    weight = nn.Parameter(torch.ones(2, 2))
    with mode(), engine.active():
        assert torch.mm(torch.ones(2, 2), weight).dtype is torch.bfloat16


def test_backward_inside_the_region_is_left_alone(engine):
    x = torch.randn(4, 4, requires_grad=True)
    results = []
    for inside in (True, False):
        x.grad = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(engine.active())
            loss = (x * 3).exp().sum() + torch.mm(x, x).float().square().sum()
            if not inside:
                stack.close()
            loss.backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_a_recomputation_that_enters_the_engine_again_is_cast(engine):
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(4, 4)
    dtypes = []

    def block(value):
        with engine.active():
            product = torch.mm(value, weight)
        dtypes.append(product.dtype)
        return product.float().square()

    with engine.active():
        checkpoint(block, x, use_reentrant=False).sum().backward()
        assert dtypes == [torch.bfloat16, torch.bfloat16]
        assert torch.mm(x, x).dtype is torch.bfloat16
    expected = torch.autograd.grad(block(x).sum(), weight)[0]
    assert torch.equal(weight.grad, expected)


def test_rules_of_single_ops(half):
    single, short, double = torch.ones(2, 2), torch.ones(2, 2).half(), torch.ones(2, 2).double()
    with half.active():
        assert torch.exp(short).dtype is torch.float32
        assert (single + short).dtype is torch.float32
        assert torch.cat([single, short]).dtype is torch.float32
        assert torch.stack([short, short.bfloat16()]).dtype is torch.float32
        assert torch.mm(short, short).dtype is torch.float16
        assert torch.mm(double, double).dtype is torch.float64
        assert single.clone().add_(short).dtype is torch.float32
        assert short.clone().add_(single).dtype is torch.float16
        assert torch.relu(short).dtype is torch.float16
        assert torch.mm(single, single, out=torch.empty(2, 2)).dtype is torch.float32
        assert torch.arange(3).sum().dtype is torch.int64
        with pytest.raises(NotImplementedError, match="binary_cross_entropy"):
            F.binary_cross_entropy(short * 0.5, short)


class Own(torch.Tensor):
    """A subclass with a dispatch of its own."""

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)

    def __init__(self, value):
        self.value = value

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen = (func, *(arg.dtype for arg in args))
        return args[0].value


def test_tensor_subclasses_are_left_alone(half):
    with half.active():
        torch.mm(Own(torch.ones(2, 2)), Own(torch.ones(2, 2)))
    assert Own.seen == (torch.ops.aten.mm.default, torch.float32, torch.float32)


def test_without_a_table_only_products_of_halves_are_touched():
    short = torch.randn(64, 64).half()
    with CompiledEngine(PrecisionPolicy(table=None)).active(), cpu_half("fp32_accumulate"):
        product, single = torch.mm(short, short), torch.mm(short.float(), short.float())
        assert torch.exp(short).dtype is torch.float16
    assert torch.equal(product, single.half())
    assert product.dtype is torch.float16


def test_it_does_not_explain(engine):
    refused = pytest.raises(RuntimeError, match="gives no reasons; use CastingEngine")
    with explaining(), refused, engine.active():
        pass
    with engine.active(), refused, explaining():
        pass
    assert thread_engines() == ()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_it_is_pickled_by_its_policy(engine):
    copy = pickle.loads(pickle.dumps(engine))
    assert isinstance(copy, CompiledEngine)
    assert copy.policy == engine.policy


BESIDE = """
import torch
from amplab.policies import CompiledEngine, PrecisionPolicy
x = torch.randn(4, 4)
engine = CompiledEngine(PrecisionPolicy(compute_dtype=torch.bfloat16))
with torch.autocast("cpu", torch.float16):
    before = [torch.mm(x, x).dtype, torch.softmax(x.half(), 0).dtype]
with engine.active():
    inside = [torch.mm(x, x).dtype, torch.is_autocast_enabled("cpu")]
with torch.autocast("cpu", torch.float16):
    after = [torch.mm(x, x).dtype, torch.softmax(x.half(), 0).dtype]
assert before == after, (before, after)
assert inside == [torch.bfloat16, False]
"""


def test_torch_autocast_beside_it_is_untouched_and_nothing_is_printed(engine):
    result = subprocess.run([sys.executable, "-W", "error", "-c", BESIDE], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_where_nothing_may_be_built_it_says_so():
    script = "from amplab.policies import CompiledEngine\nCompiledEngine()"
    environment = {**os.environ, "AMPLAB_KERNELS": "reference"}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "RuntimeError: AMPLAB_KERNELS=reference" in result.stderr


@pytest.mark.parametrize(
    "policy", [{"op_rules": {"softmax": "float32"}}, {"module_rules": {"head": "float32"}}, {"compute_dtype": "tf32"}]
)
def test_rules_by_op_and_simulated_formats_are_left_to_the_default_engine(policy):
    with pytest.raises(ValueError, match=r"expected a policy without rules .*; use CastingEngine"):
        CompiledEngine(PrecisionPolicy(**policy))


def test_a_disabled_region_of_torch_autocast_inside_casts_nothing(engine):
    x = torch.ones(2, 2)

    def dtypes() -> tuple[torch.dtype, ...]:
        return (x @ x).dtype, (x.bfloat16().exp()).dtype

    with torch.autocast("cpu", enabled=False), engine.active():
        assert dtypes() == (torch.bfloat16, torch.float32)
        with torch.autocast("cpu", enabled=False):
            assert dtypes() == (torch.float32, torch.bfloat16)
            with engine.active():
                assert dtypes() == (torch.bfloat16, torch.float32)
            assert dtypes() == (torch.float32, torch.bfloat16)
        assert dtypes() == (torch.bfloat16, torch.float32)
