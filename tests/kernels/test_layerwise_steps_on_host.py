"""layerwise_device.h, the CUDA kernels of LAMB and NovoGrad, on the host thread by thread: what the references do."""

import ctypes
import math

import pytest
import torch

from amplab.kernels.layerwise_steps import multi_tensor_lamb__reference, multi_tensor_novograd__reference

STORED = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, None: 4}
MOMENTS = (0.01, 0.9, 0.99, 0.1, 1e-6, 0.1)
SIZES = [1, 5, 1024, 1025, 3000, 7, 20_000, 2, 2048]


@pytest.fixture(scope="module")
def device(compiled_cuda):
    """The CUDA kernels, on the host."""
    return compiled_cuda("layerwise_on_host.cpp")


def lists(states, *, grad, copy, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def tensors(dtype, positive=False):
        drawn = [torch.randn(size, generator=generator) for size in SIZES]
        return [(each.abs() if positive else each).to(dtype) for each in drawn]

    kept = [tensors(torch.float32, positive=state == 1) for state in range(states)]
    copies = tensors(copy) if copy is not None else []
    return [tensors(torch.float32), tensors(grad), *kept], [torch.tensor(float(k)) for k in range(len(SIZES))], copies


def on_host(function, numbers, flags, leading, steps, copies, norms, dtypes, blocks, found_inf=None):
    """Run the kernels over the lists."""
    params, grads, *states = leading
    lines = zip(grads, params, *states, copies or [None] * len(SIZES), steps, strict=True)
    pointers = [0 if each is None else each.data_ptr() for line in lines for each in line]
    function(
        (ctypes.c_double * (len(numbers) + len(flags)))(*numbers, *flags),
        (ctypes.c_uint8 * len(dtypes))(*(STORED[dtype] for dtype in dtypes)),
        (ctypes.c_void_p * len(pointers))(*pointers),
        (ctypes.c_int64 * len(SIZES))(*SIZES),
        len(SIZES),
        ctypes.c_void_p(norms.data_ptr()),
        (ctypes.c_float * 1)(0.7),
        None if found_inf is None else (ctypes.c_float * 1)(found_inf),
        blocks,
    )


def agree(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2e-7 if a.dtype == torch.float32 else 1e-2, atol=1e-7)


BLOCKS = pytest.mark.parametrize("blocks", [1, 3, 16, 500])
DTYPES = pytest.mark.parametrize(("grad", "copy"), [(torch.float32, None), (torch.float16, torch.bfloat16)])


@BLOCKS
@DTYPES
@pytest.mark.parametrize(
    ("limit", "flags"), [(math.inf, (True, True, True)), (2.0, (False, False, True)), (math.inf, (True, True, False))]
)
def test_lamb(device, blocks, grad, copy, limit, flags):
    numbers = (*MOMENTS, limit)
    left = []
    for serves in ("device", "reference"):
        leading, steps, copies = lists(2, grad=grad, copy=copy)
        if serves == "device":
            dtypes = (grad, torch.float32, torch.float32, torch.float32, copy, None)
            on_host(device.lamb, numbers, flags, leading, steps, copies, torch.zeros(1), dtypes, blocks)
        else:
            factor = torch.tensor(0.7)
            multi_tensor_lamb__reference(*leading, steps, copies, factor, None, False, *numbers, *flags)
        left.append([each for tensors in (leading[0], *leading[2:], copies, steps) for each in tensors])
    agree(*left)


@BLOCKS
@DTYPES
@pytest.mark.parametrize("flags", [(False, False, True), (True, False, True), (False, True, False)])
def test_novograd(device, blocks, grad, copy, flags):
    left = []
    for serves in ("device", "reference"):
        leading, steps, copies = lists(1, grad=grad, copy=copy)
        norms = torch.arange(len(SIZES), dtype=torch.float32) - 1.0
        if serves == "device":
            dtypes = (grad, torch.float32, torch.float32, copy, None)
            on_host(device.novograd, MOMENTS, flags, leading, steps, copies, norms, dtypes, blocks)
        else:
            numbers, each_norm = (*MOMENTS, *flags), list(norms)
            factor = torch.tensor(0.7)
            multi_tensor_novograd__reference(*leading, steps, copies, factor, None, False, *numbers, each_norm)
        left.append([each for tensors in (leading[0], *leading[2:], copies, steps, norms) for each in tensors])
    agree(*left)


@pytest.mark.parametrize("found_inf", [1.0, math.nan])
def test_an_overflow_leaves_every_bit(device, found_inf):
    for function, states, flags in ((device.lamb, 2, (True, True, True)), (device.novograd, 1, (False, False, True))):
        leading, steps, _ = lists(states, grad=torch.float32, copy=None)
        norms = torch.ones(len(SIZES))
        kept = [*leading[0], *(each for state in leading[2:] for each in state), *steps, norms]
        before = [each.clone() for each in kept]
        numbers = (*MOMENTS, math.inf) if states == 2 else MOMENTS
        dtypes = (*[torch.float32] * (2 + states), None, None)
        on_host(function, numbers, flags, leading, steps, [], norms, dtypes, 3, found_inf)
        assert all(map(torch.equal, kept, before))


def test_non_contiguous_elements(device):
    for function, states, reference, tail in (
        (device.lamb_strided, 2, multi_tensor_lamb__reference, (math.inf, True, True, True)),
        (device.novograd_strided, 1, multi_tensor_novograd__reference, (False, False, True)),
    ):
        generator = torch.Generator().manual_seed(0)
        leading = [torch.randn(30, 40, generator=generator).abs()[:, ::2] for _ in range(2 + states)]
        expected = [each.clone() for each in leading]
        norm, theirs = torch.ones(1), torch.ones(1)
        step, count = torch.tensor(4.0), torch.tensor(4.0)
        row = [leading[1], leading[0], *leading[2:]]
        pointers = [*(each.data_ptr() for each in row), 0, step.data_ptr()]
        layout = [2, 30, 20, *(stride for each in row for stride in each.stride())]
        function(
            (ctypes.c_double * (6 + len(tail)))(*MOMENTS, *tail),
            (ctypes.c_uint8 * len(pointers))(*[2] * len(row), 4, 4),
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_int64 * len(layout))(*layout),
            ctypes.c_void_p(norm.data_ptr()),
        )
        norms = [[theirs]] if states == 1 else []
        reference(*[[each] for each in expected], [count], [], None, None, False, *MOMENTS, *tail, *norms)
        agree([leading[0], *leading[2:]], [expected[0], *expected[2:]])
