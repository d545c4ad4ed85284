"""A watch records of random loops what lists kept by hand have: losses, loss scales, skips; and it changes no bit.

What a step has is told by the gradients and weights themselves: a step is skipped if no weight changes, and its losses
are those whose backwards have added to the gradients that it uses.
"""

import math
import random
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import nn

import amplab
from amplab import amp
from amplab.lab import watch

SCALERS = {"torch": torch.amp.GradScaler, "amplab": amplab.GradScaler, "blocks": amplab.GradScaler}
LOOPS = 40  # of each scaling
STEPS = 6


@dataclass
class Plan:
    """What a loop is like; drawn from a number."""

    scaling: str
    number: int
    gives: bool = True  # the losses to the watch
    parts: int = 1  # micro-batches
    set_to_none: bool = True
    zeroes: str = "first"  # "first" in an iteration, "late": before the first backward, "last": after the step
    order: str = "c"  # of the networks in an iteration; the critic is the first of the watch
    own_scalers: bool = False  # each network has its own
    updates: str = "once"
    has_batches: bool = True
    delays: bool = False  # apex: all but the last backward with delay_unscale
    level: str = "O0"
    is_penalised: bool = False  # the critic's loss has a gradient penalty
    ascends: bool = False  # sharpness-aware: a first backward moves the critic's weights, the second is for the step
    ascents: frozenset | None = None  # if each ends with unscale_ and update: the iterations in which they overflow
    gives_ascent: bool = False  # only the loss of the first backward
    clips: bool = False  # the norm of its gradients
    closes: str = ""  # without a scaler: the critic's optimizer steps with a closure: "SGD", "LBFGS" runs it again
    given_up: dict[int, int] = field(default_factory=dict)  # iterations, and after how many backwards
    bad: frozenset = frozenset()  # iterations whose last micro-batch overflows

    @classmethod
    def drawn(cls, scaling, number):
        draw = random.Random(f"{scaling} {number}")
        plan = cls(scaling, number, parts=draw.choice((1, 1, 2, 3)), set_to_none=draw.random() < 0.6)
        plan.gives = scaling in ("none", "torch") or draw.random() < 0.5
        plan.zeroes = draw.choice(("first", "late", "last"))
        plan.order = draw.choice(("c", "c", "cg", "gc"))
        plan.own_scalers = scaling in ("torch", "amplab") and draw.random() < 0.5
        plan.updates = draw.choice(("once", "each"))
        plan.has_batches = draw.random() < 0.5
        plan.delays = scaling == "apex" and draw.random() < 0.4
        plan.level = draw.choice(("O0", "O1", "O2")) if scaling == "apex" else "O0"
        steps = range(STEPS)
        plan.given_up = {step: draw.randint(0, plan.parts) for step in steps if draw.random() < 0.25}
        plan.bad = frozenset(step for step in steps if draw.random() < 0.25 and step not in plan.given_up)
        plan.is_penalised, plan.ascends, plan.clips = (draw.random() < 0.3 for _ in range(3))
        plan.closes = draw.choice(("", "SGD", "LBFGS")) if scaling == "none" and plan.zeroes == "first" else ""
        if plan.closes:
            plan.given_up, plan.ascends, plan.clips = {}, False, False
        if plan.ascends and scaling in ("torch", "amplab") and draw.random() < 0.6:
            plan.ascents = frozenset(step for step in steps if draw.random() < 0.3)
            plan.gives_ascent = scaling == "torch" and draw.random() < 0.5
        if plan.zeroes == "last":  # else another network, or an iteration given up, would leave gradients to the next
            plan.given_up, plan.order = {}, "c"
        return plan


