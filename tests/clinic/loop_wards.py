"""Runs whose fault is in the loop: the data, the rate, the optimizer, the scale, the order of the calls."""

from collections.abc import Callable

import torch
from patients import Patient, Ward, apex, gaussian, regression
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LOOP_WARDS"]


# A learning rate that is too high


def high_rate(size: int, seed: int, broken: bool) -> Patient:
    model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0 if broken else 0.01)
    return apex(model, regression(model), gaussian(size, seed), optimizer=optimizer)


# Inf in the data


def inf_in_data(size: int, seed: int, broken: bool) -> Patient:
    model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))
    normal = gaussian(size, seed)

    def spoilt(step):
        (x,) = normal(step)
        if broken and step % 3 == 2:
            x[step % 8, seed] = float("inf")
        return (x,)

    return apex(model, regression(model), spoilt)


# A parameter in no optimizer


def left_out(size: int, seed: int, broken: bool) -> Patient:
    model = nn.ModuleDict({"body": nn.Linear(size, size), "head": nn.Linear(size, 1)})
    parts = [model["body"]] if broken else model.values()
    optimizer = torch.optim.SGD([each for part in parts for each in part.parameters()], lr=0.01)
    network = nn.Sequential(model["body"], nn.Tanh(), model["head"])
    return apex(model, regression(network), gaussian(size, seed), optimizer=optimizer)


# Gradients that are clipped while scaled


def scaler_step(clip_first: bool) -> Callable[[Patient, tuple], Tensor]:
    """The loop that the documentation of torch shows, with its two lines the right way round or not."""

    def step(patient: Patient, batch: tuple) -> Tensor:
        (optimizer,) = patient.optimizers
        optimizer.zero_grad()
        loss = patient.loss(*batch)
        patient.amp.scale(loss).backward()
        if not clip_first:
            patient.amp.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(patient.model.parameters(), 0.1)
        patient.amp.step(optimizer)
        patient.amp.update()
        return loss.detach()

    return step


def clipped_scaled(size: int, seed: int, broken: bool) -> Patient:
    model = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 1))

    def loss(x):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        return F.mse_loss(out.float().flatten(), x.mean(1) + 3)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    return Patient(model, [optimizer], scaler, gaussian(size, seed), loss, scaler_step(broken), window=2000)


# A GAN with the wrong optimizer passed


def gan_step(wrong: bool) -> Callable[[Patient, tuple], Tensor]:
    def step(patient: Patient, batch: tuple) -> Tensor:
        generator, judge = patient.model["generator"], patient.model["judge"]
        of_generator, of_judge = patient.optimizers
        (x,) = batch
        with patient.amp.casting():
            of_judge.zero_grad()
            out = torch.cat([judge(x), judge(generator(x).detach())]).float()
            real = torch.arange(len(out)) < len(x)
            loss = F.binary_cross_entropy_with_logits(out.flatten(), real.float())
            with patient.amp.scale_loss(loss, of_judge) as scaled:
                scaled.backward()
            of_judge.step()
            of_generator.zero_grad()
            loss = patient.loss(x)
            with patient.amp.scale_loss(loss, of_judge if wrong else of_generator) as scaled:
                scaled.backward()
            of_generator.step()
        return loss.detach()

    return step


def gan(size: int, seed: int, broken: bool) -> Patient:
    model = nn.ModuleDict({"generator": nn.Linear(size, size), "judge": nn.Linear(size, 1)})
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-6 if broken else 0.01) for part in model.values()]

    def fool(x):
        out = model["judge"](model["generator"](x)).float().flatten()
        return F.binary_cross_entropy_with_logits(out, torch.ones(len(out)))

    return apex(model, fool, gaussian(size, seed), optimizer=optimizers, step=gan_step(broken))


def gan_unstepped(size: int, seed: int, broken: bool) -> Patient:
    """The generator's loss is followed by another step of the judge."""

    def step(patient: Patient, batch: tuple) -> Tensor:
        of_generator, of_judge = patient.optimizers
        (x,) = batch
        fake = patient.model["generator"](x).detach()
        judged = torch.cat([patient.model["judge"](x), patient.model["judge"](fake)]).flatten()
        of_judge.zero_grad()
        F.binary_cross_entropy_with_logits(judged, (torch.arange(len(judged)) < len(x)).float()).backward()
        of_judge.step()
        of_generator.zero_grad()
        loss = patient.loss(x)
        loss.backward()
        (of_judge if broken else of_generator).step()
        return loss.detach()

    model = nn.ModuleDict({"generator": nn.Linear(size, size), "judge": nn.Linear(size, 1)})
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in model.values()]

    def fool(x):
        out = model["judge"](model["generator"](x)).flatten()
        return F.binary_cross_entropy_with_logits(out, torch.ones(len(out)))

    return Patient(model, optimizers, None, gaussian(size, seed), fool, step)


