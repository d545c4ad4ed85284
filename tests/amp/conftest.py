"""Small problems that the tests of this room train on."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab import amp


class Problem:
    """Blobs of four classes in 16 dimensions, in batches of 32."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, 4, (512,), generator=generator)
        centres = torch.randn(4, 16, generator=generator) * 2
        self.inputs = centres[self.labels] + torch.randn(512, 16, generator=generator)

    def batch(self, step):
        start = step * 32 % 512
        return self.inputs[start : start + 32], self.labels[start : start + 32]

    def model(self, seed=0, *, batch_norm=True):
        torch.manual_seed(seed)
        normalize = nn.BatchNorm1d(32) if batch_norm else nn.Identity()
        return nn.Sequential(nn.Linear(16, 32), normalize, nn.ReLU(), nn.Linear(32, 4))

    def loss(self, model, step):
        inputs, labels = self.batch(step)
        return F.cross_entropy(model(inputs), labels)

    def train(self, session, model, optimizer, steps):
        """Train under a session; the losses."""
        losses = []
        with session.casting():
            for step in steps:
                loss = self.loss(model, step)
                with session.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses


@pytest.fixture
def problem():
    return Problem()


@pytest.fixture
def session():
    return amp.Session()


@pytest.fixture(autouse=True)
def default_session_is_reset():
    yield
    amp.reset()
