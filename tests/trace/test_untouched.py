"""`untouched` puts back whatever a block changes in a model."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

from amplab import amp
from amplab.policies import CastingEngine, casts_enabled
from amplab.trace import trace_step, xray
from amplab.trace.untouched import ParkedGradients, untouched


class Counting(nn.Module):
    """Buffers of every kind: kept, not kept, none yet, and a new one in forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.register_buffer("later", None)
        self.calls, self.last = 3, torch.zeros(2)
        self.torchs, self.numpys = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.pythons = random.Random(1)


def rebind(model):
    model.hidden = model.hidden * 5
    model.later = torch.ones(1)


CHANGES = {
    "a parameter in place": lambda model: model.weight.detach().add_(1),
    "a parameter past its version": lambda model: model.weight.data.add_(1),
    "a parameter's storage": lambda model: setattr(model.weight, "data", torch.zeros(4)),
    "a parameter's dtype": lambda model: model.half(),
    "a parameter for another": lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(2))),
    "requires_grad": lambda model: model.weight.requires_grad_(False),
    "a buffer's shape": lambda model: model.hidden.resize_(6),
    "a buffer's shape and storage": lambda model: model.hidden.resize_(6000),
    "a buffer in place": lambda model: model.steps.add_(1),
    "buffers for others": rebind,
    "a new buffer": lambda model: model.register_buffer("fresh", torch.ones(2)),
    "the training flag": lambda model: model.eval(),
    "a gradient": lambda model: setattr(model.weight, "grad", torch.ones(4)),
    "torch's random state": lambda model: torch.rand(3),
    "python's random state": lambda model: random.random(),
    "numpy's random state": lambda model: np.random.rand(),
    "a number in an attribute": lambda model: setattr(model, "calls", model.calls + 1),
    "a tensor in an attribute": lambda model: setattr(model, "last", torch.ones(2)),
    "a new attribute": lambda model: setattr(model, "fresh", 1),
    "an attribute less": lambda model: delattr(model, "last"),
    "a generator of torch": lambda model: torch.rand(1, generator=model.torchs),
    "a generator of numpy": lambda model: model.numpys.random(),
    "a generator of Python": lambda model: model.pythons.random(),
}


def state(model):
    buffers = {name: None if tensor is None else tensor.tolist() for name, tensor in model._buffers.items()}
    weight = model.weight
    return (
        (weight.tolist(), weight.dtype, weight.requires_grad, model.training, buffers),
        (id(weight), id(weight.grad), weight.data_ptr(), id(model.hidden), model.steps.data_ptr()),
        (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        (model.calls, id(vars(model).get("last")), sorted(vars(model)), model.torchs.get_state().tolist()),
        (model.numpys.bit_generator.state, model.pythons.getstate()),
    )


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fails", [False, True])
def test_every_change_is_undone(change, fails):
    model = Counting()
    model.weight.grad = torch.full((4,), 3.0)
    before = state(model)

    def block():
        with untouched(model):
            CHANGES[change](model)
            assert state(model) != before
            if fails:
                raise ArithmeticError("on purpose")

    if fails:
        with pytest.raises(ArithmeticError, match="on purpose"):
            block()
    else:
        block()
    assert state(model) == before


class Graph(nn.Module):
    """A model with one buffer whose elements are not all stored, and its count of calls after it."""

    def __init__(self, adjacency):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("adjacency", adjacency)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs):
        self.calls += 1
        dense = self.adjacency.to_dense() if self.adjacency.layout != torch.strided else self.adjacency
        return self.layer(dense @ inputs)


ADJACENCIES = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "not coalesced": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (4, 4), check_invariants=True),
    "compressed by rows": lambda: torch.eye(4).to_sparse_csr(),
    "compressed by columns": lambda: torch.eye(4).to_sparse_csc(),
    "in blocks": lambda: torch.eye(4).to_sparse_bsr(2),
    "expanded": lambda: torch.ones(4, 1).expand(4, 4),
    "expanded twice": lambda: torch.ones(1, 1).expand(4, 4),
    "transposed": lambda: torch.arange(16.0).view(4, 4).t(),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
