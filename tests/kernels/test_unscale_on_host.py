"""unscale_device.h, the kernels of CUDA, run on the host thread by thread: their bits, their bounds, what they find."""

import ctypes
import math
import random

import pytest
import torch

from amplab.kernels import unscale

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REPLACE, ACCUMULATE, NOTHING = range(3)


class Findings(ctypes.Structure):
    """unscale_device.h's."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("inv_scale", "found_inf", "first_bad", "piece_squares", "block_squares")
        ),
        *((name, ctypes.c_void_p) for name in ("squares", "norm", "norms", "factor")),
        ("max_norm", ctypes.c_float),
    )


class Layout(ctypes.Structure):
    """unscale_device.h's."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("input_dtype", "output_dtype", "dim")),
        *((name, ctypes.c_int64 * 16) for name in ("sizes", "input_strides", "output_strides")),
    )


class Call(ctypes.Structure):
    """unscale_on_host.cpp's."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("write", "input_dtype", "output_dtype", "in_place", "count")),
        ("most_blocks", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("inputs", "outputs", "numels", "places")),
        ("findings", Findings),
        ("layout", ctypes.c_void_p),
        ("launches", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def kernels(compiled_cuda):
    """The CUDA kernels, on the host."""
    return compiled_cuda("unscale_on_host.cpp")


def placed(numel, dtype, offset, poison):
    """A tensor that begins `offset` elements after a multiple of 16 bytes, between two zones of poison."""
    zone = 64
    room = torch.full((numel + 2 * zone + 16,), poison, dtype=dtype)
    first = -(room.data_ptr() // room.itemsize) % (16 // room.itemsize) + zone + offset
    return room, room[first : first + numel]


def pointers(tensors):
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def call(kernels, write, inputs, outputs, inv_scale, *, most_blocks=5, places=None, layout=None, **findings):
    """Run the kernels over a list; `findings` are the tensors that receive what is found."""
    count = len(inputs)
    squares = torch.zeros(1, dtype=torch.float64)
    asked = {name: tensor.data_ptr() for name, tensor in findings.items() if isinstance(tensor, torch.Tensor)}
    numbers = {name: value for name, value in findings.items() if not isinstance(value, torch.Tensor)}
    arguments = (
        (ctypes.c_int64 * count)(*(tensor.numel() for tensor in inputs)),
        (ctypes.c_int32 * count)(*(range(count) if places is None else places)),
        pointers(inputs),
        pointers(outputs),
    )
    numels, where, ins, outs = (ctypes.cast(argument, ctypes.c_void_p) for argument in arguments)
    request = Call(
        write=write,
        input_dtype=DTYPES.index(inputs[0].dtype),
        output_dtype=DTYPES.index(outputs[0].dtype),
        in_place=outputs is inputs,
        count=count,
        most_blocks=most_blocks,
        inputs=ins,
        outputs=outs,
        numels=numels,
        places=where,
        findings=Findings(inv_scale=inv_scale.data_ptr(), squares=squares.data_ptr(), **asked, **numbers),
        layout=None if layout is None else ctypes.addressof(layout),
    )
    kernels.run_call(ctypes.byref(request))
    return request.launches


def bits(tensor):
    """The bits of a tensor, every NaN as one of them."""
    whole = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor).contiguous()
    return whole.view(torch.uint8)


def random_list(seed, dtype, output):
    """Inputs, and outputs with their zones, of random sizes and offsets."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = [
        draw.choice((1, 3, 7, 8, 15, 16, 33, 1000, 1023, 1024, 1025, 2050, 5000)) for _ in range(draw.randint(1, 7))
    ]
    inputs, outputs = [], []
    for numel in sizes:
        aligned = draw.random() < 0.5
        inputs.append(placed(numel, dtype, 0 if aligned else draw.randrange(9), math.nan))
        outputs.append(placed(numel, output, 0 if aligned else draw.randrange(9), math.nan))
        inputs[-1][1].copy_(torch.randn(numel, generator=generator) * 100)
        outputs[-1][1].copy_(torch.randn(numel, generator=generator))
    return inputs, outputs, draw


