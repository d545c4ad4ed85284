"""Accelerate with amplab's scaler and regions."""

import copy

import pytest
import torch
from torch.nn import functional as F

import amplab

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def forget():
    """Accelerate keeps its settings for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    forget()


def accelerator_with(scaler, **options):
    """As in TRAINERS.md: Accelerate casts nothing itself, and its optimizers step by the scaler."""
    forget()
    accelerator = accelerate.Accelerator(mixed_precision="no", cpu=True, **options)
    accelerator.scaler = scaler
    return accelerator


def trained(model, batches, scaler, *, accumulates=1, epochs=2, fused=False, start=None, saved=None):
    """A training loop in Accelerate's style: the losses, the skipped steps, the accelerator."""
    accelerator = accelerator_with(scaler, gradient_accumulation_steps=accumulates)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    if start is not None:
        accelerator.load_state(start)
    losses, skipped = [], []
    for _ in range(epochs):
        for x, y in batches:
            with accelerator.accumulate(model):
                with amplab.autocast(accelerator.device.type, torch.float16):
                    loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients and not fused:
                    accelerator.scaler.unscale_(optimizer.optimizer)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            skipped.append(accelerator.optimizer_step_was_skipped)
    if saved is not None:
        accelerator.save_state(saved)
    return losses, skipped, accelerator


@pytest.mark.parametrize("fused", [False, True], ids=["clipped", "fused"])
@pytest.mark.parametrize("accumulates", [1, 2])
def test_the_scaler_trains_as_torchs_does_to_the_bit(classifier, batches, overflowing, accumulates, fused):
    found = []
    for kind in (torch.amp.GradScaler, amplab.GradScaler):
        model = copy.deepcopy(classifier)
        losses, skipped, accelerator = trained(
            model, batches, kind(**overflowing), accumulates=accumulates, fused=fused
        )
        found.append((losses, skipped, list(model.parameters()), accelerator.scaler.get_scale()))
    (losses, skipped, params, scale), (our_losses, our_skipped, our_params, our_scale) = found
    assert our_losses == losses
    assert our_skipped == skipped
    assert any(skipped) != fused  # Accelerate asks whether `step` was called
    assert all(map(torch.equal, our_params, params))
    assert our_scale == scale


def test_regions_and_scaler_train(classifier, batches):
    losses, skipped, _ = trained(classifier, batches, amplab.GradScaler("cpu"), epochs=8)
    assert classifier.dtypes == (torch.float16, torch.float32)
    assert losses[-1] < 0.7 * losses[0]
    assert not any(skipped)


def test_a_resumed_run_goes_on_to_the_bit(classifier, batches, overflowing, tmp_path):
    whole, first, second = (copy.deepcopy(classifier) for _ in range(3))
    scalers = [amplab.GradScaler(**overflowing) for _ in range(3)]
    trained(whole, batches, scalers[0], epochs=4)
    trained(first, batches, scalers[1], epochs=2, saved=tmp_path)
    trained(second, batches, scalers[2], epochs=2, start=tmp_path)
    assert (tmp_path / "scaler.pt").exists()
    assert all(map(torch.equal, whole.parameters(), second.parameters()))
    assert scalers[0].state_dict() == scalers[2].state_dict()


def test_bfloat16_regions_need_no_scaler(classifier, batches):
    accelerator = accelerator_with(None)
    model, optimizer, batches = accelerator.prepare(
        classifier, torch.optim.AdamW(classifier.parameters(), lr=0.01), batches
    )
    losses = []
    for _ in range(8):
        for x, y in batches:
            optimizer.zero_grad()
            with amplab.autocast(accelerator.device.type, torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    assert classifier.dtypes == (torch.bfloat16, torch.float32)
    assert losses[-1] < 0.7 * losses[0]


def test_the_arguments_of_accelerates_scaler_fit():
    arguments = accelerate.GradScalerKwargs(init_scale=1024.0, growth_interval=5).to_kwargs()
    scaler = amplab.GradScaler("cpu", **arguments)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (1024.0, 5)


def test_the_loop_of_the_page(page, classifier, batches):
    scaler, optimizer = amplab.GradScaler("cpu"), torch.optim.AdamW(classifier.parameters(), lr=0.01)
    accelerator = accelerator_with(None, gradient_accumulation_steps=2)
    losses = [page("Accelerate").train(classifier, optimizer, batches, accelerator, scaler) for _ in range(2)]
    assert losses[1] < losses[0]
    assert scaler.get_scale() == 2.0**16


def test_a_watch_and_the_doctor_take_accelerates_optimizer(classifier, batches):
    scaler = amplab.GradScaler("cpu", init_scale=2.0**10)
    accelerator = accelerator_with(scaler)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(classifier, optimizer, batches)

    def train_step(x, y):
        optimizer.zero_grad()
        with amplab.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        return loss

    with amplab.watch(model, optimizer, scaler=scaler) as w:
        steps = sum(train_step(*batch) is not None for batch in w.batches(batches))
    assert len(w.history) == steps > 1
    found = amplab.doctor(model, next(iter(batches)), optimizer=optimizer, train_step=train_step)
    assert any("step" in each for each in found.looked_at)
