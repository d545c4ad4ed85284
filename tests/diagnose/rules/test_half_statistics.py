"""Running means in float16 that stop short of the batches, and those that do not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab import amp
from amplab.diagnose import doctor

NAME = "statistics-in-half"


def trained(offset=100.0, momentum=0.01, **options):
    """Train for 600 steps; return the doctor's findings before, and the error of the running mean after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **options)
    x, y = offset + torch.randn(128, 8), torch.randn(128, 1)

    def loss_of(batch):
        return F.mse_loss(model(batch[0]).float(), batch[1])

    before = model[0].running_mean.clone()
    found = doctor(model, (x, y), step=loss_of, optimizer=optimizer).named(NAME)
    assert torch.equal(model[0].running_mean, before)
    for _ in range(600):
        model(x)
    return [each.remedy for each in found], (model[0].running_mean.float() - x.mean(0)).abs().max().item()


def test_a_running_mean_that_stops_is_named_and_the_printed_remedy_lets_it_arrive():
    remedies, error = trained(keep_batchnorm_fp32=False)
    assert len(remedies) == 1
    assert error > 1, "a standard deviation of the batch"
    assert "keep_batchnorm_fp32=True" in remedies[0]
    remedies, error = trained(keep_batchnorm_fp32=True)
    assert remedies == []
    assert error < 0.3


@pytest.mark.parametrize("healthy", [{"offset": 0.0}, {"momentum": 0.1, "offset": 1.0}])
def test_a_running_mean_that_arrives_is_no_finding(healthy):
    remedies, error = trained(keep_batchnorm_fp32=False, **healthy)
    assert remedies == []
    assert error < 0.1
