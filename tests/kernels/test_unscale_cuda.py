"""The unscale operators on a CUDA device: the reference's bits, in one launch, without a wait, in a graph."""

import math

import pytest
import torch

from amplab.kernels import ParameterList, unscale

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPS = torch.ops.amplab


@pytest.fixture(scope="module", autouse=True)
def kernels(built):
    assert "CUDA" in built.what, built


def random_tensors(dtype, seed=0):
    """Sizes around every border, misaligned views, gaps and an order of their own; on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(numel, generator=generator).to(dtype) for numel in (1, 0, 8, 1025, 16385, 400_000)]
    tensors += [torch.randn(5003, generator=generator).to(dtype)[offset:] for offset in (1, 2, 3)]
    tensors.append(torch.randn(30, 40, generator=generator).to(dtype)[:, ::3])
    tensors.append(torch.randn(30, 40, generator=generator).to(dtype).t())
    return tensors


def to_device(tensors):
    """Copies with the same strides and the same offsets to 16 bytes."""
    moved = []
    for tensor in tensors:
        whole = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype, device="cuda")
        moved.append(whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
        moved[-1].copy_(tensor)
    return moved


def findings(count, device):
    return {
        "norm": torch.full((1,), math.nan, device=device),
        "norms": torch.full((count,), math.nan, device=device),
        "first_bad": torch.tensor(-1, device=device),
    }


@pytest.mark.parametrize("bad", [None, 0, 8])
@pytest.mark.parametrize("name", ["multi_tensor_unscale_copy", "multi_tensor_unscale_add"])
@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_have_the_references_bits(name, dtype, output, bad):
    inputs, before = random_tensors(dtype), random_tensors(output, seed=1)
    if bad is not None:
        inputs[bad].view(-1)[-1] = math.inf
    results = []
    for device, function in (("cuda", getattr(OPS, name).default), ("cpu", getattr(unscale, f"{name}_reference"))):
        ins, outs = ((to_device(side) if device == "cuda" else [x.clone() for x in side]) for side in (inputs, before))
        found, found_inf = findings(len(ins), device), torch.zeros(1, device=device)
        function(ins, outs, found_inf, torch.full((1,), 1 / 3, device=device), **found)
        results.append(([y.cpu() for y in (*outs, found_inf)], {key: value.cpu() for key, value in found.items()}))
    (bits, found), (expected_bits, expected) = results
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(bits, expected_bits, strict=True))
    assert torch.equal(found.pop("first_bad"), expected.pop("first_bad"))
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["multi_tensor_unscale_", "multi_tensor_norm"])
def test_one_list_has_the_references_bits(name, dtype):
    tensors = random_tensors(dtype)
    moved, found, expected = to_device(tensors), findings(len(tensors), "cuda"), findings(len(tensors), "cpu")
    getattr(OPS, name).default(moved, torch.zeros(1, device="cuda"), torch.full((1,), 1 / 3, device="cuda"), **found)
    getattr(unscale, f"{name}_reference")(tensors, torch.zeros(1), torch.full((1,), 1 / 3), **expected)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(moved, tensors, strict=True))
    for key, value in found.items():
        torch.testing.assert_close(value.cpu(), expected[key], rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.filterwarnings("ignore:.*clears events:UserWarning")
def test_one_launch_for_two_thousand_tensors_and_no_wait():
    grads = [torch.ones(1000, device="cuda") for _ in range(2000)]
    found_inf, half = torch.zeros(1, device="cuda"), torch.full((1,), 0.5, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    unscale.unscale_(grads, found_inf, half)
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            unscale.unscale_(grads, found_inf, half)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    launches = [event for event in profile.events() if "unscale_kernel" in event.name]
    assert len(launches) == 1
    assert all(bool((grad == 0.25).all()) for grad in grads)


def test_a_graph_captures_the_pass_and_its_norm():
    grads = [torch.ones(1000, device="cuda") for _ in range(5)]
    found_inf, half, norm = torch.zeros(1, device="cuda"), torch.full((1,), 0.5, device="cuda"), torch.zeros(())
    norm = norm.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        unscale.unscale_(grads, found_inf, half, norm=norm)
    for times in (1, 2):
        graph.replay()
        assert norm.item() == pytest.approx(math.sqrt(5000) * 0.5**times, rel=1e-6)


def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("less than 12 GiB of device memory are free")
    numel = 2**31 + 7
    grad = torch.ones(numel, dtype=torch.float16, device="cuda")
    norm = torch.zeros((), device="cuda")
    unscale.unscale_([grad], torch.zeros(1, device="cuda"), torch.full((1,), 0.5, device="cuda"), norm=norm)
    assert bool((grad[-9:] == 0.5).all())
    assert norm.item() == pytest.approx(math.sqrt(numel) * 0.5, rel=1e-6)


def test_the_gradients_of_parameters_are_found_and_clipped():
    params = [torch.nn.Parameter(torch.zeros(size, device="cuda")) for size in (3, 5000, 1)]
    twins = [torch.nn.Parameter(torch.zeros_like(param)) for param in params]
    for param, twin in zip(params, twins, strict=True):
        param.grad = torch.randn_like(param) * 512
        twin.grad = param.grad / 512
    known, norm = ParameterList(params), torch.zeros((), device="cuda")
    found_inf, inverse = torch.zeros((), device="cuda"), torch.tensor(1 / 512, device="cuda")
    assert known.unscale_grads_(found_inf, inverse, allow_half=False) == 3
    assert all(torch.equal(param.grad, twin.grad) for param, twin in zip(params, twins, strict=True))
    expected = torch.nn.utils.clip_grad_norm_(twins, 0.5)
    assert known.clip_grads_(norm, 0.5) == 3
    torch.testing.assert_close(norm, expected)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param.grad, twin.grad)
    params[1].grad[-1] = math.inf
    known.unscale_grads_(found_inf, inverse)
    assert found_inf.item() == 1.0