def inject(tensors, draw):
    """Put an inf or a NaN at the first, a middle or the last element of one tensor, or none anywhere."""
    if draw.random() < 0.3:
        return
    tensor = draw.choice(tensors)
    where = draw.choice((0, tensor.numel() // 2, tensor.numel() - 1))
    tensor[where] = draw.choice((math.inf, -math.inf, math.nan))


@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("write", [REPLACE, ACCUMULATE])
@pytest.mark.parametrize("seed", range(3))
def test_pairs_have_the_references_bits_and_nothing_beside_them_is_written(kernels, write, dtype, output, seed):
    inputs, outputs, draw = random_list(seed, dtype, output)
    inject([x for _, x in inputs], draw)
    expected = [y.clone() for _, y in outputs]
    inverse = torch.full((1,), draw.choice((0.5, 1 / 3, 2.0)))
    found, norm, norms, bad = torch.zeros(1), torch.empty(1), torch.empty(len(inputs)), torch.tensor(-1)
    function = (unscale.multi_tensor_unscale_copy_reference, unscale.multi_tensor_unscale_add_reference)[write]
    expected_found, expected_bad = torch.zeros(1), torch.tensor(-1)
    wanted = {"norm": torch.empty(1), "norms": torch.empty(len(inputs)), "first_bad": expected_bad}
    function([x for _, x in inputs], expected, expected_found, inverse, **wanted)
    rooms = [room.clone() for room, _ in outputs]
    measured = {"norm": norm, "norms": norms} if draw.random() < 0.5 else {}
    given = [x for _, x in inputs], [y for _, y in outputs]
    call(kernels, write, *given, inverse, most_blocks=draw.randint(1, 9), found_inf=found, first_bad=bad, **measured)
    assert torch.equal(found, expected_found)
    assert torch.equal(bad, expected_bad)
    for room, (now, y), value in zip(rooms, outputs, expected, strict=True):
        assert torch.equal(bits(y), bits(value))
        y.copy_(room[y.storage_offset() :][: y.numel()])
        assert torch.equal(bits(now), bits(room))
    if measured:
        torch.testing.assert_close(norm, wanted["norm"], rtol=1e-6, atol=0, equal_nan=True)
        torch.testing.assert_close(norms, wanted["norms"], rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("write", [REPLACE, NOTHING])
@pytest.mark.parametrize("seed", range(4))
def test_one_list_in_place_and_read_only(kernels, write, dtype, seed):
    inputs, _, draw = random_list(seed, dtype, dtype)
    tensors = [x for _, x in inputs]
    inject(tensors, draw)
    inverse = torch.full((1,), draw.choice((0.5, 1 / 3, 1e4)))
    expected = [x.clone() for x in tensors]
    findings = [
        {
            "found_inf": torch.zeros(1),
            "norm": torch.empty(1),
            "norms": torch.empty(len(tensors)),
            "first_bad": torch.tensor(-1),
        }
        for _ in range(2)
    ]
    reference = unscale.multi_tensor_unscale__reference if write == REPLACE else unscale.multi_tensor_norm_reference
    reference(expected, findings[0].pop("found_inf"), inverse, **findings[0])
    call(kernels, write, tensors, tensors, inverse, most_blocks=draw.randint(1, 9), **findings[1])
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(tensors, expected, strict=True))
    for name, value in findings[0].items():
        torch.testing.assert_close(findings[1][name], value, rtol=1e-6, atol=0, equal_nan=True)
    assert findings[1]["found_inf"].item() == (findings[0]["first_bad"].item() >= 0)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_the_first_of_several_bad_tensors_is_named_by_its_place(kernels, where):
    tensors = [torch.ones(1500) for _ in range(9)]
    for tensor in (3, 4, 8):
        tensors[tensor][{"first": 0, "middle": 750, "last": -1}[where]] = math.inf
    for most_blocks in (1, 4, 30):
        bad, found = torch.tensor(-1), torch.zeros(1)
        places = range(100, 1000, 100)
        call(
            kernels,
            NOTHING,
            tensors,
            tensors,
            torch.ones(1),
            most_blocks=most_blocks,
            places=places,
            first_bad=bad,
            found_inf=found,
        )
        assert (bad.item(), found.item()) == (400, 1.0)
        call(
            kernels, NOTHING, tensors[4:], tensors[4:], torch.ones(1), places=places[4:], first_bad=bad, found_inf=found
        )
        assert bad.item() == 400


@pytest.mark.parametrize("count", [2016, 2017])
def test_a_full_table_is_one_launch_and_one_tensor_more_are_two(kernels, count):
    tensors = list(torch.arange(float(count * 3)).split(3))
    expected = [tensor * 0.5 for tensor in tensors]
    found, norm, norms = torch.zeros(1), torch.empty(1), torch.empty(count)
    launches = call(
        kernels,
        REPLACE,
        tensors,
        tensors,
        torch.full((1,), 0.5),
        most_blocks=8,
        found_inf=found,
        norm=norm,
        norms=norms,
    )
    assert launches == 1 + (count > 2016)
    assert all(map(torch.equal, tensors, expected))
    torch.testing.assert_close(norms, torch.stack([each.norm() for each in expected]))
    torch.testing.assert_close(norm[0], torch.cat(expected).double().norm().float())


def test_a_norm_does_not_depend_on_who_was_faster_and_hardly_on_the_blocks(kernels):
    tensors = [torch.randn(size) for size in (5000, 3, 2048, 1024, 10_000)]
    norms = []
    for most_blocks in (7, 7, 3):
        norms.append(torch.empty(1))
        call(
            kernels,
            NOTHING,
            tensors,
            tensors,
            torch.ones(1),
            most_blocks=most_blocks,
            found_inf=torch.zeros(1),
            norm=norms[-1],
        )
    assert torch.equal(norms[0], norms[1])
    torch.testing.assert_close(norms[0], norms[2], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("size", "huge", "tiny"), [(3000, 1e25, 1e-30)])
def test_squares_beyond_float_are_summed(kernels, size, huge, tiny):
    for value in (huge, tiny):
        norm = torch.empty(1)
        tensors = [torch.full((size,), value)]
        call(kernels, NOTHING, tensors, tensors, torch.ones(1), found_inf=torch.zeros(1), norm=norm)
        assert norm.item() == pytest.approx(value * math.sqrt(size), rel=1e-6)


@pytest.mark.parametrize("max_norm", [1.0, 1e6, math.nan])
def test_clipping_is_torchs(kernels, max_norm):
    tensors = [torch.randn(1500), torch.randn(7)]
    before = [tensor.clone() for tensor in tensors]
    params = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for param, tensor in zip(params, tensors, strict=True):
        param.grad = tensor.clone()
    expected = torch.nn.utils.clip_grad_norm_(params, max_norm)
    norm, factor = torch.empty(1), torch.empty(1)
    call(kernels, NOTHING, tensors, tensors, torch.ones(1), norm=norm, factor=factor, max_norm=max_norm)
    call(kernels, REPLACE, tensors, tensors, factor)
    torch.testing.assert_close(norm[0], expected)
    for tensor, param, old in zip(tensors, params, before, strict=True):
        torch.testing.assert_close(tensor, param.grad, equal_nan=True)
        assert torch.equal(tensor, old) == (max_norm == 1e6)


@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("write", [REPLACE, ACCUMULATE])
def test_gaps_are_stepped_over(kernels, write, dtype, output):
    x = (torch.randn(6, 50, 11) * 100).to(dtype)[:, ::2, 1:9]
    room = torch.randn(8, 25, 6).to(output)
    y = room.permute(2, 1, 0)
    x[2, 3, 4] = math.inf
    expected = room.clone()
    reference = (unscale.multi_tensor_unscale_copy_reference, unscale.multi_tensor_unscale_add_reference)[write]
    reference([x], [expected.permute(2, 1, 0)], torch.zeros(1), torch.full((1,), 1 / 3))
    layout = Layout(DTYPES.index(dtype), DTYPES.index(output), 3)
    for d in range(3):
        layout.sizes[d], layout.input_strides[d], layout.output_strides[d] = x.shape[d], x.stride(d), y.stride(d)
    bad, found, norms = torch.tensor(-1), torch.zeros(1), torch.empty(8)
    call(
        kernels,
        write,
        [x],
        [y],
        torch.full((1,), 1 / 3),
        places=[7],
        layout=layout,
        found_inf=found,
        first_bad=bad,
        norms=norms,
    )
    assert torch.equal(bits(room), bits(expected))
    assert (bad.item(), found.item(), norms[7].item()) == (7, 1.0, math.inf)