@pytest.mark.parametrize("kind", ADJACENCIES)
def test_buffers_that_store_not_every_element(kind):
    model = Graph(ADJACENCIES[kind]())
    before, pointer = model.adjacency, model.calls.data_ptr()
    dense = before.to_dense().clone()
    for _ in range(2):
        report = xray(model, torch.ones(4, 4), opt_level="O1")
        assert any(op.op == "linear" for op in report)
        with untouched(model):
            model(torch.ones(4, 4))
            if "expanded" in kind:
                model.adjacency[:1, :1].mul_(2)
            else:
                model.adjacency.mul_(2)
        assert model.adjacency is before
        assert torch.equal(before.to_dense(), dense)
        assert (model.calls.item(), model.calls.data_ptr()) == (0, pointer)


def test_a_tensor_that_cannot_be_restored_does_not_keep_the_others_from_it():
    model = Graph(torch.eye(4).to_sparse_csr())

    def change():
        with untouched(model):
            model.adjacency.resize_as_sparse_(torch.ones(4, 4).to_sparse_csr())
            model.calls += 1

    with pytest.raises(RuntimeError, match="same number"):
        change()
    assert model.calls.item() == 0


def test_the_statistics_of_batch_norm_come_back():
    model = nn.BatchNorm1d(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with untouched(model):
        model(torch.randn(5, 3))
        assert not torch.equal(model.running_mean, before["running_mean"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_graph_from_before_still_runs_backward():
    model = nn.Linear(3, 2)
    loss = model(torch.ones(1, 3)).square().sum()
    with untouched(model):
        model(torch.ones(1, 3)).sum().backward()
    loss.backward()
    assert model.weight.grad is not None


def test_gradients_are_gone_inside_and_the_same_objects_after():
    model = nn.Linear(3, 2)
    kept = model.weight.grad = torch.ones(2, 3)
    with untouched(model):
        assert model.weight.grad is None
        model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is kept
    assert model.bias.grad is None


def test_an_engine_around_it_keeps_its_cache():
    model, engine = nn.Linear(3, 2), CastingEngine()
    engine.install()
    try:
        with untouched(model):
            pass
        model(torch.ones(1, 3))
        assert engine.cache_size == 2  # a weight whose memory was handed out would not be kept
    finally:
        engine.uninstall()


def test_leaves_behind_a_loss_are_parked_wherever_they_are():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x.grad, y.grad = torch.full((2,), 4.0), None
    parked = ParkedGradients()
    parked.park_leaves_of((x * y + x).sum())
    assert x.grad is None
    (x * y).sum().backward()
    parked.restore()
    assert x.grad.tolist() == [4, 4]
    assert y.grad is None


def test_hooks_on_accumulated_gradients_rest_and_come_back():
    calls = []
    model = nn.Linear(2, 1)
    handle = model.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("first"))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("second"))
    with untouched(model):
        model(torch.ones(1, 2)).sum().backward()
    assert calls == []
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert calls == ["second"]


class Caching(nn.Module):
    """What forward builds when it first needs it, in an attribute, a property and as a part of the model."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.table, self.part = None, None

    @functools.cached_property
    def powers(self):
        return 2.0 ** torch.arange(2)

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(2.0)
        if self.part is None:
            self.part = nn.Linear(2, 2)
        return self.part(x * self.weight + self.table + self.powers)


def test_what_is_built_lazily_is_built_again():
    model = Caching()
    with untouched(model):
        first = model(torch.ones(2))
        assert isinstance(model.part, nn.Linear)
    assert model.table is None
    assert model.part is None
    assert "powers" not in vars(model)
    assert torch.equal(model(torch.ones(2)), first)


REGISTERED = {
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "the older weight_norm": torch.nn.utils.weight_norm,
    "a hook": lambda module: module.register_forward_hook(lambda *_: None),
    "a hook of a parameter": lambda module: module.weight.register_hook(lambda gradient: gradient),
    "another class": lambda module: setattr(module, "__class__", type("Mine", (nn.Linear,), {})),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("change", REGISTERED)
def test_what_a_forward_registers_is_removed(change):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.is_built = nn.Linear(2, 2), False

        def forward(self, x):
            if not self.is_built:
                REGISTERED[change](self.inner)
                self.is_built = True
            return self.inner(x)

    model = Lazy()
    gave = model.inner(torch.ones(2))
    trace_step(model, lambda: model(torch.ones(2)).sum())
    assert type(model.inner) is nn.Linear
    assert model.inner._forward_hooks == model.inner._forward_pre_hooks == {}
    assert not model.inner.weight._backward_hooks
    assert torch.equal(model.inner(torch.ones(2)), gave)
    model.inner.weight.detach().mul_(2)
    assert not torch.equal(model.inner(torch.ones(2)), gave)
    assert torch.isfinite(model(torch.ones(2))).all()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_a_loss_with_a_weight_that_a_hook_computes_has_its_backward_after_a_tool(norm, level):
    """The weight is a plain attribute of a module of torch's."""
    torch.manual_seed(0)
    model, x = nn.Sequential(norm(nn.Linear(4, 3)), nn.ReLU()), torch.ones(2, 4)
    model(x)
    loss, weight = model(x).square().mean(), model[0].weight
    expected = torch.autograd.grad(loss + weight.square().sum(), model[0].bias, retain_graph=True)
    xray(model, x, opt_level=level)
    assert model[0].weight is weight
    assert torch.equal(*expected, *torch.autograd.grad(loss + model[0].weight.square().sum(), model[0].bias))


@pytest.mark.parametrize("level", [None, "O2"])
def test_the_cache_of_computed_weights_is_the_loops(level):
    model, x = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), torch.ones(2, 4)
    with nn.utils.parametrize.cached():
        xray(model, x, opt_level=level)
        weight = model.weight
        xray(model, x, opt_level=level)
        assert model.weight is weight
        model(x).sum().backward()
    assert not nn.utils.parametrize._cache


