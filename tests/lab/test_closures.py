"""`optimizer.step(closure)`, whose closure computes the gradients in the step: LBFGS needs it, and Lightning calls it.

A watch records and explains the step that the closure belongs to, and the step does what it does without a watch.
"""

import inspect
import math

import pytest
import torch
from torch import nn

import amplab
from amplab import amp
from amplab.lab import watch
from amplab.optimizers import FusedAdam

BAD = 5


class GivesArguments(torch.optim.Optimizer):
    """Calls its closure without gradients enabled, by the names of its parameters, and reads an attribute of it."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure):
        assert closure.is_mine
        assert [*inspect.signature(closure).parameters] == ["backward"]
        loss = closure(backward=True)
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=0.05)
        return loss


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.05),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.05, max_iter=4),
    "of one's own": GivesArguments,
}
CALLS = {
    "by place": lambda optimizer, closure: optimizer.step(closure),
    "by name": lambda optimizer, closure: optimizer.step(closure=closure),
}


class Training:
    """A model and its closures: `largest` has the exponent of the largest gradient of each run, by step."""

    def __init__(self, kind="SGD", session=False):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        if session:
            amp.initialize(self.model, self.optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
        self.is_scaled = session
        self.inputs = [2.0 ** -(number % 4) * torch.randn(8, 4) for number in range(9)]
        self.largest = []

    def loss_of(self, x):
        return self.model(x).float().square().mean()

    def closure(self, x, seen=lambda loss: loss):
        runs = []
        self.largest.append(runs)

        @torch.enable_grad()
        def closure(backward=True):
            self.optimizer.zero_grad()
            loss = seen(self.loss_of(x))
            if self.is_scaled:
                with amp.scale_loss(loss, self.optimizer) as scaled:
                    scaled.backward()
            elif backward:
                loss.backward()
            runs.append(exponent_of(self.model))
            return loss

        closure.is_mine = True
        return closure

    @property
    def weights(self):
        return [param.detach().clone() for param in self.model.parameters()]


def exponent_of(model):
    largest = max(param.grad.abs().max().item() for param in model.parameters())
    return math.frexp(largest)[1] - 1.0 if math.isfinite(largest) else math.inf


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_gradients_of_a_step_are_those_of_the_first_run_of_its_closure(kind, call):
    training = Training(kind)
    with watch(training.model, training.optimizer, every=1) as w:
        for x in w.batches(training.inputs):
            CALLS[call](training.optimizer, training.closure(x, w.loss))
    first = [runs[0] for runs in training.largest]
    assert len(set(first)) > 2
    assert [record.grad_exponent for record in w.history.records()] == first
    assert [sample.histogram.largest_exponent for sample in w.history.gradient_samples] == first


@pytest.mark.parametrize(
    ("kind", "scaled_by"),
    [*((kind, None) for kind in OPTIMIZERS), ("SGD", "a session"), ("SGD", "a disabled scaler")],
)
def test_the_first_bad_step_is_explained_by_its_own_batch(kind, scaled_by):
    training = Training(kind, session=scaled_by == "a session")
    training.inputs[BAD][0, 0] = math.inf
    scaler = amplab.GradScaler("cpu", enabled=False) if scaled_by == "a disabled scaler" else None
    with watch(training.model, training.optimizer, scaler=scaler, step=training.loss_of) as w:
        for x in w.batches(training.inputs):
            training.optimizer.step(training.closure(x, w.loss))
    amp.reset()
    assert w.failures == ()
    assert [(step, each.kind) for step, each in w.history.explanations.items()] == [(BAD, "data")]
    assert w.findings()[0].name == "nonfinite-batch"
    assert not math.isfinite(w.history.record(BAD).loss)


def test_updates_that_bfloat16_rounds_away_are_found():
    torch.manual_seed(0)
    model = nn.Linear(8, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        return loss

    with watch(model, optimizer) as w:
        for _ in w.batches(range(2)):
            optimizer.step(closure)
    assert w.findings().named("updates-rounded-away")
    assert any("the gradients of 1 step" in each for each in w.findings().looked_at)


def trained(kind, call, is_watched, of_others):
    """The weights, losses and number of runs; a closure of step 3 raises, and hooks of others wrap closures, too."""
    training, told = Training(kind), []

    def wraps_too(_optimizer, args, kwargs):
        def around(closure):
            def run(*given, **named):
                told.append(len(training.largest[-1]))
                return closure(*given, **named)

            return vars(run).update(vars(closure), __wrapped__=closure) or run

        named = {name: around(each) for name, each in kwargs.items()}
        return (args[0], *map(around, args[1:])), named

    def fails(loss):
        if len(training.largest) == 3:
            raise ValueError("of the loop")
        return loss

    def loop(batches, seen):
        for x in batches:
            try:
                loss = CALLS[call](training.optimizer, training.closure(x, lambda loss: fails(seen(loss))))
            except ValueError:
                told.append("raised")
            else:
                told.append(loss.item())

    if of_others == "before":
        training.optimizer.register_step_pre_hook(wraps_too)
    w = watch(training.model, training.optimizer, every=1, step=training.loss_of)
    if not is_watched:
        loop(training.inputs, lambda loss: loss)
    else:
        with w:
            if of_others == "after":
                training.optimizer.register_step_pre_hook(wraps_too)
            loop(w.batches(training.inputs), w.loss)
        assert len(w.history) == len(training.inputs) - 1
    return training.weights, told, training.largest


@pytest.mark.parametrize("of_others", ["none", "before", "after"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_with_a_closure_does_what_it_does_without_a_watch(kind, call, of_others):
    alone = trained(kind, call, False, "before" if of_others == "after" else of_others)
    watched = trained(kind, call, True, of_others)
    assert all(map(torch.equal, watched[0], alone[0]))
    assert watched[1:] == alone[1:]


def test_of_several_optimizers_each_has_its_closure():
    """The gradients of a step are those that all optimizers hold when the first one steps."""
    torch.manual_seed(0)
    nets = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    first, second = (torch.optim.SGD(net.parameters(), lr=0.05) for net in nets)
    largest = []

    def closure_of(net, optimizer, x):
        def closure():
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            if optimizer is first:
                grads = [param.grad for param in nets.parameters() if param.grad is not None]
                largest.append(math.frexp(max(grad.abs().max().item() for grad in grads))[1] - 1.0)
            return loss

        return closure

    with watch(nets, [first, second], every=1) as w:
        for number in range(6):
            x = 2.0**-number * torch.ones(2, 4)
            for net, optimizer in zip(nets, (first, second), strict=True):
                optimizer.step(closure_of(net, optimizer, x))
    assert [record.grad_exponent for record in w.history.records()] == largest
