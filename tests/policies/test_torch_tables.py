"""The torch lists against the running torch: its dispatcher's registrations, its own header, and its spellings."""

import re
import types
from pathlib import Path

import pytest
import torch
from op_calls import draw
from torch.autograd.profiler import profile
from torch.overrides import get_overridable_functions

from amplab.policies import APEX, TABLES, TORCH_CPU, TORCH_CUDA, CastPolicy
from amplab.policies.casting.plan import composites_of
from amplab.policies.tables.op_table import absent, resolve

REGISTERED = {
    "torch_cuda": torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"),
    "torch_cpu": torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"),
}
# No public function becomes one of these on a build without CUDA: they are in the rows of those that do with it.
CUDA_BUILDS = {"_cudnn_rnn"}
LISTS = pytest.mark.parametrize("table", [TORCH_CUDA, TORCH_CPU], ids=lambda table: table.name)
EVERY = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


def packets(registrations) -> set[str]:
    """Names of ATen ops without namespace and overload."""
    return {name.removeprefix("aten::").partition(".")[0] for name in registrations}


def listed(row) -> bool:
    """Whether the list itself names the op; not only an op inside it."""
    return row.spellings != row.added


@LISTS
def test_every_op_that_torch_registers_for_autocast_has_a_row(table):
    registered = packets(REGISTERED[table.name])
    assert len(registered) > 90
    assert registered - {name for row in table.rows for name in row.aten} == set()


@LISTS
def test_every_row_of_a_torch_list_is_registered_and_no_other_claims_to_be(table):
    registered = packets(REGISTERED[table.name])
    extra = [row.op for row in table.rows if row.exists and listed(row) and not registered & set(row.aten)]
    assert set(extra) <= ({"lstm", "gru", "rnn_tanh", "rnn_relu"} if CUDA_BUILDS - registered else set())
    assert all(not listed(row) for row in table.rows_of(CastPolicy.FALL_THROUGH))


@LISTS
def test_no_registered_op_is_in_two_rows_that_claim_it(table):
    registered = packets(REGISTERED[table.name])
    claims = [name for row in table.rows if listed(row) for name in row.aten if name in registered]
    shared = {name for name in claims if claims.count(name) > 1}
    # cross_entropy takes an nll_loss, torch.norm one of the others.
    assert shared <= {"nll_loss", "nll_loss2d", "linalg_vector_norm", "linalg_matrix_norm", *CUDA_BUILDS}


HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
MACROS = {
    "LOWER_PRECISION_FP": CastPolicy.LOWER_PRECISION_FP,
    "FP32": CastPolicy.FP32,
    "FP32_SET_OPT_DTYPE": CastPolicy.FP32_SET_OPT_DTYPE,
    "PROMOTE": CastPolicy.PROMOTE,
}


def cast_policies_of_the_header() -> dict[str, CastPolicy]:
    """ATen name -> cast policy, as torch's own header lists them for every accelerator."""
    text = HEADER.read_text()
    found = {"norm": CastPolicy.FP32_SET_OPT_DTYPE, "binary_cross_entropy": CastPolicy.BANNED}
    for macro, cast in MACROS.items():
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?[^\\])\n", text, re.DOTALL)
        found |= dict.fromkeys(re.findall(r"\s_\((\w+)", body[1]), cast)
    return found


