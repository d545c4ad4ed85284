"""Unscaling gradients in place: values, found_inf, devices, sparse gradients, no sync; lists that are rejected."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from amplab.scalers import FlatGradients, MasterWeights, Unscaler, inverse_scale
from amplab.scalers.unscaler import tensors_of


def parameter(*grad, dtype=torch.float32):
    """A parameter with the gradient given; without one where there is none to give."""
    param = torch.nn.Parameter(torch.zeros(len(grad), dtype=dtype))
    param.grad = torch.tensor(grad, dtype=dtype) if grad else None
    return param


def test_divides_every_gradient_by_the_scale():
    params = [parameter(256.0, -512.0), parameter(), parameter(128.0, dtype=torch.float16)]
    found_inf = Unscaler().unscale_(params, 128.0)
    assert params[0].grad.tolist() == [2.0, -4.0]
    assert params[1].grad is None
    assert params[2].grad.tolist() == [1.0]
    assert found_inf.tolist() == [0.0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_finds_non_finite_elements_at_every_position(bad, place):
    grads = [1.0, 2.0, 3.0]
    grads[place] = bad
    assert Unscaler().unscale_([parameter(1.0), parameter(*grads)], 2.0).item() == 1.0


def test_finds_what_the_division_makes_infinite():
    assert Unscaler().unscale_([parameter(60000.0, dtype=torch.float16)], 0.5).item() == 1.0


def test_gives_the_numbers_of_grad_scaler():
    """torch.amp.GradScaler.unscale_ on the same gradients, to the bit."""
    generator = torch.Generator().manual_seed(0)
    mine, theirs = ([torch.nn.Parameter(torch.zeros(7)) for _ in range(3)] for _ in range(2))
    for a, b in zip(mine, theirs, strict=True):
        a.grad = torch.randn(7, generator=generator) * 1e5
        b.grad = a.grad.clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.1)
    scaler.scale(torch.zeros(1))
    optimizer = torch.optim.SGD(theirs, lr=0.1)
    scaler.unscale_(optimizer)
    Unscaler().unscale_(mine, scaler.get_scale())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))


def test_a_parameter_listed_twice_is_unscaled_once():
    shared = parameter(8.0)
    Unscaler().unscale_([shared, parameter(8.0), shared], 2.0)
    assert shared.grad.item() == 4.0


def test_a_verdict_can_be_carried_on():
    unscaler = Unscaler()
    found_inf = unscaler.unscale_([parameter(math.inf)], 2.0)
    again = unscaler.unscale_([parameter(1.0)], 2.0, found_inf=found_inf)
    assert again is found_inf
    assert again.item() == 1.0
    assert unscaler.unscale_([parameter(1.0)], 2.0).item() == 0.0


def test_follows_new_gradients_new_parameters_and_a_new_scale():
    unscaler, param = Unscaler(), parameter(8.0)
    unscaler.unscale_([param], 2.0)
    param.grad = torch.tensor([16.0])
    unscaler.unscale_([param], 4.0)
    assert param.grad.item() == 4.0
    other = parameter(8.0)
    unscaler.unscale_([param, other], 4.0)
    assert (param.grad.item(), other.grad.item()) == (1.0, 2.0)


def test_takes_any_iterable():
    module = torch.nn.Linear(2, 1)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    Unscaler().unscale_(module.parameters(), 2.0)
    assert all((param.grad == 0.5).all() for param in module.parameters())


def test_nothing_to_unscale_is_clean():
    assert Unscaler().unscale_([], 2.0).tolist() == [0.0]
    assert Unscaler().unscale_([parameter()], 2.0).tolist() == [0.0]


def test_a_sparse_gradient_is_unscaled_and_the_sum_of_its_duplicates_checked():
    def sparse(*values):
        param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
        indices = torch.zeros(1, len(values), dtype=torch.int64)
        values = torch.tensor(values, dtype=torch.float16)
        param.grad = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
        return param

    param = sparse(4.0, 8.0)
    assert Unscaler().unscale_([param], 2.0).item() == 0.0
    assert param.grad.to_dense().tolist() == [6.0, 0.0, 0.0]
    assert Unscaler().unscale_([sparse(60000.0, 60000.0)], 2.0).item() == 1.0


def test_a_gradient_that_has_a_graph_of_its_own_is_unscaled_like_any_other():
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    [weight.grad] = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    assert weight.grad.requires_grad
    Unscaler().unscale_([weight], 4.0)
    assert weight.grad.item() == 3.0


def test_the_scale_may_be_a_tensor():
    param = parameter(8.0)
    Unscaler().unscale_([param], torch.tensor(2.0))
    assert param.grad.item() == 4.0


@pytest.mark.parametrize("scale", [2.0, torch.tensor([2.0])])
def test_never_waits_for_the_device(scale):
    """A fake tensor has no value, so that reading one on the host raises."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        found_inf = Unscaler().unscale_([parameter(1.0, 2.0), parameter(3.0, dtype=torch.float16)], scale)
        assert found_inf.shape == (1,)
        with pytest.raises(RuntimeError):  # the check itself: this one does wait
            found_inf.item()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_nonsense_scale_is_refused(scale):
    with pytest.raises(ValueError, match=r"scale=.*> 0"):
        Unscaler().unscale_([parameter(1.0)], scale)


