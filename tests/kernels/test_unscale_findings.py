"""What one pass of the unscale operators tells: norms, the first bad tensor; reference and kernel, against float64."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from amplab import kernels
from amplab.kernels import unscale, unscaled_norm

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPERATORS = ("multi_tensor_unscale_", "multi_tensor_unscale_copy", "multi_tensor_unscale_add", "multi_tensor_norm")
WRITING = OPERATORS[:3]


@pytest.fixture(params=["reference", "kernel"])
def implementation(request):
    """A function of an operator's name: its reference, or its kernel."""
    if request.param == "reference":
        return lambda name: getattr(unscale, f"{name}_reference")
    request.getfixturevalue("built")
    return lambda name: getattr(torch.ops.amplab, name).default


def receivers(count, first_bad=-1):
    return {"norm": torch.full((), -1.0), "norms": torch.full((count,), -1.0), "first_bad": torch.tensor(first_bad)}


def run(function, name, inputs, inverse=0.5, *, outputs=None, first_bad=-1):
    """The tensors measured, and what was found."""
    found = receivers(len(inputs), first_bad)
    inv_scale, found_inf = torch.tensor([inverse]), torch.zeros(1)
    if name in ("multi_tensor_unscale_", "multi_tensor_norm"):
        function(name)(inputs, found_inf, inv_scale, **found)
        values = inputs if name.endswith("_") else [x.to(arithmetic(x)) * inv_scale.to(arithmetic(x)) for x in inputs]
    else:
        values = outputs or [torch.ones_like(x) for x in inputs]
        function(name)(inputs, values, found_inf, inv_scale, **found)
    return values, found_inf, found


