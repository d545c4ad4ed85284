"""The bytes that a forward keeps for backward, against a count by hand and against the graph itself."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amplab.policies import cpu_half
from amplab.trace import xray


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


BATCH = 8


def test_by_hand_in_float32():
    found = xray(Net(), torch.randn(BATCH, 64))
    # The first product keeps its input; relu keeps its output, which is the second product's input: once.
    assert found.kept.activations == {"first": 4 * BATCH * 64, "Net": 4 * BATCH * 32}
    assert found.kept.weight_casts == {}  # and the second weight is a parameter, there anyway
    assert found.kept.total == 4 * BATCH * 96


@pytest.mark.parametrize("mode", ["fp32_accumulate", "native"])
def test_by_hand_in_half_with_products_accumulated_in_float32_and_without(mode):
    with cpu_half(mode):
        found = xray(Net(), torch.randn(BATCH, 64), opt_level="O1")
    assert any("fp32 accumulate" in record.note for record in found.trace) == (mode == "fp32_accumulate")
    assert found.kept.activations == {"first": 2 * BATCH * 64, "Net": 2 * BATCH * 32}
    assert found.kept.weight_casts == {"second": 2 * 32 * 16}  # the first input needs no gradient, so not its weight
    assert xray(Net(), torch.randn(BATCH, 64), opt_level="O2").kept.weight_casts == {}


def test_by_hand_with_a_loss_and_a_norm():
    norm = nn.LayerNorm(32)
    labels = torch.arange(BATCH)
    found = xray(norm, (torch.randn(BATCH, 32), labels), loss=F.cross_entropy)
    # The norm keeps its input, and mean and 1 / deviation of each row; cross entropy its log-probabilities, the labels
    # and the number of them.
    assert found.kept.activations == {"LayerNorm": 4 * BATCH * (32 + 2), "": 4 * BATCH * 32 + 8 * BATCH + 4}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_block_keeps_only_its_input(use_reentrant):
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def loss():
        return checkpoint(block, torch.ones(BATCH, 16, requires_grad=True), use_reentrant=use_reentrant).sum()

    plain = xray(block, step=lambda: block(torch.ones(BATCH, 16, requires_grad=True)).sum())
    assert plain.kept.total == 4 * BATCH * (16 + 64 + 64)
    assert xray(block, step=loss).kept.activations == {"": 4 * BATCH * 16}


def test_a_saved_slice_keeps_all_of_its_memory_once():
    weight = nn.Linear(4, 4)
    base = torch.randn(BATCH, 4, 10)

    def loss():
        return (weight(base[..., :4]) * base[..., 4:8]).sum()

    found = xray(weight, step=loss)
    assert found.kept.total == base.numel() * 4


def test_memory_that_was_let_go_is_counted_again():
    layer = nn.Linear(64, 64)

    def loss():
        for _ in range(5):
            layer(torch.randn(BATCH, 64)).sum().backward()
        return layer(torch.randn(BATCH, 64)).sum()

    assert xray(layer, step=loss).kept.activations == {"Linear": 4 * BATCH * 64}


def test_against_the_graph(scenario):
    """Walking the graph of an untraced step finds the same memory."""
    model, loss = scenario("cnn")
    owned = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    with torch.random.fork_rng():
        value = loss()
    memory = {}
    waiting, seen = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        for name in dir(node):
            saved = getattr(node, name) if name.startswith("_saved") else None
            if isinstance(saved, torch.Tensor) and saved.untyped_storage().data_ptr() not in owned:
                memory[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
    assert xray(model, step=loss).kept.total == sum(memory.values())


def test_gradients_are_the_same_with_and_without_counting(scenario, every_model):
    model, loss = scenario(every_model)
    with torch.random.fork_rng():
        loss().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    seen = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.__setitem__(name, grad.clone()))
    xray(model, step=loss, stats=True)
    assert all(torch.equal(seen[name], grad) for name, grad in expected.items())
