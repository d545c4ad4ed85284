"""Combined gradients train as the others do to the bit, and every way in which a view breaks is seen and mended."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amplab.scalers import FlatGradients, MasterWeights, Unscaler, ViewBreak, check_combined_tensors
from amplab.scalers.flat_buffer import aligned_size


def make_model(memory_format=torch.contiguous_format):
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 4 * 4, 7))
    return nn.Sequential(*body).to(memory_format=memory_format)


def backward(model, step=0, *, scale=1.0, create_graph=False):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(4, 3, 6, 6, generator=generator).to(next(model.parameters()).dtype)
    (model(images).float().square().mean() * scale).backward(create_graph=create_graph)


def combined(model):
    backward(model)
    return FlatGradients(model.parameters())


def gradients(model):
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def equal(left, right):
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(left, right, strict=True))


def reasons(broken):
    return {each.reason for each in broken}


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, foreach=True),
    "adam, one by one": lambda params: torch.optim.Adam(params, lr=0.01, foreach=False),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_to_the_bit_as_uncombined(name, set_to_none, memory_format):
    plain = make_model(memory_format)
    model = copy.deepcopy(plain)
    mine, theirs = (OPTIMIZERS[name](each.parameters()) for each in (model, plain))
    flat = combined(model)
    backward(plain)
    for step in range(6):
        mine.zero_grad(set_to_none=set_to_none)
        theirs.zero_grad(set_to_none=set_to_none)
        for part in range(2):  # accumulated over two backwards
            backward(model, 2 * step + part, scale=1024.0)
            backward(plain, 2 * step + part, scale=1024.0)
        found_inf = flat.unscale_(1024.0)
        assert found_inf.item() == Unscaler().unscale_(plain.parameters(), 1024.0).item() == 0.0
        assert flat.check(model.parameters()) == ()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert equal(gradients(model), gradients(plain))
        mine.step()
        theirs.step()
        assert equal(list(model.state_dict().values()), list(plain.state_dict().values()))


def test_masters_are_combined_like_any_parameters():
    def train(combine):
        model = make_model().half().float()
        params = [nn.Parameter(param.detach().half()) for param in model.parameters()]
        masters = MasterWeights(params)
        owned = [masters.of(param) for param in params]
        optimizer = OPTIMIZERS["sgd"](owned)
        flats = None
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                grad = torch.randn(param.shape, generator=generator).half()
                param.grad = grad if param.grad is None else param.grad.copy_(grad)
            masters.unscale_grads(8.0)
            if combine and flats is None:
                flats = FlatGradients(params), FlatGradients(owned)
            assert flats is None or flats[0].check() == flats[1].check() == ()
            optimizer.step()
            masters.copy_to_model()
        return params

    assert equal(train(combine=True), train(combine=False))


def test_the_buffers_hold_the_gradients_and_zeros():
    model = nn.Linear(1, 17)
    model.bias.data = model.bias.data.double()
    model.weight.grad, model.bias.grad = torch.full((17, 1), 2.0), torch.full((17,), 3.0, dtype=torch.float64)
    flat = FlatGradients([model.weight, model.bias, model.weight])
    assert [(len(buffer), buffer.dtype) for buffer in flat.buffers] == [(64, torch.float32), (64, torch.float64)]
    assert [buffer.sum().item() for buffer in flat.buffers] == [34.0, 51.0]
    flat.buffers[0].mul_(2)
    assert (model.weight.grad == 4.0).all()
    assert [aligned_size(numel) for numel in (0, 1, 16, 17)] == [32, 48, 48, 64]


def test_an_overflow_anywhere_is_found():
    model = make_model()
    flat = combined(model)
    assert flat.unscale_(2.0).item() == 0.0
    model[4].bias.grad[-1] = math.inf
    assert flat.unscale_(2.0).item() == 1.0
    flat.zero_()
    found_inf = torch.ones(1)
    assert flat.unscale_(2.0, found_inf=found_inf) is found_inf
    assert flat.unscale_(2.0).item() == 0.0


def clear(model, flat):
    model.zero_grad()


def keep_graph(model, flat):
    flat.zero_()
    backward(model, 3, create_graph=True)


def convert(model, flat):
    model.double()


def assign(model, flat):
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def reassign(model, flat):
    for param in model.parameters():
        param.grad = param.grad.clone()


def swap_data(model, flat):
    for param in model.parameters():
        param.grad.data = param.grad.data * 2


BREAKS = {
    clear: ViewBreak.CLEARED,
    keep_graph: ViewBreak.GRAPH_KEPT,
    convert: ViewBreak.CONVERTED,
    assign: ViewBreak.PARAMETER_REPLACED,
    reassign: ViewBreak.REASSIGNED,
    swap_data: ViewBreak.REASSIGNED,
}


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # create_graph=True warns of a reference cycle
@pytest.mark.parametrize("break_views", BREAKS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("after", ["combining", "zero_"])
def test_each_broken_view_is_detected_and_repaired_exactly(break_views, after):
    model = make_model()
    flat = combined(model)
    if after == "zero_":
        flat.zero_()
        backward(model, 1)
    assert check_combined_tensors(flat, model.parameters()) == ()
    break_views(model, flat)
    before = gradients(model)
    broken = check_combined_tensors(flat, model.parameters())
    assert [each.index for each in broken] == list(range(len(before)))
    assert reasons(broken) == {BREAKS[break_views]}
    assert str(broken[0]) == f"parameter 0: {BREAKS[break_views].value}."
    assert flat.rebuild(model.parameters()) == broken
    assert equal(gradients(model), before)
    assert not any(grad.requires_grad for grad in (param.grad for param in model.parameters()) if grad is not None)
    backward(model, 2)
    flat.rebuild()
    assert flat.check(model.parameters()) == ()
    now = gradients(model)
    flat.unscale_(0.5)
    assert equal(gradients(model), [grad * 2 for grad in now])
    assert sum(buffer.count_nonzero() for buffer in flat.buffers) == sum(grad.count_nonzero() for grad in now)


@pytest.mark.parametrize(
    "keep",
    [
        lambda model: backward(model, 5),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: model.load_state_dict(model.state_dict()),
    ],
)
def test_what_keeps_the_views_is_not_reported(keep):
    model = make_model()
    flat = combined(model)
    keep(model)
    assert flat.check(model.parameters()) == ()


def test_a_cleared_gradient_stays_none_and_leaves_no_trace():
    model = make_model()
    flat = combined(model)
    model[4].weight.grad.fill_(math.inf)
    model[4].weight.grad = None
    assert [each.index for each in flat.check()] == [4]
    assert flat.unscale_(2.0).item() == 0.0
    assert model[4].weight.grad is None


def test_only_what_is_broken_is_reported():
    model = make_model()
    flat = combined(model)
    model[4].weight.grad = model[4].weight.grad.clone()
    assert [each.index for each in flat.rebuild()] == [4]
    assert flat.rebuild() == ()


def test_a_parameter_without_a_gradient_stays_out_until_it_has_one():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    used.grad = torch.ones(2)
    flat = FlatGradients([used, unused])
    flat.zero_()
    assert unused.grad is None
    unused.grad = torch.full((3,), 8.0)
    assert flat.check() == ()
    flat.unscale_(2.0)
    assert unused.grad.tolist() == [4.0] * 3
    assert flat.params == (used, unused)
    flat.zero_()
    assert unused.grad.tolist() == [0.0] * 3


def test_clearing_brings_back_the_views():
    model = make_model()
    flat = combined(model)
    model.zero_grad()
    flat.zero_()
    assert flat.check() == ()
    assert all((param.grad == 0).all() for param in model.parameters())
    model.double()
    flat.zero_()
    assert {buffer.dtype for buffer in flat.buffers} == {torch.float64}


def test_combining_nothing_is_allowed():
    flat = FlatGradients([nn.Parameter(torch.ones(2))])
    assert flat.buffers == flat.check() == flat.rebuild() == ()
    assert flat.unscale_(2.0).tolist() == [0.0]


def test_a_sparse_gradient_is_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"parameter 0: .*torch.sparse_coo, torch.float32"):
        FlatGradients(embedding.parameters())


@pytest.mark.parametrize("scale", [0.0, math.inf])
def test_a_nonsense_scale_is_refused(scale):
    with pytest.raises(ValueError, match=r"scale=.*> 0"):
        combined(make_model()).unscale_(scale)


def test_never_waits_for_the_device():
    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    model = make_model()
    backward(model)
    with NoReading():
        flat = FlatGradients(model.parameters())
        flat.unscale_(2.0)
        flat.zero_()
        model.zero_grad()
        flat.rebuild()


def test_the_same_memory_in_another_order_is_broken_too():
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    flat = FlatGradients([weight])
    weight.grad = weight.grad.t()
    assert reasons(flat.rebuild()) == {ViewBreak.REASSIGNED}
    assert weight.grad.tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_two_gradients_that_changed_places_keep_their_new_values():
    one, two = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    one.grad, two.grad = torch.full((2,), 1.0), torch.full((2,), 2.0)
    flat = FlatGradients([one, two])
    one.grad, two.grad = two.grad, one.grad
    assert len(flat.rebuild()) == 2
    assert (one.grad.tolist(), two.grad.tolist()) == ([2.0, 2.0], [1.0, 1.0])
    assert flat.check() == ()


def test_a_gradient_made_sparse_is_refused_and_named():
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    flat = FlatGradients([param])
    param.grad = torch.ones(2).to_sparse()
    with pytest.raises(TypeError, match=r"parameter 0: .*torch.sparse_coo"):
        flat.rebuild()


def test_a_parameter_of_no_elements_is_combined_too():
    empty, one = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(1))
    empty.grad, one.grad = torch.zeros(0), torch.ones(1)
    flat = FlatGradients([empty, one])
    assert flat.unscale_(2.0).item() == 0.0
    assert flat.check() == ()
    assert one.grad.tolist() == [0.5]


def test_gradients_are_brought_in_all_or_none():
    model = make_model()
    flat = combined(model)
    one, half = (lambda device: torch.ones(1, device=device)), (lambda device: torch.full((1,), 0.5, device=device))
    assert list(flat.bring_in_(half, one)) == [torch.device("cpu")]
    model[4].bias.grad = model[4].bias.grad.to_sparse()
    before = gradients(model)
    assert flat.bring_in_(half, one) is None
    assert all(torch.equal(each.to_dense(), now.to_dense()) for each, now in zip(before, gradients(model), strict=True))
    assert not flat.settle(again=False)
    model.zero_grad()
    backward(model, 1)
    fresh = gradients(model)
    assert flat.bring_in_(half, one, [model[4].bias]).keys() == {torch.device("cpu")}
    assert torch.equal(model[4].bias.grad, fresh[-1] * 0.5)
    assert equal(gradients(model)[:-1], fresh[:-1])
    assert len(flat.check()) == len(fresh) - 1
