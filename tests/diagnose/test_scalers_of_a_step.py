"""A loss that trains a discriminator by itself, with a GradScaler: a tool, and a watch, leave both as they were."""

import pytest
import torch
from torch import nn

import amplab

KINDS = [torch.amp.GradScaler, amplab.GradScaler]


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
@pytest.mark.parametrize("tool", [amplab.first_nonfinite, amplab.doctor])
def test_a_tool_restores_the_scalers_that_the_step_names(tool, kind, own):
    assert same(trained(Gan(kind, own=own), ask(tool)), trained(Gan(kind, own=own)))


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