@pytest.mark.parametrize("scale", [3.0, 65536.0, 2.0**-126, 0.1])
def test_the_reciprocal_is_taken_in_double(scale):
    expected = torch.tensor([scale], dtype=torch.float64).reciprocal().float()
    assert torch.equal(inverse_scale(scale, torch.device("cpu")), expected)
    scale_fp32 = torch.tensor(scale)
    expected = scale_fp32.double().reciprocal().float().reshape(1)
    assert torch.equal(inverse_scale(scale_fp32, torch.device("cpu")), expected)


def test_a_gradient_that_cannot_be_unscaled_is_named_by_its_parameters_place():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    params[1].grad, params[2].grad = torch.ones(2), torch.ones(1).expand(2)
    with pytest.raises(RuntimeError, match="parameter 2 is expanded"):
        Unscaler().unscale_(params, 2.0)
    assert params[1].grad.tolist() == [1.0, 1.0]


REFUSED = [
    ([3], "params[0]=3: expected a tensor; pass model.parameters()."),
    ([torch.ones(1), "a"], "params[1]='a': expected a tensor; pass model.parameters()."),
    (3, "params is a int: expected several tensors; pass a list of them."),
    (torch.ones(2), "params is a Tensor: expected several tensors; pass a list of them."),
    (nn.Linear(1, 1), "params is a Linear: expected tensors; pass model.parameters()."),
]


@pytest.mark.parametrize("take", [tensors_of, MasterWeights, FlatGradients, MasterWeights().add_pairs])
@pytest.mark.parametrize(("params", "said"), REFUSED, ids=[said[:20] for _, said in REFUSED])
def test_what_is_no_list_of_parameters_is_refused(take, params, said):
    with pytest.raises(TypeError) as refusal:
        take(params)
    assert str(refusal.value) == said


class OutOfMemory(TorchDispatchMode):
    """Memory runs out in the kernel, after it has written."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "amplab":
            raise torch.OutOfMemoryError("out of memory")
        return result


def test_running_out_of_memory_keeps_its_type():
    """Before, it became a RuntimeError, as a refusal, and `GradScaler` unscaled the gradients once more."""
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.full((2,), 8.0)
    with pytest.raises(torch.OutOfMemoryError), OutOfMemory():
        Unscaler().unscale_([param], 2.0)


def test_any_iterable_of_tensors_is_taken():
    model = nn.Linear(2, 1)
    assert [*map(id, tensors_of(model.parameters()))] == [id(model.weight), id(model.bias)]
    assert tensors_of(()) == []
