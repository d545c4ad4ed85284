"""The unscale operators: reference and kernel, to the bit, over layouts, dtypes and non-finite values."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from amplab import kernels
from amplab.kernels.unscale import (
    multi_tensor_unscale__reference,
    multi_tensor_unscale_add_reference,
    multi_tensor_unscale_copy_reference,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPERATORS = {
    "multi_tensor_unscale_": multi_tensor_unscale__reference,
    "multi_tensor_unscale_copy": multi_tensor_unscale_copy_reference,
    "multi_tensor_unscale_add": multi_tensor_unscale_add_reference,
}
INVERSES = [1.0, 0.5, 2.0**-16, 1 / 3, 3.7, 2.0**15, 0.0, math.inf, math.nan]
AWKWARD = [0.0, -0.0, 1.0, 65504.0, -65519.0, 65520.0, 6e-8, 2.9e-8, 1e-40, 3.4e38, math.inf, -math.inf, math.nan]


def values(count, dtype, seed=0):
    """Numbers of every magnitude, all finite in ``dtype``; the awkward ones are separate."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 14, (count,), generator=generator)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * torch.exp2(exponents)).to(dtype)


def same_bits(a, b):
    """Equal to the bit, NaNs apart: what a NaN carries is nobody's promise."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    numbers = ~a.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a[numbers].contiguous().view(integer), b[numbers].contiguous().view(integer)
    )


def flag():
    return torch.zeros(1)


# The reference, against what others compute.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inverse", [1.0, 2.0**-16, 1 / 3])
def test_reference_in_place_is_torchs_operator(dtype, inverse):
    mine, theirs = values(500, dtype), values(500, dtype)
    found_mine, found_theirs, inv_scale = flag(), flag(), torch.tensor([inverse])
    multi_tensor_unscale__reference([mine], found_mine, inv_scale)
    torch._amp_foreach_non_finite_check_and_unscale_([theirs], found_theirs, inv_scale)
    assert same_bits(mine, theirs)
    assert found_mine.item() == found_theirs.item() == 0.0


@pytest.mark.parametrize("output", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_reference_into_outputs_is_numpys_arithmetic(dtype, output):
    x = values(500, torch.float32).numpy().astype(dtype)
    before = values(500, torch.float32, seed=1).numpy().astype(output)
    inverse = np.float32(1 / 3)
    arithmetic = np.float64 if np.float64 in (dtype, output) else np.float32
    product = x.astype(arithmetic) * arithmetic(inverse)

    def rounded(exact):  # torch takes a double to half by way of float
        return exact.astype(np.float32).astype(output) if output == np.float16 else exact.astype(output)

    copied, added, inv_scale = np.zeros(500, output), before.copy(), torch.tensor([float(inverse)])
    multi_tensor_unscale_copy_reference([torch.from_numpy(x)], [torch.from_numpy(copied)], flag(), inv_scale)
    multi_tensor_unscale_add_reference([torch.from_numpy(x)], [torch.from_numpy(added)], flag(), inv_scale)
    assert np.array_equal(copied, rounded(product))
    assert np.array_equal(added, rounded(before.astype(arithmetic) + product))


# Reference and kernel alike. `implementation` calls both, and the kernel is the operator once it is built.


@pytest.fixture(params=["reference", "kernel"])
def implementation(request):
    """A function of an operator's name: its reference, or its kernel."""
    if request.param == "reference":
        return OPERATORS.__getitem__
    request.getfixturevalue("built")
    return lambda name: getattr(torch.ops.amplab, name).default


def run(implementation, name, inputs, found_inf, inverse):
    """The outputs of any of the three operators; the outputs of those that write elsewhere begin with ones."""
    in_place = name == "multi_tensor_unscale_"
    outputs = inputs if in_place else [torch.ones_like(x) for x in inputs]
    implementation(name)(*(() if in_place else (inputs,)), outputs, found_inf, torch.tensor([inverse]))
    return outputs


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_bad_element_is_found(implementation, name, dtype, bad, place):
    numel = 75  # 64 + 8 + 3: every branch of a vectorised loop
    found_inf, tensors = flag(), [torch.ones(numel, dtype=dtype) for _ in range(3)]
    run(implementation, name, tensors, found_inf, 0.5)
    assert found_inf.item() == 0.0
    tensors = [torch.ones(numel, dtype=dtype) for _ in range(3)]
    tensors[1][{"first": 0, "middle": 37, "last": numel - 1}[place]] = bad
    run(implementation, name, tensors, found_inf, 0.5)
    assert found_inf.item() == 1.0


