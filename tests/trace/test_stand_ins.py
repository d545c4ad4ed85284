"""Tools that cast a model leave each parameter what others have put on it: hooks, graphs, its place in DDP."""

import contextlib
import os
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import amplab
from amplab.trace.stand_ins import apart, stand_ins

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from ranks import run_ranks

TOOLS = {
    "xray": lambda model, x: amplab.xray(model, x, opt_level="O2"),
    "doctor": lambda model, x: amplab.doctor(model, x, loss=torch.sum, opt_level="O3"),
    "first_nonfinite": lambda model, x: amplab.first_nonfinite(model, x, loss=torch.sum, opt_level="O2"),
}


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))


@pytest.mark.parametrize("tool", TOOLS)
def test_a_loss_from_before_a_tool_has_the_gradients_it_had(tool):
    model, x = model_of(), torch.ones(2, 4)
    loss = model(x).square().sum()
    expected = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    TOOLS[tool](model, x)
    assert all(map(torch.equal, torch.autograd.grad(loss, [*model.parameters()]), expected))


def test_hooks_run_in_the_block_and_after_it_as_before():
    model, x = model_of(), torch.ones(2, 4)
    first, last = model[0].weight, model[2].weight
    calls, reference = [], weakref.ref(first)
    first.register_hook(lambda _: calls.append("first"))
    first.grad = torch.ones(3, 4)
    with stand_ins(model.parameters()):
        assert first.grad is not None
        first.data, first.grad = first.data.half(), None
        last.register_hook(lambda _: calls.append("last, in the block"))
        first.float().sum().backward()
        last.sum().backward()
    assert calls == ["first", "last, in the block"]
    assert first.dtype == torch.float32
    assert torch.equal(first.grad, torch.ones(3, 4))
    assert last.grad is None
    assert reference() is model[0].weight is first
    last.register_hook(lambda _: calls.append("last"))
    last.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    model(x).sum().backward()
    assert calls[2:] == ["last", "accumulated", "first"]


@pytest.mark.parametrize("tool", [*TOOLS, "xray as it is"])
def test_a_hook_that_adds_up_gradients_elsewhere_sees_none_of_a_tool(tool):
    """On the AccumulateGrad node, as Megatron's for `main_grad`."""
    model, x = model_of(), torch.ones(2, 4)
    sums, nodes = {}, []
    for name, each in model.named_parameters():
        node = each.view_as(each).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, name=name, each=each: sums.update({name: sums.get(name, 0) + each.grad.clone()}))
        nodes.append(node)  # which lives only as long as it is referenced
    model(x).sum().backward()
    expected = {name: total.clone() for name, total in sums.items()}
    TOOLS.get(tool, amplab.xray)(model, x)
    assert len(expected) == 4
    assert all(torch.equal(sums[name], total) for name, total in expected.items())
    model(x).sum().backward()
    assert not any(torch.equal(sums[name], total) for name, total in expected.items() if total.any())


def test_in_a_region_of_torchs_autocast_whose_cache_refers_to_the_weights():
    model, x = model_of().share_memory(), torch.ones(2, 4)
    before = [each._cdata for each in model.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).sum()
        expected = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        amplab.xray(model, x)
        assert all(map(torch.equal, torch.autograd.grad(loss, [*model.parameters()]), expected))
        assert torch.equal(model(x).sum(), loss)
    assert [each._cdata for each in model.parameters()] == before


@pytest.mark.parametrize("used", [False, True], ids=["not used before", "used before"])
def test_casts_that_an_engine_has_cached_belong_to_the_graph_of_the_loop(used):
    gradients = []
    for block in (stand_ins, lambda _: contextlib.nullcontext()):
        model, x = model_of(), torch.ones(2, 4)
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(layer.weight.detach().clone())  # of version 0, as the tensor of the block
        with amplab.autocast("cpu", torch.float16):
            loss = model(x).float().sum() if used else 0
            with block(model.parameters()):
                model(x)
            (loss + model(x).float().sum()).backward()
        gradients.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_parameters_that_share_memory_share_it_in_the_block_too():
    class Overlapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = nn.Parameter(torch.arange(6.0))
            self.part = nn.Parameter(self.whole.data[1:5:2])

    model = Overlapping().share_memory()
    with apart(model), torch.no_grad():
        model.whole += 1
        assert model.part.tolist() == [2, 4]
    assert model.whole.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_reference_that_keeps_a_tensor_from_being_given_back_loses_no_value():
    model, kept = nn.Linear(2, 2), []
    with apart(model):
        kept.append(torch._C._WeakTensorRef(model.weight))
    assert model.weight.is_leaf
    values = model.weight.detach().clone()
    with apart(model):  # as it is
        assert torch.equal(model.weight, values)
    assert torch.equal(model.weight, values)
    with apart(nn.LazyLinear(3)):
        pass


