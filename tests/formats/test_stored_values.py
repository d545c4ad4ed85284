"""What of a tensor is in memory, for tensors of every kind."""

import pytest
import torch

from amplab.formats.stored_values import has_values, stored_values

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")


def freed(values, left=0):
    values = values.clone()
    values.untyped_storage().resize_(left)
    return values


def test_what_has_been_freed_or_never_was_has_no_values():
    part = torch.arange(8.0)
    gaps, tail = part.view(2, 4)[:, 2], part[6:]
    part.untyped_storage().resize_(24)  # six of eight elements; the last one of `gaps` is the seventh
    shapes = [gaps, tail, freed(torch.ones(3)), freed(torch.ones(3), left=8), torch.ones(2, device="meta")]
    assert [has_values(each) for each in shapes] == [False] * 5
    assert [stored_values(each).numel() for each in shapes] == [0] * 5
    assert has_values(part[:6])


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.ones(2, 3).t(), torch.ones(1).expand(5), torch.ones(3)[1:]])
def test_a_tensor_in_memory_is_all_there(tensor):
    assert has_values(tensor)
    assert stored_values(tensor) is tensor


def test_a_freed_tensor_without_elements_has_all_its_values():
    assert has_values(freed(torch.ones(3))[3:])


def test_a_zerotensor_has_zeros_of_its_shape():
    zeros = stored_values(torch._efficientzerotensor((2, 3), dtype=torch.half))
    assert (zeros.shape, zeros.dtype, zeros._is_zerotensor()) == ((2, 3), torch.half, False)
    assert not zeros.any()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_has_those_of_all_parts(layout):
    nested = torch.nested.nested_tensor([torch.ones(1, 2), torch.full((2, 2), 3.0)], layout=layout)
    for each in (nested, nested.transpose(1, 2)):
        assert stored_values(each).sum() == 14.0


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_has_those_that_are_not_zero(layout):
    assert stored_values(torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(layout=layout)).tolist() == [2.0, 3.0]