@pytest.mark.parametrize("name", OPERATORS)
def test_a_product_that_overflows_is_found(implementation, name):
    found_inf = flag()
    run(implementation, name, [torch.tensor([40000.0], dtype=torch.float16)], found_inf, 2.0)
    assert found_inf.item() == 1.0


def test_a_product_beyond_the_output_is_found(implementation):
    found_inf, output = flag(), [torch.zeros(1, dtype=torch.float16)]
    implementation("multi_tensor_unscale_copy")([torch.tensor([1e6])], output, found_inf, torch.tensor([0.5]))
    assert output[0].item() == math.inf
    assert found_inf.item() == 1.0


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 65520.0), (torch.bfloat16, (2 - 2**-8) * 2.0**127)])
@pytest.mark.parametrize("name", ["multi_tensor_unscale_copy", "multi_tensor_unscale_add"])
def test_the_border_of_overflow_is_where_rounding_puts_it(implementation, name, dtype, limit):
    """Halfway from the largest number to the next power of two, where the even neighbour is infinity."""
    x = torch.full((9,), limit)
    for inputs, found in ((x, 1.0), (-x, 1.0), (torch.nextafter(x, torch.zeros(9)), 0.0)):
        found_inf, output = flag(), torch.zeros(9, dtype=dtype)
        implementation(name)([inputs], [output], found_inf, torch.tensor([1.0]))
        assert found_inf.item() == found
        assert bool(output.isinf().all()) == bool(found)


@pytest.mark.parametrize(("before", "x", "found"), [(60000.0, 60000.0, 1.0), (math.inf, 1.0, 0.0), (1.0, 1.0, 0.0)])
def test_a_sum_is_blamed_only_for_what_it_makes_infinite(implementation, before, x, found):
    found_inf = flag()
    outputs = [torch.full((9,), before, dtype=torch.float16)]
    inputs = [torch.full((9,), x, dtype=torch.float16)]
    implementation("multi_tensor_unscale_add")(inputs, outputs, found_inf, torch.tensor([1.0]))
    assert found_inf.item() == found


@pytest.mark.parametrize("name", OPERATORS)
def test_found_inf_is_sticky(implementation, name):
    found_inf = torch.ones(1)
    run(implementation, name, [torch.ones(3)], found_inf, 0.5)
    assert found_inf.item() == 1.0


@pytest.mark.parametrize("name", OPERATORS)
def test_empty_lists_and_empty_tensors_are_clean(implementation, name):
    found_inf = flag()
    assert run(implementation, name, [], found_inf, 0.5) == []
    run(implementation, name, [torch.empty(0), torch.empty(3, 0, dtype=torch.float16), torch.ones(1)], found_inf, 0.5)
    assert found_inf.item() == 0.0


def test_scalars_may_have_no_dimension(implementation):
    tensor, found_inf = torch.tensor(math.inf), torch.tensor(0.0)
    implementation("multi_tensor_unscale_")([tensor], found_inf, torch.tensor(0.5))
    assert found_inf.item() == 1.0
    assert found_inf.shape == ()


@pytest.mark.parametrize("name", OPERATORS)
def test_mixed_dtypes_in_one_list(implementation, name):
    outputs = run(implementation, name, [torch.full((5,), 8.0, dtype=dtype) for dtype in DTYPES], flag(), 0.25)
    expected = 3.0 if name.endswith("add") else 2.0
    assert [output.tolist() for output in outputs] == [[expected] * 5] * 4


def freed(begin=0):
    values = torch.ones(4)
    part = values[begin:]
    values.untyped_storage().resize_(0)
    return part


@pytest.mark.parametrize("name", OPERATORS)
def test_memory_that_is_not_there_is_neither_read_nor_written(implementation, name):
    with pytest.raises(RuntimeError, match=r"^input 0 has no memory"):
        run(implementation, name, [freed()], flag(), 0.5)
    for tensors, found_inf in (([torch.ones(1), freed(2)], flag()), ([torch.ones(1)], freed(3))):
        words = "input 1" if len(tensors) == 2 else "found_inf"
        with pytest.raises(RuntimeError, match=f"^{words} has no memory"):
            implementation("multi_tensor_unscale_")(tensors, found_inf, torch.ones(1))
    assert tensors[0].item() == 1.0


