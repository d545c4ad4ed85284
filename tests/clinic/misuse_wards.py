"""Runs whose fault is in what happens to gradients and averages between steps; each takes its mended line as code."""

import copy
from collections.abc import Callable

import torch
from patients import Patient, Ward, gaussian
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MISUSE_WARDS", "average_loss"]

PARTS = 4


def network(size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(size, 2 * size), nn.Tanh(), nn.Linear(2 * size, 1))


def loss_in_half(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def loss(x):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        return F.mse_loss(out.float().flatten(), x.mean(1) * 3 + 1)

    return loss


def patient(size: int, seed: int, step, *, batch: int = 16, rate: float = 0.01, **options) -> Patient:
    model = network(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=options.pop("momentum", 0.0))
    scaler = options.pop("scaler", None) or torch.amp.GradScaler("cpu", init_scale=2.0**12)
    return Patient(
        model, [optimizer], scaler, gaussian(size, seed, batch, size), loss_in_half(model), step, window=2000, **options
    )


def names_in(run: Patient) -> dict:
    return {
        "optimizer": run.optimizers[0],
        "optimizers": run.optimizers,
        "scaler": run.amp,
        "model": run.model,
        "copy": copy,
    }


# Gradients unscaled before they are complete


def unscaled_early(size: int, seed: int, broken: bool, mended: str = "scaler.unscale_(optimizer)") -> Patient:
    """Accumulates four parts; unscales to clip, after the first part or after the last."""

    def step(run: Patient, batch: tuple) -> Tensor:
        run.optimizers[0].zero_grad()
        for number, part in enumerate(batch[0].chunk(PARTS)):
            loss = run.loss(part) / PARTS
            run.amp.scale(loss).backward()
            if broken and number == 0:
                run.amp.unscale_(run.optimizers[0])
        if not broken:
            exec(mended, names_in(run))
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.amp.step(run.optimizers[0])
        run.amp.update()
        return run.loss(*batch).detach()

    return patient(size, seed, step)


# zero_grad between the parts


def zeroed_inside(size: int, seed: int, broken: bool, mended: str = "optimizer.zero_grad()") -> Patient:
    def step(run: Patient, batch: tuple) -> Tensor:
        if not broken:
            exec(mended, names_in(run))
        for part in batch[0].chunk(PARTS):
            if broken:
                run.optimizers[0].zero_grad(set_to_none=seed % 2 == 0)
            run.amp.scale(run.loss(part) / PARTS).backward()
        run.amp.step(run.optimizers[0])
        run.amp.update()
        return run.loss(*batch).detach()

    return patient(size, seed, step, rate=0.02)


def zeroed_inside_apex(size: int, seed: int, broken: bool) -> Patient:
    from patients import apex

    def step(run: Patient, batch: tuple) -> Tensor:
        (optimizer,) = run.optimizers
        optimizer.zero_grad()
        with run.amp.casting():
            for part in batch[0].chunk(PARTS):
                if broken:
                    optimizer.zero_grad()
                with run.amp.scale_loss(run.loss(part) / PARTS, optimizer) as scaled:
                    scaled.backward()
        optimizer.step()
        return run.loss(*batch).detach()

    model = network(size)
    return apex(model, lambda x: F.mse_loss(model(x).float().flatten(), x.mean(1)), gaussian(size, seed), step=step)


# Two losses with a scaler each


_TWO_LOSSES = "scaler.scale(first_loss + second_loss).backward()\nscaler.step(optimizer)\nscaler.update()"


def two_scalers(size: int, seed: int, broken: bool, mended: str = _TWO_LOSSES) -> Patient:
    second = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step(run: Patient, batch: tuple) -> Tensor:
        (optimizer,) = run.optimizers
        optimizer.zero_grad()
        first_loss, second_loss = (run.loss(part) for part in batch[0].chunk(2))
        if broken:
            run.amp.scale(first_loss).backward()
            second.scale(second_loss).backward()
            for scaler in (run.amp, second):
                scaler.step(optimizer)
                scaler.update()
        else:
            exec(mended, names_in(run) | {"first_loss": first_loss, "second_loss": second_loss})
        return (first_loss + second_loss).detach() / 2

    return patient(size, seed, step, momentum=0.9, rate=0.02)


# An average of the weights in half


def half_average(size: int, seed: int, broken: bool, mended: str = "average = copy.deepcopy(model).float()") -> Patient:
    run = patient(size, seed, None, rate=0.02)
    names = names_in(run)
    exec("average = copy.deepcopy(model).half()" if broken else mended, names)
    average = names["average"]

    def step(run: Patient, batch: tuple) -> Tensor:
        (optimizer,) = run.optimizers
        optimizer.zero_grad()
        loss = run.loss(*batch)
        run.amp.scale(loss).backward()
        run.amp.step(optimizer)
        run.amp.update()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), run.model.parameters(), strict=True):
                mean.mul_(0.999).add_(now.to(mean.dtype), alpha=0.001)
        return loss.detach()

    run.step, run.average, run.steps = step, average, 40
    return run


