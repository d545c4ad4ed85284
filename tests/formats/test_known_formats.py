"""The table of formats against torch.finfo, and the way from a dtype to its format."""

import dataclasses
import re

import pytest
import torch

from amplab.formats import FLOAT8_E4M3, FLOAT16, FORMATS, TF32, format_of, known_formats

WITH_DTYPE = [fmt for fmt in FORMATS.values() if fmt.torch_dtype is not None]


@pytest.mark.parametrize("fmt", WITH_DTYPE, ids=lambda fmt: fmt.name)
def test_the_range_is_that_of_torch_finfo(fmt):
    finfo = torch.finfo(fmt.torch_dtype)
    assert fmt.max == finfo.max
    assert fmt.smallest_normal == finfo.smallest_normal
    assert fmt.epsilon == finfo.eps
    assert fmt.total_bits == finfo.bits
    smallest = torch.tensor([1], dtype=torch.uint8 if finfo.bits == 8 else getattr(torch, f"int{finfo.bits}"))
    assert fmt.smallest_subnormal == smallest.view(fmt.torch_dtype).double().item()


@pytest.mark.parametrize("fmt", WITH_DTYPE, ids=lambda fmt: fmt.name)
def test_infinity_is_there_where_torch_has_one(fmt):
    largest = torch.tensor(float("inf")).to(fmt.torch_dtype).float()
    assert largest.isinf().item() == fmt.has_infinity


def test_tf32_has_the_range_of_float32_and_the_precision_of_half():
    assert (TF32.bias, TF32.min_exponent, TF32.total_bits) == (127, -126, 19)
    assert TF32.epsilon == FLOAT16.epsilon
    assert TF32.max == torch.tensor(0x7F7FE000, dtype=torch.int32).view(torch.float32).item()


@pytest.mark.parametrize("fmt", WITH_DTYPE, ids=lambda fmt: fmt.name)
def test_format_of_is_the_inverse_of_torch_dtype(fmt):
    assert format_of(fmt.torch_dtype) is fmt


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64])
def test_format_of_another_dtype_is_refused_with_what_is_allowed(dtype):
    with pytest.raises(ValueError, match=r"expected one of torch.float32, torch.bfloat16, .*FloatFormat\("):
        format_of(dtype)


def test_names_are_the_keys_and_the_table_cannot_change():
    assert all(name == fmt.name for name, fmt in FORMATS.items())
    with pytest.raises(TypeError):
        FORMATS["mine"] = FLOAT16
    with pytest.raises(dataclasses.FrozenInstanceError):
        FLOAT16.mantissa_bits = 11


def test_the_table_of_the_docstring_is_true():
    rows = re.findall(r"^\| (\w+) +\| 1, (\d), (\d+) +\|", known_formats.__doc__, re.MULTILINE)
    stated = {name: (int(exponent), int(mantissa)) for name, exponent, mantissa in rows}
    assert stated == {f.name: (f.exponent_bits, f.mantissa_bits) for f in FORMATS.values()}


def test_e4m3_is_the_finite_variant():
    assert FLOAT8_E4M3.max == 448
    assert [bits for bits in range(256) if FLOAT8_E4M3.kind(bits) == "nan"] == [0x7F, 0xFF]
