"""Bytes, counted by what they are for."""

import torch
from torch import nn

from amplab import amp


def test_memory_counts_each_kind(session, problem):
    model = problem.model()
    optimizer = torch.optim.Adam(model.parameters())
    weights = sum(param.numel() for param in model.parameters())
    kept = 64  # BatchNorm's weight and bias
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    half = 2 * (weights - kept)
    assert session.memory() == amp.MemoryUse(half + 4 * kept, 0, 2 * half, 0)
    with session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert session.memory().gradients == 4 * weights
    optimizer.step()
    steps = 4 * len(list(model.parameters()))
    assert session.memory() == amp.MemoryUse(half + 4 * kept, 4 * kept, 2 * half, 8 * weights + steps)
    assert session.memory().total == 14 * (weights - kept) + 16 * kept + steps


def test_sparse_gradients_and_shared_parameters_count_once(session):
    model = nn.Embedding(8, 2, sparse=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    session.initialize(model, optimizers, opt_level="O0", verbosity=0)
    model(torch.tensor([1, 3, 3])).sum().backward()
    indices, values = 2 * 8, 2 * 2 * 4
    assert session.memory() == amp.MemoryUse(8 * 2 * 4, indices + values, 0, 0)
