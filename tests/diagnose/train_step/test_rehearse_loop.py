"""Where one rehearsal cannot tell, another scale does: limits near the true norm, limits that move, scales too high."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab.amp import Session
from amplab.diagnose.rules.gradients import gradient_findings
from amplab.diagnose.train_step.rehearse_loop import rehearse, rehearse_loop

SCALERS = [torch.amp.GradScaler, amplab.GradScaler]


def loss_of(model, x):
    return F.mse_loss(model(x), torch.full((len(x), 1), 5.0))


def of_size(size, seed):
    """A model, its optimizer, its loss and the true norm of its gradients."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(size, 2 * size), nn.Tanh(), nn.Linear(2 * size, 1))
    x = torch.randn(32, size)
    loss_of(model, x).backward()
    norm = nn.utils.get_total_norm([each.grad for each in model.parameters()]).item()
    return model, torch.optim.SGD(model.parameters(), lr=0.01), lambda: loss_of(model, x), norm


NEAR_THE_NORM = (0.93, 0.96, 0.99, 0.999, 1.001, 1.01, 1.04, 1.07)
SIZES_AND_SEEDS = [(8, 0), (8, 1), (8, 2), (40, 0), (40, 1), (40, 2)]


@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize("scale", [8.0, 1000.0, 65536.0])
@pytest.mark.parametrize("clips", ["before", "after", "before, by the scale"])
def test_a_limit_near_the_true_norm_is_recognized_by_the_next_write(scaler_type, size, seed, scale, clips):
    """Clipping scaled gradients to nearly their true norm multiplies them by what unscaling does."""
    model, optimizer, loss_fn, norm = of_size(size, seed)
    scaler = scaler_type("cpu", init_scale=scale)
    for share in NEAR_THE_NORM:

        def step(limit=share * norm):
            optimizer.zero_grad()
            scaler.scale(loss_fn()).backward()
            if clips == "after":
                scaler.unscale_(optimizer)
            by = scaler.get_scale() if "scale" in clips else 1.0
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit * by)
            scaler.step(optimizer)
            scaler.update()

        found = gradient_findings(rehearse_loop(model, step, [optimizer], scaler=scaler))
        expected = ["clips-scaled-gradients"] if clips == "before" else []
        assert [each.name for each in found] == expected, share


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize("inside", [True, False])
def test_a_limit_near_the_true_norm_inside_of_scale_loss(level, size, seed, inside):
    model, optimizer, loss_fn, norm = of_size(size, seed)
    session = Session()
    session.initialize(model, optimizer, opt_level=level, loss_scale=1024.0, verbosity=0)

    def step(share):
        optimizer.zero_grad()
        with session.casting(), session.scale_loss(loss_fn(), optimizer) as scaled:
            scaled.backward()
            if inside:
                torch.nn.utils.clip_grad_norm_(model.parameters(), share * norm)
        if not inside:
            torch.nn.utils.clip_grad_norm_(session.master_params(optimizer), share * norm)
        optimizer.step()

    near = [share for share in NEAR_THE_NORM if level == "O1" or abs(share - 1) > 2e-3]  # half rounds those to 1
    try:
        for share in near:
            found = gradient_findings(rehearse_loop(model, lambda s=share: step(s), [optimizer], scaler=session))
            assert [each.name for each in found] == (["clips-scaled-gradients"] if inside else []), share
    finally:
        session.reset()


@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize("before", [True, False])
def test_a_limit_near_the_true_norm_of_what_was_accumulated(scaler_type, size, seed, before):
    model, optimizer, loss_fn, norm = of_size(size, seed)
    scaler = scaler_type("cpu")

    def step(share):
        optimizer.zero_grad()
        for _ in range(4):
            scaler.scale(loss_fn() / 4).backward()
        if not before:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), share * norm)
        scaler.step(optimizer)
        scaler.update()

    for share in (0.2, *NEAR_THE_NORM):
        found = gradient_findings(rehearse_loop(model, lambda s=share: step(s), [optimizer], scaler=scaler))
        assert [each.name for each in found] == (["clips-scaled-gradients"] if before else []), share


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("scale", [1000.0, 1024.0])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_unscaling_by_hand_alone_is_right(half, scale, clip):
    """In half as well, where a division rounds."""
    model, optimizer, _, _ = of_size(8, 0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    model.to(torch.half if half else torch.float)
    x = torch.randn(32, 8).to(torch.half if half else torch.float)

    def step():
        optimizer.zero_grad()
        (model(x).float().square().mean() * scaler.get_scale()).backward()
        for parameter in model.parameters():
            parameter.grad /= scaler.get_scale()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    assert gradient_findings(rehearse_loop(model, step, [optimizer], scaler=scaler)) == []


@pytest.mark.parametrize(("inside", "expected"), [(True, ["clips-scaled-gradients"]), (False, [])])
def test_a_scale_that_overflows_is_lowered_to_look_at_the_loop(inside, expected):
    model, optimizer, loss_fn, norm = of_size(8, 0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn()
        scaler.scale(loss).backward()
        if not inside:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm / 2)
        scaler.step(optimizer)
        scaler.update()

    assert rehearse(model, step, [optimizer], scaler=scaler).overflowed
    found = gradient_findings(rehearse_loop(model, step, [optimizer], scaler=scaler))
    assert [each.name for each in found] == expected
    assert scaler.get_scale() == 2.0**22


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_that_wait_in_another_model_are_kept(clears):
    """A discriminator accumulates while the generator is examined."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, discriminator)]

    def train():
        if clears:
            for optimizer in optimizers:
                optimizer.zero_grad()
        discriminator(generator(torch.ones(2, 4))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    discriminator(torch.ones(2, 4)).sum().backward()
    waiting = [each.grad for each in discriminator.parameters()]
    before = [each.clone() for each in waiting]
    amplab.doctor(generator, train_step=train, optimizer=optimizers)
    assert all(each.grad is grad for each, grad in zip(discriminator.parameters(), waiting, strict=True))
    assert all(map(torch.equal, waiting, before))
