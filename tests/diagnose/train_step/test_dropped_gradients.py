"""Loops that use the gradients of a backward for something other than a step drop them rightly.

Each loop runs with no scaler, torch's and amplab's, in a watch and in the doctor; the loops that lose the gradients of
micro-batches run beside them.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab

SCALERS = {"none": None, "torch": torch.amp.GradScaler, "amplab": amplab.GradScaler}
EPS = 0.1


class Loop:
    """A model, its optimizer and a scaler or none."""

    def __init__(self, kind):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = SCALERS[kind] and SCALERS[kind]("cpu", init_scale=4.0)
        self.noted = lambda loss: loss
        self.number = 0

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def backward(self, loss):
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def step(self):
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def train(self, x, y):
        self.optimizer.zero_grad()
        self.backward(self.noted(self.loss(x, y)))
        self.step()


def fgsm(run, x, y):
    x = x.clone().requires_grad_()
    run.loss(x, y).backward()
    run.train((x + EPS * x.grad.sign()).detach(), y)


def fgsm_in_numpy(run, x, y):
    """No op shows that the gradient is read."""
    x = x.clone().requires_grad_()
    run.loss(x, y).backward()
    run.train(torch.from_numpy(x.detach().numpy() + EPS * x.grad.numpy()), y)


def fgsm_with_its_graph(run, x, y):
    x = x.clone().requires_grad_()
    run.backward(run.loss(x, y))
    run.train(x + EPS * x.grad.sign(), y)


def fgsm_of_a_computed_input(run, x, y):
    x = (x.clone().requires_grad_() * 2).tanh()
    x.retain_grad()
    run.loss(x, y).backward()
    run.train((x + EPS * x.grad.sign()).detach(), y)


def pgd(run, x, y):
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        run.backward(run.loss(x + delta, y))
        with torch.no_grad():
            delta.add_(0.05 * delta.grad.sign()).clamp_(-EPS, EPS)
        delta.grad.zero_()
        run.optimizer.zero_grad()
    run.train(x + delta.detach(), y)


def pgd_on_weights(run, x, y):
    """As on the embedding of a language model: the gradients of one weight are used."""
    weight = run.model[0].weight
    before = weight.detach().clone()
    for _ in range(2):
        run.optimizer.zero_grad()
        run.backward(run.loss(x, y))
        with torch.no_grad():
            weight.add_(0.05 * weight.grad / weight.grad.norm())
    run.optimizer.zero_grad()
    run.backward(run.noted(run.loss(x, y)))
    with torch.no_grad():
        weight.copy_(before)
    run.step()


def free(run, x, y):
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        run.train(x + delta, y)
        with torch.no_grad():
            delta.add_(EPS * delta.grad.sign()).clamp_(-EPS, EPS)
        delta.grad.zero_()


def virtual(run, x, y):
    with torch.no_grad():
        expected = run.model(x).softmax(-1)
    d = torch.randn_like(x).requires_grad_()
    F.kl_div(run.model(x + 1e-2 * d).log_softmax(-1), expected, reduction="batchmean").backward()
    d = F.normalize(d.grad)
    run.optimizer.zero_grad()
    smooth = F.kl_div(run.model(x + d).log_softmax(-1), expected, reduction="batchmean")
    run.backward(run.noted(run.loss(x, y) + smooth))
    run.step()


def probe(run, x, y):
    run.loss(x[:3], y[:3]).backward()
    torch.stack([each.grad.norm() for each in run.model.parameters()]).norm()
    run.train(x, y)


def probe_of_the_largest(run, x, y):
    run.loss(x[:3], y[:3]).backward()
    max(float(each.grad.abs().max()) for each in run.model.parameters())
    run.train(x, y)


def probe_by_torch(run, x, y):
    run.loss(x[:3], y[:3]).backward()
    nn.utils.get_total_norm([each.grad for each in run.model.parameters()])
    run.train(x, y)


def sam(run, x, y):
    run.optimizer.zero_grad()
    run.loss(x, y).backward()
    with torch.no_grad():
        moves = [0.05 * each.grad / (each.grad.norm() + 1e-6) for each in run.model.parameters()]
        torch._foreach_add_(list(run.model.parameters()), moves)
    run.optimizer.zero_grad()
    run.backward(run.noted(run.loss(x, y)))
    with torch.no_grad():
        torch._foreach_sub_(list(run.model.parameters()), moves)
    run.step()


def meta(run, x, y):
    """First-order MAML: inner steps on a copy, whose gradients the model gets."""
    learner = copy.deepcopy(run.model)
    inner = torch.optim.SGD(learner.parameters(), lr=0.1)
    for _ in range(2):
        inner.zero_grad()
        F.cross_entropy(learner(x[:3]), y[:3]).backward()
        inner.step()
    run.optimizer.zero_grad()
    inner.zero_grad()
    run.backward(run.noted(F.cross_entropy(learner(x[3:]), y[3:]) + 0 * run.loss(x, y)))
    for own, other in zip(run.model.parameters(), learner.parameters(), strict=True):
        own.grad.add_(other.grad)
    run.step()


def meta_in_place(run, x, y):
    """Inner steps on the model itself, by an optimizer that nobody passed."""
    before = [each.detach().clone() for each in run.model.parameters()]
    inner = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for _ in range(2):
        inner.zero_grad()
        run.loss(x[:3], y[:3]).backward()
        inner.step()
    run.optimizer.zero_grad()
    run.backward(run.noted(run.loss(x[3:], y[3:])))
    with torch.no_grad():
        torch._foreach_copy_(list(run.model.parameters()), before)
    run.step()


RIGHT = (
    *(fgsm, fgsm_in_numpy, fgsm_with_its_graph, fgsm_of_a_computed_input, pgd, pgd_on_weights, free, virtual),
    *(probe, probe_of_the_largest, probe_by_torch, sam, meta, meta_in_place),
)


def chunks(run, x, y, *, parts=1, read=lambda run: None):
    for inputs, targets in zip(x.chunk(3), y.chunk(3), strict=True):
        run.optimizer.zero_grad()
        run.backward(run.noted(run.loss(inputs, targets) / parts))
        read(run)
    run.step()


def divided_chunks(run, x, y):
    chunks(run, x, y, parts=3)


def chunks_with_gradients_of_inputs(run, x, y):
    """As where a loss has derivatives by the inputs; nothing reads what backward leaves there."""
    chunks(run, x.clone().requires_grad_(), y)


def chunks_zeroed_in_place(run, x, y):
    for inputs, targets in zip(x.chunk(3), y.chunk(3), strict=True):
        run.optimizer.zero_grad(set_to_none=False)
        run.backward(run.noted(run.loss(inputs, targets)))
    run.step()


def clipped_chunks(run, x, y):
    chunks(run, x, y, read=lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 1e6))


WRONG = (chunks, divided_chunks, chunks_with_gradients_of_inputs, chunks_zeroed_in_place, clipped_chunks)


def data(n=8):
    g = torch.Generator().manual_seed(3)
    return [(torch.randn(6, 8, generator=g), torch.randint(0, 3, (6,), generator=g)) for _ in range(n)]


def found_by_watch(run, body, *, has_batches):
    with amplab.watch(run.model, run.optimizer, scaler=run.scaler) as w:
        run.noted = w.loss
        for run.number, (x, y) in enumerate(w.batches(data()) if has_batches else data()):
            body(run, x, y)
    assert not w.failures
    assert "looked at the gradients of" in str(w.findings()) or w.findings()
    return certainties(w.findings())


def found_by_doctor(run, body):
    (x, y), *_ = data()
    found = amplab.doctor(run.model, train_step=lambda: body(run, x, y), optimizer=run.optimizer, scaler=run.scaler)
    return certainties(found)


def certainties(findings):
    return [each.certainty for each in findings if each.name == "zero-grad-in-accumulation"]


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("body", RIGHT)
def test_gradients_that_the_loop_uses_otherwise_are_not_lost(body, kind):
    assert found_by_watch(Loop(kind), body, has_batches=True) == []
    assert found_by_watch(Loop(kind), body, has_batches=False) == []
    assert found_by_doctor(Loop(kind), body) == []


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("body", WRONG)
def test_chunks_of_a_batch_whose_gradients_are_lost_are_found(body, kind):
    assert found_by_watch(Loop(kind), body, has_batches=True) == ["likely"]
    assert found_by_watch(Loop(kind), body, has_batches=False) == ["likely"]
    assert found_by_doctor(Loop(kind), body) == ["likely"]


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("reads_norm", [True, False])
def test_micro_batches_of_a_loader_whose_gradients_are_lost_are_certain(parts, reads_norm, kind):
    def body(run, x, y):
        run.optimizer.zero_grad()
        run.backward(run.noted(run.loss(x, y) / parts))
        if reads_norm:
            nn.utils.get_total_norm([each.grad for each in run.model.parameters()])
        if run.number % 2:
            run.step()

    assert found_by_watch(Loop(kind), body, has_batches=True) == ["certain"]
    if not reads_norm:
        assert found_by_watch(Loop(kind), body, has_batches=False) == ["likely"]


def test_iterations_that_are_given_up_a_thousand_steps_apart_are_no_accumulation():
    """A watch looks at a step in a thousand; what it saw in the first one says nothing of the next one."""
    run = Loop("none")
    with amplab.watch(run.model, run.optimizer) as w:
        for number, (x, y) in enumerate(w.batches(data(1010))):
            run.optimizer.zero_grad()
            run.loss(x, y).backward()
            if number not in (0, 1002):  # where the first look begins, and the third
                run.optimizer.step()
    assert certainties(w.findings()) == []


def test_an_attack_does_not_hide_micro_batches_that_are_lost():
    def body(run, x, y):
        x = x.clone().requires_grad_()
        run.backward(run.loss(x, y))
        run.optimizer.zero_grad()
        run.backward(run.noted(run.loss((x + EPS * x.grad.sign()).detach(), y)))
        if run.number % 2:
            run.step()
        run.optimizer.zero_grad()

    assert found_by_watch(Loop("none"), body, has_batches=True) == ["certain"]