def test_hooks_that_a_forward_removes_and_registers_again_are_the_users():
    """As of an initialization by the first batch, which removes its hook."""
    model, x, calls = nn.Linear(2, 2), torch.ones(1, 2), []
    handles = {}

    def once(name):
        return lambda *_: (calls.append(name), handles[name].remove(), None)[-1]

    handles["module"] = model.register_forward_pre_hook(once("module"))
    handles["weight"] = model.weight.register_hook(once("weight"))
    xray(model, x)
    assert calls == ["module", "weight"]
    model(x).sum().backward()
    assert calls == ["module", "weight"] * 2
    assert not model._forward_pre_hooks


def test_which_buffers_are_saved_is_as_before():
    class Registering(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("mask", torch.ones(2), persistent=False)
            self.register_buffer("kept", torch.ones(2))

        def forward(self, x):
            del self.mask, self.kept
            self.register_buffer("mask", torch.ones(2))
            self.register_buffer("kept", torch.ones(2), persistent=False)
            return self.linear(x) * self.mask

    model = Registering()
    before = [*model.state_dict()]
    xray(model, torch.ones(1, 2))
    assert [*model.state_dict()] == before


def test_errors_whose_contexts_make_a_ring_end_a_tool():
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first

    def step():
        raise first

    with pytest.raises(ValueError, match="first"):
        xray(nn.Linear(2, 1), step=step)


CHANGED_PARTS = {
    "added": lambda model: model.append(nn.Tanh()),
    "another": lambda model: model.__setitem__(0, nn.Tanh()),
    "removed": lambda model: model.__delitem__(0),
    "in another order": lambda model: model._modules.update({"0": model._modules.pop("0")}),
    "none": lambda model: model._modules.update({"1": None}),
}


@pytest.mark.parametrize("change", CHANGED_PARTS)
def test_the_parts_of_a_model_come_back_in_their_order(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    before, gave = [*model._modules.items()], model(torch.ones(2))
    with untouched(model):
        CHANGED_PARTS[change](model)
        assert [*model._modules.items()] != before
    assert [*model._modules.items()] == before
    assert torch.equal(model(torch.ones(2)), gave)


def test_a_wrapper_of_torch_keeps_its_own_attributes():
    model = nn.DataParallel(nn.Linear(2, 2))
    with untouched(model):
        model.was_set_up = True
    assert model.was_set_up


def test_in_a_hook_on_a_step_a_tool_sees_the_casts_of_a_forward():
    model, x = nn.Linear(4, 1), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
    found = []
    optimizer.register_step_pre_hook(lambda *_: found.extend((str(xray(model, x)), casts_enabled())))
    try:
        with amp.scale_loss(model(x).sum(), optimizer) as loss:
            loss.backward()
        before = str(xray(model, x))
        optimizer.step()
    finally:
        amp.reset()
    assert " 0 casts" not in before
    assert found == [before, False]
