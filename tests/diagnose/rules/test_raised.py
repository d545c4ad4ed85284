"""What a step raised, in the words of mixed precision."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import amplab
from amplab.diagnose.rules.raised import finding_of_error


def test_a_block_recomputed_without_its_casts_is_told_of_the_checkpoint_that_casts():
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with amplab.autocast("cpu", dtype=torch.float16):
        loss = checkpoint(block, torch.ones(2, 4), use_reentrant=False).float().sum()
    with pytest.raises(Exception, match=r"torch\.utils\.checkpoint") as refused:
        loss.backward()
    finding = finding_of_error(refused.value, block)
    assert finding.name == "recomputed-without-casts"
    assert "amplab.checkpoint(" in finding.remedy


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def test_a_checkpoint_of_torch_is_told_of_amplabs():
    with pytest.raises(CheckpointError) as refused:
        amplab.xray(Checkpointed(), torch.ones(2, 4), autocast=amplab.autocast("cpu", dtype=torch.float16))
    assert any("amplab.checkpoint" in note for note in refused.value.__notes__)
