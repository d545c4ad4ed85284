"""How a batch goes into a model nobody has seen, and what the loss is called with."""

from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab.trace.handed_step import ModelGroup, as_model, handed_step

X, Y, MASK = torch.ones(2, 3, requires_grad=True), torch.tensor([0, 1]), torch.zeros(2)
Batch = namedtuple("Batch", "x y")


class Seen(nn.Module):
    """Returns what it was called with."""

    def forward(self, *args, **kwargs):
        return SimpleNamespace(args=args, kwargs=kwargs, loss=None)


class One(nn.Module):
    def forward(self, x):
        return {"args": (x,), "logits": X}


class Two(nn.Module):
    def forward(self, x, mask):
        return {"args": (x, mask)}


class Optional(nn.Module):
    def forward(self, x, mask=None):
        return {"args": (x, mask)}


class Named(nn.Module):
    def forward(self, x, labels=None):
        return {"args": (x, labels)}


def same(values, expected):
    return len(values) == len(expected) and all(value is each for value, each in zip(values, expected, strict=True))


def call(model, batch, loss):
    """What the model and the loss were called with."""
    got = []

    def taking_one(out):
        got.append((out,))
        return X.sum()

    def taking_two(out, other):
        got.append((out, other))
        return X.sum()

    def taking_batch(out, batch):
        got.append((out, batch))
        return X.sum()

    def taking_three(out, first, second):
        got.append((out, first, second))
        return X.sum()

    losses = {1: taking_one, 2: taking_two, "batch": taking_batch, 3: taking_three}
    handed_step("xray", model, batch, loss=losses[loss])()
    out, *rest = got[0]
    return out["args"], rest


@pytest.mark.parametrize(
    ("model", "batch", "loss", "into", "rest"),
    [
        (One(), X, 1, (X,), ()),
        (One(), X, 2, (X,), (X,)),
        (One(), (X, Y), 2, (X,), (Y,)),
        (One(), [X, Y], 2, (X,), (Y,)),
        (One(), Batch(X, Y), 2, (X,), (Y,)),
        (One(), (X, Y), 1, (X,), ()),
        (One(), (X, MASK, Y), 3, (X,), (MASK, Y)),
        (Two(), (X, MASK), 1, (X, MASK), ()),
        (Two(), (X, MASK, Y), 2, (X, MASK), (Y,)),
        (Optional(), (X, MASK), 1, (X, MASK), ()),
        (Optional(), (X, Y), 2, (X, None), (Y,)),
        (Optional(), (X, MASK, Y), 2, (X, MASK), (Y,)),
        (Optional(), (X,), 1, (X, None), ()),
    ],
)
def test_by_place(model, batch, loss, into, rest):
    args, given = call(model, batch, loss)
    assert same(args, into)
    assert same(given, rest)


@pytest.mark.parametrize(("model", "into"), [(One(), (X,)), (Two(), (X, Y))])
def test_a_loss_with_an_argument_called_batch_gets_all_of_it(model, into):
    batch = (X, Y)
    args, (given,) = call(model, batch, "batch")
    assert same(args, into)
    assert given is batch


def test_a_mapping_and_a_target():
    args, rest = call(Named(), ({"x": X, "labels": Y}, MASK), 2)
    assert same(args, (X, Y))
    assert same(rest, (MASK,))
    args, rest = call(One(), ({"left": X, "right": Y}, MASK), 2)  # forward takes the mapping itself
    assert list(args[0]) == ["left", "right"]
    assert same(rest, (MASK,))


def test_by_name():
    batch = {"x": X, "labels": Y}
    args, rest = call(Named(), batch, 2)
    assert same(args, (X, Y))
    assert rest == [batch]
    args, rest = call(One(), UserDict(x=X, labels=Y), 2)
    assert same(args, (X,))
    assert rest[0]["labels"] is Y
    seen = []
    handed_step("xray", Seen(), {"x": X, "anything": Y}, loss=lambda out: seen.append(out.kwargs) or X.sum())()
    assert set(seen[0]) == {"x", "anything"}


def test_modules_and_functions_of_torch_as_losses():
    model = nn.Linear(3, 2)
    expected = F.cross_entropy(model(X), Y)
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="mean").forward):
        assert torch.equal(handed_step("xray", model, (X, Y), loss=loss)(), expected)


def test_the_outputs_own_loss_as_a_key_or_an_attribute():
    class Owns(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.make = make

        def forward(self, x):
            return self.make(loss=x.sum(), logits=x)

    for make in (dict, SimpleNamespace, namedtuple("Output", "loss logits")):
        step = handed_step("xray", Owns(make), X)
        assert step() == 6
        assert step.loss == "the output's own loss"


def test_the_sum_of_all_floating_outputs():
    class Several(nn.Module):
        def forward(self, x):
            return {"a": x.half(), "b": [x, (Y, x.double())], "loss": None, "name": "x"}

    step = handed_step("xray", Several(), X)
    assert step() == 18
    assert step.loss == "the sum of the output, as no loss is given"

    class Nothing(nn.Module):
        def forward(self, x):
            return Y

    with pytest.raises(ValueError, match="the model returned int64"):
        handed_step("xray", Nothing(), X)()


def test_several_models():
    one, two = One(), One()
    group = as_model([one, two])
    assert isinstance(group, ModelGroup)
    assert [path for path, _ in group.named_modules()] == ["", "One0", "One1"]
    assert dict(as_model({"a": one, "b": Two()}).named_children()).keys() == {"a", "b"}
    assert dict(as_model((one, Two())).named_children()).keys() == {"One", "Two"}
    assert as_model(one) is one
    assert handed_step("xray", group, X, step=lambda batch: batch.sum())() == 6
    assert handed_step("xray", group, step=X.sum)() == 6
