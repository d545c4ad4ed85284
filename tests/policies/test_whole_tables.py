"""Every row of every table, run: against torch.autocast where torch has the list, against casts by hand everywhere."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_lists_on_cpu import HEADER
from op_calls import CALLS, CONDITIONED, draw
from torch.autograd.profiler import profile
from whole_table import MIXTURES, differences, outcome

from amplab.policies import APEX, TABLES, TORCH_CPU, TORCH_CUDA, CastingEngine, CastPolicy, PrecisionPolicy, cpu_half

HALF, BFLOAT = torch.float16, torch.bfloat16
# Composites are run by the tests of composites, in-place forms by those of the casting steps.
# "recurrent" is run by the tests of recurrent nets.
ELSEWHERE = {"multi_head_attention_forward", "linear_cross_entropy", "gumbel_softmax", "backward", "recurrent"}
ONEDNN_ONLY = {"_native_multi_head_attention", "mkldnn_rnn_layer"}
ENGINES = {(name, dtype): CastingEngine(PrecisionPolicy(name, dtype)) for name in TABLES for dtype in (HALF, BFLOAT)}

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using a target size:UserWarning",
    "ignore:Was asked to gather along dimension:UserWarning",
    "ignore:.*deprecated.*:UserWarning",
)


def regime(table, dtype, mode="native"):
    """An engine with `table` in `dtype`, as something to enter."""

    @contextlib.contextmanager
    def entered():
        with cpu_half(mode), ENGINES[table, dtype].active():
            yield

    return entered


def in_place(row) -> bool:
    return row.op.endswith("_")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_has_a_call(table):
    without = {row.op for row in table.rows if row.exists and row.op not in CALLS and not in_place(row)}
    assert without <= ELSEWHERE | ONEDNN_ONLY


def called(table, *casts):
    rows = [row for row in table.rows if row.op in CALLS and not in_place(row) and (not casts or row.cast in casts)]
    return [pytest.param(row, id=row.op) for row in rows]


# Where torch refuses a mixture the engine does not; without oneDNN's half, lstm falls back to another code path.
TORCH_REFUSES = {"tensordot", "inner", "chain_matmul"}


@pytest.mark.parametrize("row", called(TORCH_CPU))
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=["bfloat16", "float16"])
def test_the_cpu_list_computes_what_torch_autocast_computes(row, dtype):
    if row.op == "lstm":
        pytest.skip("torch's own autocast refuses it where oneDNN has no 16-bit LSTM; casts by hand hold it below")
    found = {}
    for mixture in MIXTURES:
        theirs = outcome(row.op, mixture, dtype, lambda: torch.autocast("cpu", dtype))
        found[mixture] = differences(outcome(row.op, mixture, dtype, regime("torch_cpu", dtype)), theirs)
    if row.op == "lstsq":  # LAPACK's last bits differ from call to call
        found = {
            mixture: said.removeprefix("outputs: values").removeprefix("gradients: values")
            for mixture, said in found.items()
        }
    expected = "torch refuses" if row.op in TORCH_REFUSES else ""
    assert found == {"float32": "", "lower": "", "first lower": expected, "rest lower": expected}


@pytest.fixture(scope="module")
def differences_from_cuda():
    """How the engine differs from torch with CUDA's lists under CPU autocast, from a process of their own."""
    script = Path(__file__).with_name("cuda_lists_on_cpu.py")
    root = str(Path(__file__).resolve().parents[2])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        *(),
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


# Recurrent nets are cuDNN's business on a GPU, and the CPU's code for them takes other paths.
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
# What the docstring of torch_cuda_table lists.
EARLIER_IN_FLOAT32 = {
    *("cross_entropy", "pairwise_distance", "mvlgamma", "trapezoid", "triplet_margin_with_distance_loss"),
}


