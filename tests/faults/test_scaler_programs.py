"""GradScaler gives the results of float32 for every legal program, and refuses to mix scaled and unscaled gradients."""

import pytest
import torch
from scaler_programs import Program, random_program, trained
from torch import nn

from amplab.amp import GradScaler

TORCH = torch.amp.GradScaler


def combined(*arguments, **options):
    return GradScaler(*arguments, combine_grad=True, **options)


def torch_can(program: Program) -> bool:
    """Whether torch's class documents what the program does."""
    return not (program.late or program.shares or any(kind.startswith("amplab") for kind in program.kinds))


@pytest.mark.parametrize(
    "seeds",
    [range(80), *(pytest.param(range(first, first + 242), marks=pytest.mark.long) for first in range(80, 2500, 242))],
    ids=str,
)
def test_legal_programs_train_as_without_a_scale(seeds):
    torchs = 0
    for seed in seeds:
        program = random_program(seed)
        reference = trained(program, None)
        for scaler in (GradScaler, combined, TORCH):
            if scaler is not TORCH or torch_can(program):
                torchs += scaler is TORCH
                said = f"program {seed} with {scaler.__name__}:\n{program}"
                assert trained(program, scaler).equals(reference), said
    assert torchs > len(seeds) / 5  # the second oracle


# -- what is not legal -----------------------------------------------------------------------------


def two_optimizers(fused=False):
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    return params, [torch.optim.SGD([param], lr=0.5, fused=fused) for param in params]


def backward(scaler, params):
    scaler.scale(torch.stack([param.sum() for param in params]).sum()).backward()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("combine_grad", [False, True])
def test_a_scaled_backward_into_unscaled_gradients_is_refused(fused, combine_grad):
    (first, second), optimizers = two_optimizers(fused)
    scaler = GradScaler("cpu", combine_grad=combine_grad)
    backward(scaler, [first, second])
    scaler.unscale_(optimizers[0])
    backward(scaler, [first, second])
    scaler.step(optimizers[1])
    assert second.tolist() == [0.0, 0.0]  # two scaled gradients
    with pytest.raises(RuntimeError, match="the gradient of parameter 0 was unscaled, and then a backward of a scaled"):
        scaler.step(optimizers[0])
    assert first.tolist() == [1.0, 1.0]
    scaler.update()
    optimizers[0].zero_grad()
    backward(scaler, [first])
    scaler.step(optimizers[0])
    assert first.tolist() == [0.5, 0.5]


def test_torch_steps_with_a_sum_of_both():
    (first, second), optimizers = two_optimizers()
    scaler = TORCH("cpu")
    backward(scaler, [first, second])
    scaler.unscale_(optimizers[0])
    backward(scaler, [first])
    scaler.step(optimizers[0])
    assert first.tolist() == [1 - (1 + 2.0**16) / 2] * 2


@pytest.mark.parametrize("order", ["before", "after", "together"])
def test_it_is_seen_in_a_loss_that_was_scaled_before(order):
    (first, second), optimizers = two_optimizers()
    scaler = GradScaler("cpu")
    one, two = (scaler.scale(param.sum()) for param in (second, first))
    backward(scaler, [first, second])
    if order == "before":
        one.backward()
    scaler.unscale_(optimizers[0])
    if order == "together":
        torch.autograd.backward([one, two])
    else:
        two.backward()
    with pytest.raises(RuntimeError, match="a backward of a scaled loss has added to it"):
        scaler.step(optimizers[0])


def test_a_backward_that_raises_after_it_has_written_is_seen_too():
    (first, second), optimizers = two_optimizers()
    scaler = GradScaler("cpu")
    backward(scaler, [first, second])
    scaler.unscale_(optimizers[0])

    def fail(_gradient):
        raise ZeroDivisionError

    early = second.sum() * 1.0
    early.register_hook(fail)
    loss = early + first.sum()  # the engine reaches `first` first
    with pytest.raises(ZeroDivisionError):
        scaler.scale(loss).backward()
    assert first.grad.tolist() == [1 + 2.0**16] * 2
    with pytest.raises(RuntimeError, match="a backward of a scaled loss has added to it"):
        scaler.step(optimizers[0])


@pytest.mark.parametrize("edit", ["autograd.grad", "unscaled backward", "assigned"])
def test_what_adds_nothing_scaled_is_no_error(edit):
    (first, second), optimizers = two_optimizers()
    scaler = GradScaler("cpu")
    backward(scaler, [first, second])
    scaler.unscale_(optimizers[0])
    if edit == "autograd.grad":
        torch.autograd.grad(scaler.scale(first.square().sum()), [first], create_graph=True)
    elif edit == "unscaled backward":
        first.sum().backward()
    else:
        backward(scaler, [second])
        first.grad = first.grad * 1.0
    scaler.step(optimizers[0])
    assert first.tolist() == ([0.0, 0.0] if edit == "unscaled backward" else [0.5, 0.5])


def test_a_generator_reaches_a_discriminator_that_has_stepped():
    """The usual GAN: the generator's backward adds to gradients of the discriminator, which are zeroed before use."""
    (discriminator, generator), optimizers = two_optimizers()
    scaler = GradScaler("cpu")
    for step in range(3):
        optimizers[0].zero_grad(set_to_none=step == 0)
        backward(scaler, [discriminator])
        scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        optimizers[1].zero_grad()
        backward(scaler, [discriminator, generator])
        scaler.step(optimizers[1])
        scaler.update()
    assert discriminator.tolist() == generator.tolist() == [-0.5, -0.5]


def test_sparse_gradients_that_arrive_late_are_unscaled():
    torch.manual_seed(0)
    tables = [nn.Embedding(5, 2, sparse=True) for _ in range(2)]
    with torch.no_grad():
        tables[1].weight.copy_(tables[0].weight)
    scaler, rows = GradScaler("cpu"), torch.tensor([1, 3, 1])
    scaled, plain = (torch.optim.SGD(table.parameters(), lr=0.5) for table in tables)
    other = nn.Parameter(torch.ones(1))
    both = torch.optim.SGD([other, *tables[0].parameters()], lr=0.0)
    backward(scaler, [other])
    scaler.unscale_(both)
    scaler.scale(tables[0](rows).square().sum()).backward()  # arrives late for `both`
    scaler.step(both)
    scaler.step(scaled)
    scaler.update()
    tables[1](rows).square().sum().backward()
    plain.step()
    assert torch.equal(tables[0].weight, tables[1].weight)
