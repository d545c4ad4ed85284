"""What can be computed in, by every way of writing it."""

import pytest
import torch

from amplab.formats import FLOAT16, FORMATS, TF32, FloatFormat
from amplab.policies.policy.precisions import precision_name, precision_of, tensor_dtype


@pytest.mark.parametrize("name", FORMATS)
def test_names_dtypes_and_formats_mean_the_same(name):
    precision = precision_of(name, "dtype")
    assert precision_name(precision) == name
    assert precision_of(FORMATS[name], "dtype") == precision_of(precision, "dtype") == precision
    if FORMATS[name].torch_dtype is not None:
        assert precision_of(FORMATS[name].torch_dtype, "dtype") == precision
    assert tensor_dtype(precision) is (torch.float32 if isinstance(precision, FloatFormat) else precision)


def test_what_torch_computes_in_is_a_dtype():
    assert precision_of(FLOAT16, "dtype") is torch.float16
    assert precision_of(TF32, "dtype") is TF32


@pytest.mark.parametrize(
    "value", [torch.float64, torch.int8, torch.bool, "half", "int8", None, 16, FloatFormat("tf32", 8, 9)]
)
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError, match=r"compute_dtype=.*: expected torch.float16, .* or 'tf32', 'float8_e4m3'"):
        precision_of(value, "compute_dtype")