def average_loss(run: Patient, batch: tuple) -> float:
    """The loss of the averaged weights, computed in float32."""
    return loss_in_half(copy.deepcopy(run.average).float())(*batch).item()


# A norm whose groups have one element each


def constant_groups(
    size: int, seed: int, broken: bool, mended: str = "model.get_submodule('1').num_groups = 1"
) -> Patient:
    """A group for each channel leaves single numbers, of which a norm keeps nothing."""
    run = patient(size, seed, None, rate=0.05)
    model = nn.Sequential(nn.Linear(size, 32), nn.GroupNorm(32, 32), nn.ReLU(), nn.Linear(32, 1))
    run.model, run.loss = model, loss_in_half(model)
    run.optimizers = [torch.optim.SGD(model.parameters(), lr=0.05)]
    if not broken:
        exec(mended, names_in(run))

    def step(run: Patient, batch: tuple) -> Tensor:
        run.optimizers[0].zero_grad()
        loss = run.loss(*batch)
        run.amp.scale(loss).backward()
        run.amp.step(run.optimizers[0])
        run.amp.update()
        return loss.detach()

    run.step = step
    return run


# Gradients of two optimizers clipped together, of which one is unscaled


def clipped_together(
    size: int, seed: int, broken: bool, mended: str = "scaler.unscale_(optimizers[1])  # as well"
) -> Patient:
    """An optimizer for the first layer and one for the last, as for a pretrained network and its head."""

    def step(run: Patient, batch: tuple) -> Tensor:
        for each in run.optimizers:
            each.zero_grad()
        loss = run.loss(*batch)
        run.amp.scale(loss).backward()
        run.amp.unscale_(run.optimizers[0])
        if not broken:
            exec(mended, names_in(run))
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5, foreach=seed % 2 == 0)
        for each in run.optimizers:
            run.amp.step(each)
        run.amp.update()
        return loss.detach()

    run = patient(size, seed, step)
    run.optimizers = [torch.optim.SGD(run.model[place].parameters(), lr=0.02) for place in (0, 2)]
    return run


# A second loss that is not scaled


class TwoHeads(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.body, self.main, self.side = nn.Linear(size, size), nn.Linear(size, 1), nn.Linear(size, 1)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.main(hidden), self.side(hidden)


def unscaled_auxiliary(
    size: int, seed: int, broken: bool, mended: str = "scaler.scale(auxiliary_loss).backward()"
) -> Patient:
    model = TwoHeads(size)

    def losses(x):
        with torch.autocast("cpu", dtype=torch.float16):
            main, side = model(x)
        return F.mse_loss(main.float().flatten(), x.mean(1)), F.mse_loss(side.float().flatten(), x.mean(1) + 2)

    def step(run: Patient, batch: tuple) -> Tensor:
        run.optimizers[0].zero_grad()
        loss, auxiliary_loss = losses(*batch)
        run.amp.scale(loss).backward(retain_graph=True)
        if broken:
            auxiliary_loss.backward()
        else:
            exec(mended, names_in(run) | {"auxiliary_loss": auxiliary_loss})
        run.amp.step(run.optimizers[0])
        run.amp.update()
        return (loss + auxiliary_loss).detach()

    run = patient(size, seed, step)
    run.model, run.loss = model, lambda x: sum(losses(x))
    run.optimizers = [torch.optim.SGD(model.parameters(), lr=0.02)]
    return run


# Clipping that reaches no gradient


def clips_nothing(
    size: int,
    seed: int,
    broken: bool,
    mended: str = "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)",
) -> Patient:
    """The choice of what is clipped is made elsewhere, so the code of the step does not show it."""
    from patients import apex

    def step(run: Patient, batch: tuple) -> Tensor:
        (optimizer,) = run.optimizers
        optimizer.zero_grad()
        loss = run.loss(*batch)
        with run.amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        if broken:
            nn.utils.clip_grad_norm_(own, 0.1)
        else:
            exec(mended, {"torch": torch, "amp": run.amp, "optimizer": optimizer, "max_norm": 0.1})
        optimizer.step()
        return loss.detach()

    model = network(size)
    own = list(model.parameters())
    return apex(
        model, lambda x: F.mse_loss(model(x).float().flatten(), x.mean(1) + 3), gaussian(size, seed), level="O2",
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02), step=step,
    )  # fmt: skip


# One region of autocast around several steps: it keeps its half copies of the weights