@pytest.mark.skipif(not HEADER.exists(), reason="this torch ships without autocast_mode.h")
@pytest.mark.parametrize("row", called(TORCH_CUDA))
def test_the_cuda_list_computes_what_torch_with_that_list_computes(row, differences_from_cuda):
    for dtype in ("torch.bfloat16", "torch.float16"):
        found = differences_from_cuda[dtype][row.op]
        if row.op in EARLIER_IN_FLOAT32:
            assert set(found.values()) == {"outputs: values"}
        elif row.op == "binary_cross_entropy":
            assert found == {"float32": "torch refuses"}
        elif row.op in ("local_response_norm", "svd_lowrank"):  # no 16-bit kernel under them; ours does without
            assert set(found.values()) <= {"torch refuses"}
        elif row.op not in RECURRENT:
            assert found == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_cuda_list_gives_the_dtypes_of_torch_autocast_on_a_gpu():
    refused = {"_convolution", "binary_cross_entropy", "cpu"}
    found = {}
    for row in (param.values[0] for param in called(TORCH_CUDA) if param.id not in refused):
        for mixture in MIXTURES:
            theirs = outcome(row.op, mixture, HALF, lambda: torch.autocast("cuda", HALF), "cuda")
            said = differences(outcome(row.op, mixture, HALF, regime("torch_cuda", HALF), "cuda"), theirs)
            if said not in ("", "outputs: values", "gradients: values", "torch refuses"):
                found[row.op, mixture] = said
    assert found == {}


def by_hand(row, values, dtype):
    """The dtype that a row's arguments are cast to."""
    if row.cast is CastPolicy.LOWER_PRECISION_FP:
        return dtype
    dtypes = {value.dtype for value in values}
    wide = row.cast in (CastPolicy.FP32, CastPolicy.FP32_SET_OPT_DTYPE) or len(dtypes) > 1
    return torch.float32 if wide else dtypes.pop()


CAST = (
    *(CastPolicy.LOWER_PRECISION_FP, CastPolicy.FP32, CastPolicy.FP32_SET_OPT_DTYPE),
    *(CastPolicy.PROMOTE, CastPolicy.SEQUENCE_PROMOTE),
)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("table", TABLES)
def test_every_cast_is_the_one_made_by_hand(table, dtype, mixture):
    for row in (param.values[0] for param in called(TABLES[table], *CAST) if param.id not in CONDITIONED):
        _, values = draw(row.op)
        lower = [mixture == "lower" or mixture == ("rest lower" if index else "first lower") for index in range(9)]
        given = [value.to(dtype) if low else value for value, low in zip(values, lower, strict=False)]
        func = CALLS[row.op][0]
        with regime(table, dtype)():
            ours = func(*given)
        theirs = func(*(value.to(by_hand(row, given, dtype)) for value in given))
        said = differences({"outputs": flat(ours), "gradients": []}, {"outputs": flat(theirs), "gradients": []})
        assert f"{row.op}: {said}" == f"{row.op}: "


def flat(result):
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in flat(item)]
    return [result] if isinstance(result, torch.Tensor) else []


@pytest.mark.parametrize("row", [param for param in called(APEX, *CAST) if param.id != "cudnn_convolution"])
def test_rows_name_aten_ops_that_run(row):
    func, values = draw(row.op)
    with profile() as seen:
        func(*values)
    ran = {event.name.removeprefix("aten::") for event in seen.function_events}
    assert ran & set(row.aten)


# The CPU's own half kernels round partial sums, or what stands between two products, to half.
ROUND_WITHIN = {
    *("conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("addbmm", "vecdot", "scaled_dot_product_attention"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
}
PRODUCTS = [
    param
    for param in called(TORCH_CUDA, CastPolicy.LOWER_PRECISION_FP)
    if param.id not in {"prelu", "addr", *RECURRENT}
]


@pytest.mark.parametrize("row", PRODUCTS)
def test_accumulation_in_fp32_is_the_float64_result_rounded_once(row):
    results = {"fp32_accumulate": [], "native": [], "float64": []}
    for seed in range(8):
        func, values = draw(row.op, seed=seed)
        halves = [value.half() for value in values]
        for mode in ("fp32_accumulate", "native"):
            with regime("torch_cuda", HALF, mode)():
                results[mode] += flat(func(*halves))
        results["float64"] += flat(func(*(value.double() for value in halves)))
    ours, native, exact = (torch.cat([result.flatten() for result in results[mode]]) for mode in results)
    assert ours.dtype is native.dtype is HALF
    once = exact.half()
    step = torch.nextafter(once.abs(), torch.tensor(65504.0, dtype=HALF)).double() - once.abs().double()
    assert ((ours.double() - exact).abs() <= step).all()
    if row.op not in ROUND_WITHIN:
        assert (ours == native).double().mean() >= 0.99
