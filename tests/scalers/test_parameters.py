"""What is given for a list of parameters and is none, told in one sentence by everything that takes one."""

import pytest
import torch
from torch import nn

from amplab.scalers import FlatGradients, MasterWeights
from amplab.scalers.unscaler import tensors_of

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


def test_any_iterable_of_tensors_is_taken():
    model = nn.Linear(2, 1)
    assert [*map(id, tensors_of(model.parameters()))] == [id(model.weight), id(model.bias)]
    assert tensors_of(()) == []
