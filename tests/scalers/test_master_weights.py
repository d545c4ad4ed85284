"""Master weights: pairs, gradients to the masters, values back to the model."""

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from amplab.scalers import MasterWeights


def half(*values):
    return Parameter(torch.tensor(values, dtype=torch.float16))


def give_grad(param, *grad):
    param.grad = torch.tensor(grad, dtype=param.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_parameter_gets_a_float32_copy(dtype):
    param = Parameter(torch.tensor([0.1, 2.0], dtype=dtype))
    [master] = MasterWeights().add_pairs([param])
    assert isinstance(master, Parameter)
    assert master.dtype == torch.float32
    assert master.requires_grad
    assert master.is_leaf
    assert torch.equal(master, param.float())
    assert master.data_ptr() != param.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wider_parameter_is_its_own_master(dtype):
    param = Parameter(torch.ones(2, dtype=dtype))
    masters = MasterWeights()
    assert masters.add_pairs([param])[0] is param
    assert masters.of(param) is param
    assert masters.pairs == ()


def test_requires_grad_and_the_order_in_memory_are_kept():
    frozen = Parameter(torch.ones(2, dtype=torch.float16), requires_grad=False)
    image_weight = Parameter(torch.ones(2, 3, 4, 4, dtype=torch.float16).to(memory_format=torch.channels_last))
    masters = MasterWeights([frozen, image_weight])
    assert not masters.of(frozen).requires_grad
    assert masters.of(image_weight).stride() == image_weight.stride()


def test_a_shared_parameter_has_one_master():
    shared, other = half(1.0), half(2.0)
    masters = MasterWeights()
    first, second, third = masters.add_pairs([shared, other, shared])
    assert first is third
    assert first is not second
    assert masters.add_pairs([shared])[0] is first
    assert [pair.model for pair in masters.pairs] == [shared, other]


def test_a_group_that_comes_later_joins():
    first, later = half(1.0), half(2.0)
    masters = MasterWeights([first])
    [master] = masters.add_pairs([later])
    give_grad(later, 8.0)
    masters.unscale_grads(2.0)
    assert master.grad.tolist() == [4.0]


def test_gradients_come_unscaled_in_float32():
    """1 / 2^20 is far below the smallest subnormal of half, 2^-24 times it: only the master can hold the quotient."""
    param = half(1.0, 1.0)
    masters = MasterWeights([param])
    give_grad(param, 1.0, 2.0**-10)
    assert masters.unscale_grads(2.0**20).tolist() == [0.0]
    assert masters.of(param).grad.tolist() == [2.0**-20, 2.0**-30]
    assert param.grad.tolist() == [1.0, 2.0**-10]


def test_accumulating_adds_and_replacing_does_not():
    param, late = half(1.0), half(1.0)
    masters = MasterWeights([param, late])
    give_grad(param, 4.0)
    masters.unscale_grads(2.0)
    give_grad(param, 8.0)
    give_grad(late, 6.0)
    masters.unscale_grads(4.0, accumulate=True)
    assert masters.of(param).grad.tolist() == [4.0]
    assert masters.of(late).grad.tolist() == [1.5]
    masters.unscale_grads(4.0)
    assert masters.of(param).grad.tolist() == [2.0]


def test_a_parameter_without_gradient_leaves_its_master_without():
    param = half(1.0)
    masters = MasterWeights([param])
    give_grad(param, 4.0)
    masters.unscale_grads(2.0)
    param.grad = None
    masters.unscale_grads(2.0, accumulate=True)
    assert masters.of(param).grad.tolist() == [2.0]
    masters.unscale_grads(2.0)
    assert masters.of(param).grad is None


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_found(accumulate, bad):
    param, other = half(1.0), half(1.0)
    masters = MasterWeights([param, other])
    give_grad(param, 1.0)
    give_grad(other, 1.0)
    assert masters.unscale_grads(2.0).item() == 0.0
    give_grad(other, bad)
    found_inf = masters.unscale_grads(2.0, accumulate=accumulate)
    assert found_inf.item() == 1.0
    give_grad(other, 1.0)
    assert masters.unscale_grads(2.0, found_inf=found_inf) is found_inf
    assert found_inf.item() == 1.0


def test_masters_are_rounded_into_the_model_and_back():
    param = half(1.0, 1.0)
    masters = MasterWeights([param])
    version = param._version
    with torch.no_grad():
        masters.of(param).copy_(torch.tensor([0.1, 1e6]))
    masters.copy_to_model()
    assert torch.equal(param.detach(), torch.tensor([0.1, 1e6]).half())
    assert param._version > version  # whoever caches the weight by its version sees the change
    with torch.no_grad():
        param.fill_(3.0)
    masters.copy_from_model()
    assert masters.of(param).tolist() == [3.0, 3.0]


def watched(*values, dtype=torch.float16):
    """Masters that differ from their model weight by less than its rounding, and are watched."""
    masters = MasterWeights([Parameter(torch.tensor(values, dtype=dtype))])
    [(param, master)] = masters.pairs
    with torch.no_grad():
        master.mul_(1 + 2.0**-14)
    assert torch.equal(master.to(dtype), param)
    masters.watch_model()
    return masters, param, master


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("new", [3.0, 0.0, math.inf, -math.inf, math.nan])
def test_a_master_takes_the_elements_that_were_edited_and_keeps_the_bits_of_the_rest(dtype, new):
    masters, param, master = watched(1.0, 2.0, 4.0, dtype=dtype)
    before = master.detach().clone()
    param.data[1] = new
    masters.follow_edits()
    expected = torch.tensor([before[0], new, before[2]])
    torch.testing.assert_close(master.detach(), expected, rtol=0, atol=0, equal_nan=True)


def test_a_master_that_was_edited_itself_stays_edited():
    masters, param, master = watched(1.0, 2.0)
    master.data[0] = 5.0  # as old scripts write, which no version counter sees
    masters.follow_edits()
    assert master.tolist() == [5.0, 2.0 + 2.0**-13]
    masters.copy_to_model()
    assert param.tolist() == [5.0, 2.0]


def test_a_master_that_came_with_the_edit_keeps_what_the_model_has_rounded():
    masters, param, master = watched(1.0)
    param.data.fill_(0.1)
    master.data.fill_(0.1)
    masters.follow_edits()
    assert master.item() == torch.tensor(0.1).item() != param.item()


def test_an_edit_that_is_taken_back_is_followed_back():
    masters, param, master = watched(1.0)
    for value in (7.0, 1.0):
        param.data.fill_(value)
        masters.follow_edits()
        assert master.item() == value


def test_what_is_not_watched_is_left_alone():
    first, second = half(1.0), half(2.0)
    masters = MasterWeights([first, second])
    masters.watch_model([first, Parameter(torch.ones(1))])
    for param in (first, second):
        param.data.fill_(3.0)
    masters.follow_edits([second])
    assert [masters.of(param).item() for param in (first, second)] == [1.0, 2.0]
    masters.follow_edits()
    assert [masters.of(param).item() for param in (first, second)] == [3.0, 2.0]
    masters.stop_watching()
    first.data.fill_(4.0)
    masters.follow_edits()
    assert masters.of(first).item() == 3.0


def test_a_weight_of_another_shape_is_left_alone():
    masters, param, master = watched(1.0, 2.0)
    param.data = torch.ones(1, dtype=torch.float16)
    masters.follow_edits()
    assert master.shape == (2,)


def test_masters_change_by_updates_that_half_would_lose():
    param = half(1.0)
    masters = MasterWeights([param])
    optimizer = torch.optim.SGD([masters.of(param)], lr=1.0)
    for _ in range(8):
        give_grad(param, 2.0**-13 * 1024)  # a step of 2^-13, a quarter of half's spacing below 1.0
        masters.unscale_grads(1024.0)
        optimizer.step()
        masters.copy_to_model()
    assert param.item() == 1.0 - 2.0**-10


def test_no_pairs_are_allowed():
    masters = MasterWeights()
    assert masters.unscale_grads(2.0).tolist() == [0.0]
    masters.copy_to_model()
    masters.copy_from_model()


def test_never_waits_for_the_device():
    with FakeTensorMode(allow_non_fake_inputs=True):
        param = half(1.0, 2.0)
        masters = MasterWeights([param])
        give_grad(param, 1.0, 2.0)
        masters.unscale_grads(2.0)
        masters.unscale_grads(2.0, accumulate=True)
        masters.copy_to_model()
        masters.watch_model()
        masters.follow_edits()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_nonsense_scale_is_refused(scale):
    param = half(1.0)
    give_grad(param, 1.0)
    with pytest.raises(ValueError, match=r"scale=.*> 0"):
        MasterWeights([param]).unscale_grads(scale)


@pytest.mark.parametrize("kinds", list(itertools.product(("sparse", "dense"), repeat=2)), ids="+".join)
def test_sparse_gradients_reach_the_masters_and_are_added_up(kinds):
    weight = Parameter(torch.zeros(4, 2, dtype=torch.float16))
    masters = MasterWeights([weight])
    expected = torch.zeros(4, 2, dtype=torch.float64)
    for kind, factor in zip(kinds, (1.0, 3.0), strict=True):
        values = torch.tensor([[40000.0, 1.0], [40000.0, 2.0], [8.0, 4.0]], dtype=torch.float16) * factor
        values[0, 0] = values[1, 0] = 40000.0  # their sum is beyond half
        rows = torch.tensor([[1, 1, 3]])
        dense = torch.zeros(4, 2, dtype=torch.float64).index_add(0, rows[0], values.double())
        if kind == "dense":
            dense = dense.clamp(max=60000.0)
        expected += dense / 8.0
        sparse = torch.sparse_coo_tensor(rows, values, (4, 2), check_invariants=True)
        weight.grad = sparse if kind == "sparse" else dense.half()
        assert masters.unscale_grads(8.0, accumulate=True).item() == 0.0
    grad = masters.of(weight).grad
    assert grad.dtype is torch.float32
    assert grad.is_sparse == (kinds == ("sparse", "sparse"))
    assert torch.equal((grad.to_dense() if grad.is_sparse else grad).double(), expected)


def test_a_sparse_gradient_that_is_not_finite_is_found():
    weight = Parameter(torch.zeros(4, 2, dtype=torch.float16))
    masters = MasterWeights([weight])
    values = torch.tensor([[1.0, float("inf")]], dtype=torch.float16)
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[2]]), values, (4, 2), check_invariants=True)
    assert masters.unscale_grads(8.0).item() == 1.0
