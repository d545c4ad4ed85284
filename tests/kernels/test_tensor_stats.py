"""The statistics operator: reference and kernel against numpy in float64, and each other, over layouts and dtypes."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from amplab import kernels
from amplab.formats import FLOAT16, exponent_histogram, overflow_fraction, underflow_fraction
from amplab.formats.exponents import BINS, LOWEST_EXPONENT
from amplab.kernels.tensor_stats import StatsTable, tensor_stats_reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
RANGES = [(-47, 64), (LOWEST_EXPONENT, BINS), (0, 1), (-3, 5), (200, 3), (-2000, 4000)]
# fmt: off
AWKWARD = [
    0.0, -0.0, 1.0, -1.5, 65504.0, -65519.0, 65519.996, 65520.0, -65535.0, 65536.0, 2.0**-14, 2.0**-14 * (1 - 2.0**-10),
    2.0**-24, 2.0**-25, -(2.0**-25) * (1 + 2.0**-20), 2.0**-26, 1e-40, 2.0**-149, 3.4e38, 2.0**-300, 1e300, 5e-324,
    math.inf, -math.inf, math.nan,
]
# fmt: on


@pytest.fixture(params=["reference", "kernel"])
def table_of(request):
    """A function from tensors, low and bins to the table: the reference, or the kernel."""
    if request.param == "reference":
        return tensor_stats_reference
    request.getfixturevalue("built")
    return torch.ops.amplab.tensor_stats.default


def oracle(x, low, bins):
    """The row of one tensor, by numpy in float64 with frexp: two extremes, then the counts."""
    values = np.abs(x.double().numpy().ravel())
    counted = values[np.isfinite(values) & (values != 0)]
    places = np.clip(np.frexp(counted)[1] - 1 - low, 0, bins - 1)
    with np.errstate(over="ignore"):
        single = counted.astype(np.float32).astype(np.float64) if x.dtype != torch.float64 else counted
    assert np.array_equal(single, counted)
    counts = [
        (values == 0).sum(),
        (counted < 2.0**-14).sum(),
        (counted <= 2.0**-25).sum(),
        (counted >= 65520.0).sum(),
        np.isinf(values).sum(),
        np.isnan(values).sum(),
        *np.bincount(places, minlength=bins),
    ]
    return counted.max(initial=0.0), counted.min(initial=math.inf), list(map(int, counts))


def row_of(table, index):
    extremes = table.view(torch.float64)[index, :2].tolist()
    return *extremes, table[index, 2:].tolist()


def check(table_of, tensors, low=-47, bins=64):
    table = table_of(tensors, low, bins)
    assert table.shape == (len(tensors), 8 + bins)
    for index, x in enumerate(tensors):
        assert row_of(table, index) == oracle(x, low, bins), index


def values(count, dtype, seed=0, spread=20):
    """Numbers of every magnitude, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread // 2 + 1, (count,), generator=generator)
    numbers = torch.randn(count, generator=generator, dtype=torch.float64) * torch.exp2(exponents)
    return (numbers * (torch.rand(count, generator=generator) > 0.1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("low", "bins"), RANGES)
def test_every_16_bit_pattern(table_of, dtype, low, bins):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    shuffled = patterns[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    single = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)[:, None].unbind()[:: 2**15 // 400]
    check(table_of, [patterns, shuffled, *single], low, bins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("low", "bins"), RANGES)
def test_every_binade_and_its_borders(table_of, dtype, low, bins):
    info = torch.finfo(dtype)
    exponents = torch.arange(math.log2(info.smallest_normal * info.eps), math.log2(info.max) + 0.5).floor()
    border = torch.exp2(exponents.double()).to(dtype)
    border = border[border.isfinite()]
    upper, lower = (torch.nextafter(border, torch.full_like(border, side)) for side in (math.inf, 0.0))
    middle = 1.5 * border[:-1]
    check(table_of, [torch.cat([border, -upper, lower, middle]), border, upper, -lower, middle], low, bins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_bits(table_of, dtype):
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**63), 2**63 - 1, (20_011,), generator=generator)
    x = bits.view(torch.float64) if dtype == torch.float64 else bits.to(torch.int32).view(dtype)
    check(table_of, [x, x[:5000], x[7:]], LOWEST_EXPONENT, BINS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", AWKWARD)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_special_element(table_of, dtype, special, place):
    tensors = []
    for numel in (1, 3, 75, 1000, 4096, 4097):
        x = torch.linspace(1, 2, numel).to(dtype)
        x[{"first": 0, "middle": numel // 2, "last": numel - 1}[place]] = torch.tensor(special, dtype=torch.float64).to(
            dtype
        )
        tensors.append(x)
    check(table_of, tensors)
    check(table_of, tensors, LOWEST_EXPONENT, BINS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0, 8, 20, 50, 100])
@pytest.mark.parametrize("shift", [-60, 0, 40])
def test_narrow_and_wide_spreads_anywhere(table_of, dtype, spread, shift):
    tensors = [(values(n, torch.float64, n, spread) * 2.0**shift).to(dtype) for n in (16, 31, 1000, 20_000)]
    check(table_of, tensors)


@pytest.mark.parametrize("fill", [0.0, -0.0, math.inf, math.nan, 1e-40, 2.0**-25, 65520.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_one_value(table_of, dtype, fill):
    check(table_of, [torch.full((n,), fill, dtype=torch.float64).to(dtype) for n in (1, 16, 33, 5000)])


def test_empty_lists_and_empty_tensors(table_of):
    assert table_of([], -47, 64).shape == (0, 72)
    tensors = [torch.empty(0), torch.ones(2), torch.empty(3, 0, dtype=torch.float16)]
    table = table_of(tensors, -47, 64)
    assert row_of(table, 0) == row_of(table, 2) == (0.0, math.inf, [0] * 70)
    assert row_of(table, 1)[:2] == (1.0, 1.0)


LAYOUTS = {
    "transposed": lambda: values(60, torch.float32).reshape(5, 12).t(),
    "channels last": lambda: values(240, torch.float32).reshape(2, 5, 4, 6).to(memory_format=torch.channels_last),
    "every second": lambda: values(9000, torch.float16)[::2],
    "offset": lambda: values(1001, torch.float32)[1:],
    "misaligned halves": lambda: values(1001, torch.float16)[1:],
    "column": lambda: values(6000, torch.bfloat16).reshape(1000, 6)[:, 2:4],
    "expanded": lambda: values(7, torch.float32)[:, None].expand(7, 900),
    "expanded scalar": lambda: torch.tensor(3.0).expand(11, 4),
    "negative view": lambda: torch._neg_view(values(50, torch.float32)),
    "no dimension": lambda: torch.tensor(2.0**-25),
    "overlapping": lambda: values(100, torch.float32).as_strided((90, 10), (1, 1)),
    "requires grad": lambda: values(20, torch.float32).requires_grad_(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(table_of, layout):
    x = LAYOUTS[layout]()
    with torch.no_grad():
        check(table_of, [x, torch.ones(1)])


def test_mixed_dtypes_in_one_list(table_of):
    check(table_of, [values(1000, dtype, seed) for seed, dtype in enumerate(DTYPES * 3)])


REFUSALS = [
    ([torch.ones(2), torch.ones(2, dtype=torch.int32)], "tensor 1: expected float16"),
    ([torch.ones(2, dtype=torch.complex64)], "tensor 0: expected float16"),
    ([torch.ones(2), torch.ones(2, dtype=torch.bool)], "tensor 1: expected float16"),
    ([torch.eye(2).to_sparse()], "tensor 0 is not strided"),
    ([torch.ones(1), torch.ones(1, device="meta")], "tensor 1 is on another device than tensor 0"),
]


@pytest.mark.parametrize(("tensors", "message"), REFUSALS)
def test_what_has_no_statistics_is_refused(table_of, tensors, message):
    if "meta" in {x.device.type for x in tensors}:  # meta tensors would go to the fake implementation
        table_of = tensor_stats_reference
    with pytest.raises((RuntimeError, NotImplementedError), match="^" + re.escape(message)):
        table_of(tensors, -47, 64)


class Reading(TorchDispatchMode):
    """Passes a function what every op returns, as an observer does."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.read(result)
        return result


def freed(left=0, begin=0):
    values = torch.ones(4)
    part = values[begin:]
    values.untyped_storage().resize_(left)
    return part


def test_memory_that_is_not_there_is_not_read(table_of):
    columns = torch.ones(3, 4)
    last = columns.t()[1:]
    columns.untyped_storage().resize_(40)  # ten of twelve elements
    for tensor in (freed(), freed(begin=2), freed(left=8), last):
        with pytest.raises(RuntimeError, match=r"^tensor 1 has no memory"):
            table_of([torch.ones(1), tensor], -47, 64)
    assert table_of([freed(begin=4), torch.ones(3)[1:]], -47, 64).shape == (2, 72)


def test_a_zerotensor_is_read_where_torch_makes_it_zeros(table_of):
    assert kernels.tensor_stats([torch._efficientzerotensor((4,))]).read()[0].zeros == 4

    def read(tensor):
        with pytest.raises(RuntimeError, match=r"^tensor 0 has no memory"):
            table_of([tensor], -47, 64)

    with Reading(read):
        torch._efficientzerotensor((4,))


@pytest.mark.parametrize("bins", [0, -1, 4097])
def test_a_table_without_bins_or_with_too_many_is_refused(table_of, bins):
    with pytest.raises(RuntimeError, match=f"^bins={bins}:"):
        table_of([torch.ones(1)], 0, bins)


@pytest.mark.parametrize("low", [-4097, 4097])
def test_a_first_bin_that_no_number_reaches_is_refused(table_of, low):
    with pytest.raises(RuntimeError, match=f"^low={low}:"):
        table_of([torch.ones(1)], low, 64)


def test_threads_share_a_list_without_gap_or_overlap(built):
    """Enough elements for two threads, whose border falls inside a tensor."""
    tensors = [values(numel, torch.float32, seed=numel) for numel in (50_001, 3, 70_000, 0, 200_000)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(torch.ops.amplab.tensor_stats.default, tensors)
    finally:
        torch.set_num_threads(threads)


@st.composite
def tensors_of_any_kind(draw):
    shape = draw(st.lists(st.integers(0, 12), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    x = values(math.prod(shape), dtype, draw(st.integers(0, 9)), draw(st.integers(0, 60))).reshape(shape)
    if x.numel() and draw(st.booleans()):
        place = tuple(draw(st.integers(0, size - 1)) for size in x.shape)
        x[place] = torch.tensor(draw(st.sampled_from(AWKWARD)), dtype=torch.float64).to(dtype)
    how = draw(st.sampled_from(["", "transposed", "every second", "expanded"]))
    if how == "transposed":
        return x.transpose(0, -1) if x.dim() else x
    if how == "every second":
        return x[..., ::2] if x.dim() else x
    return x[None].expand(3, *x.shape) if how == "expanded" else x


@settings(max_examples=150)
@given(st.lists(tensors_of_any_kind(), max_size=5), st.sampled_from(RANGES))
def test_any_shape_layout_and_dtype_is_the_reference(built, tensors, bounds):
    kernel, reference = (
        torch.ops.amplab.tensor_stats.default(tensors, *bounds),
        tensor_stats_reference(tensors, *bounds),
    )
    assert torch.equal(kernel, reference)
    check(lambda *_: kernel, tensors, *bounds)


def test_opcheck():
    tensors = [torch.randn(3, 4), torch.randn(5).half(), torch.empty(0), torch.randn(4, 2).double().t(), torch.ones(())]
    opcheck(torch.ops.amplab.tensor_stats.default, (tensors, -47, 64))
    opcheck(torch.ops.amplab.tensor_stats.default, (tensors, LOWEST_EXPONENT, BINS))


# What is read from a table.


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_range_is_the_exponent_histogram(dtype):
    tensors = [values(5000, dtype, spread=30), torch.tensor(AWKWARD, dtype=torch.float64).to(dtype)]
    for x, stats in zip(tensors, kernels.tensor_stats(tensors, low=LOWEST_EXPONENT, bins=BINS).read(), strict=True):
        assert stats.exponents == exponent_histogram(x)


def test_shares_are_those_of_formats():
    x = values(5000, torch.float32, spread=60)
    (stats,) = kernels.tensor_stats([x]).read()
    finite_nonzero = stats.exponents.finite_nonzero
    assert stats.half_flushed / finite_nonzero == underflow_fraction(x, FLOAT16)
    assert stats.half_overflows / finite_nonzero == overflow_fraction(x, FLOAT16)
    assert (stats.numel, stats.zeros) == (5000, (x == 0).sum().item())


def test_a_table_is_used_on_its_device_and_read_at_once():
    x = torch.tensor([1.0, math.inf, -3.0, math.nan, 0.25])
    table = kernels.tensor_stats([x, torch.zeros(2)])
    assert isinstance(table, StatsTable)
    assert len(table) == 2
    assert table.absmax.tolist() == [3.0, 0.0]
    assert table.smallest_nonzero.tolist() == [0.25, math.inf]
    assert table.nonfinite.tolist() == [2, 0]
    assert table.exponent_counts.sum(1).tolist() == [3, 0]
    first, second = table.cpu().read()
    assert (first.absmax, first.infs, first.nans, first.numel) == (3.0, 1, 1, 5)
    assert (second.zeros, second.numel, second.exponents.span) == (2, 2, None)
