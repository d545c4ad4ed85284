"""GradScalers, buffers and generators that a step uses besides the model are as before after a tool, and in a watch."""

import contextlib
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import amplab

KINDS = [torch.amp.GradScaler, amplab.GradScaler]
TOOLS = [amplab.first_nonfinite, amplab.doctor, amplab.xray, amplab.gradient_range]


class Gan:
    """A generator, and a discriminator that `step` trains under `scaler` or one of its own."""

    def __init__(self, kind, *, own=False, fused=False):
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
        self.of_generator = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        self.of_discriminator = torch.optim.Adam(self.discriminator.parameters(), lr=0.01, fused=fused)
        self.scaler = kind("cpu", init_scale=1024.0, growth_interval=4)
        self.other = kind("cpu", init_scale=1024.0, growth_interval=4) if own else self.scaler
        self.noise = torch.randn(3, 4)

    def step(self):
        self.of_discriminator.zero_grad()
        scaled = self.other.scale(self.discriminator(self.generator(self.noise).detach()).square().mean())
        scaled.backward()
        self.other.step(self.of_discriminator)
        if self.other is not self.scaler:
            self.other.update()
        return self.discriminator(self.generator(self.noise)).mean()

    def iteration(self, factor=1.0):
        self.of_generator.zero_grad()
        loss = self.step() * factor
        self.scaler.scale(loss).backward()
        self.scaler.step(self.of_generator)
        self.scaler.update()

    def state(self):
        weights = [each.detach().clone() for each in (*self.generator.parameters(), *self.discriminator.parameters())]
        return weights, self.scaler.get_scale(), self.other.get_scale()


def same(found, expected):
    return found[1:] == expected[1:] and all(map(torch.equal, found[0], expected[0]))


def trained(gan, examine=None):
    for number in range(9):
        gan.iteration(float("inf") if number == 3 else 1.0)
        if examine is not None and number in (2, 3):
            examine(gan)
    return gan.state()


def ask(tool, **options):
    def examine(gan):
        tool(gan.generator, step=gan.step, **options)

    return examine


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_restores_the_scalers_that_the_step_names(tool, kind, own):
    assert same(trained(Gan(kind, own=own), ask(tool)), trained(Gan(kind, own=own)))


class Plain:
    """A loop in which a tool is called at one point of an iteration."""

    def __init__(self, kind, fused):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, fused=fused)
        self.scaler = kind("cpu", init_scale=1024.0, growth_interval=2)
        self.batch = torch.randn(3, 4)

    def iteration(self, tool=None, at=None, factor=1.0):
        def point(name):
            if tool is not None and at == name:
                tool(self)

        self.optimizer.zero_grad()
        scaled = self.scaler.scale(self.model(self.batch).square().mean() * factor)
        point("before backward")
        scaled.backward()
        point("before unscale_")
        self.scaler.unscale_(self.optimizer)
        point("before step")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        point("before update")
        self.scaler.update()


def whole_iteration(plain):
    amplab.doctor(plain.model, train_step=plain.iteration, optimizer=plain.optimizer, scaler=plain.scaler)


def loss_that_trains(plain):
    """A loss that takes a step of the same optimizer under the same scaler."""

    def step():
        plain.iteration()
        return plain.model(plain.batch).mean()

    amplab.xray(plain.model, step=step)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", ["before backward", "before unscale_", "before step", "before update"])
@pytest.mark.parametrize("tool", [whole_iteration, loss_that_trains])
def test_a_tool_within_an_iteration_leaves_its_scaler(tool, at, kind, fused):
    expected, examined = Plain(kind, fused), Plain(kind, fused)
    scale = None
    for number in range(9):
        factor = float("inf") if number == 4 else 1.0
        expected.iteration(factor=factor)
        examined.iteration(tool if number in (1, 4) else None, at, factor)
        scale = scale if scale is not None else examined.scaler._scale
    assert examined.scaler._scale is scale  # the tensor that a captured graph reads
    assert examined.scaler.get_scale() == expected.scaler.get_scale()
    assert examined.scaler._get_growth_tracker() == expected.scaler._get_growth_tracker()
    for found, wanted in zip(examined.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tool", [amplab.xray, amplab.gradient_range, amplab.first_nonfinite])
def test_a_scaler_leaves_nothing_on_a_fused_optimizer(tool, kind):
    """It gives it grad_scale and found_inf for one step, and each later step would divide by the scale."""
    gan = Gan(kind, own=True, fused=True)
    gan.iteration()
    ask(tool)(gan)
    assert {"grad_scale", "found_inf"}.isdisjoint(vars(gan.of_discriminator))


@pytest.mark.filterwarnings("ignore:amplab.watch:RuntimeWarning")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_watch_that_runs_a_step_again_restores_them(kind, own):
    gan = Gan(kind, own=own)
    with amplab.watch(gan.generator, gan.of_generator, scaler=gan.scaler, step=gan.step) as w:
        found = trained(gan)
    assert w.history.skip_count == 1
    assert same(found, trained(Gan(kind, own=own)))


class Center(nn.Module):
    """A criterion with a running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(()))

    def forward(self, output):
        self.center = self.center * 0.9 + output.detach().float().mean() * 0.1
        return (output.float() - self.center).square().mean()


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_leaves_the_buffers_of_other_modules_and_the_generators_that_a_step_uses(tool):
    torch.manual_seed(0)
    encoder, projector = nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), torch.jit.script(nn.BatchNorm1d(4)))
    criterion, noise, numbers = Center(), torch.Generator().manual_seed(1), np.random.default_rng(2)
    batch = torch.randn(8, 4)

    def step():
        with_noise = encoder(batch) + torch.randn(8, 4, generator=noise) + float(numbers.normal())
        return criterion(projector(with_noise))

    def state():
        modules = [each.clone() for module in (criterion, projector) for each in module.buffers()]
        return [*modules, noise.get_state(), torch.tensor(numbers.bit_generator.state["state"]["state"] % 2**62)]

    before, center = state(), criterion.center
    tool(encoder, step=step)
    assert criterion.center is center
    assert all(map(torch.equal, state(), before))
    tool(nn.Linear(4, 4), batch, loss=criterion)
    assert all(map(torch.equal, state(), before))


@pytest.mark.filterwarnings("ignore:amplab.watch:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_watch_that_runs_a_step_again_leaves_them(kind):
    def trained(*, watched):
        torch.manual_seed(0)
        encoder, projector, noise = nn.Linear(4, 4), nn.BatchNorm1d(4), torch.Generator().manual_seed(1)
        optimizer, scaler = torch.optim.SGD(encoder.parameters(), lr=0.1), kind("cpu", init_scale=1024.0)
        factor, criterion = [1.0], Center()

        def step():
            drawn = torch.randn(8, 4, generator=noise)
            return criterion(projector(encoder(drawn)) * encoder.weight.sum()) * factor[0]

        watch = amplab.watch(encoder, optimizer, scaler=scaler, step=step) if watched else contextlib.nullcontext()
        losses = []
        with watch:
            for _ in watch.batches(range(9)) if watched else range(9):
                factor[0] = float("inf") if len(losses) in (2, 5) else 1.0
                optimizer.zero_grad()
                loss = step()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
        return losses, int(projector.num_batches_tracked)

    assert trained(watched=True) == trained(watched=False)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_step_names_may_be_gone(tool):
    class Trainer:
        pass

    gone, model = Trainer(), nn.Linear(4, 4)
    settings = types.SimpleNamespace(parent=weakref.proxy(gone))
    del gone
    assert tool(model, step=lambda: (settings, model(torch.ones(2, 4)).square().mean())[1]) is not NotImplemented
