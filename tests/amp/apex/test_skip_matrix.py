"""Which steps are skipped: one to three models, losses and scalers, one or two optimizers, an overflow in each loss.

The reference skips by hand: the backward that overflows is left out, and so are the steps of the optimizers that it was
passed. In float32 the reference is plain torch; at O1 and O2 it is a run whose scale is halved by hand. All comparisons
are bit for bit.
"""

import dataclasses
import itertools
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from amplab import amp
from amplab.amp.backward.without_parameters import without_parameters

STEPS, OVERFLOW_AT = 4, 1
CASES = [
    (models, losses, optimizers, overflowing)
    for models, losses, optimizers in itertools.product((1, 2, 3), (1, 2, 3), (1, 2))
    for overflowing in range(losses)
]


class Setup:
    """Models with their parameters shared out; loss 0 sees all models, loss 1 the first, loss 2 the last."""

    def __init__(self, models, losses, optimizers):
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(models)]
        self.sees = [self.models, self.models[:1], self.models[-1:]][:losses]
        params = [param for model in self.models for param in model.parameters()]
        cut = len(params) if optimizers == 1 else 2
        shares = [share for share in (params[:cut], params[cut:]) if share]
        self.optimizers = [torch.optim.SGD(share, lr=0.1, momentum=0.9) for share in shares]
        self.owned = [set(share) for share in shares]

    def loss(self, index, step):
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + index))
        return sum(model(inputs).float().square().mean() * (index + 1) for model in self.sees[index])

    def of_loss(self, index):
        """The optimizers whose parameters this loss reaches."""
        reached = {param for model in self.sees[index] for param in model.parameters()}
        return [each for each, owned in zip(self.optimizers, self.owned, strict=True) if reached & owned]

    def weights(self):
        return [value.clone() for model in self.models for value in model.state_dict().values()]


def run(setup, session, overflowing, num_losses):
    """Train; the skipped (step, optimizer) pairs, and the scales at the end."""
    skipped = []
    for step in range(STEPS):
        for index in range(len(setup.sees)):
            with session.casting():
                loss = setup.loss(index, step)
                loss_id = index if num_losses > 1 else 0
                with session.scale_loss(loss, setup.of_loss(index), loss_id=loss_id) as scaled_loss:
                    spoilt = step == OVERFLOW_AT and index == overflowing
                    (scaled_loss * (float("inf") if spoilt else 1.0)).backward()
        for number, optimizer in enumerate(setup.optimizers):
            optimizer.step()
            if not session.last_step(optimizer).stepped:
                skipped.append((step, number))
            optimizer.zero_grad()
    return skipped, [session.loss_scale(loss_id) for loss_id in range(num_losses)]


def run_by_hand(setup, session, overflowing, num_losses):
    """The same with every skip written out; without a session in plain float32."""
    for step in range(STEPS):
        skipped = setup.of_loss(overflowing) if step == OVERFLOW_AT else []
        for index in range(len(setup.sees)):
            loss_id = index if num_losses > 1 else 0
            if skipped and index == overflowing:
                if session is not None:
                    scaler = session.scalers[loss_id]
                    scaler.state = dataclasses.replace(scaler.state, scale=scaler.scale / 2, clean_steps=0)
            elif session is None:
                setup.loss(index, step).backward()
            else:
                with session.casting():
                    loss = setup.loss(index, step)
                    with session.scale_loss(loss, setup.of_loss(index), loss_id=loss_id) as scaled_loss:
                        scaled_loss.backward()
        for optimizer in setup.optimizers:
            if optimizer not in skipped:
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("models", "losses", "optimizers", "overflowing"), CASES)
def test_the_steps_that_overflowed_are_left_out_of_float32_training(models, losses, optimizers, overflowing):
    check(models, losses, optimizers, overflowing, opt_level="O1", patch_torch_functions=False)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("models", "losses", "optimizers", "overflowing"), [case for case in CASES if case[3] == 1])
def test_the_steps_that_overflowed_are_left_out_of_a_level(models, losses, optimizers, overflowing, level):
    check(models, losses, optimizers, overflowing, opt_level=level)