def region_around_steps(size: int, seed: int, broken: bool, mended: str = "torch.clear_autocast_cache()") -> Patient:
    def step(run: Patient, batch: tuple) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            for part in batch[0].chunk(PARTS):
                run.optimizers[0].zero_grad()
                run.amp.scale(run.loss(part)).backward()
                run.amp.step(run.optimizers[0])
                run.amp.update()
                if not broken:
                    exec(mended, {"torch": torch})
        return run.loss(*batch).detach()

    return patient(size, seed, step)


# Gradients that a skipped step leaves behind


def left_over(size: int, seed: int, broken: bool, mended: str = "optimizer.zero_grad()") -> Patient:
    """The first steps overflow until the loss scale fits."""

    def step(run: Patient, batch: tuple) -> Tensor:
        (optimizer,) = run.optimizers
        loss = run.loss(*batch)
        run.amp.scale(loss).backward()
        before = run.amp.get_scale()
        run.amp.step(optimizer)
        run.amp.update()
        if not broken:
            exec(mended, names_in(run))
        elif run.amp.get_scale() >= before:
            optimizer.zero_grad(set_to_none=seed % 2 == 0)
        return loss.detach()

    return patient(size, seed, step, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24), rate=0.02)


# A scaler that is disabled


def disabled_scaler(
    size: int, seed: int, broken: bool, mended: str = "scaler = torch.amp.GradScaler(x.device.type)"
) -> Patient:
    """A small target, so that the gradients of all but the last layer are smaller than float16 can hold."""

    def loss(x):
        with torch.autocast("cpu", dtype=torch.float16):
            out = run.model(x)
        return F.mse_loss(out.float().flatten(), x.mean(1) * 2e-4)

    def step(run: Patient, batch: tuple) -> Tensor:
        run.optimizers[0].zero_grad()
        loss = run.loss(*batch)
        run.amp.scale(loss).backward()
        run.amp.step(run.optimizers[0])
        run.amp.update()
        return loss.detach()

    names = {"torch": torch, "x": torch.zeros(1)}
    exec("scaler = torch.amp.GradScaler('cpu', enabled=torch.cuda.is_available())" if broken else mended, names)
    run = patient(size, seed, step, scaler=names["scaler"])
    run.model = nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(size, size), nn.Tanh())))
    run.model.append(nn.Linear(size, 1))
    with torch.no_grad():
        run.model[-1].weight.mul_(1e-3)
        run.model[-1].bias.zero_()
    run.optimizers, run.loss = [torch.optim.Adam(run.model.parameters(), lr=3e-4, eps=1e-14)], loss
    return run


# A derivative of a scaled value in the loss


def scaled_slope(size: int, seed: int, broken: bool, mended: str = "slope = slope / scaler.get_scale()") -> Patient:
    """A gradient penalty, whose derivative is taken of a scaled value so that it does not underflow."""

    def loss(x):
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16):
            out = run.model(x)
        (slope,) = torch.autograd.grad(run.amp.scale(out.float().sum()), x, create_graph=True)
        if not broken:
            names = {"slope": slope, "scaler": run.amp}
            exec(mended, names)
            slope = names["slope"]
        return F.mse_loss(out.float().flatten(), x.mean(1)) + 0.1 * (slope.square().sum(1) - 1).square().mean()

    def step(run: Patient, batch: tuple) -> Tensor:
        run.optimizers[0].zero_grad()
        loss = run.loss(*batch)
        run.amp.scale(loss).backward()
        run.amp.step(run.optimizers[0])
        run.amp.update()
        return loss.detach()

    run = patient(size, seed, step, scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    run.loss = loss
    return run


MISUSE_WARDS = {
    "region around steps": Ward(region_around_steps, "stale-half-weights", ""),
    "scaled slope": Ward(scaled_slope, "loss-depends-on-scale", ""),
    "left over": Ward(left_over, "gradients-left-over", ""),
    "disabled scaler": Ward(disabled_scaler, "gradients-underflow", ""),
    "clipped together": Ward(clipped_together, "clips-scaled-gradients", "2"),
    "auxiliary loss": Ward(unscaled_auxiliary, "loss-not-scaled", "side"),
    "clips nothing": Ward(clips_nothing, "clips-model-gradients", ""),
    "unscaled early": Ward(unscaled_early, "unscaled-too-early", ""),
    "zero_grad inside": Ward(zeroed_inside, "zero-grad-in-accumulation", ""),
    "zero_grad inside, apex": Ward(zeroed_inside_apex, "zero-grad-in-accumulation", ""),
    "two scalers": Ward(two_scalers, "two-scalers", ""),
    "constant groups": Ward(constant_groups, "norm-of-constant", "1"),
    "half average": Ward(half_average, "average-in-half", ""),
}
