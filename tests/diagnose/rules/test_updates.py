"""Steps that 16-bit weights round away are counted against the same step in float32; ordinary rounding is let be."""

import math

import pytest
import torch
from rateless_optimizers import RATELESS
from torch import nn
from torch.nn import functional as F

import amplab
from amplab.amp import Session
from amplab.diagnose import doctor
from amplab.diagnose.observed_step.values import observe_step
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.rules.updates import never_stepped, optimizers_left_out, updates_bound_to_be_lost, updates_lost
from amplab.diagnose.train_step.rehearse_loop import rehearse

SIZES_AND_SEEDS = [(16, 0), (16, 1), (40, 2), (40, 3)]
KINDS = {
    "sgd": lambda params, rate: torch.optim.SGD(params, lr=rate),
    "momentum": lambda params, rate: torch.optim.SGD(params, lr=rate, momentum=0.9, weight_decay=1e-4),
    "adam": lambda params, rate: torch.optim.AdamW(params, lr=rate / 10, eps=1e-4),
    "fused": lambda params, rate: amplab.optimizers.FusedSGD(params, lr=rate, momentum=0.9),
}

PLAIN = Api(ApiStyle.PLAIN)


def loop(size, seed, dtype, kind, rate):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(size, 2 * size), nn.Tanh(), nn.Linear(2 * size, 4)).to(dtype)
    optimizer = KINDS[kind](model.parameters(), rate)
    x, y = torch.randn(32, size).to(dtype), torch.arange(32) % 4

    def loss_fn():
        return F.cross_entropy(model(x).float(), y)

    def step():
        optimizer.zero_grad()
        loss_fn().backward()
        optimizer.step()

    return model, optimizer, loss_fn, step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize("trained", [0, 3])
def test_updates_below_half_the_last_bit(kind, dtype, size, seed, trained):
    """Both ways of looking find it, and the count is that of the weights which did not move.

    Some updates are too small for float32 as well, and are not counted.
    """
    model, optimizer, loss_fn, step = loop(size, seed, dtype, kind, 1e-5)
    for _ in range(trained):
        step()
    weights = [each.detach().clone() for each in model.parameters()]
    found = doctor(model, step=loss_fn, train_step=step, optimizer=optimizer).named("updates-rounded-away")
    assert [(each.severity, each.certainty) for each in found] == [("warning", "certain")]
    assert all(map(torch.equal, weights, model.parameters()))
    (guessed,) = updates_bound_to_be_lost(model, [optimizer], observe_step(model, loss_fn))
    step()
    still = sum(int(((a == b) & (a != 0)).sum()) for a, b in zip(weights, model.parameters(), strict=True))
    assert found[0].evidence["unmoved"] <= still
    assert found[0].evidence["unmoved"] >= 0.9 * still
    assert guessed.evidence["unmoved"] <= still or guessed.certainty == "possible"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
def test_updates_that_weights_hold(kind, dtype, size, seed):
    model, optimizer, loss_fn, step = loop(size, seed, dtype, kind, 0.3)
    for _ in range(3):
        assert not doctor(model, step=loss_fn, train_step=step, optimizer=optimizer).named("updates-rounded-away")
        step()


@pytest.mark.parametrize("kind", RATELESS)
@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_an_optimizer_without_a_learning_rate_is_examined(kind, factor):
    """No bound is known of its updates; an inf for which other learning rates are tried in float32 is found."""
    model, _, loss_fn, _ = loop(16, 0, torch.float16, "sgd", 1e-5)
    optimizer = kind(model.parameters())
    found = doctor(model, step=lambda: loss_fn() * factor, optimizer=optimizer)
    assert not found.named("updates-rounded-away")
    assert any(each.severity == "error" for each in found) == math.isinf(factor)
    assert not [*updates_bound_to_be_lost(model, [optimizer], observe_step(model, loss_fn))]