@pytest.mark.parametrize("name", ["multi_tensor_unscale_copy", "multi_tensor_unscale_add"])
def test_an_output_without_memory_is_refused(implementation, name):
    with pytest.raises(RuntimeError, match=r"^output 0 has no memory"):
        implementation(name)([torch.ones(4)], [freed()], flag(), torch.ones(1))


REFUSALS = [
    (
        lambda: ([torch.ones(2), torch.ones(2, dtype=torch.int32)], flag()),
        "input 1 is int32:",
    ),
    (lambda: ([torch.ones(2, dtype=torch.complex64)], flag()), "input 0 is complex64:"),
    (lambda: ([torch.ones(2, dtype=torch.bool)], flag()), "input 0 is bool:"),
    (lambda: ([torch.eye(2).to_sparse()], flag()), "input 0 is not strided"),
    (lambda: ([torch.ones(1).expand(4)], flag()), "input 0 is expanded"),
    (lambda: ([torch.ones(2)], torch.zeros(2)), "found_inf:"),
    (lambda: ([torch.ones(2)], torch.zeros(1).half()), "found_inf:"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS)
def test_what_cannot_be_unscaled_is_refused(implementation, arguments, message):
    tensors, found_inf = arguments()
    with pytest.raises(RuntimeError, match="^" + re.escape(message)):
        implementation("multi_tensor_unscale_")(tensors, found_inf, torch.ones(1))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "1 inputs, 0 outputs:"),
        ([torch.ones(3)], "output 0 has shape [3]:"),
        ([torch.ones(2, 1)], "output 0 has shape [2, 1]:"),
        ([torch.ones(())], "output 0 has shape []:"),
        ([torch.ones(2, dtype=torch.int64)], "output 0 is int64:"),
        ([torch.ones(1).expand(2)], "output 0 is expanded"),
    ],
)
@pytest.mark.parametrize("name", ["multi_tensor_unscale_copy", "multi_tensor_unscale_add"])
def test_outputs_that_do_not_fit_are_refused(implementation, name, outputs, message):
    with pytest.raises(RuntimeError, match="^" + re.escape(message)):
        implementation(name)([torch.ones(2)], outputs, flag(), torch.ones(1))


def test_an_inverse_scale_that_is_not_a_scalar_is_refused(implementation):
    with pytest.raises(RuntimeError, match=r"^inv_scale:"):
        implementation("multi_tensor_unscale_")([torch.ones(2)], flag(), torch.ones(2))


# The kernel against the reference, to the bit.


def compare(name, inputs, outputs, inverse):
    """Run kernel and reference on copies that keep the layout; equal outputs, equal verdicts."""
    inv_scale, results = torch.tensor([inverse]), []
    for function in (getattr(torch.ops.amplab, name).default, OPERATORS[name]):
        found_inf, x = flag(), [keep_layout(t) for t in inputs]
        y = x if name.endswith("unscale_") else [keep_layout(t) for t in outputs]
        function(*((x,) if y is x else (x, y)), found_inf, inv_scale)
        results.append((y, found_inf))
    (mine, found_mine), (theirs, found_theirs) = results
    assert all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))
    assert torch.equal(found_mine, found_theirs)


