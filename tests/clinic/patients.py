"""Small training runs, each broken in one known way and healthy otherwise: what the clinic sees.

A ward is a function of (size, seed, broken) and makes a `Patient`. The names of wards are for people; nothing that
diagnoses is given one, nor a seed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amplab.amp import Session
from amplab.diagnose import Observation, StepObservation

__all__ = ["WARDS", "Patient", "Ward", "train"]

SIZES = (16, 40)
SEEDS = (0, 1, 2)


@dataclass
class Patient:
    """A run: what learns, from what, and how one step goes."""

    model: nn.Module
    optimizers: list
    amp: object
    batch: Callable[[int], tuple]
    loss: Callable[..., Tensor]
    step: Callable[["Patient", tuple], Tensor]
    steps: int = 12
    window: int | None = None
    last: tuple = ()
    last_scale: float = 1.0
    looked_at: str = ""


@dataclass(frozen=True)
class Ward:
    """How to make a patient, and what the first finding has to say of a broken one."""

    admit: Callable[[int, int, bool], Patient]
    name: str
    module: str


def train(patient: Patient) -> Observation:
    """Run the patient's steps and write down what a log would; keep the batch of the last step that was skipped."""
    run = Observation(growth_interval=patient.window)
    for number in range(patient.steps):
        scale = scale_of(patient.amp)
        rate = patient.optimizers[0].param_groups[0]["lr"]
        before = [each.detach().clone() for each in patient.model.parameters()]
        batch = patient.batch(number)
        loss = patient.step(patient, batch)
        after = scale_of(patient.amp)
        skipped = after < scale
        if skipped or patient.looked_at != "skipped":
            patient.last, patient.last_scale = batch, scale
            patient.looked_at = "skipped" if skipped else "last"
        assert not skipped or all(map(unchanged, before, patient.model.parameters()))
        run = run.then(StepObservation(number, loss.item(), scale, skipped, after, learning_rate=rate))
    return run


def unchanged(before: Tensor, after: Tensor) -> bool:
    return torch.equal(before.nan_to_num(), after.nan_to_num())


def scale_of(amp) -> float:
    if amp is None:
        return 1.0
    return amp.loss_scale() if isinstance(amp, Session) else amp.get_scale()


def apex_step(patient: Patient, batch: tuple) -> Tensor:
    """The loop that the documentation of apex shows."""
    for optimizer in patient.optimizers:
        optimizer.zero_grad()
    with patient.amp.casting():
        loss = patient.loss(*batch)
        with patient.amp.scale_loss(loss, patient.optimizers) as scaled:
            scaled.backward()
    for optimizer in patient.optimizers:
        optimizer.step()
    return loss.detach()


def apex(model, loss, batch, *, level="O1", optimizer=None, step=apex_step, window=2000, **options) -> Patient:
    """A patient under a session of its own."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    session = Session()
    given = model if isinstance(model, nn.Sequential) or not isinstance(model, nn.ModuleDict) else list(model.values())
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    session.initialize(
        given, optimizers, opt_level=level, verbosity=0, scale_window=window, on_collapse="warn", **options
    )
    return Patient(model, optimizers, session, batch, loss, step, window=window)


def gaussian(size: int, seed: int, *shape: int, scale: float = 1.0) -> Callable[[int], tuple[Tensor]]:
    """Batches of normal numbers, the same for the same step."""

    def batch(step: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        return (torch.randn(*(shape or (8, size)), generator=generator) * scale,)

    return batch


def padded(normal: Callable[[int], tuple[Tensor]]) -> Callable[[int], tuple[Tensor]]:
    """The same batches with rows of zeros at their end."""

    def batch(step: int) -> tuple[Tensor]:
        (x,) = normal(step)
        return (x * (torch.arange(len(x)) < 6)[:, None],)

    return batch


def regression(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Learn the mean of each row."""
    return lambda x: F.mse_loss(model(x).float().flatten(), x.reshape(len(x), -1).mean(1))


# -- 1: attention whose logits leave half


