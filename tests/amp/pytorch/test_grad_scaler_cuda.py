"""GradScaler on a GPU: torch's scales and parameters to the bit, and gradients on two devices under one scale."""

import pytest
import torch
from torch import nn

from amplab.amp import GradScaler

INF = float("inf")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def run(scaler_type, **options):
    torch.manual_seed(0)
    model = nn.Linear(8, 4).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **options)
    scaler = scaler_type("cuda", growth_interval=2)
    for fault in (1.0, INF, 1.0, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 8, device="cuda")).square().mean() * fault).backward()
        scaler.step(optimizer)
        scaler.update()
    return [*model.parameters()], scaler.get_scale()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_a_run_is_torchs_to_the_bit(options):
    (ours, our_scale), (theirs, their_scale) = run(GradScaler, **options), run(torch.amp.GradScaler, **options)
    assert our_scale == their_scale
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("of_loss", ["cuda", "cpu"])
@pytest.mark.parametrize("bad", [1.0, INF])
def test_values_for_the_cpu_have_arrived_when_it_reads_them(bad, of_loss):
    """A GPU that is busy does not change what is unscaled on the CPU, nor whether the step is skipped."""
    params = [nn.Parameter(torch.ones(2, device=device)) for device in ("cuda", "cpu")]
    optimizer, scaler = torch.optim.SGD(params, lr=1.0), GradScaler("cuda", init_scale=4.0)
    for _ in range(2):
        loss = scaler.scale(torch.ones((), device=of_loss))
        params[0].grad, params[1].grad = torch.full((2,), 8.0 * bad, device="cuda"), torch.full((2,), 8.0)
        before = params[1].detach().clone()
        torch.cuda._sleep(50_000_000)
        scaler.unscale_(optimizer)
        assert params[1].grad.tolist() == [8.0 / loss.item()] * 2
        scaler.step(optimizer)
        assert torch.equal(params[1], before) == (bad == INF)
        scaler.update()


def test_gradients_on_two_devices_are_unscaled_under_one_scale():
    params = [nn.Parameter(torch.ones(2, device=device)) for device in ("cuda", "cpu")]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = GradScaler("cuda", init_scale=4.0)
    for bad in (1.0, INF):
        scaler.scale(torch.ones((), device="cuda"))
        params[0].grad, params[1].grad = torch.full((2,), 8.0, device="cuda"), torch.full((2,), 8.0 * bad)
        scaler.unscale_(optimizer)
        assert params[0].grad.tolist() == [2.0, 2.0]
        assert len(scaler._found_inf_per_device(optimizer)) == 2
        scaler.step(optimizer)
        assert scaler.last_step.stepped == (bad == 1.0)
        scaler.update()
    assert scaler.get_scale() == 2.0