class Loop:
    """One loop; `told` has what a person would note: loss, loss scale, whether the step was skipped."""

    def __init__(self, plan):
        torch.manual_seed(plan.number)
        self.plan, self.told = plan, []
        self.models = {"c": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), "g": nn.Linear(4, 4)}
        self.optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.01) for name, each in self.models.items()}
        make = SCALERS.get(plan.scaling)
        scaler = make and make("cpu", init_scale=64.0)
        if plan.closes == "LBFGS":
            self.optimizers["c"] = torch.optim.LBFGS(self.models["c"].parameters(), lr=0.01, max_iter=3)
        self.scalers = {name: make("cpu", init_scale=64.0) if plan.own_scalers else scaler for name in "cg"}
        self.batches = [torch.randn(plan.parts, 8, 4) for _ in range(STEPS)]
        self.losses = []  # those in the gradients of the critic
        self.overflowed_at = None  # apex: the scale of the first backward that overflowed

    def run(self, *, is_watched=True):
        plan, models, optimizers = self.plan, list(self.models.values()), list(self.optimizers.values())
        if plan.scaling == "apex":
            amp.initialize(models, optimizers, opt_level=plan.level, loss_scale="dynamic", num_losses=2, verbosity=0)
        scaler = amp if plan.scaling == "apex" else self.scalers["c"]
        try:
            if not is_watched:
                self.train(self.batches, lambda loss: loss)
                return None
            with watch(models[0], optimizers, scaler=scaler) as w:
                batches = w.batches(self.batches) if plan.has_batches else self.batches
                self.train(batches, w.loss if plan.gives else lambda loss: loss)
            return w
        finally:
            amp.reset()

    def train(self, batches, give):
        for step, batch in enumerate(batches):
            stepped = [self.iteration(step, name, batch, give) for name in self.plan.order]
            if self.plan.updates == "once" and self.plan.scaling in SCALERS:
                used = {id(self.scalers[name]): self.scalers[name] for name in self.plan.order}
                for scaler in used.values() if all(stepped) else ():
                    scaler.update()

    def iteration(self, step, name, batch, give):
        """Train one network; return whether its optimizer was called for."""
        plan = self.plan
        if plan.closes and name == "c":
            self.take_step(name, partial(self.closure, batch, give))
            return True
        backwards = plan.given_up.get(step, plan.parts)
        if plan.zeroes == "first":
            self.zero(name)
        ascended = plan.ascends and name == "c" and plan.zeroes == "first" and self.ascend(step, batch[0], give)
        if ascended and plan.gives_ascent:
            give = nn.Identity()
        for number, x in enumerate(batch):
            bad = step in plan.bad and number == plan.parts - 1
            loss = give(self.loss_of(name, x, overflows=bad))
            if number == 0 and plan.zeroes == "late":
                self.zero(name)
            if number == backwards:
                return False
            delays = plan.delays and number < plan.parts - 1
            self.backward(loss, name, delays=delays)
            if name == "c" and not (ascended and plan.gives_ascent):
                self.losses.append(loss.item())
        for each, before in ascended or ():
            each.data.copy_(before)
        if step in plan.given_up:
            return False
        self.clip(name)
        self.take_step(name)
        if plan.zeroes == "last":
            self.zero(name)
        return True

    def zero(self, name):
        self.optimizers[name].zero_grad(set_to_none=self.plan.set_to_none)
        if name == "c":
            self.losses = []
            self.overflowed_at = None if self.plan.set_to_none else self.overflowed_at  # as `amplab.amp` documents it

    def closure(self, batch, give):
        had = self.losses  # of the first run, which is at the weights before the step
        self.zero("c")
        losses = [give(self.loss_of("c", x, overflows=False)) for x in batch]
        for loss in losses:
            loss.backward()
        self.losses = had or [loss.item() for loss in losses]
        return sum(losses)

    def ascend(self, step, x, give):
        """Move the critic's parameters after a backward; return each with what it was."""
        ascents, scaler = self.plan.ascents, self.scalers["c"]
        loss = give(self.loss_of("c", x, overflows=ascents is not None and step in ascents))
        self.backward(loss, "c", delays=False)
        if ascents is not None:
            scaler.unscale_(self.optimizers["c"])
            scaler.update()
        moved = [(each, each.detach().clone()) for each in self.models["c"].parameters()]
        for each, _ in moved:
            each.data.mul_(1.01)  # by how much is of no matter here
        self.zero("c")
        self.losses = [loss.item()] if self.plan.gives_ascent else []
        return moved

    def clip(self, name):
        plan, optimizer = self.plan, self.optimizers[name]
        if not plan.clips:
            return
        if plan.scaling in ("torch", "amplab"):
            self.scalers[name].unscale_(optimizer)
        parameters = amp.master_params(optimizer) if plan.scaling == "apex" else self.models[name].parameters()
        nn.utils.clip_grad_norm_(parameters, 0.1)

    def loss_of(self, name, x, *, overflows):
        critic, generator = self.models["c"], self.models["g"]
        x = x.clone().requires_grad_(self.plan.is_penalised)
        score = critic(x if name == "c" else generator(x)).float()
        loss = score.square().mean()
        if self.plan.is_penalised and name == "c":
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            loss = loss + (slope.square().sum(1) - 1).square().mean()
        return loss * math.inf if overflows and self.plan.scaling != "none" else loss

    def backward(self, loss, name, *, delays):
        plan, optimizer = self.plan, self.optimizers[name]
        if plan.scaling == "apex":
            scale = self.scale(name)
            with amp.scale_loss(loss, optimizer, loss_id="cg".index(name), delay_unscale=delays) as scaled:
                scaled.backward()
            if name == "c" and self.scale(name) < scale and self.overflowed_at is None:
                self.overflowed_at = scale
        elif plan.scaling == "blocks":
            with self.scalers[name].scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            (loss if plan.scaling == "none" else self.scalers[name].scale(loss)).backward()

    def take_step(self, name, *closure):
        plan, optimizer = self.plan, self.optimizers[name]
        before = [each.detach().clone() for each in self.models[name].parameters()]
        scale = self.scale(name)
        optimizer.step(*closure) if plan.scaling in ("none", "apex") else self.scalers[name].step(optimizer)
        pairs = zip(before, self.models[name].parameters(), strict=True)
        if name == "c":
            skipped = all(torch.equal(old, new) for old, new in pairs)
            self.told.append(f"{sum(self.losses)} {(skipped and self.overflowed_at) or scale} {skipped}")
            self.overflowed_at = None
            self.losses = [] if closure else self.losses
        if plan.updates == "each" and plan.scaling in SCALERS:
            self.scalers[name].update()

    def scale(self, name):
        if self.plan.scaling == "apex":
            return amp.default_session().loss_scale("cg".index(name))
        return 1.0 if self.plan.scaling == "none" else self.scalers[name].get_scale()


def weights_of(loop):
    return [each.detach().clone() for model in loop.models.values() for each in model.parameters()]


@pytest.mark.parametrize("scaling", ["none", "apex", *SCALERS])
def test_a_watch_of_a_random_loop_has_what_its_own_list_has(scaling):
    for number in range(LOOPS):
        plan = Plan.drawn(scaling, number)
        loop, plain = Loop(plan), Loop(plan)
        w = loop.run()
        assert [f"{each.loss} {each.loss_scale} {each.skipped}" for each in w.history] == loop.told, plan
        assert not (loop.told and w.failures), plan
        plain.run(is_watched=False)
        assert all(map(torch.equal, weights_of(loop), weights_of(plain))), plan
