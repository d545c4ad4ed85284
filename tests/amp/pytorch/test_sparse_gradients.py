"""Sparse gradients under GradScaler: the bits of torch's scaler and of a loop without a scaler, overflows, clipping."""

import pytest
import torch
from torch import nn

from amplab.amp import GradScaler

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of Adagrad

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
PLAIN, TORCH = (lambda: None), (lambda: torch.amp.GradScaler("cpu", init_scale=1024.0))
AMPLAB = [
    lambda: GradScaler("cpu", init_scale=1024.0),
    lambda: GradScaler("cpu", init_scale=1024.0, combine_grad=True),
]


def trained(make_scaler, make_optimizer, dtype=torch.float32, *, tables=1, rows=64, backwards=2, unscale_=None):
    """Return the weights after three steps of embeddings whose sum is classified; rows are drawn repeatedly."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Embedding(20, 4, sparse=True, dtype=dtype) for _ in range(tables))
    head, scaler = nn.Linear(4, 3, dtype=dtype), make_scaler()
    optimizers = [make_optimizer(list(model.parameters())), torch.optim.SGD(head.parameters(), lr=0.1)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(backwards):
            index, target = torch.randint(20, (rows,)), torch.randint(3, (rows,))
            loss = nn.functional.cross_entropy(head(sum(table(index) for table in model)).float(), target)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if unscale_ is not None:
            unscale_(scaler, optimizers[0])
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
    return [param.detach() for param in (*model.parameters(), *head.parameters())]


def same(left, right):
    return all(map(torch.equal, left, right))


@pytest.mark.parametrize("make_scaler", AMPLAB, ids=["plain", "combined"])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_torchs_scaler_and_of_no_scaler(name, dtype, backwards, make_scaler):
    found = [
        trained(each, OPTIMIZERS[name], dtype, backwards=backwards, unscale_=unscale_)
        for each in (PLAIN, TORCH, make_scaler)
        for unscale_ in (None, lambda scaler, optimizer: scaler and scaler.unscale_(optimizer))
    ]
    assert all(same(found[0], each) for each in found[1:])


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_embeddings_of_a_sum_have_gradients_of_their_own(name, rows):
    """The backward of a sum gives both embeddings one gradient in one memory; torch 2.13's scaler divides it twice."""
    plain, *ours = (trained(each, OPTIMIZERS[name], tables=2, rows=rows, backwards=1) for each in (PLAIN, *AMPLAB))
    assert all(same(each, plain) for each in ours)


def clipped(max_norm):
    """Return a function that unscales and clips, by the scaler if it is amplab's, else with torch's operators."""

    def unscale_(scaler, optimizer):
        if isinstance(scaler, GradScaler):
            scaler.unscale_and_clip_(optimizer, max_norm)
            return
        params = optimizer.param_groups[0]["params"]
        sums = [param.grad.coalesce().values().flatten() for param in params]
        factor = torch.clamp(max_norm / (torch.linalg.vector_norm(torch.cat(sums)) + 1e-6), max=1.0)
        for param in params:
            param.grad = param.grad * factor

    return unscale_


@pytest.mark.parametrize("make_scaler", AMPLAB, ids=["plain", "combined"])
@pytest.mark.parametrize("max_norm", [0.01, 1e9])
def test_a_clip_takes_the_norm_of_the_sums_and_keeps_their_order(max_norm, make_scaler):
    for tables in (1, 2):
        plain, ours = (
            trained(each, OPTIMIZERS["SGD momentum"], tables=tables, unscale_=clipped(max_norm))
            for each in (PLAIN, make_scaler)
        )
        assert same(ours, plain)


@pytest.mark.parametrize("dtype", [torch.float16, *DTYPES], ids=str)
def test_an_overflow_in_a_sum_of_duplicates_is_found_where_torch_finds_it(dtype):
    largest = torch.finfo(dtype).max
    found = []
    for scaler_type in (torch.amp.GradScaler, GradScaler):
        table = nn.Parameter(torch.zeros(4, dtype=dtype))
        optimizer, scaler = torch.optim.SGD([table], lr=1.0), scaler_type("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        values = torch.tensor([largest, 1.0, largest], dtype=dtype)
        table.grad = torch.sparse_coo_tensor(torch.tensor([[0, 1, 0]]), values, (4,), check_invariants=True)
        (flag,) = scaler._unscale_grads_(optimizer, torch.tensor(1.0), torch.zeros(()), True).values()
        found.append((flag.item(), table.grad.is_coalesced(), table.grad.to_dense().tolist()))
    assert found[0] == found[1]
    assert found[0][0] == float(dtype is torch.float16)
