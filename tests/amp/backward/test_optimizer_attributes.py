"""Parameters that an optimizer keeps beside its groups: in lists, dicts, tuples and sets, and in inner optimizers."""

import warnings
from collections import deque, namedtuple

import pytest
import torch
from torch.nn import Parameter

from amplab import amp
from amplab.amp.backward.optimizer_attributes import containers_in, objects_with, optimizers_in, replace_in

Pair = namedtuple("Pair", ["first", "rest"])


class Own(torch.optim.Optimizer):
    """Steps the parameters that it finds with ``read``, with momenta in a list of its own."""

    def __init__(self, params, keep, read, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.read = read
        self.kept = keep([param for group in self.param_groups for param in group["params"]])
        self.momenta = [torch.zeros_like(param) for param in read(self.kept)]

    @torch.no_grad()
    def step(self, closure=None):
        for param, momentum in zip(self.read(self.kept), self.momenta, strict=False):
            if param.grad is not None:
                momentum.mul_(0.9).add_(param.grad)
                param.sub_(momentum, alpha=self.param_groups[0]["lr"])
                self.state[param]["steps"] = self.state[param].get("steps", 0) + 1


class Around(torch.optim.Optimizer):
    def __init__(self, base):
        super().__init__([{**group, "params": list(group["params"])} for group in base.param_groups], {})
        self.base = base

    def step(self, closure=None):
        self.base.step(closure)


def around(params, keep, read):
    return Around(Own(params, keep, read))


class Box:
    def __init__(self, params):
        self.params = params


KEPT = {
    "a list": (list, list),
    "a tuple": (tuple, list),
    "lists in a dict": (lambda params: {"a": params[:1], "b": params[1:]}, lambda kept: [*kept["a"], *kept["b"]]),
    "a dict by name": (lambda params: dict(enumerate(params)), lambda kept: list(kept.values())),
    "the keys of a dict": (lambda params: dict.fromkeys(params, 0.9), list),
    "pairs in a list": (lambda params: [(param, 0.9) for param in params], lambda kept: [param for param, _ in kept]),
    "a named tuple": (lambda params: Pair(params[0], tuple(params[1:])), lambda kept: [kept.first, *kept.rest]),
    "a deque": (deque, list),
}


def trained(make, level, kept, steps=5):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = make(model.parameters(), *kept)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", dynamic_init_scale=8.0, verbosity=0)
    inputs = torch.randn(8, 4)
    for step in range(steps):
        optimizer.zero_grad()
        factor = float("inf") if step == 2 else 1.0
        with session.scale_loss(model(inputs).float().square().mean() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert session.last_step(optimizer).stepped == (step != 2)
    return session, model, optimizer


@pytest.mark.parametrize("make", [Own, around])
@pytest.mark.parametrize("kept", KEPT)
def test_masters_are_stepped_where_an_optimizer_keeps_its_parameters(make, kept):
    _, expected, _ = trained(make, "O0", KEPT[kept])
    session, model, optimizer = trained(make, "O2", KEPT[kept])
    masters, inner = list(session.master_params(optimizer)), optimizers_in(optimizer)[-1]
    for param, master in zip(expected.parameters(), masters, strict=True):
        torch.testing.assert_close(master, param, rtol=1e-2, atol=2e-3)
    assert all(a is b for a, b in zip(inner.read(inner.kept), masters, strict=True))
    assert all(a is b for a, b in zip(inner.state, masters, strict=True))
    values = [master.detach().clone() for master in masters]
    session.reset()
    assert all(a is b for a, b in zip(inner.read(inner.kept), model.parameters(), strict=True))
    assert [inner.state[param]["steps"] for param in model.parameters()] == [4] * 4
    assert all(map(torch.equal, values, model.parameters()))


def test_a_set_of_parameters_has_the_masters():
    weight, bias = Parameter(torch.ones(2).half()), Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)
    optimizer.decayed, new = {weight, bias}, Parameter(torch.ones(2))
    for _ in range(2):
        for container in containers_in(optimizer):
            replace_in(container, {id(weight): new})
        assert optimizer.decayed == {new, bias}
        assert optimizer.param_groups[0]["params"] == [new, bias]


def test_parameters_added_later_are_replaced_in_lists_too():
    session, _, optimizer = trained(Own, "O2", KEPT["a list"])
    layer = torch.nn.Linear(4, 2).half()
    optimizer.add_param_group({"params": list(layer.parameters())})
    optimizer.kept += layer.parameters()
    optimizer.momenta += [torch.zeros(param.shape) for param in layer.parameters()]
    before = [param.detach().clone() for param in layer.parameters()]
    with session.scale_loss(layer(torch.ones(1, 4).half()).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert [param.dtype for param in optimizer.kept] == [torch.float32] * 6
    assert not any(map(torch.equal, before, layer.parameters()))


@pytest.mark.parametrize("kept", ["a list", "a tuple", "the keys of a dict"])
def test_a_failing_initialize_leaves_the_containers_as_they_were(kept, monkeypatch):
    keep, read = KEPT[kept]
    model = torch.nn.Linear(4, 2)
    optimizer = Around(Own(model.parameters(), keep, read))
    container = optimizer.base.kept
    monkeypatch.setattr("amplab.amp.apex.hooks.warn_of_vanishing_eps", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert optimizer.base.kept is container
    for params in (read(container), optimizer.param_groups[0]["params"], optimizer.base.param_groups[0]["params"]):
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_an_object_that_keeps_half_parameters_is_named():
    model = torch.nn.Linear(4, 2)
    optimizer = Own(model.parameters(), lambda params: [Box(params)], lambda kept: kept[0].params)
    with pytest.warns(UserWarning, match=r"^Own\.kept\[0\], an object of type Box, keeps half parameters"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert optimizer.kept[0].params[0] is model.weight


def test_a_model_and_other_objects_are_not_named():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.model, optimizer.box, optimizer.itself = model, Box([torch.ones(2)]), [optimizer]
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert list(objects_with(optimizer, [model.weight])) == []
    assert optimizer.model.weight.dtype is torch.float16
