"""step_device.h, the kernels of CUDA, run on the host thread by thread: the reference's bits, and nothing beside."""

import ctypes
import functools
import math

import pytest
import torch

from amplab.kernels import adaptive_steps, steps

STORED = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3, None: 4}
ADAM = (1e-2, 0.9, 0.999, 1e-8, 0.1, True, True, False)
SGD = (0.1, 0.9, 0.25, 0.3, False, False, False)
SIZES = (1, 7, 8, 1024, 1025, 3000, 5000)
ZONE = 32


class Call(ctypes.Structure):
    """steps_on_host.cpp's."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("most_blocks", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("pointers", "numels", "factor", "found_inf")),
        ("sign", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("stored", "strided", "numbers")),
    )


@pytest.fixture(scope="module")
def device(compiled_cuda):
    """The CUDA kernels, on the host."""
    return compiled_cuda("steps_on_host.cpp")


def placed(values, offset):
    """The values `offset` elements after a multiple of 16 bytes, between two zones that nobody may write to."""
    room = torch.full((values.numel() + 2 * ZONE + 16,), 7.0, dtype=values.dtype)
    first = -(room.data_ptr() // room.itemsize) % (16 // room.itemsize) + ZONE + offset
    return room, room[first : first + values.numel()].copy_(values)


def run(function, rows, dtypes, numbers, *, factor=None, found_inf=None, maximize=False, blocks=3, strided=None):
    """Step the rows, each (grad, param, states…, copy or None, step or None)."""
    flat = [0 if tensor is None else tensor.data_ptr() for row in rows for tensor in row]
    arrays = (
        (ctypes.c_void_p * len(flat))(*flat),
        (ctypes.c_int64 * len(rows))(*(row[1].numel() for row in rows)),
        (ctypes.c_int32 * len(dtypes))(*(STORED[dtype] for dtype in dtypes)),
        (ctypes.c_double * len(numbers))(*map(float, numbers)),
        None if strided is None else (ctypes.c_int64 * len(strided))(*strided),
    )
    addresses = [None if array is None else ctypes.addressof(array) for array in arrays]
    scalars = [None if scalar is None else scalar.data_ptr() for scalar in (factor, found_inf)]
    sign = -1.0 if maximize else 1.0
    call = Call(len(rows), blocks, addresses[0], addresses[1], *scalars, sign, addresses[2], addresses[4], addresses[3])
    function(ctypes.byref(call), int(rows[0][1].dtype == torch.float64))


def drawn(numel, dtype, generator, *, positive=False):
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    return (values.abs() if positive else values).to(dtype)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("copy", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("grad", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("param", [torch.float16, torch.float32, torch.float64])
def test_adam_over_a_list(device, param, grad, copy, offset):
    state = torch.float64 if param == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)
    rooms, rows = [], []
    for index, numel in enumerate(SIZES):
        dtypes = (grad, param, state, state, copy)
        row = []
        for place, dtype in enumerate(dtypes):
            values = None if dtype is None else drawn(numel, dtype, generator, positive=place == 3)
            room, tensor = (None, None) if dtype is None else placed(values, offset)
            rooms.append((room, tensor))
            row.append(tensor)
        rows.append([*row, torch.tensor(float(index))])
    expected = [[None if tensor is None else tensor.clone() for tensor in row] for row in rows]
    factor = torch.tensor(1 / 3)
    run(device.run_adam, rows, (grad, param, state, state, copy, None), ADAM, factor=factor, maximize=True)
    lists = [[row[place] for row in expected] for place in (1, 0, 2, 3, 5)]
    copies = [] if copy is None else [row[4] for row in expected]
    steps.multi_tensor_adam__reference(*lists, copies, factor, None, True, *ADAM)
    for mine, theirs in zip(rows, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a is b is None or torch.allclose(a, b, rtol=0 if a.dtype != torch.float64 else 1e-14, atol=0)
    for room, tensor in rooms:
        assert room is None or (room == 7.0).sum() >= room.numel() - tensor.numel()


@pytest.mark.parametrize("name", ["run_momentum_sgd", "run_plain_sgd"])
def test_sgd_over_a_list(device, name):
    generator = torch.Generator().manual_seed(0)
    plain = name == "run_plain_sgd"
    rows, lists = [], [[], [], []]
    for numel in SIZES:
        grad, param, buffer = (placed(drawn(numel, torch.float32, generator), 0)[1] for _ in range(3))
        for each, tensor in zip(lists, (param, grad, buffer), strict=True):
            each.append(tensor.clone())
        rows.append([grad, param, *([] if plain else [buffer]), None, None])
    states = () if plain else (torch.float32,)
    run(getattr(device, name), rows, (torch.float32, torch.float32, *states, None, None), SGD)
    steps.multi_tensor_sgd__reference(lists[0], lists[1], [] if plain else lists[2], [], None, None, False, *SGD)
    assert all(torch.equal(row[1], param) for row, param in zip(rows, lists[0], strict=True))
    assert plain or all(torch.equal(row[2], buffer) for row, buffer in zip(rows, lists[2], strict=True))


RMSPROP = (0.01, 0.9, 1e-3, 0.1, 0.8, False, True, True)
RULES = {
    "adagrad": (1, (0.1, 1e-10, 0.2, 0.05, True), adaptive_steps.multi_tensor_adagrad__reference),
    "adadelta": (2, (0.7, 0.9, 1e-6, 0.1), adaptive_steps.multi_tensor_adadelta__reference),
    "rmsprop": (1, RMSPROP, functools.partial(adaptive_steps.multi_tensor_rmsprop__reference, False, False)),
    "centered_momentum_rmsprop": (
        3,
        RMSPROP,
        functools.partial(adaptive_steps.multi_tensor_rmsprop__reference, True, True),
    ),
}


@pytest.mark.parametrize("grad", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", RULES)
def test_adaptive_rules_over_a_list(device, name, grad):
    count, numbers, reference = RULES[name]
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index, numel in enumerate(SIZES):
        states = [placed(drawn(numel, torch.float32, generator, positive=True), 0)[1] for _ in range(count)]
        grads, params = (placed(drawn(numel, dtype, generator), 0)[1] for dtype in (grad, torch.float32))
        rows.append([grads, params, *states, None, torch.tensor(float(index))])
    lists = [[row[place].clone() for row in rows] for place in (1, 0, *range(2, 2 + count), 3 + count)]
    factor = torch.tensor(1 / 3)
    run(
        getattr(device, f"run_{name}"), rows, (grad, *[torch.float32] * (1 + count), None, None), numbers, factor=factor
    )
    reference(*lists, [], factor, None, False, *numbers)
    for place, theirs in zip((1, *range(2, 2 + count), 3 + count), (lists[0], *lists[2:]), strict=True):
        assert all(torch.equal(row[place], tensor) for row, tensor in zip(rows, theirs, strict=True))


@pytest.mark.parametrize("found_inf", [1.0, math.nan])
def test_an_overflow_leaves_every_bit(device, found_inf):
    generator = torch.Generator().manual_seed(0)
    tensors = [drawn(3000, torch.float32, generator) for _ in range(4)]
    before = [tensor.clone() for tensor in tensors]
    count = torch.tensor(2.0)
    dtypes = (*[torch.float32] * 4, None, None)
    run(device.run_adam, [[*tensors, None, count]], dtypes, ADAM, found_inf=torch.tensor(found_inf))
    assert all(map(torch.equal, tensors, before))
    assert count.item() == 2.0
    run(device.run_adam, [[*tensors, None, count]], dtypes, ADAM, found_inf=torch.tensor(0.0))
    assert not torch.equal(tensors[1], before[1])
    assert count.item() == 3.0


def test_more_tensors_than_one_table_holds(device):
    generator = torch.Generator().manual_seed(0)
    rows = [
        [*(drawn(3, torch.float32, generator).abs() for _ in range(4)), None, torch.tensor(1.0)] for _ in range(700)
    ]
    expected = [[row[place].clone() for row in rows] for place in (1, 0, 2, 3, 5)]
    run(device.run_adam, rows, (*[torch.float32] * 4, None, None), ADAM)
    steps.multi_tensor_adam__reference(*expected, [], None, None, False, *ADAM)
    assert all(torch.equal(row[1], param) for row, param in zip(rows, expected[0], strict=True))
    assert all(row[5].item() == 2.0 for row in rows)


def test_non_contiguous_elements(device):
    generator = torch.Generator().manual_seed(0)
    base = [drawn(600, torch.float32, generator).abs().reshape(20, 30) for _ in range(4)]
    tensors = [base[0].T, base[1][:, ::2].T, base[2].T[:15, :20], base[3].reshape(30, 20)[:15]]
    tensors[0] = tensors[0][::2]
    expected = [tensor.clone() for tensor in tensors]
    count = torch.tensor(0.0)
    strides = [stride for tensor in tensors for stride in tensor.stride()]
    layout = [2, *tensors[1].shape, *strides, *[0] * 4]
    dtypes = (*[torch.float32] * 4, None, None)
    run(device.run_adam, [[*tensors, None, count]], dtypes, ADAM, strided=layout)
    lists = [[expected[place]] for place in (1, 0, 2, 3)]
    steps.multi_tensor_adam__reference(*lists, [torch.tensor(0.0)], [], None, None, False, *ADAM)
    assert all(torch.equal(tensors[place], expected[place]) for place in (1, 2, 3))
