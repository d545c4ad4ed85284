"""Hooks of a watch come and go with the need for them."""

import torch
from torch import nn
from torch.nn import functional as F

from amplab.lab import watch

torch.manual_seed(5)
BATCHES = [(torch.randn(16, 16), torch.randint(4, (16,))) for _ in range(8)]


def make():
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_hooks_are_there_only_while_they_are_needed():
    model, optimizer = make()
    with watch(model, optimizer, scaler=torch.amp.GradScaler("cpu"), every=3) as w:
        seen = []
        for x, y in w.batches(BATCHES[:8]):
            optimizer.zero_grad()
            seen.append((len(model._forward_hooks), len(optimizer._optimizer_step_pre_hooks)))
            assert not model._forward_pre_hooks  # the batches tell
            w.loss(F.cross_entropy(model(x), y)).backward()
            optimizer.step()
        assert len(model._forward_pre_hooks) == 1
    assert [sampled for _, sampled in seen] == [1, 0, 0, 1, 0, 0, 1, 0]
    assert [looked for looked, _ in seen] == [1] + [0] * 7
    assert [each.step for each in w.history.gradient_samples] == [0, 3, 6]
