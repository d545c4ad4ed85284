"""The stack of modules at work, seen from inside their forwards."""

import pytest
import torch
from torch import nn

from amplab.trace.modules import ModuleStack


class Spy(nn.Module):
    """Notes the path that a stack gives while its forward runs."""

    def __init__(self, seen, inner=None, fails=False):
        super().__init__()
        self.seen, self.inner, self.fails, self.stack = seen, inner, fails, None

    def forward(self, x):
        self.seen.append((self.stack.path, self.stack.depth, self.stack.stage))
        if self.fails:
            raise ArithmeticError("on purpose")
        x = x if self.inner is None else self.inner(x)
        self.seen.append((self.stack.path, self.stack.depth, self.stack.stage))
        return x


def follow(model):
    stack = ModuleStack(model)
    for module in model.modules():
        if isinstance(module, Spy):
            module.stack = stack
    return stack


def test_nested_modules_are_named_by_their_path():
    seen = []
    model = Spy(seen, nn.Sequential(Spy(seen), Spy(seen, Spy(seen))))
    stack = follow(model)
    with stack.following():
        assert (stack.path, stack.depth, stack.stage) == ("", 0, "")
        model(torch.ones(1))
        assert stack.depth == 0
    assert seen == [
        ("Spy", 1, ""),
        *[("inner.0", 3, "")] * 2,
        ("inner.1", 3, ""),
        *[("inner.1.inner", 4, "")] * 2,
        ("inner.1", 3, ""),
        ("Spy", 1, ""),
    ]


def test_a_shared_module_goes_by_its_first_name():
    seen = []
    shared = Spy(seen)
    model = nn.Sequential(shared, shared)
    with follow(model).following():
        model(torch.ones(1))
    assert [path for path, _, _ in seen] == ["0"] * 4


def test_a_module_that_raises_is_left():
    seen = []
    model = nn.ModuleList([Spy(seen, Spy(seen, fails=True)), Spy(seen)])
    stack = follow(model)
    with stack.following():
        with pytest.raises(ArithmeticError):
            model[0](torch.ones(1))
        assert stack.depth == 0
        model[1](torch.ones(1))
    assert [path for path, _, _ in seen] == ["0", "0.inner", "1", "1"]


def test_hooks_around_a_forward_have_a_stage():
    stages = []
    model = nn.Linear(2, 2)
    stack = ModuleStack(model)
    model.register_forward_pre_hook(lambda module, args: stages.append((stack.path, stack.stage)))
    model.register_forward_hook(lambda module, args, output: stages.append((stack.path, stack.stage)))
    with stack.following():
        model(torch.ones(1, 2))
    assert stages == [("Linear", "before"), ("Linear", "after")]


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_stays(fails):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def block():
        with ModuleStack(model).following():
            model(torch.ones(1, 3 if fails else 2))

    if fails:
        with pytest.raises(RuntimeError):
            block()
    else:
        block()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called


def test_parameters_have_the_names_that_torch_gives_them():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(nn.Linear(2, 2, bias=False), shared), nn.LSTM(2, 2))
    model[1][0].weight = shared.weight  # tied: one parameter, and the name it has first
    model.own = nn.Parameter(torch.ones(1))
    expected = {id(parameter): name for name, parameter in model.named_parameters()}
    assert ModuleStack(model).parameter_names() == expected
    assert ModuleStack(shared).parameter_names() == {id(shared.weight): "weight", id(shared.bias): "bias"}