# Statistics that one look at a bad sample has spoilt


def spoilt_statistics(size: int, seed: int, broken: bool) -> Patient:
    model = nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size), nn.ReLU(), nn.Linear(size, 1))
    patient = apex(model, regression(model), gaussian(size, seed))
    usual = patient.step

    def step(patient: Patient, batch: tuple) -> Tensor:
        """The usual one, and a prediction for what may be a bad sample, made without eval()."""
        loss = usual(patient, batch)
        sample = batch[0].clone()
        sample[seed, 0] = float("nan") if broken else 0.0
        with torch.no_grad(), patient.amp.casting():
            model(sample)
        return loss

    patient.step = step
    return patient


# A scale of 2^24 with a short window


def short_window(size: int, seed: int, broken: bool) -> Patient:
    model = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 1))
    options = {"dynamic_init_scale": 2.0**24, "window": 3} if broken else {}
    patient = apex(model, lambda x: (model(x).float() - 3).square().mean(), gaussian(size, seed), **options)
    patient.steps = 40
    return patient


def adam_on_half(size: int, seed: int, broken: bool) -> Patient:
    model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    level = {"level": "O3", "loss_scale": "dynamic"} if broken else {"level": "O2"}
    return apex(model, regression(model), gaussian(size, seed), optimizer=optimizer, **level)


def step_in_block(size: int, seed: int, broken: bool) -> Patient:
    def step(patient: Patient, batch: tuple) -> Tensor:
        (optimizer,) = patient.optimizers
        optimizer.zero_grad()
        with patient.amp.casting():
            loss = patient.loss(*batch)
            with patient.amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
                if broken:
                    optimizer.step()
            if not broken:
                optimizer.step()
        return loss.detach()

    model = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7 if broken else 0.01)
    return apex(model, regression(model), gaussian(size, seed), optimizer=optimizer, step=step)


def unscaled_twice(size: int, seed: int, broken: bool) -> Patient:
    def step(patient: Patient, batch: tuple) -> Tensor:
        (optimizer,) = patient.optimizers
        optimizer.zero_grad()
        loss = patient.loss(*batch)
        patient.amp.scale(loss).backward()
        for parameter in patient.model.parameters() if broken else ():
            parameter.grad.div_(patient.amp.get_scale())
        patient.amp.step(optimizer)
        patient.amp.update()
        return loss.detach()

    patient = clipped_scaled(size, seed, broken=False)
    patient.step = step
    return patient


def replaced_parameters(size: int, seed: int, broken: bool) -> Patient:
    """The optimizer is built, and then the model is made anew."""
    model = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if broken:
        for module in (model[0], model[2]):
            module.weight, module.bias = (nn.Parameter(each.detach().clone()) for each in (module.weight, module.bias))
    patient = clipped_scaled(size, seed, broken=False)

    def step(patient: Patient, batch: tuple) -> Tensor:
        optimizer.zero_grad()
        loss = patient.loss(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Patient(model, [optimizer], None, patient.batch, regression(model), step)


def lost_updates(size: int, seed: int, broken: bool) -> Patient:
    """Half weights, and steps that are smaller than half their last bit."""
    model = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    level = {"level": "O3", "loss_scale": "dynamic"} if broken else {"level": "O2"}
    return apex(
        model, lambda x: (model(x).float() - 1).square().mean(), gaussian(size, seed), optimizer=optimizer, **level
    )


LOOP_WARDS = {
    "learning rate": Ward(high_rate, "diverging", ""),
    "inf in data": Ward(inf_in_data, "nonfinite-batch", ""),
    "left out": Ward(left_out, "parameter-in-no-optimizer", "head"),
    "clipped scaled": Ward(clipped_scaled, "clips-scaled-gradients", ""),
    "gan": Ward(gan, "stepped-with-scaled-gradients", "generator"),
    "gan without a step": Ward(gan_unstepped, "optimizer-never-stepped", "generator"),
    "spoilt statistics": Ward(spoilt_statistics, "nonfinite-buffer", "1"),
    "short window": Ward(short_window, "window-too-short", ""),
    "adam on half": Ward(adam_on_half, "adam-on-half", "0"),
    "step in block": Ward(step_in_block, "stepped-with-scaled-gradients", ""),
    "unscaled twice": Ward(unscaled_twice, "unscaled-twice", ""),
    "replaced parameters": Ward(replaced_parameters, "optimizer-of-another-model", ""),
    "lost updates": Ward(lost_updates, "updates-rounded-away", ""),
}