def keep_layout(tensor):
    """A copy with the same strides, gaps and offset, in memory of its own."""
    base = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0).clone()
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_dtypes_is_bitwise_the_reference(built, dtype, output, inverse):
    x = torch.cat([values(300, dtype), torch.tensor(AWKWARD, dtype=torch.float64).to(dtype)])
    y = torch.cat([values(300, output, seed=1), torch.tensor(AWKWARD[::-1], dtype=torch.float64).to(output)])
    for name in OPERATORS:
        compare(name, [x], [y], inverse)
        for bare in (x[:300], x[300:], x[:0], x[:1], x[:8]):  # AWKWARD would hide a verdict that is wrong
            compare(name, [bare], [y[: len(bare)]], inverse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_pattern_is_bitwise_the_reference(built, dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for output in DTYPES:
        compare("multi_tensor_unscale_copy", [patterns], [torch.empty(2**16, dtype=output)], 1 / 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ties_are_rounded_to_even(built, dtype):
    halfway = 2.0**-11 if dtype == torch.float16 else 2.0**-8
    x = torch.cat([1 + halfway * torch.arange(64.0), 2.0**-24 * torch.arange(0, 16, 0.5)])
    compare("multi_tensor_unscale_copy", [x], [torch.empty(len(x), dtype=dtype)], 1.0)


def test_an_output_too_large_for_the_caches_is_bitwise_the_reference(built):
    """Above 16 MB the kernel stores past the caches, from the first aligned address on."""
    inputs = [values(numel, torch.float16, seed=numel) for numel in (1, 5, 4_200_000, 77)]
    storage = torch.empty(4_200_200)
    outputs, start = [], 1
    for x in inputs:
        outputs.append(storage[start : start + len(x)])
        start += len(x) + 3
    for bad in (None, 0, 2_000_000, 4_199_999):
        found_inf = flag()
        if bad is not None:
            inputs[2][bad] = math.nan
        kernels.unscale_copy(inputs, outputs, found_inf, torch.tensor([0.5]))
        assert found_inf.item() == (0.0 if bad is None else 1.0)
        assert all(same_bits(x.float() * 0.5, y) for x, y in zip(inputs, outputs, strict=True))
        inputs[2][bad or 0] = 1.0


def test_threads_share_a_list_without_gap_or_overlap(built):
    """Enough elements for two threads, whose border falls inside a tensor."""
    tensors = [values(numel, torch.float32, seed=numel) for numel in (50_001, 3, 70_000)]
    expected = [x * torch.tensor(1 / 3) for x in tensors]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found_inf = flag()
        kernels.unscale_(tensors, found_inf, torch.tensor([1 / 3]))
        tensors[2][-1] = math.inf
        found_at_the_end = flag()
        kernels.unscale_(tensors, found_at_the_end, torch.tensor([1.0]))
    finally:
        torch.set_num_threads(threads)
    tensors[2][-1] = expected[2][-1]
    assert all(same_bits(x, y) for x, y in zip(tensors, expected, strict=True))
    assert (found_inf.item(), found_at_the_end.item()) == (0.0, 1.0)


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1),
    "channels last": lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "every second": lambda t: t[..., ::2] if t.dim() else t,
    "offset": lambda t: t.flatten()[1:],
    "row of a matrix": lambda t: t.select(0, 0) if t.dim() and t.shape[0] else t,
}


@st.composite
def pairs(draw):
    """An input and an output of one shape, any two dtypes, any two layouts that leave the shapes equal."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    layout = draw(st.sampled_from(list(LAYOUTS)))
    x = LAYOUTS[layout](values(math.prod(shape), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9))).reshape(shape))
    y = values(x.numel(), draw(st.sampled_from(DTYPES)), 10).reshape(x.shape)
    if draw(st.booleans()):
        y = torch.empty_strided(x.shape, x.stride(), dtype=y.dtype).copy_(y)
    if x.numel() and draw(st.booleans()):
        x[tuple(draw(st.integers(0, size - 1)) for size in x.shape)] = draw(st.sampled_from(AWKWARD))
    return x, y


@settings(max_examples=150)
@given(st.lists(pairs(), max_size=5), st.sampled_from(INVERSES), st.sampled_from(list(OPERATORS)))
def test_any_shape_layout_and_dtype_is_bitwise_the_reference(built, drawn, inverse, name):
    compare(name, [x for x, _ in drawn], [y for _, y in drawn], inverse)


# torch's own checks of a custom operator.


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name):
    inputs = [torch.randn(3, 4), torch.randn(5).half(), torch.empty(0), torch.randn(4, 2).double().t(), torch.ones(())]
    outputs = [torch.randn(x.shape) for x in inputs]
    arguments = (inputs,) if name.endswith("unscale_") else (inputs, outputs)
    opcheck(getattr(torch.ops.amplab, name).default, (*arguments, flag(), torch.tensor([0.5])))


def test_the_public_functions_call_the_operators():
    x, y, found_inf, inv_scale = torch.full((2,), 4.0), torch.empty(2), flag(), torch.tensor([0.5])
    kernels.unscale_copy([x], [y], found_inf, inv_scale)
    assert y.tolist() == [2.0, 2.0]
    kernels.unscale_add([x], [y], found_inf, inv_scale)
    assert y.tolist() == [4.0, 4.0]
    kernels.unscale_([y], found_inf, inv_scale)
    assert y.tolist() == [2.0, 2.0]
    assert x.tolist() == [4.0, 4.0]
