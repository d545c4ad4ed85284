"""Gradients of inputs through half layers, and the recipes that need them: penalties and GANs, against float32."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab import amp

LEVELS = ("O0", "O1", "O2", "O3")


def critic(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 1))


def data(seed=0):
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))


def session_for(models, optimizers, level, **options):
    session = amp.Session()
    session.initialize(models, optimizers, opt_level=level, verbosity=0, **options)
    return session


@pytest.mark.parametrize("level", LEVELS)
def test_small_gradients_survive_half(level):
    """Inputs' gradients around 2^-26, zero in half (up to 2^-25), are right when they were scaled on their way."""
    expected, model = critic(), critic()
    for each in (expected, model):
        with torch.no_grad():
            each[2].weight.mul_(2.0**-12)
    session = session_for(model, torch.optim.SGD(model.parameters(), lr=0.1), level, loss_scale=2.0**14)
    inputs = data().requires_grad_()
    (reference,) = torch.autograd.grad(expected(inputs).mean() * 2.0**-8, inputs)
    assert 0 < reference.abs().max() < 2.0**-22
    with session.casting():
        (grad,) = session.scaled_grad(model(inputs).mean() * 2.0**-8, inputs)
        (plain,) = torch.autograd.grad(model(inputs).mean() * 2.0**-8, inputs)
    assert grad.dtype == torch.float32
    torch.testing.assert_close(grad, reference, rtol=0.02, atol=reference.abs().max().item() * 0.02)
    if level != "O0":
        assert (plain == 0).float().mean() > (grad == 0).float().mean()


def test_it_leaves_grads_and_scale_alone():
    model = critic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = session_for(model, optimizer, "O1", num_losses=2)
    inputs = data().requires_grad_()
    with session.casting():
        first, second = session.scaled_grad(model(inputs), [inputs, model[0].weight], grad_outputs=torch.ones(16, 1))
        (unused,) = session.scaled_grad(model(inputs).sum(), torch.ones(1, requires_grad=True), allow_unused=True)
        (overflowed,) = session.scaled_grad(model(inputs).sum() * float("inf"), inputs, loss_id=1)
    assert (first.shape, second.shape, unused) == ((16, 8), (32, 8), None)
    assert not overflowed.isfinite().all()
    assert all(param.grad is None for param in (*model.parameters(), inputs))
    assert session.state_dict()["loss_scaler1"] == {"loss_scale": 2.0**16, "unskipped": 0}


def penalty_step(model, inputs, grad_of):
    inputs = inputs.clone().requires_grad_()
    scores = model(inputs)
    (grads,) = grad_of(scores.sum(), inputs, create_graph=True)
    return scores.float().mean() + 10 * (grads.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize(("level", "tolerance"), [("O0", 0.0), ("O1", 0.05), ("O2", 0.05)])
def test_a_gradient_penalty_trains_as_in_float32(level, tolerance):
    by_hand, model = critic(), critic()
    hand_optimizer, optimizer = (torch.optim.SGD(each.parameters(), lr=0.02) for each in (by_hand, model))
    session = session_for(model, optimizer, level, dynamic_init_scale=2.0**6)
    expected, losses = [], []
    for step in range(30):
        loss = penalty_step(by_hand, data(step), torch.autograd.grad)
        hand_optimizer.zero_grad()
        loss.backward()
        hand_optimizer.step()
        expected.append(loss.item())
        with session.casting():
            loss = penalty_step(model, data(step), session.scaled_grad)
            optimizer.zero_grad()
            with session.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert expected[-1] < 0.7 * expected[0]
    assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_a_penalty_that_overflows_skips_the_step():
    model = critic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session = session_for(model, optimizer, "O1")
    with session.casting():
        loss = penalty_step(model, data() * 1e30, session.scaled_grad)
        with session.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert not session.last_step(optimizer).stepped
    assert session.loss_scale() == 2.0**15


def gan(step_of, generator, discriminator, opt_g, opt_d):
    """DCGAN's loop with three losses; ``step_of(loss, optimizer, loss_id)`` runs the backward."""
    losses = []
    for step in range(20):
        real, noise = data(step) + 2, data(1000 + step)
        opt_d.zero_grad()
        loss_real = F.binary_cross_entropy_with_logits(discriminator(real), torch.ones(16, 1))
        step_of(loss_real, opt_d, 0)
        fake = generator(noise)
        loss_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), torch.zeros(16, 1))
        step_of(loss_fake, opt_d, 1)
        opt_d.step()
        opt_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(discriminator(fake), torch.ones(16, 1))
        step_of(loss_g, opt_g, 2)
        opt_g.step()
        losses += [loss_real.item(), loss_fake.item(), loss_g.item()]
    return losses


def networks():
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    discriminator = critic(2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, discriminator)]
    return generator, discriminator, *optimizers


@pytest.mark.parametrize(("level", "tolerance"), [("O0", 0.0), ("O1", 0.05), ("O2", 0.05)])
def test_a_gan_with_three_loss_ids_trains_as_in_float32(level, tolerance):
    expected = gan(lambda loss, _optimizer, _loss_id: loss.backward(), *networks())
    generator, discriminator, opt_g, opt_d = networks()
    session = session_for([discriminator, generator], [opt_d, opt_g], level, num_losses=3, dynamic_init_scale=2.0**10)

    def step_of(loss, optimizer, loss_id):
        with session.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()

    with session.casting():
        losses = gan(step_of, generator, discriminator, opt_g, opt_d)
    assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance)
    if level != "O0":  # no scale, no count
        assert [entry["unskipped"] for entry in session.state_dict().values()] == [20, 20, 20]


def test_refusals():
    with pytest.raises(RuntimeError, match="internal Amp state has not been initialized"):
        amp.Session().scaled_grad(torch.ones(()), [])
    with pytest.raises(IndexError, match=r"^loss_id=3: there are 1 loss scalers"):
        session_for(nn.Linear(1, 1), None, "O1").scaled_grad(torch.ones(()), [], loss_id=3)
    with pytest.raises(TypeError, match=r"^scaled_grad got outputs of type int: expected a tensor"):
        session_for(nn.Linear(1, 1), None, "O1").scaled_grad(3, [])
    with pytest.raises(TypeError, match=r"^subscribe got 3: expected a function of one ScaleRecord"):
        amp.Session().subscribe(3)