def test_an_error_while_parameters_change_gives_all_of_them_back():
    model = model_of()
    before = [each._cdata for each in model.parameters()]
    seen = []

    def change():
        with stand_ins(model.parameters()):
            seen.extend(each._cdata for each in model.parameters())
            raise KeyError

    with pytest.raises(KeyError):
        change()
    assert not {*seen} & {*before}
    assert [each._cdata for each in model.parameters()] == before


def train_beside(model, begun, done, updates):
    """What another process does to a shared model, as with Hogwild."""
    torch.set_num_threads(1)
    while not done.is_set():
        with torch.no_grad():
            model.bias.add_(1)
            model.running.add_(1)
        updates.value += 1
        begun.set()
        time.sleep(0.0005)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("tool", [*TOOLS, "xray as it is", "a whole step", "a watch"])
def test_what_another_process_writes_to_shared_memory_meanwhile_stays(tool):
    model, x = nn.Linear(64, 64), torch.ones(8, 64)
    model.register_buffer("running", torch.zeros(64))
    nn.init.zeros_(model.bias)
    model.share_memory()
    processes = torch.multiprocessing.get_context("fork")
    begun, done, updates = processes.Event(), processes.Event(), processes.Value("q", 0)
    other = processes.Process(target=train_beside, args=(model, begun, done, updates))
    other.start()
    begun.wait()
    if tool == "a watch":
        optimizer, scaler = torch.optim.SGD([model.weight], lr=1e-3), torch.amp.GradScaler("cpu")
        with amplab.watch(model, optimizer, scaler=scaler, loss=torch.sum) as w:
            for batch in w.batches([x, x * torch.inf] * 5):
                scaler.scale(model(batch).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert w.history.skip_count == len(w.history.explanations) == 5
    elif tool == "a whole step":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def train_step(x):
            model(x).sum().backward()
            optimizer.step()

        for _ in range(3):
            amplab.doctor(model, x, optimizer=optimizer, train_step=train_step)
    else:
        for _ in range(5):
            TOOLS.get(tool, amplab.xray)(model, x)
    done.set()
    other.join()
    assert model.bias[0] == model.running[0] == updates.value


def check_the_averaged_gradient(model):
    gradient = model.module[0].weight.grad
    both = [torch.empty_like(gradient) for _ in range(2)]
    torch.distributed.all_gather(both, gradient)
    assert torch.equal(*both)
    assert gradient.count_nonzero()


def train_on(rank, tool):
    """Call a tool on every rank, as in the middle of a training, and compare the gradients of the step after it."""
    model, x = nn.parallel.DistributedDataParallel(model_of()), torch.full((2, 4), float(rank + 1))
    model(x).sum().backward()
    model.zero_grad()
    TOOLS[tool](model, x)
    model(x).square().sum().backward()
    check_the_averaged_gradient(model)


@pytest.mark.parametrize("tool", TOOLS)
def test_ddp_averages_the_gradients_after_a_tool(tool):
    run_ranks(train_on, tool)


def train_in_a_profile(rank, tool):
    """The profiler refers to the parameters, so that no tensor can be put in their place."""
    model, x = nn.parallel.DistributedDataParallel(model_of()), torch.full((2, 4), float(rank + 1))
    with torch.profiler.profile(record_shapes=True):
        model(x).sum().backward()
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"torch\.profiler\.profile\(record_shapes=True\).*drop the object"):
            TOOLS[tool](model, x)
        model(x).square().sum().backward()
    check_the_averaged_gradient(model)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_of_several_ranks_is_refused_in_a_profile_of_shapes(tool):
    run_ranks(train_in_a_profile, tool)