def check(models, losses, optimizers, overflowing, **options):
    for num_losses in {1, losses}:
        setups = [Setup(models, losses, optimizers) for _ in range(2)]
        sessions = [amp.Session() for _ in setups]
        for setup, session in zip(setups, sessions, strict=True):
            session.initialize(
                setup.models, setup.optimizers, num_losses=num_losses, verbosity=0, dynamic_init_scale=2.0**8, **options
            )
        expected = [
            (OVERFLOW_AT, number)
            for number, optimizer in enumerate(setups[0].optimizers)
            if optimizer in setups[0].of_loss(overflowing)
        ]
        skipped, scales = run(setups[0], sessions[0], overflowing, num_losses)
        in_float32 = "patch_torch_functions" in options
        if in_float32:
            sessions[1].reset()
        run_by_hand(setups[1], None if in_float32 else sessions[1], overflowing, num_losses)
        assert skipped == expected
        assert scales == [2.0**7 if num_losses == 1 or each == overflowing else 2.0**8 for each in range(num_losses)]
        assert all(map(torch.equal, setups[0].weights(), setups[1].weights()))


class OfOnesOwn(torch.optim.Optimizer):
    """Counts wherever an optimizer can, and asks for the device of its first parameter, as apex's FusedLAMB does."""

    def __init__(self, params, **settings):
        super().__init__(params, {"lr": 0.1, "step": 0, "count": torch.zeros(()), "seen": [], **settings})
        self.steps, self.state["all"]["step"] = 0, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        self.state["all"]["step"] += 1
        one = torch.ones((), device=self.param_groups[0]["params"][0].device)
        for group in self.param_groups:
            group["step"] += 1
            group["count"] += one
            group["seen"].append(group["step"])
            for param in group["params"]:
                self.update(param, group["lr"])

    def counts(self):
        group = self.param_groups[0]
        return [self.steps, self.state["all"]["step"], group["step"], int(group["count"]), len(group["seen"])]

    def update(self, param, lr):
        if param.grad is not None:
            param.sub_(param.grad, alpha=lr)


class Decays(OfOnesOwn):
    """Decays weights before it asks whether there is a gradient."""

    def update(self, param, lr):
        param.mul_(1 - lr)
        super().update(param, lr)


class NeverAsks(OfOnesOwn):
    """Uses gradients without asking whether there are any."""

    def update(self, param, lr):
        param.sub_(param.grad.clamp(-1, 1), alpha=lr)
        self.state[param]["updates"] = self.state[param].get("updates", 0) + 1


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", [OfOnesOwn, Decays, NeverAsks])
def test_a_skipped_step_changes_nothing_of_an_optimizer_of_ones_own(session, level, kind):
    model = torch.nn.Linear(2, 1)
    optimizer = kind(model.parameters())
    model, optimizer = session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    counts, weights = [], []
    for factor in (0.1, float("inf"), 0.1):
        optimizer.zero_grad()
        with session.casting(), session.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        counts.append(optimizer.counts())
        weights.append([param.detach().clone() for param in amp_params(optimizer)])
    assert counts == [[1] * 5, [1] * 5, [2] * 5]
    assert all(map(torch.equal, weights[0], weights[1]))
    assert not any(map(torch.equal, weights[1], weights[2]))
    if kind is NeverAsks:
        assert [optimizer.state[param]["updates"] for param in amp_params(optimizer)] == [2, 2]


