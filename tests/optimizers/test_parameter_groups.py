"""Groups of one rule become one group, and every parameter is stepped as before, to the bit."""

import pytest
import torch
from torch import nn

from amplab.optimizers import merge_groups


def one_group_each(model):
    return [
        {"params": param, "weight_decay": 0.0 if param.dim() == 1 else 0.1, "lr": 0.05} for param in model.parameters()
    ]


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_training_is_the_same_to_the_bit(kind, foreach):
    def train(merge):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        groups = one_group_each(model)
        optimizer = kind(merge_groups(groups) if merge else groups, foreach=foreach)
        for step in range(8):
            optimizer.zero_grad()
            model(torch.full((3, 4), step + 1.0)).square().sum().backward()
            optimizer.step()
        return len(optimizer.param_groups), list(model.parameters())

    (merged, mine), (separate, theirs) = train(True), train(False)
    assert (merged, separate) == (2, 6)
    assert all(torch.equal(*each) for each in zip(mine, theirs, strict=True))


def test_order_names_and_what_was_passed_are_kept():
    params = [nn.Parameter(torch.full((1,), float(index))) for index in range(4)]
    groups = [{"params": [param], "param_names": [str(i)], "lr": i % 2} for i, param in enumerate(params)]
    merged = merge_groups(groups)
    assert [group["param_names"] for group in merged] == [["0", "2"], ["1", "3"]]
    assert [param.item() for group in merged for param in group["params"]] == [0.0, 2.0, 1.0, 3.0]
    assert [len(group["params"]) for group in groups] == [1] * 4
    assert merge_groups(merged) == merged
    assert merge_groups([]) == []


def test_what_only_looks_the_same_stays_apart():
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    rate = torch.tensor(0.1)
    apart = [
        ({"lr": 1}, {"lr": True}),
        ({"lr": rate}, {"lr": rate.clone()}),
        ({"lr": 0.1}, {"lr": 0.1, "name": "a"}),
        ({"lr": 0.1}, {"lr": 0.1, "param_names": ["b"]}),
    ]
    for left, right in apart:
        assert len(merge_groups([{"params": [one], **left}, {"params": [other], **right}])) == 2
    assert len(merge_groups([{"params": [one], "lr": rate}, {"params": [other], "lr": rate}])) == 1


def test_what_is_no_group_is_refused():
    with pytest.raises(TypeError, match=r"^groups\[0\] is a Parameter"):
        merge_groups([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=r"^groups\[1\] has lr"):
        merge_groups([{"params": []}, {"lr": 1.0}])