def arithmetic(x):
    return torch.promote_types(x.dtype, torch.float32)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_lengths(values, found):
    """The norms against float64."""
    exact = [v.double().square().sum().item() for v in values]
    torch.testing.assert_close(found["norms"].double(), torch.tensor(exact).double().sqrt(), rtol=2e-7, atol=0.0)
    assert found["norm"].item() == pytest.approx(math.sqrt(math.fsum(exact)), rel=2e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_norms_are_those_of_what_was_written(implementation, name, dtype):
    inputs = [normal(n, dtype=dtype, seed=n) for n in (1, 0, 7, 75, 2049, 40_000)]
    inputs.insert(2, normal(30, 40, dtype=dtype)[:, ::3])
    values, found_inf, found = run(implementation, name, inputs, 1 / 3)
    assert_lengths(values, found)
    assert (found_inf.item(), found["first_bad"].item()) == (0.0, -1)


@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_outputs_in_another_dtype(implementation, dtype, output):
    inputs = [normal(500, dtype=dtype), normal(20, 30, dtype=dtype).t()]
    outputs = [torch.zeros(500, dtype=output), torch.zeros(30, 20, dtype=output)]
    values, _, found = run(implementation, "multi_tensor_unscale_copy", inputs, 1 / 3, outputs=outputs)
    assert_lengths(values, found)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
@pytest.mark.parametrize("name", OPERATORS)
def test_squares_neither_vanish_nor_overflow(implementation, name, magnitude):
    """In float32 the square of 1e-30 is 0, and that of 1e30 infinite."""
    outputs = [torch.zeros(9)] if name in WRITING[1:] else None
    _, found_inf, found = run(implementation, name, [torch.full((9,), magnitude)], 1.0, outputs=outputs)
    assert found["norm"].item() == pytest.approx(3 * magnitude, rel=1e-6)
    assert found_inf.item() == 0.0


def test_a_norm_of_64_million_elements_is_exact_to_the_last_bits(built):
    x = torch.full((2**26,), 0.1)
    _, _, found = run(lambda name: getattr(torch.ops.amplab, name).default, "multi_tensor_norm", [x], 1.0)
    assert found["norm"].item() == pytest.approx(float(torch.tensor(0.1)) * 2**13, rel=1e-7)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_first_bad_tensor_is_named(implementation, name, bad, place):
    inputs = [torch.ones(75), torch.empty(0), torch.ones(4, 6)[:, ::2], torch.ones(75).half(), torch.ones(40_000)]
    for index in (2, 3, 4):
        found_here = [x.clone() if x.is_contiguous() else x.clone().repeat(1, 2)[:, ::2] for x in inputs]
        for later in range(index, 5):
            x = found_here[later]
            flat_place = {"first": 0, "middle": x.numel() // 2, "last": x.numel() - 1}[place]
            x[tuple(torch.unravel_index(torch.tensor(flat_place), x.shape))] = bad
        _, found_inf, found = run(implementation, name, found_here)
        assert (found_inf.item(), found["first_bad"].item()) == (1.0, index)
        assert found["norm"].isnan() if math.isnan(bad) else found["norm"].isinf()
        assert found["norms"].isfinite().tolist() == [i < index for i in range(5)]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("before", "after"), [(-1, 1), (0, 0), (1, 1), (7, 1)])
def test_the_index_keeps_the_smallest_of_several_calls(implementation, name, before, after):
    inputs = [torch.ones(3), torch.tensor([math.nan])]
    assert run(implementation, name, inputs, first_bad=before)[2]["first_bad"].item() == after
    assert run(implementation, name, [torch.ones(3)], first_bad=before)[2]["first_bad"].item() == before


@pytest.mark.parametrize("name", OPERATORS)
def test_an_empty_list_has_length_zero(implementation, name):
    _, found_inf, found = run(implementation, name, [])
    assert (found_inf.item(), found["norm"].item(), found["first_bad"].item()) == (0.0, 0.0, -1)
    assert run(implementation, name, [torch.empty(0)])[2]["norms"].tolist() == [0.0]


@pytest.mark.parametrize("name", OPERATORS)
def test_each_can_be_requested_alone(implementation, name):
    tensors = [torch.tensor([6.0, 8.0]), torch.tensor([math.inf])]
    for chosen in itertools.chain.from_iterable(itertools.combinations(receivers(2), count) for count in range(4)):
        inputs, found = (
            [x.clone() for x in tensors],
            {key: value for key, value in receivers(2).items() if key in chosen},
        )
        outputs = [] if name in ("multi_tensor_unscale_", "multi_tensor_norm") else [[torch.zeros(2), torch.zeros(1)]]
        implementation(name)(inputs, *outputs, torch.zeros(1), torch.tensor([0.5]), **found)
        expected = {"norm": math.inf, "norms": [5.0, math.inf], "first_bad": 1}
        assert {key: value.tolist() for key, value in found.items()} == {key: expected[key] for key in chosen}


def test_the_norm_operator_writes_nothing(implementation):
    x = normal(1000, dtype=torch.float16)
    before, version = x.clone(), x._version
    run(implementation, "multi_tensor_norm", [x, x, x[:1].expand(4)], 1 / 3)
    assert torch.equal(x, before)
    assert x._version == version


def test_half_products_are_measured_before_they_are_rounded(implementation):
    """6e-8 is half's smallest subnormal; a hundredth of it is nothing in half, and something in float32."""
    x = torch.full((4,), 6e-8, dtype=torch.float16)
    _, found_inf, found = run(implementation, "multi_tensor_norm", [x], 0.01)
    assert found["norm"].item() == pytest.approx(2 * x[0].item() * 0.01, rel=1e-6)
    _, _, rounded = run(implementation, "multi_tensor_unscale_", [x], 0.01)
    assert (found_inf.item(), rounded["norm"].item()) == (0.0, 0.0)


def test_a_product_that_only_half_cannot_hold_is_finite_to_the_norm(implementation):
    x = torch.full((4,), 60000.0, dtype=torch.float16)
    assert run(implementation, "multi_tensor_norm", [x], 2.0)[1].item() == 0.0
    assert run(implementation, "multi_tensor_unscale_", [x], 2.0)[1].item() == 1.0


def test_a_norm_does_not_depend_on_the_number_of_threads(built):
    inputs = [normal(n, seed=n) for n in (50_001, 3, 70_000, 100_000, 1)]
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            norm, norms = torch.zeros(()), torch.zeros(5)
            kernels.unscaled_norm(inputs, torch.zeros(1), torch.tensor([1 / 3]), norm=norm, norms=norms)
            results.append([norm.item(), *norms.tolist()])
    finally:
        torch.set_num_threads(threads)
    assert all(result == results[0] for result in results)


def test_every_element_belongs_to_one_thread_alone(built):
    """Borders of threads inside chunks, between small tensors and after the last whole chunk."""
    tensors = [torch.ones(n) for n in [*range(1, 300), 32768, 32769, 65536, 100_000, *range(1, 300)]]
    threads, total = torch.get_num_threads(), sum(x.numel() for x in tensors)
    try:
        for count in (1, 2, 3, 5, 8):
            torch.set_num_threads(count)
            norm = torch.zeros(())
            kernels.unscale_(tensors, torch.zeros(1), torch.tensor([2.0]), norm=norm)
            assert all(bool((x == x[0]).all()) for x in tensors)
            kernels.unscale_(tensors, torch.zeros(1), torch.tensor([0.5]))
            assert all(bool((x == 1.0).all()) for x in tensors)
            assert norm.item() == pytest.approx(2.0 * math.sqrt(total), rel=1e-7)
    finally:
        torch.set_num_threads(threads)


def test_a_large_copy_is_measured_too(built):
    """Above 16 MB the outputs go past the caches."""
    inputs = [normal(4_200_000, dtype=torch.float16), normal(77, dtype=torch.float16, seed=1)]
    outputs = [torch.zeros(x.shape) for x in inputs]
    values, _, found = run(
        lambda name: getattr(torch.ops.amplab, name).default, "multi_tensor_unscale_copy", inputs, outputs=outputs
    )
    assert_lengths(values, found)
    assert torch.equal(values[0], inputs[0].float() * 0.5)


REFUSALS = [
    ({"norm": torch.zeros(2)}, "norm:"),
    ({"norm": torch.zeros(1).double()}, "norm:"),
    ({"norms": torch.zeros(3)}, "norms:"),
    ({"norms": torch.zeros(2, 1)}, "norms:"),
    ({"norms": torch.zeros(4)[::2]}, "norms:"),
    ({"norms": torch.zeros(2).half()}, "norms:"),
    ({"first_bad": torch.zeros(1)}, "first_bad:"),
    ({"first_bad": torch.zeros(2, dtype=torch.int64)}, "first_bad:"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSALS)
@pytest.mark.parametrize("name", OPERATORS)
def test_receivers_that_do_not_fit_are_refused(implementation, name, wrong, message):
    inputs = [torch.ones(2), torch.ones(3)]
    outputs = [] if name in ("multi_tensor_unscale_", "multi_tensor_norm") else [[torch.ones(2), torch.ones(3)]]
    with pytest.raises(RuntimeError, match="^" + re.escape(message)):
        implementation(name)(inputs, *outputs, torch.zeros(1), torch.ones(1), **wrong)
    assert all(bool((x == 1.0).all()) for x in inputs)


# Memory that is shared.


def overlapping():
    base, matrix = torch.ones(40), torch.ones(6, 8)
    return {
        "twice": ([base[:8], base[20:30], base[:8]], 0, 2),
        "a part": ([base[:8], base[20:30], base[7:12]], 0, 2),
        "inside": ([base[30:32], base[:20], base[4:6]], 1, 2),
        "after a long one": ([base[:20], base[2:3].clone(), base[19:21]], 0, 2),
        "another dtype": ([base[:8], base[4:8].view(torch.float16)], 0, 1),
        "a column of a row": ([matrix[2], matrix[:, 3][2:]], 0, 1),
        "the same columns": ([matrix[:, ::2], matrix[:, ::4]], 0, 1),
    }


@pytest.mark.parametrize("case", overlapping())
@pytest.mark.parametrize("reverse", [False, True])
def test_tensors_that_overlap_are_refused_in_place(implementation, case, reverse):
    tensors, first, second = overlapping()[case]
    if reverse:
        tensors, first, second = tensors[::-1], len(tensors) - 1 - second, len(tensors) - 1 - first
    expected = rf"^input ({first} and input {second}|{second} and input {first}) overlap"
    before = [x.clone() for x in tensors]
    with pytest.raises(RuntimeError, match=expected):
        implementation("multi_tensor_unscale_")(tensors, torch.zeros(1), torch.tensor([0.5]))
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("name", WRITING[1:])
def test_inputs_and_outputs_that_overlap_are_refused(implementation, name):
    base = torch.ones(40)
    scalars = torch.zeros(1), torch.ones(1)
    with pytest.raises(RuntimeError, match=r"^output 0 and output 1 overlap"):
        implementation(name)([torch.ones(4), torch.ones(4)], [base[:4], base[2:6]], *scalars)
    with pytest.raises(RuntimeError, match=r"^output 0 and input 0 overlap"):
        implementation(name)([base[2:6]], [base[:4]], *scalars)
    with pytest.raises(RuntimeError, match=r"^output 0 and input 0 overlap"):
        implementation(name)([base.view(torch.float16)[:4]], [base[:4]], *scalars)
    with pytest.raises(RuntimeError, match=r"^output 0 and input 1 overlap"):
        implementation(name)([torch.ones(4), base[:4]], [base[:4], torch.ones(4)], *scalars)


def test_neighbours_and_interleaved_columns_do_not_overlap(implementation):
    matrix, base = torch.ones(6, 8), torch.ones(40)
    tensors = [matrix[:, ::2], matrix[:, 1::2], base[8:16], base[:8], base[16:16], base[16:]]
    implementation("multi_tensor_unscale_")(tensors, torch.zeros(1), torch.tensor([2.0]))
    assert bool((matrix == 2.0).all())
    assert bool((base == 2.0).all())


def test_an_output_may_be_its_own_input_and_inputs_may_be_shared(implementation):
    x, y = torch.ones(40), [torch.zeros(40), torch.zeros(40)]
    implementation("multi_tensor_unscale_copy")([x], [x], torch.zeros(1), torch.tensor([2.0]))
    implementation("multi_tensor_unscale_copy")([x, x], y, torch.zeros(1), torch.tensor([2.0]))
    assert (x[0].item(), y[0][0].item(), y[1][-1].item()) == (2.0, 4.0, 4.0)


# Kernel and reference together.


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 90), st.sampled_from(DTYPES), st.booleans()), max_size=6),
    inverse=st.sampled_from([1.0, 1 / 3, 2.0**-16]),
    bad=st.integers(0, 5),
    name=st.sampled_from(OPERATORS),
)
def test_random_lists_find_what_the_reference_finds(built, sizes, inverse, bad, name):
    def tensors():
        made = []
        for index, (numel, dtype, gaps) in enumerate(sizes):
            x = normal(2 * numel, dtype=dtype, seed=index)[:: 2 if gaps else 1]
            if index == bad and x.numel():
                x[-1] = math.inf
            made.append(x)
        return made

    _, found_kernel, kernel = run(lambda name: getattr(torch.ops.amplab, name).default, name, tensors(), inverse)
    _, found_reference, reference = run(lambda name: getattr(unscale, f"{name}_reference"), name, tensors(), inverse)
    assert torch.equal(found_kernel, found_reference)
    assert torch.equal(kernel["first_bad"], reference["first_bad"])
    for key in ("norm", "norms"):
        torch.testing.assert_close(kernel[key], reference[key], rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck_with_receivers(name):
    x = [torch.randn(5), torch.randn(2, 3).half()]
    outputs = [] if name in ("multi_tensor_unscale_", "multi_tensor_norm") else [[torch.zeros(5), torch.zeros(2, 3)]]
    operator = getattr(torch.ops.amplab, name).default
    opcheck(operator, (x, *outputs, torch.zeros(1), torch.ones(1)), receivers(2))


def test_the_public_functions_pass_receivers_on():
    for function, outputs in (
        (kernels.unscale_, []),
        (kernels.unscale_copy, [[torch.zeros(2)]]),
        (kernels.unscale_add, [[torch.zeros(2)]]),
        (kernels.unscaled_norm, []),
    ):
        found = receivers(1)
        function([torch.tensor([6.0, 8.0])], *outputs, torch.zeros(1), torch.tensor([0.5]), **found)
        assert (found["norm"].item(), found["norms"].tolist()) == (5.0, [5.0])


def aliased():
    """Arguments of which two share memory: the list, found_inf, inv_scale and the receivers."""
    one, two, pair = torch.ones(1), torch.ones(1), torch.ones(2)
    return {
        "found_inf and norm": ([pair], one, two, {"norm": one}),
        "found_inf and inv_scale": ([pair], one, one, {}),
        "norm and inv_scale": ([pair], one, two, {"norm": two}),
        "norm and norms": ([pair, torch.ones(1)], one, two, {"norm": pair[:1].clone(), "norms": None}),
        "found_inf and input 0": ([pair], pair[:1], two, {}),
        "input 0 and inv_scale": ([pair], one, pair[:1], {}),
    }


@pytest.mark.parametrize("names", aliased())
def test_scalars_that_share_memory_are_refused(implementation, names):
    tensors, found_inf, inv_scale, receivers = aliased()[names]
    if names == "norm and norms":
        receivers["norms"] = torch.ones(2)
        receivers["norm"] = receivers["norms"][:1]
    with pytest.raises(RuntimeError, match=f"^{names} overlap"):
        implementation("multi_tensor_unscale_")(tensors, found_inf, inv_scale, **receivers)
    if "input" not in names:
        with pytest.raises(RuntimeError, match=f"^{names} overlap"):
            implementation("multi_tensor_norm")(tensors, found_inf, inv_scale, **receivers)


def norm_of(tensor, inverse=1.0):
    found, norm = torch.zeros(()), torch.zeros(())
    unscaled_norm([tensor], found, torch.tensor(inverse), norm=norm)
    return norm.item(), found.item()


@pytest.mark.parametrize("numel", [255, 256, 4096, 100_001])
@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-13, 1e-3, 1.0, 1e18, 1e25, 1e30])
def test_norms_of_every_size(built, numel, size):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * size
    norm, found = norm_of(values.float())
    assert norm == pytest.approx(values.float().double().norm().item(), rel=1e-6)
    assert found == 0.0


def test_one_large_number_among_tiny_ones_and_a_scale_that_makes_them_small(built):
    values = torch.full((8192,), 1e-25)
    values[5000] = 3e20
    assert norm_of(values)[0] == pytest.approx(3e20, rel=1e-6)
    assert norm_of(torch.full((8192,), 2.0**40), 2.0**-80)[0] == pytest.approx(2.0**-40 * math.sqrt(8192), rel=1e-6)
    assert norm_of(torch.zeros(8192)) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 255, 256, 8191, 8192, 8199])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_not_finite_is_found_wherever_it_is(built, dtype, place, bad):
    values = torch.ones(8200, dtype=dtype)
    assert norm_of(values)[1] == 0.0
    values[place] = bad
    norm, found = norm_of(values)
    assert found == 1.0
    assert not math.isfinite(norm)