def amp_params(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


class Counting(torch.optim.SGD):
    """Counts in attributes that are changed in place, and keeps momenta in a list of its own."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.count, self.losses, self.latest, self.by_kind = torch.zeros(()), [], deque(maxlen=3), {"all": {"steps": 0}}
        self.meter, self.options = Meter(), SimpleNamespace(steps=0)
        self.params = [param for group in self.param_groups for param in group["params"]]
        self.momenta = [torch.zeros_like(param) for param in self.params]
        self.rule = self.updated

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        self.losses.append(1.0)
        self.latest.append(1.0)
        self.by_kind["all"]["steps"] += 1
        self.meter.update()
        self.options.steps += 1
        for param, momentum in zip(self.params, self.momenta, strict=True):
            self.rule(param, momentum)

    def updated(self, param, momentum):
        self.count += 0
        param.mul_(0.9)
        momentum.mul_(0.9).add_(param.grad)
        param.sub_(momentum, alpha=self.param_groups[0]["lr"])

    def counts(self):
        lengths = [len(self.losses), len(self.latest)]
        return [int(self.count), *lengths, self.by_kind["all"]["steps"], self.meter.count, self.options.steps]


class Meter:
    def __init__(self):
        self.count, self.seen = 0, []

    def update(self):
        self.count += 1
        self.seen.append(self.count)


class Around(torch.optim.Optimizer):
    """As timm's Lookahead: the inner optimizer has the groups, and this one has no ``super().__init__()``."""

    def __init__(self, base):
        self.bases, self.param_groups, self.defaults = [base], base.param_groups, base.defaults
        self.state, self.key = defaultdict(dict), f"steps around {type(base).__name__}"

    @torch.no_grad()
    def step(self, closure=None):
        for base in self.bases:
            base.step(closure)
        for group in self.param_groups:
            group[self.key] = group.get(self.key, 0) + 1

    def counts(self):
        return [*self.bases[0].counts(), self.param_groups[0][self.key]]


class Slotted(OfOnesOwn):
    __slots__ = ("taken",)

    def __init__(self, params):
        super().__init__(params)
        self.taken = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.taken += 1

    def counts(self):
        return [*super().counts(), self.taken]


def scheduled(optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, 100)  # sets an attribute `step` that is bound to this optimizer
    return optimizer


KEPT = {
    "attributes": Counting,
    "a wrapper": lambda params: Around(Counting(params)),
    "a wrapper of groups": lambda params: Around(OfOnesOwn(params)),
    "a wrapper of a scheduled one": lambda params: Around(scheduled(Counting(params))),
    "a wrapper of a wrapper": lambda params: Around(Around(Counting(params))),
    "slots": Slotted,
}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", KEPT)
def test_a_skipped_step_changes_nothing_in_attributes_nor_of_an_inner_optimizer(session, level, kind):
    model = torch.nn.Linear(2, 1)
    optimizer = KEPT[kind](model.parameters())
    model, optimizer = session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    counts, weights = [], []
    for factor in (0.1, float("inf"), 0.1):
        optimizer.param_groups[0]["params"][0].grad = optimizer.param_groups[0]["params"][1].grad = None
        with session.casting(), session.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        counts.append(set(optimizer.counts()))
        weights.append([param.detach().clone() for param in amp_params(optimizer)])
    assert counts == [{1}, {1}, {2}]
    assert all(map(torch.equal, weights[0], weights[1]))
    assert not any(map(torch.equal, weights[1], weights[2]))


def test_hooks_of_an_inner_optimizer_do_not_run_in_a_skipped_step(session):
    """They belong to a step that is not taken, as under torch's GradScaler."""
    model, ran = torch.nn.Linear(2, 1), []
    optimizer = Around(Counting(model.parameters()))
    optimizer.bases[0].register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.bases[0].register_step_post_hook(lambda *_: ran.append("after"))
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for factor in (float("inf"), 0.1):
        with session.casting(), session.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        model.zero_grad()
    assert ran == ["before", "after"]


def test_a_skipped_step_copies_no_large_tensor_of_an_optimizer():
    model = torch.nn.Linear(1024, 1024)
    optimizer = Counting(model.parameters())
    optimizer.average = torch.zeros(1024, 1024)
    without = without_parameters(optimizer)
    assert without.average is optimizer.average
    assert (list(without.params), list(without.momenta)) == ([], [])
    assert without.params[0] is model.weight
    assert without.count is not optimizer.count
    assert without.param_groups[0]["params"] == []


def test_what_belongs_to_a_parameter_is_found_in_a_skipped_step(session):
    class CountsInTheFirst(torch.optim.SGD):
        def step(self, closure=None):
            state = self.state[self.param_groups[0]["params"][0]]
            state["steps"] = state.get("steps", 0) + 1
            return super().step(closure)

    model = torch.nn.Linear(2, 1)
    optimizer = CountsInTheFirst(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for factor in (0.1, float("inf"), 0.1):
        with session.scale_loss(model(torch.ones(1, 2)).float().sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        model.zero_grad()
    assert optimizer.state[model.weight]["steps"] == 2


def test_what_an_optimizer_shares_stays_shared_in_a_skipped_step():
    optimizer = Around(Counting(torch.nn.Linear(2, 1).parameters()))
    without = without_parameters(optimizer)
    assert without.bases[0] is not optimizer.bases[0]
    assert without.param_groups is without.bases[0].param_groups
    assert without.param_groups is not optimizer.param_groups
    assert without.bases[0].rule.__self__ is without.bases[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("first", [True, False])
def test_a_schedule_in_a_hook_keeps_the_rate_that_it_sets_in_a_skipped_step(session, level, first):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if first:
        optimizer.register_step_post_hook(lambda *_: schedule.step())
    session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    if not first:
        optimizer.register_step_post_hook(lambda *_: schedule.step())
    for factor in (0.01, float("inf"), 0.01):
        optimizer.zero_grad()
        with session.casting(), session.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] == pytest.approx(0.01)
