"""Ops that no list of a GPU names, on CPU tensors under those lists: what torch.autocast("cpu") runs, they run."""

import os

import pytest
import torch
from op_calls import CALLS
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from whole_table import MIXTURES, differences, outcome

import amplab
from amplab.kernels.builder.recipe import obstacle
from amplab.policies import (
    TORCH_CPU,
    TORCH_CUDA,
    CastingEngine,
    CastPolicy,
    CompiledEngine,
    PrecisionPolicy,
    explaining,
)
from amplab.policies.tables.torch_cpu_table import ON_THE_CPU

HALF, BFLOAT16 = torch.float16, torch.bfloat16
LOWER = pytest.mark.parametrize("lower", [BFLOAT16, HALF], ids=["bfloat16", "float16"])
CUDA = {row.op for row in TORCH_CUDA.rows}
OWN = [row for row in ON_THE_CPU.rows if row.op not in CUDA and row.op in CALLS]
UNBUILT = obstacle() is not None or os.environ.get("AMPLAB_KERNELS") == "reference"
ENGINES = pytest.mark.parametrize(
    "kind",
    [CastingEngine, pytest.param(CompiledEngine, marks=pytest.mark.skipif(UNBUILT, reason="nothing can be built"))],
)
PROMOTED = [row.op for row in OWN if row.cast is CastPolicy.PROMOTE]

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_rows_are_those_of_the_cpus_list_and_no_other():
    named = {row.op for row in TORCH_CPU.rows}
    assert {row.op for row in ON_THE_CPU.rows} <= named
    assert {"avg_pool3d", "_addmm_activation", "ctc_loss", "fft_fft", "svd", "quantile"} <= {row.op for row in OWN}


@LOWER
@pytest.mark.parametrize("row", [pytest.param(row, id=row.op) for row in OWN])
def test_what_has_no_16_bit_kernel_runs_as_under_torch_autocast_on_the_cpu(row, lower):
    for mixture in MIXTURES:
        ours = outcome(row.op, mixture, lower, lambda: amplab.autocast("cpu", lower))
        theirs = outcome(row.op, mixture, lower, lambda: torch.autocast("cpu", lower))
        found = differences(ours, theirs)
        if row.op in PROMOTED and mixture == "lower":
            assert not isinstance(ours, str)  # there is a kernel by now, and a GPU returns that dtype, too
        elif row.op in ("lstsq", "_addmm_activation"):  # LAPACK's last bits; float16 products are summed in float32
            assert found.removeprefix("outputs: values").removeprefix("gradients: values") == ""
        else:
            assert found == "", mixture


@LOWER
def test_every_op_of_both_lists_runs_where_torch_runs_it(lower):
    refused = []
    for op in CALLS:
        for mixture in MIXTURES:
            ours = outcome(op, mixture, lower, lambda: amplab.autocast("cpu", lower))
            if isinstance(ours, str):
                theirs = outcome(op, mixture, lower, lambda: torch.autocast("cpu", lower))
                refused += [op] if not isinstance(theirs, str) else []
    assert set(refused) == {"binary_cross_entropy"}  # banned, as in torch.autocast("cuda")


@LOWER
@pytest.mark.parametrize("level", ["apex", "torch_cuda"])
def test_a_net_with_a_volume_pool_trains(lower, level):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv3d(1, 4, 3), torch.nn.AvgPool3d(2), torch.nn.Flatten(), torch.nn.Linear(32, 2)
    )
    optimizer, x = torch.optim.SGD(net.parameters(), lr=0.2), torch.randn(8, 1, 6, 6, 6)
    labels, losses, pooled = (x.mean((1, 2, 3, 4)) > 0).long(), [], []
    net[1].register_forward_hook(lambda _module, _args, output: pooled.append(output))
    for _ in range(20):
        optimizer.zero_grad()
        with amplab.autocast("cpu", policy=PrecisionPolicy(level, lower)):
            loss = F.cross_entropy(net(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert pooled[0].dtype is torch.float32
    assert losses[-1] < 0.5 * losses[0]


def test_a_users_rule_comes_first():
    x = torch.randn(1, 1, 4, 4, 4)
    policy = PrecisionPolicy("torch_cuda", BFLOAT16, op_rules={"max_pool3d": "float32"})
    with amplab.autocast("cpu", policy=policy):
        assert F.max_pool3d(x.bfloat16(), 2).dtype is torch.float32
    with amplab.autocast("cpu", policy=PrecisionPolicy("torch_cuda", BFLOAT16)):
        assert F.max_pool3d(x.bfloat16(), 2).dtype is BFLOAT16  # as on a GPU


@ENGINES
def test_other_devices_are_left_alone(kind):
    x = torch.ones(1, 1, 4, 4, 4, dtype=BFLOAT16)
    with kind(PrecisionPolicy("torch_cuda", BFLOAT16)).active():
        assert F.avg_pool3d(x, 2).dtype is torch.float32
        assert F.avg_pool3d(x.to("meta"), 2).dtype is BFLOAT16


@pytest.mark.skipif(UNBUILT, reason="nothing can be built")
@pytest.mark.parametrize("row", [pytest.param(row, id=row.op) for row in OWN])
def test_the_compiled_engine_does_the_same(row):
    if row.op in ("lstsq", "stft"):
        pytest.skip("LAPACK's last bits differ from call to call; the padding in stft is an op of its own there")
    policy = PrecisionPolicy("torch_cuda", BFLOAT16)
    for mixture in MIXTURES:
        found = [outcome(row.op, mixture, BFLOAT16, kind(policy).active) for kind in (CompiledEngine, CastingEngine)]
        assert differences(*found) == "", mixture


def test_without_lists_the_dtype_stays():
    with CastingEngine(PrecisionPolicy(None, BFLOAT16)).active():
        assert F.avg_pool3d(torch.ones(1, 1, 4, 4, 4).bfloat16(), 2).dtype is BFLOAT16


def test_the_reason_is_the_row():
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, explanation.decision))
            return func(*args, **(kwargs or {}))

    with CastingEngine(PrecisionPolicy("torch_cuda", BFLOAT16)).active(), explaining() as explanation, Seen():
        F.avg_pool3d(torch.ones(1, 1, 4, 4, 4).bfloat16(), 2)
        F.avg_pool3d(torch.ones(1, 1, 4, 4, 4, device="meta").bfloat16(), 2)
    assert any("cast to float32 for avg_pool3d" in decision.reason for _, decision in seen if decision is not None)
    assert "on no list of torch_cuda" in seen[-1][1].reason
