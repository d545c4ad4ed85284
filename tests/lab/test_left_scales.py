"""The gradients of several optimizers are recorded without the scale, whichever of them steps first."""

import math

import pytest
import torch
from torch import nn

import amplab
from amplab.lab import watch

SCALERS = [torch.amp.GradScaler, amplab.GradScaler]
SCALE = 65536.0
torch.manual_seed(3)
BATCHES = [torch.randn(4, 4) for _ in range(18)]


def largest_and_norm(gradients):
    """The exponent of the largest element, by frexp, and the norm in float64."""
    flat = torch.cat([each.flatten() for each in gradients]).double()
    return math.frexp(flat.abs().max().item())[1] - 1, flat.norm().item()


def make(fused, *, shared=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    halves = [[*model[0].parameters()], [*model[2].parameters()]]
    if shared:
        halves[1].append(halves[0][1])
    return model, [torch.optim.SGD(each, lr=0.01, fused=kind) for each, kind in zip(halves, fused, strict=True)]


def check(w, own, every):
    assert len(w.history.records()) == len(own)
    for record, (exponent, _) in zip(w.history.records(), own, strict=True):
        if record.step % every == 0 or record.step % 16 == 0:
            assert record.grad_exponent == exponent, record.step
    samples = w.history.gradient_samples
    assert [sample.step for sample in samples] == list(range(0, len(own), every))
    assert [sample.histogram.largest_exponent for sample in samples] == [own[sample.step][0] for sample in samples]
    for step in range(0, len(own), every):
        assert w.observation.steps[step].gradient_norm == pytest.approx(own[step][1], rel=1e-5)


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("unscaled", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("fused", [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_gradients_of_two_optimizers_are_recorded_without_the_scale(scaler_type, order, fused, unscaled, every):
    model, optimizers = make(fused)
    scaler, own = scaler_type("cpu", init_scale=SCALE), []
    with watch(model, optimizers, scaler=scaler, every=every) as w:
        for x in BATCHES:
            model.zero_grad()
            scaler.scale(w.loss(model(x).square().mean())).backward()
            own.append(largest_and_norm([weight.grad / SCALE for weight in model.parameters()]))
            for place in unscaled:
                scaler.unscale_(optimizers[place])
            for place in order:
                scaler.step(optimizers[place])
            scaler.update()
    check(w, own, every)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_gradients_that_an_optimizer_has_used_before_keep_their_size(scaler_type, set_to_none, fused):
    """Each of two networks zeroes its gradients before its own backward, as in a GAN."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, fused=fused) for each in model]
    scaler, own, used = scaler_type("cpu", init_scale=SCALE), [], []
    with watch(model, optimizers, scaler=scaler, every=1) as w:
        for x in BATCHES:
            for place, optimizer in enumerate(optimizers):
                optimizer.zero_grad(set_to_none=set_to_none)
                # The second network has the larger gradients, so that they are the largest of all.
                scaler.scale(w.loss(model[place](x).square().mean() * 64**place)).backward()
                grads = [weight.grad / SCALE for weight in model[place].parameters()]
                if place == 0:
                    own.append(largest_and_norm([*grads, *used]))
                used = grads
                scaler.step(optimizer)
            scaler.update()
    check(w, own, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_that_two_optimizers_share_counts_once(fused):
    model, optimizers = make((fused, fused), shared=True)
    scaler = amplab.GradScaler("cpu", init_scale=SCALE)
    with watch(model, optimizers, scaler=scaler, every=1) as w:
        for x in BATCHES[:2]:
            model.zero_grad()
            scaler.scale(w.loss(model(x).square().mean())).backward()
            _, norm = largest_and_norm([weight.grad / SCALE for weight in model.parameters()])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            assert w.observation.steps[-1].gradient_norm == pytest.approx(norm, rel=1e-5)