@pytest.mark.skipif(not HEADER.exists(), reason="this torch ships without autocast_mode.h")
def test_cast_policies_of_the_cuda_list_are_those_of_torchs_header():
    expected = cast_policies_of_the_header()
    assert len(expected) > 95
    ours = {name: row.cast for row in TORCH_CUDA.rows if listed(row) for name in row.aten}
    assert {name: ours.get(name) for name in expected} == expected
    # cuDNN's own entries and what torch registers without a list are in no header.
    inside = {"lstm", "gru", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer", "linalg_matrix_sqrth", *CUDA_BUILDS}
    assert set(ours) - set(expected) - inside <= {
        *("cudnn_convolution", "cudnn_convolution_transpose", "log_sigmoid", "linalg_norm"),
        "multilabel_margin_loss_forward",
    }


@EVERY
def test_every_spelling_is_a_function_of_the_running_torch_or_marked(table):
    spellings = [name for row in table.rows for name in row.spellings]
    assert [name for name in spellings if callable(resolve(name)) == absent(name)] == []


@EVERY
def test_every_row_names_the_aten_ops_that_it_becomes(table):
    nameless = {row.op for row in table.rows if row.exists and not row.aten}
    composites = {"multi_head_attention_forward", "linear_cross_entropy", "gumbel_softmax", "lp_pool", "backward"}
    assert nameless <= composites | {"svd_lowrank", "recurrent"}
    known = set(torch._C._dispatch_get_all_op_names())
    known = packets(name for name in known if name.startswith("aten::"))
    assert [name for row in table.rows for name in row.aten if name not in known | CUDA_BUILDS] == []


@EVERY
def test_op_names_are_unique_and_reasons_begin_with_them(table):
    names = [row.op for row in table.rows]
    assert len(names) == len(set(names))
    for row in table.rows:
        assert row.reason.startswith(f"{row.op}: ")
        said = row.reason.removeprefix(row.op)
        assert row.cast is CastPolicy.FALL_THROUGH or any(letter.isdigit() for letter in said)


@LISTS
def test_shared_rows_have_the_facts_of_apexs(table):
    apex = {row.op: row for row in APEX.rows}
    shared = [row for row in table.rows if row.op in apex]
    assert len(shared) > 50
    for row in shared:
        facts = apex[row.op]
        assert (row.spellings, row.aten) == (facts.spellings, facts.aten)
        assert row.reason == facts.reason or row.cast in (CastPolicy.PROMOTE, CastPolicy.FALL_THROUGH)


@LISTS
def test_python_functions_with_listed_ops_inside_are_listed_or_opened(table):
    rows = [row for row in table.rows if row.cast is not CastPolicy.FALL_THROUGH]
    inner = {spelling.rpartition(".")[2] for row in rows for spelling in row.spellings}
    functions = {func for family in get_overridable_functions().values() for func in family}
    unseen = {
        func.__name__
        for func in functions
        if isinstance(body := getattr(func, "__wrapped__", func), types.FunctionType)
        and inner & set(body.__code__.co_names)
        and table.rule(func) is None
        and func not in composites_of(table)
    }
    assert unseen <= {"sym_sum"}  # adds sizes, not tensors


@LISTS
def test_what_is_opened_is_python(table):
    opened = [func for row in table.rows_of(CastPolicy.FALL_THROUGH) for func in map(resolve, row.spellings)]
    assert all(isinstance(func, types.FunctionType) for func in opened if func is not None)


NO_KERNEL = {
    "polar": lambda dtype: torch.polar(torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype)),
    "view_as_complex": lambda dtype: torch.view_as_complex(torch.ones(2, 2, dtype=dtype)),
    "fft_fft": lambda dtype: torch.fft.fft(torch.ones(3, dtype=dtype)),
    "svd": lambda dtype: torch.linalg.svdvals(torch.eye(3, dtype=dtype)),
    "inverse": lambda dtype: torch.inverse(torch.eye(3, dtype=dtype)),
}


@pytest.mark.parametrize(("op", "call"), NO_KERNEL.items(), ids=NO_KERNEL)
def test_what_the_cpu_list_keeps_in_float32_for_want_of_a_kernel(op, call):
    reason = next(row.reason for row in TORCH_CPU.rows if row.op == op)
    assert "only" in reason or "bfloat16" in reason
    call(torch.float32)
    with pytest.raises(RuntimeError):
        call(torch.bfloat16)


def test_rows_of_a_list_that_torch_does_not_name_have_a_registered_op_inside():
    registered = packets(REGISTERED["torch_cuda"])
    inside = [row for row in TORCH_CUDA.rows if not listed(row) and row.cast is not CastPolicy.FALL_THROUGH]
    assert {row.op for row in inside} >= {"square", "trapezoid", "cross_entropy", "inner"}
    for row in inside:
        func, values = draw(row.op)
        with profile() as seen:
            func(*values)
        assert registered & {event.name.removeprefix("aten::") for event in seen.function_events}, row.op