class Attention(nn.Module):
    """One head; the query is scaled down where it should be."""

    def __init__(self, size: int, scaled: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.factor = size**-0.5 if scaled else 1.0

    def forward(self, x):  # (rows, size)
        scores = (self.query(x) * self.factor) @ self.key(x).t()  # (rows, rows)
        return F.softmax(scores, dim=-1) @ self.value(x)


class Attends(nn.Module):
    def __init__(self, size: int, scaled: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.attention = Attention(size, scaled)
        self.head = nn.Linear(size, 1)
        if not scaled:
            nn.init.normal_(self.attention.query.weight, std=12.0)
            nn.init.normal_(self.attention.key.weight, std=40.0)

    def forward(self, x):
        return self.head(self.attention(self.norm(x)))


def attention_logits(size: int, seed: int, broken: bool) -> Patient:
    model = Attends(size, not broken)
    return apex(model, regression(model), gaussian(size, seed, 2 * size, size))


# -- 2: a norm by hand whose eps is 0 in half


class HandNorm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()


def vanishing_eps(size: int, seed: int, broken: bool) -> Patient:
    """Rows of padding are constant, and their variance is 0."""
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    model.add_module("norm", HandNorm(1e-8 if broken else 1e-3))
    model.add_module("head", nn.Linear(size, 1))
    return apex(model, regression(model), padded(gaussian(size, seed)), level="O2")


# -- 3: the logarithm of a softmax that reached 0


class Chooses(nn.Module):
    def __init__(self, size: int, by_hand: bool) -> None:
        super().__init__()
        self.body = nn.Linear(size, size)
        self.choice = Choice(by_hand)
        nn.init.normal_(self.body.weight, std=4.0)

    def forward(self, x):
        return self.choice(self.body(x))


class Choice(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, x):
        return torch.log(torch.softmax(x, -1)) if self.by_hand else torch.log_softmax(x, -1)


def log_of_softmax(size: int, seed: int, broken: bool) -> Patient:
    model = Chooses(size, broken)
    return apex(model, lambda x: F.nll_loss(model(x).float(), x.argmax(1)), gaussian(size, seed), level="O2")


# -- 4: binary cross entropy of a sigmoid in half


class Detector(nn.Module):
    def __init__(self, size: int, squashes: bool) -> None:
        super().__init__()
        self.body = nn.Linear(size, size)
        self.out = nn.Sequential(nn.Linear(size, 1), *([nn.Sigmoid()] if squashes else []))
        nn.init.normal_(self.out[0].weight, std=10.0)

    def forward(self, x):
        return self.out(self.body(x))


def bce_of_sigmoid(size: int, seed: int, broken: bool) -> Patient:
    model = Detector(size, broken)
    criterion = F.binary_cross_entropy if broken else F.binary_cross_entropy_with_logits
    return apex(
        model, lambda x: criterion(model(x).flatten(), (x.mean(1) > 0).float()), gaussian(size, seed), level="O2"
    )


# -- 5: the sum of a large plane


class Pool(nn.Module):
    def __init__(self, sums: bool) -> None:
        super().__init__()
        self.sums = sums

    def forward(self, x):
        return x.sum((2, 3)) if self.sums else x.mean((2, 3))


def sum_of_plane(size: int, seed: int, broken: bool) -> Patient:
    """A plane of 64 x 64 and more, of brightness about 40."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1))
    nn.init.constant_(model[0].weight, 1.0)
    model.add_module("pool", Pool(broken))
    model.add_module("norm", nn.LayerNorm(4))
    model.add_module("head", nn.Linear(4, 1))
    normal = gaussian(size, seed, 2, 1, 48 + size, 48 + size)

    def planes(step):
        (x,) = normal(step)
        return (x + 40,)

    return apex(model, lambda x: (model(x).float() - 1).square().mean(), planes, level="O2")


# -- 6: a learning rate that is too high


def high_rate(size: int, seed: int, broken: bool) -> Patient:
    model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0 if broken else 0.01)
    return apex(model, regression(model), gaussian(size, seed), optimizer=optimizer)


# -- 7: inf in the data


def inf_in_data(size: int, seed: int, broken: bool) -> Patient:
    model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))
    normal = gaussian(size, seed)

    def spoilt(step):
        (x,) = normal(step)
        if broken and step % 3 == 2:
            x[step % 8, seed] = float("inf")
        return (x,)

    return apex(model, regression(model), spoilt)


# -- 8: masks of -1e9


class Masked(nn.Module):
    """Attention over rows, of which some are padding; a mask that leaves a row nothing to look at."""

    def __init__(self, size: int, fill: float) -> None:
        super().__init__()
        self.scores = nn.Linear(size, size)
        self.masking = Masking(fill)
        self.head = nn.Linear(size, 1)

    def forward(self, x):
        kept = (x[:, :1] > -0.5).to(self.head.weight.dtype).expand(-1, x.shape[1])
        return self.head(torch.softmax(self.masking(self.scores(x), kept), -1) * x)


class Masking(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, scores, kept):
        return scores + (1 - kept) * self.fill


def large_mask(size: int, seed: int, broken: bool) -> Patient:
    model = Masked(size, -1e9 if broken else -1e4)
    return apex(model, regression(model), gaussian(size, seed), level="O2")


# -- 9: a parameter in no optimizer


def left_out(size: int, seed: int, broken: bool) -> Patient:
    model = nn.ModuleDict({"body": nn.Linear(size, size), "head": nn.Linear(size, 1)})
    parts = [model["body"]] if broken else model.values()
    optimizer = torch.optim.SGD([each for part in parts for each in part.parameters()], lr=0.01)
    network = nn.Sequential(model["body"], nn.Tanh(), model["head"])
    return apex(model, regression(network), gaussian(size, seed), optimizer=optimizer)


# -- 10: gradients that are clipped while scaled


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


# -- 11: a GAN with the wrong optimizer passed


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


# -- 12: a scale of 2^24 with a short window


def short_window(size: int, seed: int, broken: bool) -> Patient:
    model = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 1))
    options = {"dynamic_init_scale": 2.0**24, "window": 3} if broken else {}
    patient = apex(model, lambda x: (model(x).float() - 3).square().mean(), gaussian(size, seed), **options)
    patient.steps = 40
    return patient


# -- 13 and on


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


def late_where(size: int, seed: int, broken: bool) -> Patient:
    """sqrt at 0, thrown away by a where that comes after it: forward is finite, its gradient is not."""

    class Root(nn.Module):
        def forward(self, x):
            squares = x.square()
            inside = squares if broken else torch.where(squares > 0, squares, 1.0)
            return torch.where(squares > 0, inside.sqrt(), 0.0)

    model = nn.Sequential(nn.Linear(size, size, bias=False))
    model.add_module("root", Root())
    model.add_module("head", nn.Linear(size, 1))
    return apex(model, regression(model), padded(gaussian(size, seed)))


WARDS = {
    "attention logits": Ward(attention_logits, "logits-overflow-half", "attention"),
    "eps": Ward(vanishing_eps, "constant-vanishes-in-half", "norm"),
    "log of softmax": Ward(log_of_softmax, "log-of-zero", "choice"),
    "bce": Ward(bce_of_sigmoid, "bce-after-sigmoid", "out.1"),
    "sum of a plane": Ward(sum_of_plane, "reduction-overflows-half", "pool"),
    "learning rate": Ward(high_rate, "diverging", ""),
    "inf in data": Ward(inf_in_data, "nonfinite-batch", ""),
    "mask": Ward(large_mask, "constant-overflows-half", "masking"),
    "left out": Ward(left_out, "parameter-in-no-optimizer", "head"),
    "clipped scaled": Ward(clipped_scaled, "clips-scaled-gradients", ""),
    "gan": Ward(gan, "stepped-with-scaled-gradients", "generator"),
    "short window": Ward(short_window, "window-too-short", ""),
    "adam on half": Ward(adam_on_half, "adam-on-half", "0"),
    "step in block": Ward(step_in_block, "stepped-with-scaled-gradients", ""),
    "unscaled twice": Ward(unscaled_twice, "unscaled-twice", ""),
    "replaced parameters": Ward(replaced_parameters, "optimizer-of-other-parameters", ""),
    "late where": Ward(late_where, "gradient-undefined", "root"),
}
