"""A policy is a value with a string form, and explains every function."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from amplab.policies import APEX, TABLES, TORCH_CPU, CastPolicy, PrecisionPolicy

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("table", "dtype"), list(itertools.product((*TABLES.values(), None), DTYPES)))
def test_string_form_parses_back(table, dtype):
    policy = PrecisionPolicy(table, dtype)
    assert PrecisionPolicy.parse(str(policy)) == policy


def test_defaults_are_apex_in_float16():
    assert PrecisionPolicy() == PrecisionPolicy(APEX, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e5m2])
def test_other_compute_dtypes_are_refused(dtype):
    with pytest.raises(
        ValueError, match=rf"compute_dtype={dtype}: expected torch.float16, torch.bfloat16 or torch.float32; pass"
    ):
        PrecisionPolicy(compute_dtype=dtype)


@pytest.mark.parametrize("text", ["", "apex", "apex/half", "cuda/float16", "apex/float16/x"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=rf"policy '{text}': expected 'table/dtype' .* e.g. 'apex/float16'"):
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
    assert PrecisionPolicy().explain(F.softmax).reason == "softmax: exp overflows half above 11.09"
    unlisted = PrecisionPolicy().explain(torch.relu)
    assert unlisted.cast is CastPolicy.FALL_THROUGH
    assert unlisted.reason == "relu: on no list of apex/float16, runs in the dtype it gets"
    assert PrecisionPolicy(None).explain(F.softmax).cast is CastPolicy.FALL_THROUGH