@pytest.mark.parametrize("rate", [1e-5, 0.1])
def test_the_step_beside_it_is_the_one_in_float32(rate):
    """Oracle: the same step by hand in float32 and float64, and torch's own step for what moved."""
    model, optimizer, _, step = loop(16, 0, torch.float16, "sgd", rate)
    (lost,) = rehearse(model, step, [optimizer]).lost
    weights = [each.detach().clone() for each in model.parameters()]
    step()
    grads = [each.grad.float() for each in model.parameters()]
    wide = [was.float().add(grad, alpha=-rate) - was.float() for was, grad in zip(weights, grads, strict=True)]
    still = [now == was for now, was in zip(model.parameters(), weights, strict=True)]
    update, lost_too = torch.cat([each.flatten() for each in wide]).double(), torch.cat([e.flatten() for e in still])
    assert lost.updated == int((update != 0).sum())
    assert lost.unmoved == int(((update != 0) & lost_too).sum())
    share = update.masked_fill(~lost_too, 0).norm() / update.norm()
    assert lost.norm_share == pytest.approx(share.item(), rel=1e-6)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_masters_and_float32_weights_lose_nothing(level):
    model, optimizer, _, _ = loop(16, 0, torch.float32, "sgd", 1e-5)
    session = Session()
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(8, 16)

    def loss_fn():
        return model(x).float().square().mean()

    def step():
        optimizer.zero_grad()
        with session.casting(), session.scale_loss(loss_fn(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    try:
        for given in ({"train_step": step}, {"step": loss_fn}):
            found = doctor(model, optimizer=optimizer, scaler=session, **given)
            assert bool(found.named("updates-rounded-away")) == (level == "O3")
    finally:
        session.reset()


@pytest.mark.parametrize("level", [None, "O3"])
def test_pasted_the_remedy_makes_them_add_up(level):
    model, optimizer, *_ = loop(16, 0, torch.float32 if level else torch.float16, "sgd", 1e-4)
    if level:
        amplab.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x, y = torch.randn(32, 16), torch.arange(32) % 4
    dtype = next(model.parameters()).dtype
    found = doctor(model, step=lambda: F.cross_entropy(model(x.to(dtype)).float(), y), optimizer=optimizer)
    names = {"amp": amplab.amp, "model": model, "optimizer": optimizer}
    try:
        exec(found.named("updates-rounded-away")[0].remedy, names)
        before = [each.detach().clone() for each in amplab.amp.master_params(optimizer)]
        with amplab.amp.scale_loss(F.cross_entropy(model(x).float(), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        moved = [
            (a != b).double().mean().item() for a, b in zip(before, amplab.amp.master_params(optimizer), strict=True)
        ]
        assert min(moved) > 0.95
    finally:
        amplab.amp.reset()


def test_an_optimizer_that_wants_a_closure_is_let_be():
    model, _, loss_fn, _ = loop(16, 0, torch.bfloat16, "sgd", 1e-5)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-6, max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = loss_fn()
        loss.backward()
        return loss

    assert list(updates_lost(rehearse(model, lambda: optimizer.step(closure), [optimizer]).lost)) == []


def gan_step(model, optimizers, stepped, *, zeroed=True):
    def step():
        for optimizer in optimizers if zeroed else ():
            optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        for number in stepped:
            optimizers[number].step()

    return step


@pytest.mark.parametrize(("stepped", "left_out"), [((0, 1), []), ((1,), [0]), ((0,), [1]), ((), [])])
def test_an_optimizer_that_a_step_leaves_out(stepped, left_out):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    found = list(optimizers_left_out(rehearse(model, gan_step(model, optimizers, stepped), optimizers), PLAIN))
    assert [each.evidence["optimizer"] for each in found] == left_out
    for each in found:
        assert (each.name, each.module, each.certainty) == ("optimizer-never-stepped", str(left_out[0]), "likely")
        before = [weight.detach().clone() for weight in model[left_out[0]].parameters()]
        gan_step(model, optimizers, stepped)()
        exec(each.remedy, {"optimizers": optimizers})
        assert not torch.equal(before[0], model[left_out[0]].weight)


def test_an_optimizer_without_gradients_need_not_step():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]

    def step():  # a critic's, several of which come before the generator's
        optimizers[1].zero_grad()
        model[1](model[0](torch.ones(2, 4)).detach()).square().mean().backward()
        optimizers[1].step()

    assert not list(optimizers_left_out(rehearse(model, step, optimizers), PLAIN))


class Adversaries:
    """A critic whose step does not detach what it reads, and a generator with a step of its own."""

    def __init__(self):
        self.model = nn.ModuleDict({"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 1)})
        self.of_critic, self.of_generator = (
            torch.optim.SGD(self.model[part].parameters(), lr=0.1) for part in ("critic", "generator")
        )

    def loss(self):
        return self.model["critic"](self.model["generator"](torch.ones(2, 4))).square().mean()

    def critic_step(self):
        self.of_critic.zero_grad()
        self.loss().backward()
        self.of_critic.step()

    def whole_step(self):
        self.of_generator.zero_grad()
        self.critic_step()


@pytest.mark.parametrize(("step", "severity"), [("critic_step", "note"), ("whole_step", "error")])
def test_a_step_that_does_not_name_an_optimizer_may_be_anothers(step, severity):
    both = Adversaries()
    found = doctor(both.model, train_step=getattr(both, step), optimizer=[both.of_critic, both.of_generator])
    assert [(each.name, each.severity) for each in found] == [("optimizer-never-stepped", severity)]


def test_a_skipped_optimizer_is_not_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    scaler = torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(model(torch.full((2, 4), torch.inf)).square().mean()).backward()
        scaler.step(optimizers[0])
        optimizers[1].step()
        scaler.update()

    assert not list(optimizers_left_out(rehearse(model, step, optimizers, scaler=scaler), PLAIN))


@pytest.mark.parametrize(("steps", "severity"), [(8, "note"), (100, "note"), (101, "error")])
def test_a_critic_may_begin_with_steps_of_its_own(steps, severity):
    found = never_stepped(0, ["generator.weight"], PLAIN, {"parameters": 1, "steps_of_others": steps})
    assert (found.severity, found.certainty) == (severity, "likely" if severity == "error" else "possible")
