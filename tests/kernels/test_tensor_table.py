"""A prepared list: the same bits as `unscale_`, wherever its tensors lie by then."""

import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

from amplab.kernels import ParameterList, TensorTable, unscale_
from amplab.trace.dispatch_mode import DispatchMode

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALF = torch.tensor([0.5])


@pytest.fixture(params=["reference", "kernel"])
def served(request, monkeypatch):
    """With the kernels, and where they are not built."""
    if request.param == "kernel":
        request.getfixturevalue("built")
    else:
        monkeypatch.setattr("amplab.kernels.tensor_table.TensorTableHandle.is_ready", lambda self: False)
    return request.param


def found(count):
    return {"norm": torch.zeros(()), "norms": torch.zeros(count), "first_bad": torch.tensor(-1)}


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 90), st.sampled_from(DTYPES), st.booleans()), max_size=6),
    bad=st.integers(0, 8),
)
def test_a_table_does_what_the_list_does(built, sizes, bad):
    def tensors():
        made = []
        for index, (numel, dtype, gaps) in enumerate(sizes):
            x = torch.randn(2 * numel, generator=torch.Generator().manual_seed(index)).to(dtype)[:: 2 if gaps else 1]
            if index == bad and x.numel():
                x[-1] = math.nan
            made.append(x)
        return made

    mine, theirs, inverse = tensors(), tensors(), torch.tensor([1 / 3])
    found_mine, found_theirs, mine_found, theirs_found = (
        torch.zeros(1),
        torch.zeros(1),
        found(len(sizes)),
        found(len(sizes)),
    )
    TensorTable(mine).unscale_(found_mine, inverse, **mine_found)
    unscale_(theirs, found_theirs, inverse, **theirs_found)
    assert torch.equal(found_mine, found_theirs)
    for a, b in (*zip(mine, theirs, strict=True), *zip(mine_found.values(), theirs_found.values(), strict=True)):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_storage_that_has_moved_is_found_where_it_is(served):
    tensor, other = torch.full((4,), 8.0), torch.full((3,), 8.0)
    table = TensorTable([tensor, other])
    table.unscale_(torch.zeros(1), HALF)
    old = tensor.detach()
    tensor.set_(torch.full((6,), 16.0).untyped_storage(), 2, (4,))
    other.data = torch.full((5,), 32.0)
    table.unscale_(torch.zeros(1), HALF)
    assert (tensor.tolist(), other.tolist(), old.tolist()) == ([8.0] * 4, [16.0] * 5, [4.0] * 4)


def test_storage_that_was_freed_is_not_written(served):
    tensor = torch.full((1000,), 8.0)
    table = TensorTable([tensor])
    table.unscale_(torch.zeros(1), HALF)
    tensor.untyped_storage().resize_(0)
    tensor.data = torch.empty(0)
    table.unscale_(torch.zeros(1), HALF, norm=(norm := torch.ones(())))
    assert (tensor.numel(), norm.item()) == (0, 0.0)


def test_a_dtype_that_changed_is_met(served):
    tensor = torch.full((4,), 8.0)
    table = TensorTable([tensor])
    table.unscale_(torch.zeros(1), HALF)
    tensor.data = torch.full((2,), 8.0, dtype=torch.bfloat16)
    table.unscale_(torch.zeros(1), HALF)
    assert tensor.tolist() == [4.0, 4.0]
    tensor.data = torch.full((2,), 8)
    with pytest.raises(RuntimeError, match=r"^input 0 is int64"):
        table.unscale_(torch.zeros(1), HALF)


def test_tensors_that_come_to_overlap_are_refused(served):
    tensors = [torch.ones(4) for _ in range(3)]
    table = TensorTable(tensors)
    table.unscale_(torch.zeros(1), HALF)
    tensors[2].set_(tensors[0].untyped_storage(), 1, (3,))
    with pytest.raises(RuntimeError, match=r"^input 0 and input 2 overlap"):
        table.unscale_(torch.zeros(1), HALF)
    assert tensors[0].tolist() == [0.5] * 4


def test_a_table_keeps_its_tensors_and_gives_them_back(served):
    tensor = torch.ones(4)
    held = tensor._use_count()
    table = TensorTable([tensor])
    table.unscale_(torch.zeros(1), HALF)
    del table
    gc.collect()
    assert tensor._use_count() == held


def test_an_empty_table(served):
    table, norm = TensorTable([]), torch.ones(())
    table.unscale_(torch.zeros(1), HALF, norm=norm)
    assert (len(table), norm.item()) == (0, 0.0)


def test_receivers_that_do_not_fit_are_refused(served):
    with pytest.raises(RuntimeError, match=r"^norms:"):
        TensorTable([torch.ones(2)]).unscale_(torch.zeros(1), HALF, norms=torch.zeros(3))


def test_gradients_are_named_by_their_parameters_place(built):
    params = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    params[1].grad, params[2].grad = torch.tensor([6.0, 8.0]), torch.tensor([1.0, math.inf])
    found_inf, told = torch.zeros(()), found(4)
    assert ParameterList(params).unscale_grads_(found_inf, torch.tensor(0.5), **told) == 2
    assert told["norms"].tolist() == [0.0, 5.0, math.inf, 0.0]
    assert (found_inf.item(), told["first_bad"].item(), told["norm"].item()) == (1.0, 2, math.inf)
    assert params[1].grad.tolist() == [3.0, 4.0]


def test_gradients_that_share_memory_are_left_to_the_operator_that_names_them(built):
    params, shared = [nn.Parameter(torch.zeros(2)) for _ in range(2)], torch.ones(2)
    params[0].grad, params[1].grad = shared, shared
    assert ParameterList(params).unscale_grads_(torch.zeros(()), torch.tensor(0.5)) is None
    assert shared.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (torch.ones(2), "TensorTable got a Tensor: expected a list"),
        ([torch.ones(2), None], r"tensors\[1\] is a NoneType:"),
    ],
)
def test_what_is_no_list_of_tensors_is_refused(tensors, words):
    with pytest.raises(TypeError, match=words):
        TensorTable(tensors)


class Seen(DispatchMode):
    """A dispatch mode of somebody else."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_table_that_is_collected_inside_a_fake_kernel_is_deleted(built):
    """There the dispatcher takes tensors of the CPU for meta tensors, as while torch.compile traces."""
    tensor = torch.ones(4)
    held = tensor._use_count()
    table = TensorTable([tensor])
    table.unscale_(torch.zeros(1), HALF)
    with in_kernel_invocation_manager(FakeTensorMode()):
        del table
        gc.collect()
    assert tensor._use_count() == held


def test_a_dispatch_mode_does_not_see_a_table_that_is_collected(built):
    table = TensorTable([torch.ones(4)])
    table.unscale_(torch.zeros(1), HALF)
    with Seen() as seen:
        del table
        gc.collect()
    assert seen.ops == []
