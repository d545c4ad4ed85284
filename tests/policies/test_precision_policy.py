"""A policy is a value with a string form, and explains every function."""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from amplab.formats import FLOAT8_E4M3, FLOAT8_E5M2, TF32
from amplab.policies import APEX, TABLES, TORCH_CPU, CastPolicy, PrecisionPolicy

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("table", "dtype"), list(itertools.product((*TABLES.values(), None), DTYPES)))
def test_string_form_parses_back(table, dtype):
    policy = PrecisionPolicy(table, dtype)
    assert PrecisionPolicy.parse(str(policy)) == policy


def test_defaults_are_apex_in_float16():
    assert PrecisionPolicy() == PrecisionPolicy(APEX, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fnuz])
def test_other_compute_dtypes_are_refused(dtype):
    with pytest.raises(
        ValueError, match=rf"compute_dtype={dtype}: expected torch.float16, torch.bfloat16 or torch.float32; pass"
    ):
        PrecisionPolicy(compute_dtype=dtype)


@pytest.mark.parametrize("text", ["", "apex", "cuda/float16", "apex/float16/x", "apex/float16; softmax"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=rf"policy '{text}': expected 'table/dtype'.* e.g. 'apex/float16'"):
        PrecisionPolicy.parse(text)


def test_a_table_may_be_given_by_name():
    assert PrecisionPolicy("torch_cpu") == PrecisionPolicy(TORCH_CPU)
    assert str(PrecisionPolicy("torch_cpu", torch.bfloat16)) == "torch_cpu/bfloat16"


def test_a_misspelt_table_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"e.g. 'apex/float16'; did you mean torch_cuda or torch_cpu\?"):
        PrecisionPolicy.parse("torch_cud/float16")


def test_ops_are_explained_by_name():
    assert PrecisionPolicy().explain("softmax") == PrecisionPolicy().explain(F.softmax)
    assert PrecisionPolicy().explain("F.relu").cast is CastPolicy.FALL_THROUGH
    assert PrecisionPolicy("torch_cpu").explain("softmax").reason.startswith("softmax: on no list of torch_cpu/float16")


def test_explain_listed_unlisted_and_without_table():
    assert PrecisionPolicy().explain(F.softmax).reason == "softmax: probabilities below 2^-25 are zero in float16"
    unlisted = PrecisionPolicy().explain(torch.relu)
    assert unlisted.cast is CastPolicy.FALL_THROUGH
    assert unlisted.reason == "relu: on no list of apex/float16; runs in the dtype of its arguments"
    assert PrecisionPolicy(None).explain(F.softmax).cast is CastPolicy.FALL_THROUGH


PRECISIONS = (*DTYPES, TF32, FLOAT8_E4M3, FLOAT8_E5M2)
OPS = ("softmax", "linear", "relu", "add", "torch.nn.functional.linear", "torch.Tensor.add", F.gelu, torch.exp)
CASTS = ("lower_precision_fp", "fp32", "promote", "sequence_promote", "match_self", "banned", "fall_through")


@st.composite
def policies(draw):
    words = st.sampled_from([*PRECISIONS, *CASTS])
    return PrecisionPolicy(
        draw(st.sampled_from([*TABLES.values(), None])),
        draw(st.sampled_from(PRECISIONS)),
        draw(st.dictionaries(st.sampled_from(OPS[3:] if draw(st.booleans()) else OPS[:3]), words)),
        draw(st.dictionaries(st.text(), st.sampled_from(PRECISIONS), max_size=4)),
        cast_outputs_back=draw(st.booleans()),
    )


@settings(deadline=None)
@given(policies())
def test_every_policy_comes_back_from_its_string_and_its_pickle(policy):
    assert PrecisionPolicy.parse(str(policy)) == policy
    back = pickle.loads(pickle.dumps(policy))
    assert back == policy
    assert hash(back) == hash(policy)
    assert copy.deepcopy(policy) == policy


def test_the_option_of_the_rules_is_a_switch():
    with pytest.raises(TypeError, match="cast_outputs_back='yes': expected True or False"):
        PrecisionPolicy(cast_outputs_back="yes")


def test_rules_may_be_written_in_several_ways():
    by_function = PrecisionPolicy(op_rules={F.linear: torch.float32}, module_rules={"a": "tf32", "b": torch.bfloat16})
    by_name = PrecisionPolicy(
        compute_dtype="torch.float16",
        op_rules={"torch.nn.functional.linear": "fp32"},
        module_rules={"b": "bfloat16", "a": TF32},
    )
    assert by_function == by_name
    assert str(by_name) == "apex/float16; op torch.nn.functional.linear=float32; module a=tf32; module b=bfloat16"


def test_simulated_formats_stay_float32_tensors():
    policy = PrecisionPolicy(compute_dtype=torch.float8_e4m3fn)
    assert (policy.compute_dtype, policy.simulated, policy.tensor_dtype) == (FLOAT8_E4M3, FLOAT8_E4M3, torch.float32)
    assert str(policy) == "apex/float8_e4m3"
    assert PrecisionPolicy(compute_dtype=torch.bfloat16).simulated is None
    assert PrecisionPolicy(compute_dtype=torch.bfloat16).tensor_dtype is torch.bfloat16


def test_a_dtype_that_is_not_floating_is_refused_in_a_string():
    with pytest.raises(ValueError, match=r"compute_dtype='half': expected torch.float16"):
        PrecisionPolicy.parse("apex/half")
    with pytest.raises(ValueError, match=r"module_rules\['a'\]=torch.int8: expected torch.float16"):
        PrecisionPolicy(module_rules={"a": torch.int8})
    with pytest.raises(ValueError, match="module head has two rules"):
        PrecisionPolicy.parse("apex/float16; module head=tf32; module head=float32")


def test_explain_names_the_users_rule_first():
    policy = PrecisionPolicy(op_rules={"softmax": "bfloat16", "relu": torch.float32})
    row = policy.explain(F.softmax)
    assert (row.cast, row.by_user) == (CastPolicy.LOWER_PRECISION_FP, True)
    assert row.reason == "softmax: your rule, bfloat16; the apex list has fp32"
    assert policy.explain(torch.Tensor.relu).reason == "relu: your rule, float32"
    assert not policy.explain(F.linear).by_user
    assert policy.explain("softmax").by_user
    assert policy.explain("F.softmax").by_user


@pytest.mark.parametrize("table", [3, ("apex",), PrecisionPolicy])
def test_what_is_no_table_is_refused(table):
    with pytest.raises(TypeError) as refusal:
        PrecisionPolicy(table)
    assert str(refusal.value).startswith(f"table={table!r}: expected an OpTable")
